"""Every parallel layout gives the same run, and a checkpoint of one continues under any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import quick
from layout_runs import (
    Trajectory,
    load_each,
    reduced_sketches,
    train,
    train_and_save,
    train_watching_reductions,
)
from megatron.core import dist_checkpointing
from ranks import Ranks
from reference import VOCABULARY, Reference, config_for, make_batches, make_checkpoint

from megatron_logra.model.gpt import transformer_config
from megatron_logra.sketch.projection import Columns, Projections

UPDATES = 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor": 2}),
    "tp2-sequence": (2, {"tensor": 2, "sequence": True}),
    "dp2": (2, {}),
    "tp2-dp2": (4, {"tensor": 2, "sequence": True}),
    "pp2": (2, {"pipeline": 2}),
    "pp2-interleaved": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "cp2-tp2": (4, {"context": 2, "tensor": 2, "sequence": True}),
    "pp2-dp2": (4, {"pipeline": 2}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2, "sequence": True}),
}
FP32 = {"step_control": {"factor_dtype": "fp32", "realised_kl_interval": 1}}
VARIANTS: dict[str, dict[str, Any]] = {
    "frozen": FP32,
    "non-targets": {**FP32, "optimizer": {"non_targets": "adam"}},
    "lr": {
        "step_control": {"mode": "lr", "factor_dtype": "fp32", "lr": {"lr": 0.1, "clip_grad": 0.1}}
    },
    "adam": {"optimizer": {"kind": "adam", "adam": {"lr": 1e-3}}},  # a control of the harness
    "recomputed": {**FP32, "train": {"recompute": "full"}},
    "selective": {**FP32, "train": {"recompute": "selective"}},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "qwen3", True, layers=4)  # a vocabulary of 131: padded under TP
    return path


@pytest.fixture(scope="module")
def references(ranks, directory) -> dict[str, Trajectory]:
    """Each variant on one rank."""
    return {
        name: ranks.run(1, train, directory, sections, UPDATES)[0]
        for name, sections in VARIANTS.items()
    }


def assert_same(run: Trajectory, reference: Trajectory, tolerance: float = 1e-5) -> None:
    assert run.weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        error = (run.weights[name] - weight).norm() / weight.norm()
        assert error < tolerance, name
    for mine, theirs in zip(run.steps, reference.steps, strict=True):
        assert mine["applied"] == theirs["applied"]
        for key in ("kl_predicted", "alpha", "sketch_norm", "update_ratio", "grad_norm"):
            if theirs[key] is not None:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-4), key
        for key in ("kl_realised", "kl_along"):  # without a prediction nothing lies along it
            assert (mine[key] is None) == (theirs[key] is None)
            if theirs[key] is not None:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-2), key


EVERYWHERE = ("frozen", "adam")
MIXED = ("tp2-sequence", "pp2-interleaved", "tp2-dp2", "cp2-tp2")
"""Layouts of each kind of parallelism, for the variants that say little new about a layout."""


EVERY = [(x, y) for y in VARIANTS for x in LAYOUTS if y in EVERYWHERE or x in MIXED]
AGAIN = {(x, y) for x in ("tp2-dp2", "cp2-tp2") for y in ("lr", "recomputed", "selective")}
"""Of layouts of four ranks, what layouts of two say as well."""


@pytest.mark.parametrize(("layout", "variant"), quick(EVERY, set(EVERY) - AGAIN))
def test_every_layout_gives_the_same_trajectory(layout, variant, ranks, directory, references):
    size, parallel = LAYOUTS[layout]
    sections = {**VARIANTS[variant], "parallel": parallel}
    for run in ranks.run(size, train, directory, sections, UPDATES):
        assert_same(run, references[variant])


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("sequence", [False, True])
def test_sketches_of_four_ranks_are_the_dense_float64_gradients(
    sequence, recompute, ranks, directory, generator
):
    """TP2 × DP2, in buckets, against transformers' model: S = G Aᵀ."""
    batches = make_batches(generator, [[18, 9], [12, 20], [6, 32], [8, 28]])
    parallel = {"tensor": 2, "sequence": sequence, "bucket_size": 2000}
    sections = {"parallel": parallel, "train": {"recompute": recompute}}
    runs = ranks.run(4, reduced_sketches, directory, sections, batches)
    cfg = config_for(directory)
    reference = Reference(directory, transformer_config(cfg)[0], tied=True)
    for name, gradient in reference.gradients(batches).items():
        (first, row_parallel, strided), (second, _, _) = (runs[tp][name] for tp in (0, 1))
        if row_parallel:
            whole = torch.cat([first, second])
        else:  # gate and up are halved each
            halves = [part.chunk(strided) for part in (first, second)]
            whole = torch.cat([part for pair in zip(*halves, strict=True) for part in pair])
        columns = Columns(name.removesuffix(".weight"), 0, gradient.shape[1])
        projections = Projections([columns], cfg.sketch.rank, "rademacher", 0, torch.device("cpu"))
        projections.redraw(0)
        expected = gradient @ projections.transposed(0, torch.float64) * projections.scale
        assert (whole - expected).norm() < 1e-5 * expected.norm(), name
        for mine, theirs in zip(runs[:2], runs[2:], strict=True):
            assert torch.equal(mine[name][0], theirs[name][0])


