"""Projections are a pure function of (seed, draw, layer, row, column)."""

from __future__ import annotations

import hashlib
import itertools
import math

import pytest
import torch

from megatron_logra.counter_rng import philox4x32, to_unit_interval
from megatron_logra.sketch.projection import Columns, Projections, projection_bytes

CPU = torch.device("cpu")


def draw(
    layers: list[Columns], rank: int, draw: int, *, seed: int = 7, kind: str = "rademacher"
) -> list[torch.Tensor]:
    """A [r, k] of every layer, unscaled."""
    projections = Projections(layers, rank, kind, seed, CPU)  # type: ignore[arg-type]
    projections.redraw(draw)
    return [projections.transposed(i, torch.float32).t() for i in range(len(layers))]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    first, *rest = counter
    words = philox4x32((torch.tensor([first]), *rest), key)
    assert tuple(int(word) for word in words) == expected


def test_signs_are_fixed_for_all_time():
    """A change of these values would break every checkpoint and every receiver."""
    (a,) = draw([Columns("decoder.layers.0.mlp.linear_fc1", 0, 8)], 4, 3, seed=11)
    signs = ["".join("+" if x > 0 else "-" for x in row) for row in a]
    assert signs == ["-+++-++-", "--+--+--", "++-+--++", "--+--+-+"]


def python_sign(name: str, seed: int, number: int, rank: int, row: int, column: int) -> int:
    """The sign of A[row, column] from Philox in Python's integers, by the documented layout."""
    digest = hashlib.blake2b(f"projection/{name}".encode(), digest_size=8).digest()
    word = column * -(-rank // 32) + row // 32
    block = word // 4
    c = [block % 2**32, block >> 32, *(int.from_bytes(digest[i : i + 4], "little") for i in (0, 4))]
    k = [seed, number]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q % 2**32, (p >> 32) ^ c[3] ^ k[1], p % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return 1 if c[word % 4] >> (row % 32) & 1 else -1


def test_signs_are_those_of_an_independent_generator():
    (a,) = draw([Columns("x", 3, 40)], 70, 9, seed=2**32 - 5)
    expected = [[python_sign("x", 2**32 - 5, 9, 70, i, j) for j in range(3, 40)] for i in range(70)]
    assert torch.equal(a, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("rank", [1, 5, 32, 40, 64, 200])
def test_any_slice_of_columns_is_the_slice_of_the_whole(rank):
    (whole,) = draw([Columns("x", 0, 101)], rank, 5)
    assert whole.shape == (rank, 101)
    for start, stop in [(0, 1), (0, 50), (50, 101), (13, 14), (99, 101)]:
        other = Columns("other", 3, 10)
        _, part = draw([other, Columns("x", start, stop)], rank, 5)
        assert torch.equal(part, whole[:, start:stop])


def test_a_slice_of_the_gaussian_equals_the_slice_of_the_whole():
    (whole,) = draw([Columns("x", 0, 101)], 6, 5, kind="gaussian")
    (part,) = draw([Columns("x", 33, 70)], 6, 5, kind="gaussian")
    torch.testing.assert_close(part, whole[:, 33:70], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_projection_is_an_isometry_in_expectation(kind):
    """E[AᵀA] = I: over 4,000 draws of rank 4 every entry of the mean is within 5 of its σ."""
    rank, columns, draws = 4, 6, 4000
    projections = Projections([Columns("x", 0, columns)], rank, kind, 1, CPU)
    total = torch.zeros(columns, columns, dtype=torch.float64)
    for number in range(draws):
        projections.redraw(number)
        at = projections.transposed(0, torch.float64)
        total += at @ at.t() * projections.scale**2
    mean = total / draws
    sigma = math.sqrt(2 / (rank * draws))
    assert (mean - torch.eye(columns)).abs().max() < 5 * sigma


def test_entries_have_the_stated_values():
    (a,) = draw([Columns("x", 0, 400)], 48, 0)
    assert set(a.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(a.mean())) < 5 / math.sqrt(a.numel())
    (g,) = draw([Columns("x", 0, 400)], 48, 0, kind="gaussian")
    assert abs(float(g.mean())) < 5 / math.sqrt(g.numel())
    assert abs(float(g.var()) - 1) < 5 * math.sqrt(2 / g.numel())


def test_layers_updates_and_seeds_never_share_signs():
    """Agreement of two independent draws of n signs is n/2 within 5 of its σ."""
    layers = [Columns(f"decoder.layers.{i}.mlp.linear_fc1", 0, 512) for i in range(3)]
    signs = [a for number in (0, 1) for a in draw(layers, 32, number)]
    signs += draw(layers, 32, 0, seed=8)
    for a, b in itertools.combinations(signs, 2):
        correlation = float((a * b).sum()) / math.sqrt(a.numel())
        assert abs(correlation) < 5


def test_project_and_gram_are_those_of_the_scaled_matrix(generator):
    projections = Projections([Columns("x", 0, 90), Columns("y", 5, 75)], 24, "rademacher", 3, CPU)
    projections.redraw(2)
    x = torch.randn(13, 70, generator=generator)
    a = projections.transposed(1, torch.float64).t() / math.sqrt(24)
    actual = projections.project(x, 1).double()
    torch.testing.assert_close(actual, x.double() @ a.t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(projections.gram(1).double(), a @ a.t(), rtol=1e-5, atol=1e-6)


def test_bytes_are_those_of_the_formula():
    layers = [Columns("x", 0, 90), Columns("y", 5, 75)]
    for kind, rank in [("rademacher", 40), ("rademacher", 256), ("gaussian", 40)]:
        projections = Projections(layers, rank, kind, 3, CPU)
        assert projections.nbytes == projection_bytes(160, rank, kind)
    assert projection_bytes(1000, 256, "rademacher") == 1000 * 256 // 8


def test_uniforms_never_reach_0_or_1():
    ends = to_unit_interval(torch.tensor([0, 2**32 - 1]))
    assert 0 < ends[0] < 1e-9 and 1 - 1e-9 < ends[1] < 1
