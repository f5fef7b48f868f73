"""megatron-core's dynamic engine gives what the static one and forward passes give."""

from __future__ import annotations

import faulthandler
import gc
import math
import signal
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from helpers import tiny_config, tiny_model
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random
from test_static_engine import (
    MODELS,
    assert_bf16_logprobs_are_near,
    assert_logprobs_are_of,
    full_logits,
    full_logprobs,
    random_prompts,
)
from torch import Tensor, nn

from megatron_logra.config import DynamicEngineConfig, SamplingConfig
from megatron_logra.errors import UserError
from megatron_logra.model.gpt import transformer_config
from megatron_logra.rl.policy import Policy
from megatron_logra.rollout import cuda_graphs, paged_attention
from megatron_logra.rollout.drawing import Response
from megatron_logra.rollout.dynamic_engine import DynamicEngine
from megatron_logra.rollout.static_engine import StaticEngine

OPTIONS: dict[str, Any] = {
    "stop_ids": frozenset(),
    "pad_id": 0,
    "max_sequence_length": 64,
    "batch_size": 8,
}
GREEDY = SamplingConfig(temperature=0.0, max_tokens=12)
prefix_cached = pytest.mark.parametrize("prefix_cache", [False, True], ids=["plain", "prefix"])


def dynamic(model: nn.Module, pg: ProcessGroupCollection, **options: Any) -> DynamicEngine:
    """With blocks of 8 tokens, so that prompts have several; `settings` are keys of the cache."""
    settings = DynamicEngineConfig(**{"block_tokens": 8, **options.pop("settings", {})})
    return DynamicEngine([model], pg=pg, settings=settings, **(OPTIONS | options))


def static(model: nn.Module, pg: ProcessGroupCollection, **options: Any) -> StaticEngine:
    return StaticEngine([model], pg=pg, **(OPTIONS | options))