OVERLAPPED = [
    *[("dp2", variant) for variant in VARIANTS],
    *[("tp2-dp2", variant) for variant in ("non-targets", "adam")],
    *[("pp2-interleaved-dp2", variant) for variant in ("non-targets", "recomputed")],
]


@pytest.mark.parametrize(
    ("layout", "variant"),
    quick(
        OVERLAPPED, set(OVERLAPPED) - {("dp2", "lr"), ("dp2", "selective"), ("dp2", "recomputed")}
    ),
)
def test_overlapped_reduction_gives_the_same_trajectory(layout, variant, ranks, directory):
    """Several buckets, each reduced once the last micro-batch's backward pass has filled it."""
    interleaved = (4, {"pipeline": 2, "virtual_pipeline": 2})
    size, parallel = {**LAYOUTS, "pp2-interleaved-dp2": interleaved}[layout]
    sections = {**VARIANTS[variant], "parallel": {**parallel, "bucket_size": 2000}}
    runs = ranks.run(size, train_watching_reductions, directory, sections, 3)
    sections["parallel"] = {**parallel, "overlap_grad_reduce": False}
    references = ranks.run(size, train_watching_reductions, directory, sections, 3)
    for (run, reductions), (reference, later) in zip(runs, references, strict=True):
        # Other rows on each rank, so norms are summed in another order.
        assert_same(run, reference, 1e-6)
        assert all(before == 0 for before, _ in later)
        # Megatron learns from the first update how often each gradient comes.
        assert reductions[0][0] == 0
        assert all(before == total for before, total in reductions[1:])
    assert runs[0][1][-1][1] > 2, "one bucket alone"


@pytest.mark.parametrize(
    ("variant", "overlap"),
    [("frozen", False), ("non-targets", True), ("lr", True), ("adam", True), ("bf16", True)],
)
def test_several_optimizer_instances_give_the_same_trajectory(
    overlap, variant, ranks, directory, references
):
    parallel = {"optimizer_instances": 2, "overlap_grad_reduce": overlap, "bucket_size": 2000}
    if variant == "bf16":  # masters are divided within an instance
        sections: dict[str, Any] = {"train": {"precision": "bf16"}}
        (reference,) = ranks.run(1, train, directory, sections, UPDATES)
    else:
        sections, reference = VARIANTS[variant], references[variant]
    runs = ranks.run(4, train, directory, {**sections, "parallel": parallel}, UPDATES)
    for run in runs:
        if variant == "bf16":
            for name, weight in reference.weights.items():
                assert (run.weights[name] - weight).norm() < 1e-3 * weight.norm(), name
            assert run.bytes_by_kind["master"] * 2 == reference.bytes_by_kind["master"]
        else:
            assert_same(run, reference)


def test_updates_are_large_enough_for_the_comparison(directory, references, ranks):
    """The weights move by more than the tolerance in each update, so a lost one would be seen."""
    short = ranks.run(1, train, directory, VARIANTS["frozen"], UPDATES - 1)[0]
    with pytest.raises(AssertionError):
        assert_same(Trajectory(references["frozen"].steps, short.weights, {}), references["frozen"])


@pytest.mark.parametrize("master", ["sharded", "replicated"])
@pytest.mark.parametrize("layout", ["dp2", "tp2-dp2"])
def test_bf16_masters_follow_one_rank(layout, master, ranks, directory):
    """bf16 activations round differently from layout to layout; the weights stay within 1e-3."""
    size, parallel = LAYOUTS[layout]
    sections = {"train": {"precision": "bf16"}, "optimizer": {"master": master}}
    reference = ranks.run(1, train, directory, sections, UPDATES)[0]
    runs = ranks.run(size, train, directory, {**sections, "parallel": parallel}, UPDATES)
    for run in runs:
        for name, weight in reference.weights.items():
            assert (run.weights[name] - weight).norm() < 1e-3 * weight.norm(), name
    for name, weight in runs[0].weights.items():
        assert all(torch.equal(run.weights[name], weight) for run in runs), name


def test_fp32_masters_are_divided_over_data_parallel_ranks(ranks, directory):
    sections = {"train": {"precision": "bf16"}}
    (one,) = ranks.run(1, train, directory, sections, 1)
    for run in ranks.run(2, train, directory, sections, 1):
        assert run.bytes_by_kind["master"] * 2 == one.bytes_by_kind["master"]


@pytest.mark.parametrize("layout", quick(LAYOUTS, ("tp2-dp2", "pp2-dp2", "cp2", "pp2")))
def test_one_ranks_nan_skips_the_step_on_all(layout, ranks, directory, references):
    size, parallel = LAYOUTS[layout]
    sections = {**FP32, "parallel": parallel}
    assert_skipped_by_all(ranks.run(size, _train_poisoned, directory, sections))


