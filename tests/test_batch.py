"""Micro-batches hold every token where it belongs, whatever the size of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from megatron_logra.rl.batch import MicroBatch, Sample, micro_batches, probe_batch

PAD = 99


@pytest.fixture
def draw(generator: torch.Generator) -> Callable[[int], int]:
    return lambda high: int(torch.randint(high, (), generator=generator))


def random_samples(draw: Callable[[int], int], count: int = 13) -> list[Sample]:
    """Uneven samples of tokens below 90; some without advantage, some without response."""
    samples = []
    for _ in range(count):
        response = [draw(90) for _ in range(draw(12))]
        samples.append(
            Sample(
                prompt_ids=[draw(90) for _ in range(1 + draw(9))],
                response_ids=response,
                rollout_logprobs=[-draw(1000) / 128 for _ in response],
                advantage=float(draw(5) - 2),
                completed=bool(draw(2)),
            )
        )
    return samples


def rows(batches: list[MicroBatch]) -> list[tuple[MicroBatch, int, int]]:
    return [(batch, row, place) for batch in batches for row, place in enumerate(batch.places)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("multiple", [1, 8])
def test_rows_hold_their_samples(draw: Callable[[int], int], size: int, multiple: int) -> None:
    samples = random_samples(draw)
    batches = micro_batches(samples, size, PAD, length_multiple=multiple)
    for batch, row, place in rows(batches):
        sample = samples[place]
        ids = [*sample.prompt_ids, *sample.response_ids]
        width = batch.tokens.shape[1]
        assert width % multiple == 0
        padding = [PAD] * (width - len(ids) + 1)
        assert batch.tokens[row].tolist() == ids[:-1] + padding
        assert batch.targets[row].tolist() == ids[1:] + padding
        assert batch.position_ids[row].tolist() == list(range(width))
        mask = batch.loss_mask[row]
        assert batch.targets[row][mask].tolist() == list(sample.response_ids)
        assert mask.nonzero()[0].item() == len(sample.prompt_ids) - 1
        assert batch.rollout_logprobs[row][mask].tolist() == list(sample.rollout_logprobs)
        assert torch.count_nonzero(batch.rollout_logprobs[row][~mask]) == 0
        assert batch.advantages[row].item() == sample.advantage
        assert batch.completed[row].item() == sample.completed
    used = sorted(place for *_, place in rows(batches))
    assert used == [i for i, s in enumerate(samples) if s.advantage != 0 and s.response_ids]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_order_of_the_sequences_does_not_depend_on_the_micro_batch_size(
    draw: Callable[[int], int], size: int
) -> None:
    samples = random_samples(draw, 20)
    order = [place for *_, place in rows(micro_batches(samples, 1, PAD))]
    batches = micro_batches(samples, size, PAD)
    assert [place for *_, place in rows(batches)] == order
    assert [len(batch.places) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    lengths = [len(samples[p].prompt_ids) + len(samples[p].response_ids) for p in order]
    assert lengths == sorted(lengths, reverse=True)
    assert all(
        batch.tokens.shape[1]
        == max(len(samples[p].prompt_ids) + len(samples[p].response_ids) - 1 for p in batch.places)
        for batch in batches
    )


def test_without_a_loss_carrying_sample_there_is_no_micro_batch(
    draw: Callable[[int], int],
) -> None:
    samples = [Sample([draw(9)], [draw(9)], [-1.0], advantage=0.0), Sample([draw(9)], [])]
    assert micro_batches(samples, 2, PAD) == []
    assert micro_batches([], 2, PAD) == []


def test_supervised_samples_need_neither_logprobs_nor_advantage(
    draw: Callable[[int], int],
) -> None:
    sample = Sample([draw(9) for _ in range(3)], [draw(9) for _ in range(4)])
    (batch,) = micro_batches([sample], 4, PAD)
    assert batch.loss_mask.sum() == 4
    assert batch.old_logprobs is None


def test_old_logprobs_are_all_or_none() -> None:
    with_old = Sample([1], [2, 3], [-1.0, -2.0], old_logprobs=[-0.5, -0.25])
    (batch,) = micro_batches([with_old] * 2, 2, PAD)
    assert batch.old_logprobs is not None
    assert batch.old_logprobs[batch.loss_mask].tolist() == [-0.5, -0.25] * 2
    with pytest.raises(ValueError, match="all samples"):
        micro_batches([with_old, Sample([1], [2, 3], [-1.0, -2.0])], 2, PAD)


def test_sample_without_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt"):
        micro_batches([Sample([], [1, 2])], 1, PAD)


@pytest.mark.parametrize("n", [1, 3, 4, 50])
def test_probe_is_evenly_spaced_and_cut_whatever_the_advantages(
    draw: Callable[[int], int], n: int
) -> None:
    samples = [sample for sample in random_samples(draw, 40) if sample.response_ids]
    empty = Sample([1, 2], [])
    probe = probe_batch([empty, *samples, empty], n, 5, PAD)
    count = min(n, len(samples))
    assert probe.tokens.shape[0] == count
    places = [i * len(samples) // count for i in range(count)]
    gaps = {b - a for a, b in pairwise(places)}
    assert len(gaps) <= 2
    for row, place in enumerate(places):
        sample = samples[place]
        ids = [*sample.prompt_ids, *sample.response_ids[:5]]
        assert probe.tokens[row, : len(ids) - 1].tolist() == ids[:-1]
        expected = range(len(sample.prompt_ids) - 1, len(ids) - 1)
        assert probe.mask[row].nonzero().squeeze(1).tolist() == list(expected)
        assert probe.position_ids[row].tolist() == list(range(probe.tokens.shape[1]))
    with pytest.raises(ValueError, match="at least one"):
        probe_batch([empty], 4, 5, PAD)


@pytest.mark.parametrize("shares", [1, 2, 3, 20])
def test_shares_are_equally_many_and_hold_everything_once(
    draw: Callable[[int], int], shares: int
) -> None:
    samples = random_samples(draw)
    whole = micro_batches(samples, 2, PAD)
    parts = [
        micro_batches(samples, 2, PAD, length_multiple=4, share=(number, shares))
        for number in range(shares)
    ]
    assert {len(part) for part in parts} == {-(-len(whole) // shares)}
    places = [place for part in parts for batch in part for place in batch.places if place >= 0]
    assert sorted(places) == sorted(place for batch in whole for place in batch.places)
    for batch in (batch for part in parts for batch in part):
        assert batch.tokens.shape[1] % 4 == 0
        assert batch.loss_mask.any() == (batch.places[0] >= 0)