def assert_same(found: list[list[Response]], expected: list[list[Response]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert [r.token_ids for r in mine] == [r.token_ids for r in theirs]
        assert [r.finish_reason for r in mine] == [r.finish_reason for r in theirs]
        for one, other in zip(mine, theirs, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)


def move(model: GPTModel, generator: torch.Generator) -> None:
    """An update, far larger than any tolerance."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS.keys())
def test_greedy_tokens_equal_the_static_engines_and_a_full_forwards(
    pg: ProcessGroupCollection, generator: torch.Generator, spec: dict[str, Any]
) -> None:
    model = tiny_model(pg, spec)
    prompts = random_prompts(generator, [3, 9, 4, 16, 23, 8])
    results = dynamic(model, pg).generate(prompts, 1, GREEDY, seed=1, update=0)
    assert_same(results, static(model, pg).generate(prompts, 1, GREEDY, seed=1, update=0))
    for prompt, (response,) in zip(prompts, results, strict=True):
        logits = full_logits(model, prompt + response.token_ids)[len(prompt) - 1 : -1]
        best, second = logits.topk(2, dim=-1).values.T
        for token, row, gap in zip(response.token_ids, logits, best - second, strict=True):
            assert token == int(row.argmax()) or gap < 1e-5
    assert_logprobs_are_of(model, prompts, results)


SAMPLINGS = {
    "plain": SamplingConfig(max_tokens=14),
    "cooler": SamplingConfig(max_tokens=14, temperature=0.6),
    "filtered": SamplingConfig(max_tokens=14, temperature=1.3, top_k=40, top_p=0.8),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@prefix_cached
def test_sampled_tokens_equal_the_static_engines(
    pg: ProcessGroupCollection,
    generator: torch.Generator,
    sampling: SamplingConfig,
    prefix_cache: bool,
) -> None:
    model = tiny_model(pg)
    prompts = random_prompts(generator, [3, 9, 16, 40])
    prompts += [prompts[3][:20], prompts[2]]  # beginnings that are shared
    options: dict[str, Any] = {"seed": 5, "update": 2, "stream": "eval", "first_sample": 7}
    options["stop_token_ids"] = {4, 5}
    stop_ids = set(range(4))
    expected = static(model, pg, stop_ids=stop_ids).generate(prompts, 3, sampling, **options)
    settings = {"prefix_cache": prefix_cache}
    for batch_size in (1, 5, 64) if sampling.temperature == 1 else (5,):
        engine = dynamic(model, pg, stop_ids=stop_ids, batch_size=batch_size, settings=settings)
        assert_same(engine.generate(prompts, 3, sampling, **options), expected)
        assert (engine.engine._prefix_cache_hits > 0) == (prefix_cache and batch_size > 1)
    reasons = {response.finish_reason for group in expected for response in group}
    assert reasons == {"stop", "length"}
    if sampling.top_k == 0:
        t = sampling.temperature
        for prompt, group in zip(prompts, expected, strict=True):
            for response in group:
                gaps = torch.tensor(response.logprobs) - full_logprobs(model, prompt, response, t)
                assert gaps.abs().max() * t < 1e-5  # the logits' rounding is divided by t, too


def test_requests_join_as_others_leave(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = tiny_model(pg)
    prompts = random_prompts(generator, [6, 3, 10, 6])
    engine = dynamic(model, pg, batch_size=3, stop_ids=set(range(25)))
    batches: list[int] = []
    draw = engine._sampling.sample_kernel

    def noting(logits: Tensor, n: int, *args: Any, **options: Any) -> Tensor:
        batches.append(n)
        return draw(logits, n, *args, **options)

    engine._sampling.sample_kernel = noting  # type: ignore[method-assign]
    progress: list[tuple[int, int]] = []
    results = engine.generate(
        prompts,
        4,
        SamplingConfig(max_tokens=20),
        seed=3,
        update=0,
        progress=lambda done, total: progress.append((done, total)),
    )
    lengths = [len(response.token_ids) for group in results for response in group]
    assert sum(batches) == sum(lengths)  # nobody decodes for nothing
    last_full = max(i for i, n in enumerate(batches) if n == 3)
    assert set(batches[: last_full + 1]) == {3}  # full as long as anyone waits
    assert sum(batches[last_full + 1 :]) < 2 * 20 and len(set(lengths)) > 3
    assert progress == sorted(set(progress)) and progress[-1] == (16, 16)


@prefix_cached
def test_a_full_cache_delays_requests_and_changes_nothing(
    pg: ProcessGroupCollection, generator: torch.Generator, prefix_cache: bool
) -> None:
    model = tiny_model(pg)
    prompts = random_prompts(generator, [6, 3, 17, 30])
    sampling = SamplingConfig(max_tokens=25)
    expected = static(model, pg).generate(prompts, 3, sampling, seed=5, update=2)
    token = 2 * 2 * 2 * 12 * 4  # bytes: keys and values, layers, groups, channels, fp32
    settings = {"kv_cache_gb": 14.5 * 8 * token / 2**30, "prefix_cache": prefix_cache}
    engine = dynamic(model, pg, batch_size=12, settings=settings)
    found = engine.generate(prompts, 3, sampling, seed=5, update=2)
    assert engine.engine.evicted_request_count > 0  # some were computed anew
    assert_same(found, expected)
    with pytest.raises(UserError, match=r"kv_cache_gb=1e-05: expected at least .* 64 tokens$"):
        dynamic(model, pg, settings={"kv_cache_gb": 1e-5})


@prefix_cached
def test_no_key_or_value_of_older_weights_is_read(
    pg: ProcessGroupCollection, generator: torch.Generator, prefix_cache: bool
) -> None:
    model = tiny_model(pg)
    prompts = random_prompts(generator, [30, 17, 30])
    engine = dynamic(model, pg, settings={"prefix_cache": prefix_cache})
    sampling = SamplingConfig(max_tokens=8)
    for update in range(3):
        results = engine.generate(prompts, 2, sampling, seed=1, update=update)
        assert_logprobs_are_of(model, prompts, results)
        move(model, generator)


def generate_while_weights_change(
    pg: ProcessGroupCollection, generator: torch.Generator, prefix_cache: bool
) -> tuple[set[int], float]:
    """Generate with three updates meanwhile.

    Returns:
        The versions that tokens were drawn from, and the largest difference of a log-probability
        from that of its version's weights in a forward pass over all before the token.
    """
    model = tiny_model(pg)
    prompts = random_prompts(generator, [20, 3, 11, 20])
    engine = dynamic(model, pg, batch_size=5, settings={"prefix_cache": prefix_cache})
    weights = {4: [p.detach().clone() for p in model.parameters()]}
    steps = 0

    def new_weights() -> int | None:
        nonlocal steps
        steps += 1
        if steps % 6 or len(weights) == 4:
            return None
        move(model, generator)
        version = max(weights) + 1
        weights[version] = [p.detach().clone() for p in model.parameters()]
        return version

    results = engine.generate(
        prompts, 2, SamplingConfig(max_tokens=15), seed=1, update=4, new_weights=new_weights
    )
    versions: set[int] = set()
    worst = 0.0
    for version, values in weights.items():
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
        for prompt, group in zip(prompts, results, strict=True):
            for response in group:
                assert len(response.versions) == len(response.token_ids) == 15
                assert response.versions == sorted(response.versions)
                assert response.versions[0] < response.versions[-1] or 7 in response.versions
                versions |= set(response.versions)
                mine = torch.tensor(response.versions) == version
                gaps = torch.tensor(response.logprobs) - full_logprobs(model, prompt, response)
                worst = max([worst, *gaps[mine].abs().tolist()])
    return versions, worst


@prefix_cached
def test_weights_that_change_meanwhile_hold_from_the_next_token_on(
    pg: ProcessGroupCollection, generator: torch.Generator, prefix_cache: bool
) -> None:
    versions, worst = generate_while_weights_change(pg, generator, prefix_cache)
    assert versions == {4, 5, 6, 7} and worst < 1e-5


@prefix_cached
def test_without_suspending_the_cache_would_be_stale(
    pg: ProcessGroupCollection,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    prefix_cache: bool,
) -> None:
    """The control of the test above."""
    suspend = DynamicInferenceEngine.suspend

    def between_calls_only(self: DynamicInferenceEngine) -> None:
        if not self.has_unfinished_requests():
            suspend(self)

    monkeypatch.setattr(DynamicInferenceEngine, "suspend", between_calls_only)
    _, worst = generate_while_weights_change(pg, generator, prefix_cache)
    assert worst > 1e-2


def fail_in_progress(engine: DynamicEngine, _model: GPTModel) -> dict[str, Any]:
    def progress(_done: int, _total: int) -> None:
        assert InferenceMode.is_active()
        raise RuntimeError("stop here")

    return {"progress": progress}


def fail_in_the_model(_engine: DynamicEngine, model: GPTModel) -> dict[str, Any]:
    with torch.no_grad():
        model.output_layer.weight[3, 4] = math.nan
    return {}


@pytest.mark.parametrize(
    ("fail", "error"),
    [(fail_in_progress, "stop here"), (fail_in_the_model, "finite softmax")],
)
def test_after_a_failure_the_engine_goes_on(
    pg: ProcessGroupCollection,
    generator: torch.Generator,
    fail: Callable[[DynamicEngine, GPTModel], dict[str, Any]],
    error: str,
) -> None:
    model = tiny_model(pg)
    prompts = random_prompts(generator, [6, 3, 10])
    engine = dynamic(model, pg, batch_size=2)
    expected = engine.generate(prompts, 2, GREEDY, seed=1, update=0)
    weight = model.output_layer.weight.detach().clone()
    with pytest.raises((RuntimeError, FloatingPointError), match=error):
        engine.generate(prompts, 2, GREEDY, seed=1, update=0, **fail(engine, model))
    with torch.no_grad():
        model.output_layer.weight.copy_(weight)
    assert not InferenceMode.is_active()
    assert_same(engine.generate(prompts, 2, GREEDY, seed=1, update=0), expected)


def test_the_model_is_left_as_it_was_and_the_cache_is_freed(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = tiny_model(pg, {"softmax_scale": 0.2})
    model.train()
    model.decoder.layers[1].eval()
    modes = {name: part.training for name, part in model.named_modules()}
    prompts = random_prompts(generator, [6, 3, 10])
    engine = dynamic(model, pg)

    def live() -> tuple[int, int]:
        gc.collect()
        tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
        return len(tensors), sum(found.untyped_storage().nbytes() for found in tensors)

    def largest() -> int:
        found = [t for t in vars(engine.engine.context).values() if isinstance(t, Tensor)]
        return max((t.untyped_storage().nbytes() for t in found), default=0)

    sizes: ClassVar[list[int]] = []
    for _ in range(2):
        engine.generate(
            prompts, 2, GREEDY, seed=1, update=0, progress=lambda *_: sizes.append(largest())
        )
    before = live()
    for _ in range(4):
        engine.generate(prompts, 2, GREEDY, seed=1, update=0)
    assert live() == before
    cache = 2 * 2 * (8 * 8 + 1) * 8 * 2 * 12 * 4
    assert max(sizes) == cache and largest() < cache / 10
    assert {name: part.training for name, part in model.named_modules()} == modes
    assert not hasattr(model.decoder.layers[0].self_attention, "softmax_scale")
    assert torch.is_grad_enabled() and not InferenceMode.is_active()
    tokens = torch.tensor([prompts[2]])
    model(tokens, torch.arange(10)[None], None).logsumexp(-1).sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
def test_bf16_models_generate_with_logprobs_near_the_full_forward(
    pg: ProcessGroupCollection, generator: torch.Generator, wrapped: bool
) -> None:
    assert_bf16_logprobs_are_near(dynamic, pg, generator, wrapped)


@pytest.mark.parametrize("length", [0, 40, 500])
def test_a_prompt_without_room_is_refused_by_name(
    pg: ProcessGroupCollection, generator: torch.Generator, length: int
) -> None:
    prompts = random_prompts(generator, [5, length])
    with pytest.raises(UserError, match=f"^prompt 1 has {length} tokens: expected 1 to 39, .* 40$"):
        dynamic(tiny_model(pg), pg, max_sequence_length=40).generate(
            prompts, 1, GREEDY, seed=1, update=0
        )


@pytest.mark.parametrize("parallel", [{"context": 2}, {"pipeline": 2, "virtual_pipeline": 2}])
def test_training_layouts_that_the_engine_cannot_have_are_refused(
    pg: ProcessGroupCollection, parallel: dict[str, int]
) -> None:
    """Separate workers have other layouts; what generates with the trainer's own is refused."""
    rollout = {"engine": "dynamic", "placement": "separate", "sync": "sketch"}
    cfg = tiny_config(parallel=parallel, rollout=rollout)
    tokenizer: Any = SimpleNamespace(stop_ids=frozenset(), pad_id=0)
    policy = Policy(cfg, pg, *transformer_config(tiny_config()), [tiny_model(pg)], tokenizer)
    key = list(parallel)[-1]
    with pytest.raises(UserError, match=rf"^rollout.engine: dynamic cannot have parallel.{key}=2"):
        policy.engine()


def paged(
    generator: torch.Generator, lengths: Sequence[int]
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Keys of requests [length, 2, 4], and the same in blocks of 4 (the rest NaN), with a table."""
    keys = [torch.randn(n, 2, 4, generator=generator, dtype=torch.float64) for n in lengths]
    needed = [-(-n // 4) for n in lengths]
    table = torch.full((len(lengths), max(needed) + 1), -1, dtype=torch.int32)
    places = iter(torch.randperm(sum(needed) + 3, generator=generator).tolist())
    cache = torch.full((sum(needed) + 3, 4, 2, 4), math.nan, dtype=torch.float64)
    for i, key in enumerate(keys):
        for j, part in enumerate(key.split(4)):
            table[i, j] = place = next(places)
            cache[place, : len(part)] = part
    return keys, cache, table


def reference(q: Tensor, k: Tensor, v: Tensor, left: int) -> tuple[Tensor, Tensor]:
    """[new, 6, 4] at [total, 2, 4], query by query and head by head; scale 0.3."""
    out, lse = torch.empty_like(q), q.new_empty(6, len(q))
    for i in range(len(q)):
        end = len(k) - len(q) + i + 1
        begin = max(0, end - 1 - left) if left >= 0 else 0
        for head in range(6):
            scores = k[begin:end, head // 3] @ q[i, head] * 0.3
            lse[head, i] = scores.logsumexp(0)
            out[i, head] = scores.softmax(0) @ v[begin:end, head // 3]
    return out, lse


@pytest.mark.parametrize("left", [-1, 0, 3])
def test_paged_attention_is_attention(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    monkeypatch.setattr(paged_attention, "_SCORES", 100)  # some queries of a request at a time
    lengths, new = [5, 9, 16, 1], [1, 9, 6, 1]
    keys, k_cache, table = paged(generator, lengths)
    values = [torch.randn(k.shape, generator=generator, dtype=torch.float64) for k in keys]
    v_cache = torch.full_like(k_cache, math.nan)
    for value, row in zip(values, table, strict=True):
        for j, part in enumerate(value.split(4)):
            v_cache[row[j], : len(part)] = part
    queries = [torch.randn(n, 6, 4, generator=generator, dtype=torch.float64) for n in new]
    expected = [reference(*each, left) for each in zip(queries, keys, values, strict=True)]
    options: dict[str, Any] = {"softmax_scale": 0.3, "causal": True, "window_size": (left, 0)}

    padding = torch.full((2, 6, 4), math.nan, dtype=torch.float64)
    out, lse, _ = paged_attention.flash_attn_varlen_func(
        torch.cat([*queries, padding]),
        k_cache,
        v_cache,
        torch.tensor([0, *new, 0]).cumsum(0),
        torch.tensor([0, *lengths, 0]).cumsum(0),
        9,
        16,
        block_table=torch.cat([table, table[:1]]),
        return_attn_probs=True,
        **options,
    )
    assert not out[-2:].any()
    tolerance: dict[str, Any] = {"atol": 1e-5, "rtol": 0, "check_dtype": False}  # float32 softmax
    torch.testing.assert_close(out[:-2], torch.cat([o for o, _ in expected]), **tolerance)
    torch.testing.assert_close(lse[:, :-2], torch.cat([s for _, s in expected], 1), **tolerance)

    last = torch.stack([q[-1:] for q in queries])
    decoded, sums = paged_attention.flash_attn_with_kvcache(
        torch.cat([last, padding[:1, None]]),
        k_cache,
        v_cache,
        cache_seqlens=torch.tensor([*lengths, 0]),
        block_table=torch.cat([table, torch.full_like(table[:1], -1)]),
        return_softmax_lse=True,
        **options,
    )
    assert not decoded[-1].any()
    torch.testing.assert_close(
        decoded[:-1, 0], torch.stack([o[-1] for o, _ in expected]), **tolerance
    )
    torch.testing.assert_close(
        sums[:-1, :, 0], torch.stack([s[:, -1] for _, s in expected]), **tolerance
    )


def test_a_request_to_stop_prints_no_stack():
    coordinator = "megatron.core.inference.data_parallel_inference_coordinator.coordinator"
    assert coordinator in sys.modules, "what would have it printed"
    assert not faulthandler.unregister(signal.SIGTERM)
    assert not faulthandler.unregister(signal.SIGINT)


class EagerGraphs(nn.Module):
    """In place of Megatron's manager of CUDA graphs: runs what it would capture and replay."""

    sizes: ClassVar[list[int]] = []

    def __init__(self, config: Any, **_options: Any) -> None:
        super().__init__()
        assert config.cuda_graph_impl == "local"

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.sizes.append(len(kwargs["hidden_states"]))
        return (nn.Module.__call__(module, *args, **kwargs),)


def test_steps_that_decode_are_filled_up_to_a_graph(
    pg: ProcessGroupCollection, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens and logprobs as without; the graphs themselves need a GPU."""
    monkeypatch.setattr(cuda_graphs, "require_graphs", lambda: None)
    monkeypatch.setattr(cuda_graphs, "CudaGraphManager", EagerGraphs)
    monkeypatch.setattr(EagerGraphs, "sizes", [])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    model = tiny_model(pg)
    prompts = random_prompts(generator, [3, 9, 4, 16, 5, 7, 2])
    sampling = SamplingConfig(max_tokens=14)
    options: dict[str, Any] = {"stop_ids": set(range(25)), "batch_size": 8}
    expected = static(model, pg, **options).generate(prompts, 1, sampling, seed=3, update=0)
    tracker = megatron_random.get_cuda_rng_tracker()
    engine = dynamic(model, pg, settings={"cuda_graphs": 3}, **options)
    sizes = [graph.token_count for graph in engine.engine.context.cuda_graph_batch_dimensions_list]
    assert sizes == [8, 4, 1]
    for _ in range(2):
        EagerGraphs.sizes.clear()
        found = engine.generate(prompts, 1, sampling, seed=3, update=0)
        assert_same(found, expected)
        # Each is captured first; then there are seven requests, and ever fewer.
        captured, decoded = EagerGraphs.sizes[:3], EagerGraphs.sizes[3:]
        assert captured == sizes
        assert decoded == sorted(decoded, reverse=True) and set(decoded) == set(sizes)
        assert not hasattr(model.decoder, "cudagraph_manager")
        assert model.config.cuda_graph_impl == "none"
        assert megatron_random.get_cuda_rng_tracker() is tracker


def test_graphs_that_cannot_be_had_are_refused(
    pg: ProcessGroupCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="cuda_graphs: this machine shows no GPU"):
        dynamic(tiny_model(pg), pg, settings={"cuda_graphs": 4})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="cuda_graphs: needs flash-attn"):
        cuda_graphs.require_graphs()
