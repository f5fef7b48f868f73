"""The simulator's parts are the formulas that it states, and move as they must."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from helpers import tiny_config

from megatron_logra.config import Config, load_config
from megatron_logra.planner.hardware import TABLE, Efficiency
from megatron_logra.planner.report import plan
from megatron_logra.planner.simulate import simulate

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tools"))

import simulate as tool  # noqa: E402

H100 = TABLE["H100"]
# Links without a limit, so that only one thing at a time is left.
FREE = Efficiency(1, 1, 1e9, 1e9, 0, 0, 0)


def recipe(name: str, *overrides: str) -> Config:
    return load_config(REPO / "examples" / name / "train.yaml", list(overrides))


def test_computation_is_six_flops_a_weight_and_token_for_dense_adam() -> None:
    cfg = recipe("qwen2.5_7b", "train.seq_length=128")  # short: attention hardly counts
    times = simulate(cfg, 1, "adam", H100, FREE).times
    tokens = 128 * 128
    weights = 7.615e9 - 152064 * 3584  # the embedding is looked up
    expected = 6 * weights * tokens / H100.bf16_flops
    assert times.forward + times.backward == pytest.approx(expected, rel=0.01)
    assert times.backward == pytest.approx(2 * times.forward, rel=0.01)
    assert times.tensor == times.reduce == times.gather == times.bubble == 0


def test_sketches_come_to_the_floor_of_their_flops() -> None:
    spec = {"hidden_size": 512, "ffn_hidden_size": 2048, "num_layers": 4, "kv_channels": 64}
    spec |= {"num_attention_heads": 8, "num_query_groups": 8, "vocab_size": 16}
    for rank in (16, 128):
        cfg = tiny_config(spec, sketch={"rank": rank}, train={"seq_length": 8})
        sums = {
            kind: (t := simulate(cfg, 1, kind, H100, FREE).times).forward + t.backward
            for kind in ("adam", "logra")
        }
        sizes = [(3 * 512, 512), (512, 512), (2 * 2048, 512), (512, 2048)]
        dense = sum(3 * d * k for d, k in sizes)
        floor = sum((2 + rank / d + rank / k) * d * k for d, k in sizes) / dense
        assert sums["logra"] / sums["adam"] == pytest.approx(floor, abs=0.01)


def test_bubbles_links_and_hops() -> None:
    cfg = recipe("llama3_70b", "parallel.pipeline=4", "parallel.tensor=2", "sketch.rank=64")
    times = simulate(cfg, 8, "logra", H100, FREE).times
    assert times.bubble == pytest.approx((times.forward + times.backward) * 3 / 128)
    virtual = recipe("llama3_70b", "parallel.pipeline=4", "parallel.virtual_pipeline=5")
    bubble = simulate(virtual, 32, "logra", H100, FREE).times
    assert bubble.bubble == pytest.approx((bubble.forward + bubble.backward) * 3 / (5 * 128))

    # Twice the bytes a second, half the time; latency alone grows with the ranks.
    slow, fast = dataclasses.replace(FREE, link=0.5), dataclasses.replace(FREE, link=1.0)
    pair = [simulate(recipe("gemma3_27b"), 8, "logra", H100, e).times.tensor for e in (slow, fast)]
    assert pair[0] == pytest.approx(2 * pair[1])
    late = dataclasses.replace(FREE, network_latency_s=1e-5)
    seven = recipe("qwen2.5_7b", "optimizer.master=replicated")
    gathers = [simulate(seven, n, "logra", H100, late).times.gather for n in (16, 32)]
    assert gathers == pytest.approx([15e-5, 31e-5], rel=1e-3)


def test_reduction_hides_behind_one_backward_pass_only() -> None:
    cfg = recipe("qwen2.5_7b", "optimizer.master=replicated")
    for scale in (1.0, 1e-3):
        slow = dataclasses.replace(FREE, network=scale)
        for kind in ("adam", "logra"):
            times = simulate(cfg, 16, kind, H100, slow).times
            numbers = {"adam": 7.615e9, "logra": 28 * 256 * (4608 + 3584 + 37888 + 3584)}[kind]
            sent = 4 * numbers * 15 / 16 / (scale * H100.network_rate)
            hidden = times.backward / 8  # 128 sequences on 16 ranks
            assert times.reduce == pytest.approx(max(0, sent - hidden), rel=0.01)


def test_memory_is_the_planners_and_fits_are_said() -> None:
    for name, ranks, fits in (("qwen2.5_7b", 8, False), ("llama3_70b", 16, False)):
        found = simulate(recipe(name), ranks, "adam", H100, Efficiency())
        assert found.fits is fits
        assert simulate(recipe(name), ranks, "logra", H100, Efficiency()).fits
        assert not simulate(recipe(name), ranks, "adam", TABLE["A100"], Efficiency()).fits


def test_a_layout_of_its_own_generates_as_a_run_in_it_beside_its_copy() -> None:
    stages = ("parallel.pipeline=2", "parallel.tensor=4")
    copied = (*stages, "rollout.sync=dense", "rollout.layout={tensor: 8}")
    staged, own, whole = (
        simulate(recipe("llama3_70b", *changes), 16, "logra", H100, FREE)
        for changes in (stages, copied, ())
    )
    assert own.times.train == pytest.approx(staged.times.train)
    assert own.times.rollout == pytest.approx(whole.times.rollout)
    assert own.times.rollout < staged.times.rollout
    weights = plan(recipe("llama3_70b", *copied), 16)["rollout_copy"]["weights"]
    assert own.bytes == pytest.approx(staged.bytes + weights)


def test_the_tool_stops_where_replicas_outnumber_sequences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(REPO / "examples" / "qwen2.5_7b" / "train.yaml")
    arguments = ["simulate", "scale", config, "--ranks", "8,128,256"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--plot", str(tmp_path / "p.png")])
    assert tool.main() == 0
    told = capsys.readouterr().out
    assert "   128 logra" in told and "   256 " not in told
    assert (tmp_path / "p.png").stat().st_size > 10_000
    monkeypatch.setattr(sys, "argv", [*arguments, "--growing"])
    assert tool.main() == 0 and "   256 logra" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["simulate", "scale", str(tmp_path / "none.yaml")])
    assert tool.main() == 2


def test_the_check_is_fitted_to_the_measured_steps_of_dense_adam() -> None:
    size = tool.SIZES[0]
    measured = {"dense": {"forward": 0.5, "backward": 1.1, "optimizer": 0.2}}
    found = tool.predict(size, "adam", tool.fitted(size, measured)).times
    assert found.forward + found.backward == pytest.approx(1.6)
    assert found.optimizer == pytest.approx(0.2)
