"""Generation with the KV cache equals forward passes over whole sequences."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from megatron_logra.config import SamplingConfig
from megatron_logra.errors import UserError
from megatron_logra.rollout import static_engine as module
from megatron_logra.rollout.attention import _DecodingCore
from megatron_logra.rollout.drawing import Response
from megatron_logra.rollout.static_engine import StaticEngine

VOCABULARY = 131
GEMMA3: dict[str, Any] = {
    "window_size": (5, 0),
    "window_attn_skip_freq": [1, 0],
    "rotary_base_local": 100.0,
    "post_layernorms": True,
    "scale_embeddings": True,
    "layernorm_zero_centered_gamma": True,
    "activation_func": "gelu_tanh",
    "softmax_scale": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    "grouped_queries": {},
    "plain_heads": {"num_query_groups": 6, "qk_layernorm": False},
    "scaled_by_layer": {"apply_query_key_layer_scaling": True},
    "window": {"window_size": (5, 0)},
    "interleaved_rotary": {"rotary_interleaved": True, "rotary_percent": 0.5},
    "attention_sink": {"softmax_type": "off-by-one"},
    "layer_without_rotation": {"no_rope_freq": [1, 0]},
    "yarn": {"yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 16},
    "gemma3": GEMMA3,
}
GREEDY = SamplingConfig(temperature=0.0, max_tokens=12)


def engine(model: nn.Module, pg: ProcessGroupCollection, **options: Any) -> StaticEngine:
    settings = {"stop_ids": frozenset(), "pad_id": 0, "max_sequence_length": 64, "batch_size": 8}
    return StaticEngine([model], pg=pg, **(settings | options))


def random_prompts(generator: torch.Generator, lengths: Sequence[int]) -> list[list[int]]:
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def full_logits(model: GPTModel, tokens: list[int]) -> Tensor:
    """[s, vocabulary] float64 logits of one unpadded sequence, without any cache."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)[0].double()


def full_logprobs(
    model: GPTModel, prompt: list[int], response: Response, temperature: float = 1.0
) -> Tensor:
    logits = full_logits(model, prompt + response.token_ids)[len(prompt) - 1 : -1]
    chosen = torch.tensor(response.token_ids)[:, None]
    return (logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0]


def assert_logprobs_are_of(
    model: GPTModel, prompts: list[list[int]], results: list[list[Response]], t: float = 1.0
) -> None:
    for prompt, group in zip(prompts, results, strict=True):
        for response in group:
            found = torch.tensor(response.logprobs, dtype=torch.float64)
            expected = full_logprobs(model, prompt, response, t)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