@pytest.mark.parametrize(
    "layout", quick(("tp2-sequence", "dp2", "pp2", "cp2"), ("tp2-sequence", "dp2", "pp2"))
)
def test_one_ranks_nan_activation_skips_the_step_on_all(layout, ranks, directory):
    size, parallel = LAYOUTS[layout]
    sections = {**FP32, "parallel": parallel}
    assert_skipped_by_all(ranks.run(size, _train_poisoned, directory, sections, True))


def assert_skipped_by_all(runs: list[Trajectory]) -> None:
    for run in runs:
        assert [step["applied"] for step in run.steps] == [True, False, True]
        assert run.steps[1]["reason"] == "a sketch is not finite"
    for name, weight in runs[0].weights.items():
        assert all(torch.equal(run.weights[name], weight) for run in runs), name
        assert weight.isfinite().all()


def _train_poisoned(
    directory: Path, sections: dict[str, Any], activations: bool = False
) -> Trajectory:
    return train(directory, sections, 3, poison=1, activations=activations)


SIX = ["one", "tp2-sequence", "dp2-buckets", "tp2-dp2", "pp2-interleaved", "cp2"]
SAVED: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2-buckets": (2, {"bucket_size": 2000}),
    **LAYOUTS,
}


def save_under_each(ranks: Ranks, directory: Path, sections: dict[str, Any], to: Path) -> None:
    """Two updates and a checkpoint under each of six layouts, in `to`/LAYOUT."""
    for name in SIX:
        size, parallel = SAVED[name]
        ranks.run(size, train_and_save, directory, {**sections, "parallel": parallel}, to / name)


def assert_same_tensors(path: Path, other: Path) -> None:
    """Every tensor of one checkpoint is bit for bit in the other, and no more.

    But for the rows that fill a vocabulary up under tensor parallelism, which are zeros.
    """
    stored, others = (dict(stored_tensors(p)) for p in (path, other))
    assert stored.keys() == others.keys() and len(stored) > 10
    for name, tensor in stored.items():
        other, padded = others[name], "embedding" in name and tensor.dim() > 0
        if padded:
            assert not tensor[VOCABULARY:].any() and not other[VOCABULARY:].any(), name
            tensor, other = tensor[:VOCABULARY], other[:VOCABULARY]
        assert torch.equal(tensor, other), name


def stored_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole tensors of a checkpoint by their place in it, random states aside."""

    def tensors_in(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield place, value
        elif isinstance(value, dict):
            for key, inner in value.items():
                yield from tensors_in(inner, f"{place}/{key}")

    yield from tensors_in(dist_checkpointing.load_plain_tensors(str(path)), "")


@pytest.mark.parametrize("every", quick((False, True), (False,)))
@pytest.mark.parametrize("loaded", quick((*SIX, "dp4-instances"), SIX))
def test_a_checkpoint_of_any_layout_continues_under_any_other(
    loaded, every, ranks, directory, saved_in_fp32, references, tmp_path
):
    """Weights, row moments and Adam's state are bit-equal, and the next updates the same.

    Quickly: each from two others, so that each is also loaded by two others.
    """
    size, parallel = {**SAVED, "dp4-instances": (4, {"optimizer_instances": 2})}[loaded]
    sections = {**VARIANTS["non-targets"], "parallel": parallel}
    place = SIX.index(loaded) if loaded in SIX else 0
    saved = SIX if every else [SIX[(place + step) % len(SIX)] for step in (1, 3)]
    sources = [saved_in_fp32 / name for name in saved]
    reference = references["non-targets"]
    expected = Trajectory(reference.steps[2:], reference.weights, {})
    for runs in ranks.run(size, load_each, directory, sections, sources, tmp_path, UPDATES - 2):
        for run in runs:
            assert_same(run, expected)
    for name in saved:
        path = saved_in_fp32 / name / "iter_0000002"
        assert_same_tensors(path, tmp_path / name / "iter_0000002")


@pytest.fixture(scope="module")
def saved_in_fp32(ranks, directory, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    save_under_each(ranks, directory, VARIANTS["non-targets"], root)
    return root


@pytest.mark.parametrize("master", ["sharded", "replicated"])
def test_fp32_masters_are_bit_equal_under_any_layout(master, ranks, directory, tmp_path):
    """Also where the holder of the missing 16 bits is another one than that which saved them."""
    other = "replicated" if master == "sharded" else "sharded"
    bf16 = {"train": {"precision": "bf16"}}
    saved, resaved = tmp_path / "saved", tmp_path / "resaved"
    size, parallel = SAVED["tp2-dp2"]
    sections = {**bf16, "optimizer": {"master": master}, "parallel": parallel}
    ranks.run(size, train_and_save, directory, sections, saved)
    for name in ("one", "dp2-buckets", "tp2-sequence", "pp2-interleaved"):
        size, parallel = SAVED[name]
        sections = {**bf16, "optimizer": {"master": other}, "parallel": parallel}
        ranks.run(size, load_each, directory, sections, [saved], resaved / name, 0)
        again = resaved / name / "saved" / "iter_0000002"
        assert_same_tensors(saved / "iter_0000002", again)
