"""Forward-backward passes over reference batches, as the training loop does them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from reference import Batch

from megatron_logra.config import Config
from megatron_logra.model.gpt import build_model, forward_head, transformer_config
from megatron_logra.model.huggingface import load_hf_weights
from megatron_logra.optimizer.learner import Learner
from megatron_logra.optimizer.predicted_kl import ProbeBatch


def make_learner(cfg: Config, pg: Any) -> Learner:
    """The configured model with its checkpoint's weights, ready to train."""
    tconfig, arguments = transformer_config(cfg)
    model = build_model(tconfig, arguments, pg)
    if cfg.model.hf is not None:
        load_hf_weights(cfg.model.hf, model)
    return Learner([model], tconfig, cfg, pg)


def backward(learner: Learner, batches: list[Batch]) -> None:
    """Zero, then accumulate and reduce the gradients of all batches, one a micro-batch."""

    def forward_step(batches_left: Any, model: torch.nn.Module) -> Any:
        batch = next(batches_left)

        def head(hidden: torch.Tensor, logits_fn: Any) -> torch.Tensor:
            return logits_fn(hidden).transpose(0, 1).float()

        def loss(logits: torch.Tensor) -> Any:
            logprobs = torch.log_softmax(logits[:, :-1], -1)
            picked = logprobs.gather(-1, batch.tokens[:, 1:, None])[..., 0]
            total = -(batch.weights[:, 1:] * picked).sum()
            return total, batch.mask.sum().int(), {"loss": total.detach()}

        return forward_head(model, batch.tokens, batch.positions, head), loss

    learner.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=learner.chunks,
        num_microbatches=len(batches),
        seq_length=batches[0].tokens.shape[1],
        micro_batch_size=len(batches[0].tokens),
        forward_only=False,
    )


def probe_of(batch: Batch) -> ProbeBatch:
    """The batch's loss positions as a probe."""
    return ProbeBatch(batch.tokens, batch.positions, batch.mask)
