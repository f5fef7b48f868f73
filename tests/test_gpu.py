"""On one GPU: Transformer Engine's layers, bf16 tensor cores, NCCL (marked gpu).

The models are random, so that nothing is needed but the package and Transformer Engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import letters_config, tiny_config
from reference import Batch, make_batches
from test_sketch import relative_error
from training import backward, make_learner, probe_of

from megatron_logra import platform
from megatron_logra.config import SamplingConfig, dump_yaml
from megatron_logra.counter_rng import philox4x32
from megatron_logra.metrics import read_metrics
from megatron_logra.model.gpt import build_model, forward_head, transformer_config
from megatron_logra.optimizer.learner import Learner
from megatron_logra.rollout.dynamic_engine import DynamicEngine
from megatron_logra.rollout.static_engine import StaticEngine
from megatron_logra.sketch.projection import Columns, Projections

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPEC = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 8,
    "kv_channels": 16,
    "vocab_size": 272,
    "init_method_std": 0.1,
}
"""Sizes that tensor cores take."""
ENGINE: dict[str, Any] = {"implementation": "transformer_engine"}
LOCAL: dict[str, Any] = {"implementation": "local"}
LENGTHS = [[60, 40], [48, 58]]


@pytest.fixture(autouse=True)
def transformer_engine() -> Any:
    return pytest.importorskip("transformer_engine.pytorch")


def config_of(model: dict[str, Any], precision: str, **sections: dict[str, Any]) -> Any:
    own = {"train": {"precision": precision, "seq_length": 64}, "sketch": {"rank": 16}}
    cfg = tiny_config(SPEC, **(own | sections))
    return cfg.model_copy(update={"model": cfg.model.model_copy(update=model)})


def batches_of(generator: torch.Generator) -> list[Batch]:
    device = platform.device()
    batches = make_batches(generator, LENGTHS)
    return [Batch(batch.tokens.to(device), batch.weights.to(device)) for batch in batches]


@torch.no_grad()
def logits_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return forward_head(
        model, batch.tokens, batch.positions, lambda hidden, logits_fn: logits_fn(hidden)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_engine_layers_give_the_logits_of_local_ones(precision, pg, generator):
    models = [
        build_model(*transformer_config(config_of(model, precision)), pg)
        for model in (ENGINE, LOCAL)
    ]
    weights = {k: v for k, v in models[0].state_dict().items() if not k.endswith("_extra_state")}
    models[1].load_state_dict(weights)
    (batch, _) = batches_of(generator)
    mine, theirs = (logits_of(model.eval(), batch)[batch.mask.T] for model in models)
    assert relative_error(mine, theirs) < (1e-4 if precision == "fp32" else 3e-2)


def first_learner(pg: Any, generator: torch.Generator, **control: Any) -> tuple[Learner, Any]:
    """A learner over Transformer Engine's layers in bf16, after a backward pass."""
    learner = make_learner(config_of(ENGINE, "bf16", step_control=control), pg)
    batches = batches_of(generator)
    backward(learner, batches)
    return learner, batches


