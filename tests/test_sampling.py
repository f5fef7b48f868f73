"""Sampling against an independent reference in plain Python and float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_logra.config import SamplingConfig
from megatron_logra.counter_rng import domain, philox4x32
from megatron_logra.rollout import sampling as module
from megatron_logra.rollout.sampling import noise, sample

VOCABULARIES = (7, 256, 700)  # less than, exactly, and no multiple of a block of the CDF
SETTINGS = {
    "plain": SamplingConfig(),
    "cold": SamplingConfig(temperature=0.6),
    "hot": SamplingConfig(temperature=1.3),
    "top_k": SamplingConfig(top_k=5),
    "top_p": SamplingConfig(top_p=0.8),
    "both": SamplingConfig(temperature=0.7, top_k=20, top_p=0.9),
    "larger_than_vocabulary": SamplingConfig(top_k=10_000, top_p=0.999),
}
every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())


def reference(logits: Tensor, setting: SamplingConfig) -> list[float]:
    """Probabilities of one row's tokens, by sorting and summing in Python floats."""
    scaled = [value / setting.temperature for value in logits.double().tolist()]
    largest = max(scaled)
    weights = {token: math.exp(value - largest) for token, value in enumerate(scaled)}
    order = sorted(weights, key=lambda token: (-scaled[token], token))
    if setting.top_k:
        order = order[: setting.top_k]
    if setting.top_p < 1:
        goal = setting.top_p * math.fsum(weights[token] for token in order)
        kept: list[int] = []
        while not kept or math.fsum(weights[token] for token in kept) < goal:
            kept.append(order[len(kept)])
        order = kept
    total = math.fsum(weights[token] for token in order)
    return [weights[t] / total if t in set(order) else 0.0 for t in range(len(scaled))]


def random_logits(generator: torch.Generator, rows: int, vocabulary: int) -> Tensor:
    return torch.randn(rows, vocabulary, generator=generator) * 3


def uniform(generator: torch.Generator, rows: int) -> Tensor:
    return torch.rand(rows, generator=generator, dtype=torch.float64)


@every_setting
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("candidates", [3, 1024])
def test_tokens_and_logprobs_are_those_of_the_inverse_cdf(
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    setting: SamplingConfig,
    vocabulary: int,
    candidates: int,
) -> None:
    monkeypatch.setattr(module, "_CANDIDATES", candidates)
    logits, uniforms = random_logits(generator, 20, vocabulary), uniform(generator, 20)
    before = logits.clone()
    tokens, logprobs = sample(logits, uniforms, setting)
    assert torch.equal(logits, before)
    for row, token in enumerate(tokens.tolist()):
        probabilities = reference(logits[row], setting)
        assert probabilities[token] > 0
        below = math.fsum(probabilities[:token])
        assert below - 1e-6 <= uniforms[row] <= below + probabilities[token] + 1e-6
        assert float(logprobs[row]) == pytest.approx(math.log(probabilities[token]), abs=2e-6)


