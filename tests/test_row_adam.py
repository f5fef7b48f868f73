"""RowAdam's factors against the formulas written out in numpy, float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_logra.sketch.row_adam import row_factors, updated_moment

BETA2, EPS = 0.95, 1e-8


def reference_direction(rule: str, s: np.ndarray, v: np.ndarray, t: int) -> np.ndarray:
    m = np.sqrt(v / (1 - BETA2**t))
    if rule == "sgd":
        return s
    if rule == "plain":
        return s / (m + EPS)[:, None]
    q = 1 / (m + EPS * m.mean())
    q = q / np.sqrt((q**2).mean())
    d = q[:, None] * s
    return d * np.linalg.norm(s) / np.linalg.norm(d)


@pytest.mark.parametrize("rule", ["norm_preserving", "plain", "sgd"])
def test_direction_follows_the_formula_over_five_updates(rule, generator):
    shapes = [(30, 8), (7, 8)]
    v = [np.zeros(rows) for rows, _ in shapes]
    moments = [torch.zeros(rows) for rows, _ in shapes]
    for t in range(1, 6):
        s = [torch.randn(shape, generator=generator).exp() for shape in shapes]
        moments = [updated_moment(m, x, BETA2) for m, x in zip(moments, s, strict=True)]
        factors = factors_of(rule, s, moments, t)
        for i, x in enumerate(s):
            x64 = x.double().numpy()
            v[i] = BETA2 * v[i] + (1 - BETA2) * (x64**2).mean(1)
            expected = reference_direction(rule, x64, v[i], t)
            actual = (x * factors[i].unsqueeze(1)).double().numpy()
            assert np.linalg.norm(actual - expected) < 1e-6 * np.linalg.norm(expected)


def test_norm_preserving_keeps_each_layers_norm(generator):
    s = [torch.randn(20, 4, generator=generator) * 1e-6, torch.randn(5, 4, generator=generator)]
    moments = [updated_moment(torch.zeros(len(x)), x, BETA2) for x in s]
    for x, factor in zip(s, factors_of("norm_preserving", s, moments, 1), strict=True):
        torch.testing.assert_close((x * factor.unsqueeze(1)).norm(), x.norm())


@pytest.mark.parametrize("rule", ["norm_preserving", "plain", "sgd"])
@pytest.mark.parametrize("history", [0.0, 1.0])
def test_an_all_zero_sketch_gives_a_zero_direction(rule, history, generator):
    s = [torch.zeros(6, 4), torch.randn(3, 4, generator=generator)]
    moments = [torch.full((6,), history), torch.ones(3)]
    direction = s[0] * factors_of(rule, s, moments, 3)[0].unsqueeze(1)
    assert torch.equal(direction, torch.zeros(6, 4))


def test_rows_without_a_gradient_do_not_blow_up_the_rest(generator):
    s = torch.randn(6, 4, generator=generator) * 1e-12
    s[2] = 0
    moments = [updated_moment(torch.zeros(6), s, BETA2)]
    direction = s * factors_of("norm_preserving", [s], moments, 1)[0].unsqueeze(1)
    assert direction.isfinite().all() and not direction[2].any()
    torch.testing.assert_close(direction.norm(), s.norm())


def test_a_layer_split_by_rows_gives_the_same_direction(generator):
    s = torch.randn(12, 4, generator=generator)
    moment = updated_moment(torch.zeros(12), s, BETA2)
    whole = factors_of("norm_preserving", [s], [moment], 1)[0]
    halves = [slice(0, 5), slice(5, 12)]
    # Both "ranks" run in lockstep: every call of reduce_sums waits for the other's sums.
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    barrier, mailbox = Barrier(2), [torch.zeros(0)] * 2

    def rank(index: int) -> torch.Tensor:
        def reduce_sums(sums: torch.Tensor) -> torch.Tensor:
            mailbox[index] = sums
            barrier.wait()
            total = mailbox[0] + mailbox[1]
            barrier.wait()
            return total

        rows = halves[index]
        (factor,) = row_factors(
            "norm_preserving",
            [s[rows]],
            [moment[rows]],
            [12],
            beta2=BETA2,
            eps=EPS,
            step=1,
            reduce_sums=reduce_sums,
        )
        return factor

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(rank, range(2)))
    torch.testing.assert_close(torch.cat(parts), whole)


def factors_of(rule, sketches, moments, step):
    return row_factors(
        rule,
        sketches,
        moments,
        [len(s) for s in sketches],
        beta2=BETA2,
        eps=EPS,
        step=step,
        reduce_sums=lambda sums: sums,
    )