def test_sketches_in_bf16_are_the_dense_gradients_times_a(pg, generator):
    """Against a local model in fp32 with the same weights and torch's own dense gradients."""
    learner, batches = first_learner(pg, generator)
    assert learner.sketch is not None
    capture = learner.sketch.capture
    dense = build_model(*transformer_config(config_of(LOCAL, "fp32")), pg)
    own = {name: p.detach().float() for name, p in learner.chunks[0].named_parameters()}
    parameters = dict(dense.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            (whole,) = (value for key, value in own.items() if key.endswith(name))
            parameter.copy_(whole)
    tokens = sum(int(batch.mask.sum()) for batch in batches)
    for batch in batches:
        logits = forward_head(dense, batch.tokens, batch.positions, lambda h, f: f(h))
        logprobs = torch.log_softmax(logits.transpose(0, 1).float()[:, :-1], -1)
        picked = logprobs.gather(-1, batch.tokens[:, 1:, None])[..., 0]
        (-(batch.weights[:, 1:] * picked).sum() / tokens).backward()
    for index, target in enumerate(capture.targets):
        a = capture.projections.transposed(index, torch.float32).t() * capture.projections.scale
        gradient = parameters[f"{target.name}.weight"].grad
        assert gradient is not None
        assert relative_error(target.sketch, gradient @ a.t()) < 5e-2, target.name


@pytest.mark.parametrize("estimator", ["forward_ad", "finite_difference"])
def test_a_prediction_over_engine_layers_is_realised(estimator, pg, generator):
    budget = {"kl_budget": 2e-3, "kl_budget_final": 2e-3, "update_ratio": 1e-2}
    learner, batches = first_learner(
        pg, generator, estimator=estimator, realised_kl_interval=1, **budget
    )
    result = learner.step(probe_of(batches[0]))
    assert result.applied and result.alpha is not None and result.alpha < 3
    assert result.kl_ratio == pytest.approx(1, abs=0.3)
    if estimator == "forward_ad":
        assert any("through local layers" in note for note in result.notes)


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_projections_are_those_of_the_cpu(distribution):
    layers = [Columns("decoder.layers.0.mlp.linear_fc1", 3, 77), Columns("b", 0, 130)]
    drawn = []
    for device in (torch.device("cpu"), platform.device()):
        projections = Projections(layers, 40, distribution, 7, device)
        projections.redraw(5)
        drawn.append([projections.transposed(i, torch.float32).cpu() for i in range(2)])
    for mine, theirs in zip(*drawn, strict=True):
        if distribution == "rademacher":
            assert torch.equal(mine, theirs)
        else:  # logarithms and cosines differ in their last bit
            assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_counters_give_the_same_numbers_as_on_the_cpu():
    counter = tuple(torch.arange(1000) + lane for lane in range(4))
    on_cpu = philox4x32(counter, (1, 2))
    on_gpu = philox4x32(tuple(lane.cuda() for lane in counter), (1, 2))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, on_gpu, strict=True))


def test_both_engines_give_the_same_greedy_tokens(pg, generator):
    model = build_model(*transformer_config(config_of(ENGINE, "fp32")), pg).eval()
    prompts = [torch.randint(256, (n,), generator=generator).tolist() for n in (3, 9, 17)]
    options = {"stop_ids": frozenset(), "pad_id": 0, "max_sequence_length": 64, "batch_size": 8}
    greedy = SamplingConfig(temperature=0.0, max_tokens=12)
    found = [
        engine([model], pg=pg, **options).generate(prompts, 1, greedy, seed=1, update=0)
        for engine in (StaticEngine, DynamicEngine)
    ]
    tokens = [[response.token_ids for (response,) in responses] for responses in found]
    assert tokens[0] == tokens[1]


def test_a_run_on_the_gpu_is_the_run_on_the_cpu(tmp_path):
    """In fp32 with local layers: the same tokens, rewards and predictions."""
    for place in ("gpu", "cpu"):
        config = letters_config(tmp_path / place, SPEC, train={"steps": 4})
        config = config.model_copy(update={"model": config.model.model_copy(update=LOCAL)})
        file = tmp_path / f"{place}.yaml"
        file.write_text(dump_yaml(config))
        tests = Path(__file__).parent
        paths = [str(tests.parent), str(tests), *os.environ.get("PYTHONPATH", "").split(":")]
        environment = dict(os.environ)
        if place == "cpu":  # where Transformer Engine must not be found
            environment["CUDA_VISIBLE_DEVICES"] = ""
            paths = [p for p in paths if not (Path(p) / "transformer_engine").exists()]
        environment["PYTHONPATH"] = ":".join(paths)
        command = [sys.executable, "-m", "megatron_logra", "train", str(file)]
        subprocess.run(command, env=environment, check=True, timeout=300)
    mine, theirs = (read_metrics(tmp_path / place) for place in ("gpu", "cpu"))
    assert len(mine) == len(theirs) == 4
    for record, other in zip(mine, theirs, strict=True):
        for key in ("reward/mean", "policy/kl_predicted", "policy/alpha"):
            assert record[key] == pytest.approx(other[key], rel=1e-3), key
