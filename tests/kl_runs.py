"""What each rank does in the tests of predicted and realised KL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from layout_runs import backward, padded
from reference import Batch, config_for, make_batches
from training import make_learner, probe_of

from megatron_logra import distributed
from megatron_logra.optimizer.learner import Learner
from megatron_logra.optimizer.predicted_kl import ProbeBatch

BUDGETS = (2e-5, 2e-4, 2e-3)


@dataclass(frozen=True)
class Row:
    """A learner's first step at one budget."""

    predicted: dict[str, float]
    """Predicted KL at α = 1, by estimator, if asked for."""
    in_fp32: float | None
    """Likewise of the same weights and direction in fp32, by forward mode, if asked for."""
    scaled: float
    """Predicted KL of the step as taken."""
    realised: float
    along: float
    """The part of the realised KL along the prediction."""


def table(
    directory: Path, sections: dict[str, Any], seed: int, budgets: tuple[float, ...] = BUDGETS
) -> list[Row]:
    """The same first step at every budget, predicted by both estimators."""
    bf16 = sections.get("train", {}).get("precision") == "bf16"
    return [_row(directory, sections, seed, budget, in_fp32=bf16) for budget in budgets]


def off_the_grid(
    directory: Path, seed: int, draws: int, budgets: tuple[float, ...]
) -> list[list[Row]]:
    """Steps in bf16 of some draws, by budget, where masters lie anywhere between bf16 numbers.

    As they do after some updates. Those that were just read from bf16 lie on the numbers, and a
    change of less than half their distance is not seen at all.
    """
    bf16 = {"train": {"precision": "bf16", "micro_batch_size": 2}}
    return [
        [_row(directory, bf16, seed + draw, budget, spread=True) for draw in range(draws)]
        for budget in budgets
    ]


def _spread(learner: Learner, seed: int) -> None:
    """Move each master by up to half the distance of bf16 numbers, which leaves the weights."""
    generator = torch.Generator().manual_seed(seed)
    assert learner.sketch is not None
    for master in learner.sketch.masters:
        value = master.value()
        distance = 2.0 ** (torch.frexp(value).exponent - 8)
        master.load(value + (torch.rand(value.shape, generator=generator) - 0.5) * distance)


def _row(
    directory: Path,
    sections: dict[str, Any],
    seed: int,
    budget: float,
    *,
    spread: bool = False,
    in_fp32: bool = False,
) -> Row:
    control = {
        "kl_budget": budget,
        "kl_budget_final": budget,
        # Large enough that the budget decides.
        "update_ratio": 1e-2,
        "realised_kl_interval": 1,
    }
    learner = first_learner(directory, sections | {"step_control": control}, seed)
    if spread:
        _spread(learner, seed)
    assert learner.sketch is not None and learner.predictor is not None
    predictor = learner.predictor
    generator = torch.Generator().manual_seed(seed)
    # Of different lengths, but equally many: the interleaved schedule wants one shape.
    batches = make_batches(generator, [[60, 40], [48, 58], [50, 20], [63, 33]])
    batches = [padded(batch, 64) for batch in batches]  # positions may be divided evenly
    probe = probe_of(together(batches))
    predictor.rows = len(probe.tokens)  # one pass instead of four
    predicted, exact = {}, None
    if not spread:
        _make_direction(learner, batches, probe)
        with torch.no_grad():
            predicted = {
                "forward_ad": predictor._by_forward_mode(probe),
                # From an expectation that is far off: these are 0.03 to 0.2.
                "finite_difference": predictor._by_differences(probe, 1e-4),
            }
        if in_fp32:
            exact = _in_fp32(learner, directory, sections, batches, probe, seed)
    backward(learner, batches)  # the direction was made in the sketches' place
    result = learner.step(probe)
    assert result.applied and result.alpha is not None and result.alpha < 3
    assert result.kl_predicted_scaled is not None and result.kl_realised is not None
    assert result.kl_ratio == result.kl_realised / result.kl_predicted_scaled
    assert result.kl_along is not None
    return Row(predicted, exact, result.kl_predicted_scaled, result.kl_realised, result.kl_along)


def _make_direction(learner: Learner, batches: list[Batch], probe: ProbeBatch) -> None:
    """Leave the direction in the proxies; nothing is applied."""
    assert learner.sketch is not None
    backward(learner, batches)
    learner.sketch.probe = probe
    assert not learner.sketch.prepare_grads()


def _in_fp32(
    learner: Learner,
    directory: Path,
    sections: dict[str, Any],
    batches: list[Batch],
    probe: ProbeBatch,
    seed: int,
) -> float:
    """What a model in fp32 predicts of a learner's weights and direction."""
    train = sections.get("train", {}) | {"precision": "fp32"}
    other = first_learner(directory, sections | {"train": train}, seed)
    _make_direction(other, batches, probe)
    assert other.sketch is not None and other.predictor is not None
    with torch.no_grad():
        for source, target in zip(_moved(learner), _moved(other), strict=True):
            target.copy_(source)
        other.sketch.capture.gather_directions()
        return other.predictor._by_forward_mode(probe)


def _moved(learner: Learner) -> list[torch.Tensor]:
    """All that a prediction depends on, beside the projections."""
    assert learner.sketch is not None
    weights = [weight for chunk in learner.chunks for weight in chunk.parameters()]
    return weights + [target.proxy for target in learner.sketch.capture.targets]


def together(batches: list[Batch]) -> Batch:
    """The responses of batches of one length: eight are as many as a probe has by default."""
    tokens, weights = ([getattr(b, name) for b in batches] for name in ("tokens", "weights"))
    return Batch(torch.cat(tokens), torch.cat(weights))


def first_learner(directory: Path, sections: dict[str, Any], seed: int) -> Learner:
    cfg = config_for(directory, **sections)
    return make_learner(cfg, distributed.initialize(cfg.parallel, seed))
