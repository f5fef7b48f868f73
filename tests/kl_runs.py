"""What each rank does in the tests of predicted and realised KL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from layout_runs import backward, padded
from reference import config_for, make_batches
from training import make_learner, probe_of

from megatron_logra import distributed
from megatron_logra.optimizer.learner import Learner

BUDGETS = (2e-5, 2e-4, 2e-3)


@dataclass(frozen=True)
class Row:
    """A learner's first step at one budget."""

    predicted: dict[str, float]
    """Predicted KL at α = 1, by estimator."""
    scaled: float
    """Predicted KL of the step as taken."""
    realised: float
    along: float
    """The part of the realised KL along the prediction."""


def table(
    directory: Path, sections: dict[str, Any], seed: int, budgets: tuple[float, ...] = BUDGETS
) -> list[Row]:
    """The same first step at every budget, predicted by both estimators."""
    return [_row(directory, sections, seed, budget) for budget in budgets]


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
    directory: Path, sections: dict[str, Any], seed: int, budget: float, *, spread: bool = False
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
    sketch, predictor = learner.sketch, learner.predictor
    generator = torch.Generator().manual_seed(seed)
    # Of different lengths, but equally many: the interleaved schedule wants one shape.
    batches = make_batches(generator, [[60, 40], [48, 58], [50, 20], [63, 33]])
    batches = [padded(batch, 64) for batch in batches]  # positions may be divided evenly
    backward(learner, batches)
    probe = probe_of(batches[0])
    sketch.probe = probe
    assert not sketch.prepare_grads()  # the direction is in the proxies; nothing is applied
    with torch.no_grad():
        predicted = {
            "forward_ad": predictor._by_forward_mode(probe),
            # From an expectation that is far off.
            "finite_difference": predictor._by_differences(probe, 1e-8),
        }
    backward(learner, batches)  # the direction was made in the sketches' place
    result = learner.step(probe)
    assert result.applied and result.alpha is not None and result.alpha < 3
    assert result.kl_predicted_scaled is not None and result.kl_realised is not None
    assert result.kl_ratio == result.kl_realised / result.kl_predicted_scaled
    assert result.kl_along is not None
    return Row(predicted, result.kl_predicted_scaled, result.kl_realised, result.kl_along)


def first_learner(directory: Path, sections: dict[str, Any], seed: int) -> Learner:
    cfg = config_for(directory, **sections)
    return make_learner(cfg, distributed.initialize(cfg.parallel, seed))