@every_setting
def test_frequencies_match_the_distribution(setting: SamplingConfig) -> None:
    logits = random_logits(torch.Generator().manual_seed(5), 1, 40)
    draws = 20_000
    index = torch.arange(draws)
    uniforms = noise(index % 50, index // 50, seed=3, update=4, stream="rollout")
    tokens, _ = sample(logits.expand(draws, -1), uniforms, setting)
    counts = tokens.bincount(minlength=40).tolist()
    expected = [draws * probability for probability in reference(logits[0], setting)]
    likely = [i for i, value in enumerate(expected) if value >= 5]
    rare = [i for i, value in enumerate(expected) if value < 5]
    bins = [([i], expected[i]) for i in likely]
    bins.append((rare, math.fsum(expected[i] for i in rare)))
    statistic = sum((sum(counts[i] for i in ids) - e) ** 2 / e for ids, e in bins if e > 0)
    freedom = sum(e > 0 for _, e in bins) - 1
    assert statistic < freedom + 3.5 * math.sqrt(2 * freedom) + 3
    assert all(counts[i] == 0 for i, value in enumerate(expected) if value == 0)


@every_setting
@pytest.mark.parametrize("u", [0.0, 2.0**-33, 1e-300, 0.5, 1 - 2.0**-33, 1 - 2.0**-53, 1.0])
def test_extreme_noise_never_picks_a_token_without_mass(
    generator: torch.Generator, setting: SamplingConfig, u: float
) -> None:
    logits = random_logits(generator, 12, 900)
    logits[:, :300] = -math.inf  # a whole block, and part of the next
    logits[:, 600:] = -math.inf
    logits[:, 400:500] -= 1e4  # underflows to nothing
    logits[0, 450] = 1e4  # the only token with mass
    tokens, logprobs = sample(logits, torch.full((12,), u, dtype=torch.float64), setting)
    for row, token in enumerate(tokens.tolist()):
        assert reference(logits[row], setting)[token] > 0
    assert tokens[0] == 450 and logprobs[0] == 0
    assert bool(torch.isfinite(logprobs).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_greedy_takes_the_lowest_of_tied_tokens_with_the_plain_logprob(
    generator: torch.Generator, dtype: torch.dtype, vocabulary: int
) -> None:
    logits = random_logits(generator, 30, vocabulary).to(dtype)
    tied = torch.rand(30, vocabulary, generator=generator) < 0.3
    logits[tied] = logits.amax()
    setting = SamplingConfig(temperature=0.0, top_k=2, top_p=0.5)
    tokens, logprobs = sample(logits, uniform(generator, 30), setting)
    expected = logits.double().log_softmax(dim=-1)
    for row, token in enumerate(tokens.tolist()):
        values = logits[row].tolist()
        assert token == values.index(max(values))
        assert float(logprobs[row]) == pytest.approx(float(expected[row, token]), abs=2e-6)


def test_filters_keep_the_lowest_of_tied_tokens() -> None:
    logits = torch.zeros(1000, 600)
    logits[:, 590] = 1.0
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens, _ = sample(logits, uniforms, SamplingConfig(top_k=4))
    assert set(tokens.tolist()) == {0, 1, 2, 590}
    # Token 590 has e / (599 + e) of the mass, the others the same each.
    tokens, _ = sample(logits, uniforms, SamplingConfig(top_p=(math.e + 2.5) / (599 + math.e)))
    assert set(tokens.tolist()) == {0, 1, 2, 590}


@every_setting
def test_a_row_depends_on_no_other_row(generator: torch.Generator, setting: SamplingConfig) -> None:
    logits, uniforms = random_logits(generator, 16, 700), uniform(generator, 16)
    logits[3] = logits[4]  # ties within one row only
    logits[3].round_()
    tokens, logprobs = sample(logits, uniforms, setting)
    order = torch.randperm(16, generator=generator)
    shuffled, shuffled_logprobs = sample(logits[order], uniforms[order], setting)
    assert torch.equal(shuffled, tokens[order])
    assert torch.equal(shuffled_logprobs, logprobs[order])
    for row in range(16):
        token, logprob = sample(logits[row, None], uniforms[row, None], setting)
        assert token == tokens[row] and logprob == logprobs[row]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(
    generator: torch.Generator, bad: float, temperature: float
) -> None:
    logits = random_logits(generator, 4, 30)
    logits[2, 11] = bad
    with pytest.raises(FloatingPointError, match="row 2"):
        sample(logits, uniform(generator, 4), SamplingConfig(temperature=temperature))
    logits[2] = -math.inf
    with pytest.raises(FloatingPointError, match="row 2"):
        sample(logits, uniform(generator, 4), SamplingConfig(temperature=temperature))


def test_noise_is_a_hash_of_its_coordinates() -> None:
    position, index = torch.tensor([0, 5, 5]), torch.tensor([0, 2, 2**32 - 1])
    base = noise(position, index, seed=9, update=8, stream="rollout")
    word = philox4x32((position, index, *domain("rollout")), (9, 8))[0]
    assert torch.equal(base, (word.double() + 0.5) / 2**32)
    others = [
        noise(position, index, seed=8, update=8, stream="rollout"),
        noise(position, index, seed=9, update=9, stream="rollout"),
        noise(position, index, seed=9, update=8, stream="eval"),
        noise(position + 1, index, seed=9, update=8, stream="rollout"),
        noise(position, index - torch.tensor([-1, 1, 1]), seed=9, update=8, stream="rollout"),
    ]
    for other in others:
        assert not bool((other == base).any())
    assert torch.equal(noise(position[1:], index[1:], seed=9, update=8, stream="rollout"), base[1:])
