"""Generation with the KV cache equals forward passes over whole sequences."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import tiny_model
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor, nn

from megatron_logra.config import SamplingConfig
from megatron_logra.errors import UserError
from megatron_logra.rollout.static_engine import Response, StaticEngine

PREFILL_SIZES = (7, 4096)  # with 7, prompts are prefilled in several parts
MODELS: dict[str, dict[str, Any]] = {
    "grouped_queries": {},
    "plain_heads": {"num_query_groups": 6, "qk_layernorm": False},
    "scaled_by_layer": {"apply_query_key_layer_scaling": True},
    "window": {"window_size": (5, 0)},
    "interleaved_rotary": {"rotary_interleaved": True, "rotary_percent": 0.5},
    "learned_sink": {"softmax_type": "learnable"},
}


def engine(model: nn.Module, pg: ProcessGroupCollection, **options: Any) -> StaticEngine:
    settings = {"stop_ids": frozenset(), "pad_id": 0, "max_sequence_length": 64, "batch_size": 8}
    return StaticEngine(model, pg=pg, **(settings | options))


def random_prompts(generator: torch.Generator, lengths: list[int]) -> list[list[int]]:
    return [torch.randint(131, (n,), generator=generator).tolist() for n in lengths]


def full_logits(model: GPTModel, tokens: list[int]) -> Tensor:
    """[s, vocabulary] float64 logits of one unpadded sequence, without any cache."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        return model(ids, torch.arange(len(tokens))[None], None)[0].double()


def full_logprobs(model: GPTModel, prompt: list[int], response: Response, t: float) -> Tensor:
    logits = full_logits(model, prompt + response.token_ids)[len(prompt) - 1 : -1]
    chosen = torch.tensor(response.token_ids)[:, None]
    return (logits / t).log_softmax(-1).gather(1, chosen)[:, 0]


@pytest.fixture(autouse=True, params=PREFILL_SIZES, ids=lambda n: f"prefill{n}")
def prefill_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_logra.rollout.static_engine._PREFILL_TOKENS", request.param)


@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS.keys())
def test_greedy_equals_a_full_forward_at_mixed_prompt_lengths(
    pg: ProcessGroupCollection, generator: torch.Generator, spec: dict[str, Any]
) -> None:
    model = tiny_model(pg, spec)
    prompts = random_prompts(generator, [1, 9, 4, 9, 23, 5])
    sampling = SamplingConfig(temperature=0.0, max_tokens=12)
    results = engine(model, pg).generate(prompts, 1, sampling, seed=1, update=0)
    for prompt, (response,) in zip(prompts, results, strict=True):
        tokens = list(prompt)
        for token, logprob in zip(response.token_ids, response.logprobs, strict=True):
            expected = full_logits(model, tokens)[-1].log_softmax(-1)
            assert token == int(expected.argmax())
            assert logprob == pytest.approx(float(expected[token]), abs=1e-5)
            tokens.append(token)
        assert len(response.token_ids) == 12
        assert response.finish_reason == "length"
