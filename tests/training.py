"""Forward-backward passes over reference batches, as the training loop does them."""

from __future__ import annotations

from typing import Any

import torch
from reference import Batch

from megatron_logra.config import Config
from megatron_logra.model.gpt import build_chunks, forward_head, transformer_config
from megatron_logra.model.huggingface import load_hf_weights
from megatron_logra.optimizer.learner import Learner
from megatron_logra.optimizer.predicted_kl import ProbeBatch


def make_learner(cfg: Config, pg: Any) -> Learner:
    """The configured model with its checkpoint's weights, ready to train."""
    tconfig, arguments = transformer_config(cfg)
    chunks = build_chunks(tconfig, arguments, pg)
    if cfg.model.hf is not None:
        for chunk in chunks:
            load_hf_weights(cfg.model.hf, chunk)
    return Learner(chunks, tconfig, cfg, pg)


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
    learner.forward_backward(forward_step, batches, batches[0].tokens.shape[1])


def probe_of(batch: Batch) -> ProbeBatch:
    """The batch's loss positions as a probe."""
    return ProbeBatch(batch.tokens, batch.positions, batch.mask)