class Calls:
    """The token shapes, logits and caches of a model's forward passes."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.logits: list[int] = []  # positions
        self.caches: list[tuple[int, int]] = []  # rows, positions
        self.contexts: list[weakref.ref[Any]] = []
        self.handle = model.register_forward_hook(self._note, with_kwargs=True)

    def _note(
        self, _model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], logits: Tensor
    ) -> None:
        rows, new = inputs[0].shape
        context = options["inference_context"]
        self.shapes.append((rows, new))
        self.logits.append(logits.size(1))
        self.caches.append((context.max_batch_size, context.max_sequence_length))
        self.contexts.append(weakref.ref(context))


@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("attention", ["quick", "megatron"])
@pytest.mark.parametrize("prefill_tokens", [7, 4096])
def test_greedy_equals_a_full_forward_at_mixed_prompt_lengths(
    pg: ProcessGroupCollection,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    spec: dict[str, Any],
    attention: str,
    prefill_tokens: int,
) -> None:
    monkeypatch.setattr(module, "_PREFILL_TOKENS", prefill_tokens)
    if attention == "megatron":
        monkeypatch.setattr(module, "quick_decoding", lambda *_: contextlib.nullcontext())
    model = tiny_model(pg, spec)
    prompts = random_prompts(generator, [3, 9, 4, 9, 13, 5])
    results = engine(model, pg).generate(prompts, 1, GREEDY, seed=1, update=0)
    for prompt, (response,) in zip(prompts, results, strict=True):
        logits = full_logits(model, prompt + response.token_ids)[len(prompt) - 1 : -1]
        best, second = logits.topk(2, dim=-1).values.T
        for token, row, gap in zip(response.token_ids, logits, best - second, strict=True):
            assert token == int(row.argmax()) or gap < 1e-5
        assert len(response.token_ids) == 12
        assert response.finish_reason == "length"
    assert_logprobs_are_of(model, prompts, results)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.3])
def test_logprobs_are_those_of_the_sampling_temperature(
    pg: ProcessGroupCollection, generator: torch.Generator, temperature: float
) -> None:
    model = tiny_model(pg)
    prompts = random_prompts(generator, [2, 8, 5])
    sampling = SamplingConfig(temperature=temperature, max_tokens=10)
    results = engine(model, pg).generate(prompts, 3, sampling, seed=5, update=2)
    assert_logprobs_are_of(model, prompts, results, temperature)
    assert len({tuple(response.token_ids) for group in results for response in group}) == 9


def test_a_response_depends_on_no_batch_order_or_neighbour(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = tiny_model(pg)
    prompts = random_prompts(generator, [4, 12, 7, 7, 2])
    sampling = SamplingConfig(max_tokens=15)
    stops = set(range(6))
    base = engine(model, pg, stop_ids=stops).generate(prompts, 3, sampling, seed=5, update=2)
    flat = [response for group in base for response in group]

    def tokens(responses: Sequence[Response]) -> list[list[int]]:
        return [response.token_ids for response in responses]

    for batch_size in (1, 2, 64):
        small = engine(model, pg, stop_ids=stops, batch_size=batch_size)
        again = small.generate(prompts, 3, sampling, seed=5, update=2)
        assert [tokens(group) for group in again] == [tokens(group) for group in base]
    one_by_one = engine(model, pg, stop_ids=stops)
    for index in torch.randperm(15, generator=generator).tolist():
        ((alone,),) = one_by_one.generate(
            [prompts[index // 3]], 1, sampling, seed=5, update=2, first_sample=index
        )
        assert alone.token_ids == flat[index].token_ids
        assert alone.logprobs == pytest.approx(flat[index].logprobs, abs=1e-5)
    for other in ({"seed": 6}, {"update": 3}, {"stream": "eval"}, {"first_sample": 100}):
        options: dict[str, Any] = {"seed": 5, "update": 2} | other
        changed = engine(model, pg, stop_ids=stops).generate(prompts, 3, sampling, **options)
        assert tokens([r for group in changed for r in group]) != tokens(flat)


def test_stop_tokens_end_a_response_and_belong_to_it(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = tiny_model(pg)
    prompts = random_prompts(generator, [6, 3, 10, 6])
    sampling = SamplingConfig(max_tokens=30)
    free = engine(model, pg).generate(prompts, 4, sampling, seed=7, update=0)
    always = set(range(16))
    extra = set(range(16, 24))
    stopped = engine(model, pg, stop_ids=always).generate(
        prompts, 4, sampling, seed=7, update=0, stop_token_ids=extra
    )
    reasons = set()
    for free_group, group in zip(free, stopped, strict=True):
        for whole, response in zip(free_group, group, strict=True):
            ends = [i for i, token in enumerate(whole.token_ids) if token in always | extra]
            length = ends[0] + 1 if ends else 30
            assert response.token_ids == whole.token_ids[:length]
            assert response.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)
            assert response.finish_reason == ("stop" if ends else "length")
            reasons.add(response.token_ids[-1] in extra)
    assert reasons == {True, False}


def test_prompts_are_prefilled_once_and_finished_rows_are_not_decoded(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = tiny_model(pg)
    prompts = random_prompts(generator, [6, 6, 9])
    prompts.append(list(prompts[0]))
    calls = Calls(model)
    progress: list[tuple[int, int]] = []
    results = engine(model, pg, batch_size=16, stop_ids=set(range(20))).generate(
        prompts,
        4,
        SamplingConfig(max_tokens=25),
        seed=int(generator.seed() % 2**32),
        update=0,
        progress=lambda done, total: progress.append((done, total)),
    )
    lengths = [len(response.token_ids) for group in results for response in group]
    assert calls.shapes[0] == (3, 6)
    decoded = calls.shapes[1:]
    assert all(new == 1 for _, new in decoded)
    assert set(calls.logits) == {1}
    assert set(calls.caches) == {(3, 6), (16, 9 + 25 - 1)}
    fed = 4 * (9 - 6)
    assert sum(rows for rows, _ in decoded) == fed + sum(length - 1 for length in lengths)
    assert len(set(lengths)) > 1
    assert progress == sorted(set(progress)) and progress[-1] == (16, 16)


def test_rows_beyond_the_batch_size_are_generated_in_waves_of_similar_prompts(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = tiny_model(pg)
    calls = Calls(model)
    lengths = [30, 3, 31, 2, 50]
    prompts = random_prompts(generator, lengths)
    results = engine(model, pg, batch_size=4).generate(
        prompts, 2, SamplingConfig(max_tokens=5), seed=1, update=0
    )
    calls.handle.remove()
    assert_logprobs_are_of(model, prompts, results)
    prefills = [shape for shape in calls.shapes if shape[1] > 1]
    assert prefills == [(2, 2), (2, 30), (1, 50)]
    assert max(rows for rows, _ in calls.shapes) == 4


def test_responses_stop_at_the_longest_sequence(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = tiny_model(pg)
    prompts = random_prompts(generator, [57, 63, 60])
    results = engine(model, pg, max_sequence_length=1000).generate(
        prompts, 2, SamplingConfig(max_tokens=20), seed=1, update=0
    )
    assert [[len(r.token_ids) for r in group] for group in results] == [[7] * 2, [1] * 2, [4] * 2]
    assert all(response.finish_reason == "length" for group in results for response in group)
    assert_logprobs_are_of(model, prompts, results)


@pytest.mark.parametrize("length", [0, 40, 41, 500])
def test_a_prompt_without_room_is_refused_by_name(
    pg: ProcessGroupCollection, generator: torch.Generator, length: int
) -> None:
    prompts = random_prompts(generator, [5, length])
    with pytest.raises(UserError, match=f"^prompt 1 has {length} tokens: expected 1 to 39, .* 40$"):
        engine(tiny_model(pg), pg, max_sequence_length=40).generate(
            prompts, 1, GREEDY, seed=1, update=0
        )


def test_new_weights_hold_from_the_next_call_on(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = tiny_model(pg)
    prompts = random_prompts(generator, [6, 3, 10])
    rollout = engine(model, pg)
    sampling = SamplingConfig(max_tokens=8)
    before = rollout.generate(prompts, 2, sampling, seed=1, update=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    after = rollout.generate(prompts, 2, sampling, seed=1, update=0)
    assert_logprobs_are_of(model, prompts, after)
    old = torch.tensor(before[0][0].logprobs[:1])
    assert (old - full_logprobs(model, prompts[0], before[0][0])[:1]).abs() > 1e-3


@pytest.mark.parametrize("failing", [False, True], ids=["finished", "failed"])
def test_the_model_is_left_as_it_was_and_the_cache_is_freed(
    pg: ProcessGroupCollection, generator: torch.Generator, failing: bool
) -> None:
    model = tiny_model(pg)
    model.train()
    model.decoder.layers[1].eval()
    modes = {name: part.training for name, part in model.named_modules()}
    prompts = random_prompts(generator, [6, 3, 10])
    calls = Calls(model)

    def progress(_done: int, _total: int) -> None:
        assert not any(part.training for part in model.modules())
        if failing:
            raise RuntimeError("stop here")

    def run() -> None:
        with pytest.raises(RuntimeError, match="here") if failing else contextlib.nullcontext():
            engine(model, pg).generate(prompts, 2, GREEDY, seed=1, update=0, progress=progress)

    def live() -> tuple[int, int]:
        gc.collect()
        # Reading the class of some library objects warns.
        tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
        return len(tensors), sum(found.untyped_storage().nbytes() for found in tensors)

    run()
    first = live()
    for _ in range(3):
        run()
    assert live() == first
    assert not any(context() for context in calls.contexts)
    assert {name: part.training for name, part in model.named_modules()} == modes
    assert all(
        type(layer.self_attention.core_attention) is DotProductAttention
        for layer in model.decoder.layers
    )
    assert torch.is_grad_enabled() and not InferenceMode.is_active()
    calls.handle.remove()
    tokens = torch.tensor([prompts[2]])
    model(tokens, torch.arange(10)[None], None).logsumexp(-1).sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def assert_bf16_logprobs_are_near(
    make: Callable[..., Any], pg: ProcessGroupCollection, generator: torch.Generator, wrapped: bool
) -> None:
    """What an engine, made by `make(model, pg)`, reports of a bf16 model is near a full forward."""
    model = tiny_model(pg, train={"precision": "bf16"})
    assert next(model.parameters()).dtype == torch.bfloat16
    prompts = random_prompts(generator, [6, 3, 10])
    outer = Float16Module(model.config, model) if wrapped else model
    results = make(outer, pg).generate(prompts, 4, SamplingConfig(max_tokens=12), seed=1, update=0)
    gaps = torch.cat(
        [
            torch.tensor(response.logprobs) - full_logprobs(model, prompt, response)
            for prompt, group in zip(prompts, results, strict=True)
            for response in group
        ]
    )
    # Roundings may differ between batch shapes, depending on the machine's matrix products.
    assert gaps.abs().mean() < 0.05 and gaps.abs().max() < 0.4


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
def test_bf16_models_generate_with_logprobs_near_the_full_forward(
    pg: ProcessGroupCollection, generator: torch.Generator, wrapped: bool
) -> None:
    assert_bf16_logprobs_are_near(engine, pg, generator, wrapped)


@pytest.mark.parametrize("spec", [{}, {"apply_query_key_layer_scaling": True}])
def test_quick_attention_rounds_as_megatron_does_in_bf16(
    pg: ProcessGroupCollection, generator: torch.Generator, spec: dict[str, Any]
) -> None:
    model = tiny_model(pg, spec, train={"precision": "bf16"})
    original = model.decoder.layers[1].self_attention.core_attention
    quick = _DecodingCore(original, angles=torch.zeros(30, 1, 1, 12))  # rotates by nothing

    def inputs(length: int, heads: int) -> Tensor:
        return torch.randn(length, 9, heads, 12, generator=generator).bfloat16()

    for length in (1, 17, 30):
        query, key, value = inputs(1, 6), inputs(length, 2), inputs(length, 2)
        expected, found = (core(query, key, value, None) for core in (original, quick))
        assert found.shape == expected.shape and found.dtype == torch.bfloat16
        assert (found == expected).float().mean() > 0.98
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_weights_that_are_not_finite_are_an_error(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = tiny_model(pg)
    with torch.no_grad():
        model.output_layer.weight[3, 4] = math.nan
    with pytest.raises(FloatingPointError, match="finite"):
        engine(model, pg).generate(random_prompts(generator, [4]), 1, GREEDY, seed=1, update=0)


def test_the_benchmark_gets_the_same_responses_with_and_without_a_cache(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    sizes = ["--prompts=3", "--samples=2", "--prompt-tokens=20", "--tokens=6", "--batch-size=4"]
    subprocess.run(
        [sys.executable, root / "tools/bench_rollout.py", *sizes, "--json", tmp_path / "out.json"],
        check=True,
        env=os.environ | {"PYTHONPATH": str(root)},
        timeout=120,
        stdout=subprocess.DEVNULL,
    )
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["same_responses"] == result["dynamic"]["same_responses"] == 1
    assert result["engine"]["tokens"] == result["plain"]["tokens"] == 36
    assert result["ratio"] == pytest.approx(
        result["engine"]["tokens_per_s"] / result["plain"]["tokens_per_s"]
    )
