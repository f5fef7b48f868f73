"""A vocabulary that tensor-parallel ranks cannot divide is padded, and nothing shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tiny_config
from megatron.core.inference.utils import InferenceMode
from torch import distributed as dist
from torch.autograd import forward_ad

from megatron_logra import distributed
from megatron_logra.model.gpt import build_model, forward_head, transformer_config
from megatron_logra.model.vocabulary import NO_LOGIT, padded_size, without_columns
from megatron_logra.optimizer import forward_ad as rules

SPEC = {"num_attention_heads": 6, "num_query_groups": 6, "hidden_size": 24, "ffn_hidden_size": 36}


@pytest.mark.parametrize(
    ("vocabulary", "ranks", "padded"), [(131, 1, 131), (131, 2, 132), (132, 2, 132), (5, 4, 8)]
)
def test_padded_sizes_are_the_next_multiple_and_stay_it(vocabulary, ranks, padded):
    assert padded_size(vocabulary, ranks) == padded
    assert padded_size(padded, ranks) == padded


def test_padding_columns_have_no_gradient_and_no_tangent(generator):
    logits = torch.randn(4, 1, 7, generator=generator, requires_grad=True)
    hidden = without_columns(logits * 2, 5)
    assert torch.equal(hidden[..., 5:], torch.full((4, 1, 2), NO_LOGIT))
    torch.log_softmax(hidden, -1)[..., 3].sum().backward()
    assert logits.grad is not None and not logits.grad[..., 5:].any() and logits.grad[..., :5].all()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.randn(4, 1, 7), torch.ones(4, 1, 7))
        tangent = forward_ad.unpack_dual(without_columns(dual * 2, 5)).tangent
    assert (
        tangent is not None and not tangent[..., 5:].any() and bool((tangent[..., :5] == 2).all())
    )


@pytest.mark.parametrize("tied", [False, True])
def test_models_agree_on_any_number_of_ranks(ranks, tied):
    """At TP3 a vocabulary of 4 leaves the last rank nothing but padding."""
    for vocabulary in (4, 131):
        spec = SPEC | {"vocab_size": vocabulary, "share_embeddings_and_output_weights": tied}
        ((expected, expected_grad, columns),) = ranks.run(1, _logits, spec, 1)
        assert columns == vocabulary
        for size in (2, 3):
            for logits, grad, columns in ranks.run(size, _logits, spec, size):
                assert columns == padded_size(vocabulary, size) // size
                torch.testing.assert_close(logits[..., :vocabulary], expected)
                assert bool((logits[..., vocabulary:] == NO_LOGIT).all())
                torch.testing.assert_close(grad, expected_grad)


def _logits(spec: dict[str, Any], tensor: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Gathered logits; the embedding's whole gradient of a loss; columns of this rank."""
    cfg = tiny_config(spec, parallel={"tensor": tensor})
    pg = distributed.initialize(cfg.parallel, 0)
    rules.install()
    model = build_model(*transformer_config(cfg), pg)
    tokens = torch.tensor([[1, 3, 2, 0, 3, 1]])
    positions = torch.arange(6).expand_as(tokens)
    with torch.no_grad(), InferenceMode.active():
        logits = model(tokens, positions, None, runtime_gather_output=True)
    columns = []

    def head(hidden, logits_fn):
        own = logits_fn(hidden)
        columns.append(own.shape[-1])
        # Σ log Σ exp over the whole vocabulary, from the ranks' parts.
        masses = [torch.empty(own.shape[:2]) for _ in range(tensor)]
        dist.all_gather(masses, own.detach().exp().sum(-1), group=pg.tp)
        return (own.exp().sum(-1) / torch.stack(masses).sum(0)).sum()

    forward_head(model, tokens, positions, head).backward()
    own = model.embedding.word_embeddings.weight.grad
    whole = [torch.empty_like(own) for _ in range(tensor)]
    dist.all_gather(whole, own, group=pg.tp)
    gradient = torch.cat(whole)
    assert not gradient[spec["vocab_size"] :].any()
    return logits, gradient[: spec["vocab_size"]], columns[0]
