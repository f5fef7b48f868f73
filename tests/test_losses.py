"""Losses and their gradients against float64 references, and what must not depend on anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import tiny_model
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_logra.config import AlgorithmConfig, SamplingConfig
from megatron_logra.model.gpt import forward_head
from megatron_logra.model.vocabulary import without_columns
from megatron_logra.rl.batch import MicroBatch, Sample, micro_batches
from megatron_logra.rl.losses import (
    GAP_LIMIT,
    logprobs_head,
    policy_head,
    sft_head,
    token_logprobs,
    total,
)
from megatron_logra.rollout.static_engine import StaticEngine

VOCABULARY, HIDDEN = 37, 11


class Readout:
    """An output layer [h, V] in fp32 that remembers how many logits it made at once."""

    def __init__(self, generator: torch.Generator, columns: int = VOCABULARY) -> None:
        self.weight = torch.randn(HIDDEN, columns, generator=generator)
        self.rows: list[int] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        self.rows.append(hidden.shape[0] * hidden.shape[1])
        return hidden @ self.weight


def integer(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=generator))


def random_samples(
    generator: torch.Generator, count: int, *, vocabulary: int = VOCABULARY, old: bool = False
) -> list[Sample]:
    """Uneven samples with logprobs near those of a uniform policy."""
    samples = []
    for _ in range(count):
        length = integer(generator, 1, 9)
        noise = torch.randn(2, length, generator=generator).tolist()
        logprobs = [[x - math.log(vocabulary) for x in row] for row in noise]
        advantage = float(torch.randn((), generator=generator))
        samples.append(
            Sample(
                prompt_ids=[integer(generator, 0, vocabulary) for _ in range(1 + length % 4)],
                response_ids=[integer(generator, 0, vocabulary) for _ in range(length)],
                rollout_logprobs=logprobs[0],
                advantage=advantage,
                completed=integer(generator, 0, 3) > 0,
                old_logprobs=logprobs[1] if old else None,
            )
        )
    return samples


def one_batch(samples: list[Sample]) -> MicroBatch:
    (batch,) = micro_batches(samples, len(samples), 0)
    return batch


def random_hidden(generator: torch.Generator, batch: MicroBatch, scale: float = 0.5) -> Tensor:
    b, s = batch.tokens.shape
    return (scale * torch.randn(s, b, HIDDEN, generator=generator)).requires_grad_()


def reference_logprobs(
    batch: MicroBatch, hidden: Tensor, weight: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Logprobs [b, s] of the targets and entropies [b, s] in float64."""
    distribution = (hidden.transpose(0, 1) @ weight.double() / temperature).log_softmax(-1)
    logprobs = distribution.gather(2, batch.targets[..., None]).squeeze(2)
    return logprobs, -(distribution.exp() * distribution).sum(-1)


def relative_error(result: Tensor, reference: Tensor) -> float:
    return float((result.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.3])
@pytest.mark.parametrize("old", [False, True], ids=["one_update", "several_updates"])
@pytest.mark.parametrize("truncation", [1.1, None])
def test_policy_loss_and_gradient_equal_a_float64_reference(
    pg: ProcessGroupCollection,
    generator: torch.Generator,
    temperature: float,
    old: bool,
    truncation: float | None,
) -> None:
    samples = random_samples(generator, 9, old=old)
    batch = one_batch(samples)
    readout, hidden = Readout(generator), random_hidden(generator, batch)
    algorithm = AlgorithmConfig(clip_low=0.2, clip_high=0.3, importance_truncation=truncation)
    loss, tokens, report = policy_head(batch, algorithm, temperature, pg.tp)(hidden, readout)
    loss.backward()

    exact = hidden.detach().double().requires_grad_()
    logprobs, entropy = reference_logprobs(batch, exact, readout.weight, temperature)
    expected = torch.zeros((), dtype=torch.float64)
    sums = dict.fromkeys(
        ("entropy", "clipped", "truncated", "kl_rollout", "mismatch", "mismatch_tokens"), 0.0
    )
    for row, place in enumerate(batch.places):
        sample = samples[place]
        for i in range(len(sample.response_ids)):
            at = row, len(sample.prompt_ids) - 1 + i
            new = logprobs[at]
            before = new.detach()
            if sample.old_logprobs is not None:
                before = torch.tensor(sample.old_logprobs[i], dtype=torch.float64)
            gap = before - sample.rollout_logprobs[i]
            ratio = torch.exp(new - before)
            plain = ratio * sample.advantage
            cut = ratio.clamp(0.8, 1.3) * sample.advantage
            weight = 1.0 if truncation is None else min(math.exp(gap), truncation)
            expected = expected - weight * torch.minimum(plain, cut)
            sums["entropy"] += float(entropy[at].detach())
            sums["clipped"] += float(cut < plain)
            sums["truncated"] += truncation is not None and math.exp(gap) > truncation
            sums["kl_rollout"] += math.exp(gap) - 1 - float(gap)
            sums["mismatch"] -= float(gap) * sample.completed
            sums["mismatch_tokens"] += sample.completed
    expected.backward()

    count = sum(len(sample.response_ids) for sample in samples)
    assert tokens.dtype == torch.int32 and int(tokens) == count
    assert float(loss) == pytest.approx(float(expected), rel=2e-5, abs=1e-5)
    assert hidden.grad is not None and exact.grad is not None
    assert relative_error(hidden.grad, exact.grad) < 2e-6
    assert sums["clipped"] > 0 or not old
    for name, value in sums.items():
        assert float(report.sums[name]) == pytest.approx(value, rel=1e-4, abs=1e-4), name
    assert float(report.sums["tokens"]) == count
    assert float(report.sums["loss"]) == pytest.approx(float(loss), rel=1e-5, abs=1e-5)
    assert not report.nonfinite.any()


def test_supervised_loss_and_gradient_equal_a_float64_reference(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    batch = one_batch(random_samples(generator, 5))
    readout, hidden = Readout(generator), random_hidden(generator, batch)
    loss, tokens, report = sft_head(batch, AlgorithmConfig(), pg.tp)(hidden, readout)
    loss.backward()
    exact = hidden.detach().double().requires_grad_()
    logprobs, entropy = reference_logprobs(batch, exact, readout.weight, 1.0)
    expected = -logprobs[batch.loss_mask].sum()
    expected.backward()
    assert hidden.grad is not None and exact.grad is not None
    assert int(tokens) == int(batch.loss_mask.sum())
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert relative_error(hidden.grad, exact.grad) < 2e-6
    expected_entropy = float(entropy[batch.loss_mask].sum())
    assert float(report.sums["entropy"]) == pytest.approx(expected_entropy, rel=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 7, 10_000])
def test_chunks_give_the_same_and_hold_no_more_logits_than_they_may(
    pg: ProcessGroupCollection, generator: torch.Generator, chunk: int
) -> None:
    batch = one_batch(random_samples(generator, 8))
    readout, hidden = Readout(generator), random_hidden(generator, batch)
    count = int(batch.loss_mask.sum())
    upstream = torch.randn(count, generator=generator)
    places = batch.loss_mask.t().reshape(-1).nonzero().squeeze(1)
    targets = batch.targets.t()[batch.loss_mask.t()]
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        is_weight = tensor.data_ptr() == readout.weight.data_ptr()
        if tensor.dim() > 1 and tensor.shape[-1] == VOCABULARY and not is_weight:
            sizes.append(tensor.numel() // VOCABULARY)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, entropy = token_logprobs(
            hidden, readout, places, targets, temperature=0.7, chunk=chunk, tp_group=pg.tp
        )
    forward_rows = list(readout.rows)
    kept = sum(sizes)
    logprobs.backward(upstream)

    exact = hidden.detach().double().requires_grad_()
    expected, expected_entropy = reference_logprobs(batch, exact, readout.weight, 0.7)
    expected = expected.t()[batch.loss_mask.t()]
    expected.backward(upstream.double())
    assert hidden.grad is not None and exact.grad is not None
    assert relative_error(logprobs.detach(), expected.detach()) < 1e-6
    assert relative_error(entropy, expected_entropy.t()[batch.loss_mask.t()].detach()) < 1e-6
    assert relative_error(hidden.grad, exact.grad) < 2e-6
    assert sum(forward_rows) == count  # only positions with a loss ever get logits
    assert max(readout.rows) <= chunk
    if chunk < count:
        assert kept == 0  # nothing over the vocabulary waits for the backward pass
        assert len(readout.rows) == 2 * len(forward_rows)
    else:
        assert kept > 0
        assert len(readout.rows) == 1


def test_padding_columns_of_the_vocabulary_have_no_probability(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    batch = one_batch(random_samples(generator, 6))
    padded, hidden = Readout(generator, VOCABULARY + 5), random_hidden(generator, batch)
    head = logprobs_head(batch, 0.8, 16, pg.tp)
    logprobs, entropy = head(hidden, lambda h: without_columns(padded(h), VOCABULARY))
    weight = padded.weight[:, :VOCABULARY]
    expected = reference_logprobs(batch, hidden.detach().double(), weight, 0.8)
    for result, reference in zip((logprobs, entropy), expected, strict=True):
        assert relative_error(result.detach(), reference * batch.loss_mask) < 1e-6
        assert torch.count_nonzero(result[~batch.loss_mask]) == 0
    logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_gap_of_200_nats_stays_finite_clamped_and_counted(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    lengths, sign = (4, 5), (1.0, -1.0)
    samples = [
        Sample([1, 2], list(range(n)), [-3.6 + s * 200.0] * n, advantage=s, old_logprobs=old)
        for n, s, old in zip(lengths, sign, ([-3.6] * 4, [-203.6] * 5), strict=True)
    ]
    batch = one_batch(samples)
    hidden = random_hidden(generator, batch)
    for truncation in (2.0, None):
        algorithm = AlgorithmConfig(importance_truncation=truncation)
        loss, tokens, report = policy_head(batch, algorithm, 1.0, pg.tp)(hidden, Readout(generator))
        (gradient,) = torch.autograd.grad(loss, hidden)
        assert loss.isfinite() and gradient.isfinite().all()
        assert all(value.isfinite() for value in report.sums.values())
        assert int(tokens) == 9 and int(report.sums["clamped"]) == 9
        assert float(report.sums["mismatch"]) == pytest.approx(4 * GAP_LIMIT, rel=1e-6)
        # In the second sample trainer and rollout agree to the last bit before the update.
        assert float(report.sums["kl_rollout"]) == pytest.approx(
            4 * (math.exp(-GAP_LIMIT) - 1 + GAP_LIMIT), rel=1e-6
        )


def test_batch_without_loss_carrying_tokens_gives_zero_tokens_and_no_nan(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    batch = one_batch(random_samples(generator, 3))
    batch.loss_mask.zero_()
    readout = Readout(generator)
    hidden = torch.full((batch.tokens.shape[1], 3, HIDDEN), math.nan, requires_grad=True)
    for head in (
        policy_head(batch, AlgorithmConfig(), 1.0, pg.tp),
        sft_head(batch, AlgorithmConfig(), pg.tp),
    ):
        loss, tokens, report = head(hidden, readout)
        (gradient,) = torch.autograd.grad(loss, hidden)
        assert float(loss) == 0.0 and int(tokens) == 0
        assert torch.count_nonzero(gradient) == 0
        assert total([report], [batch]) == ({}, [])
    logprobs, _ = logprobs_head(batch, 1.0, 8, pg.tp)(hidden, readout)
    assert torch.count_nonzero(logprobs) == 0


def test_sequence_with_nan_is_named_by_its_place(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    samples = random_samples(generator, 7)
    bad = integer(generator, 0, 7)
    batches = micro_batches(samples, 2, 0)
    reports = []
    for batch in batches:
        hidden = random_hidden(generator, batch).detach()
        if bad in batch.places:
            row = batch.places.index(bad)
            hidden[len(samples[bad].prompt_ids) - 1, row, 0] = math.nan
        head = policy_head(batch, AlgorithmConfig(logprob_chunk=5), 1.0, pg.tp)
        reports.append(head(hidden, Readout(generator))[2])
    sums, places = total(reports, batches)
    assert places == [bad]
    assert sums["tokens"] == sum(len(sample.response_ids) for sample in samples)
    assert math.isnan(sums["loss"])


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("chunk", [4, 1024])
def test_loss_and_gradients_do_not_depend_on_how_the_batch_is_split(
    pg: ProcessGroupCollection, size: int, chunk: int
) -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    samples = random_samples(generator, 6, vocabulary=131)
    algorithm = AlgorithmConfig(logprob_chunk=chunk)

    def run(size: int, pad_id: int) -> tuple[float, int, dict[str, Tensor], dict[str, float]]:
        model = tiny_model(pg)
        batches = micro_batches(samples, size, pad_id)
        losses, counts, reports = [], [], []
        for batch in batches:
            head = policy_head(batch, algorithm, 0.9, pg.tp)
            result = forward_head(model, batch.tokens, batch.position_ids, head)
            loss, tokens, report = result
            loss.backward()
            losses.append(float(loss))
            counts.append(int(tokens))
            reports.append(report)
        gradients = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        return sum(losses), sum(counts), gradients, total(reports, batches)[0]

    loss, tokens, gradients, sums = run(size, integer(generator, 0, 131))
    expected = run(6, 0)
    assert tokens == expected[1] == sum(len(sample.response_ids) for sample in samples)
    assert loss == pytest.approx(expected[0], rel=1e-5, abs=1e-5)
    assert gradients.keys() == expected[2].keys() and len(gradients) > 10
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[2][name].double()) < 1e-5, name
    for name, value in sums.items():
        assert value == pytest.approx(expected[3][name], rel=1e-5, abs=1e-4), name


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.3])
def test_unchanged_weights_give_ratio_and_importance_weight_one(
    pg: ProcessGroupCollection, generator: torch.Generator, temperature: float
) -> None:
    model = tiny_model(pg)
    engine = StaticEngine(
        [model], stop_ids=frozenset({3}), pad_id=0, max_sequence_length=64, batch_size=8, pg=pg
    )
    prompts = [
        [integer(generator, 0, 131) for _ in range(integer(generator, 1, 20))] for _ in range(4)
    ]
    sampling = SamplingConfig(temperature=temperature, max_tokens=16)
    responses = engine.generate(prompts, 2, sampling, seed=integer(generator, 0, 99), update=3)
    samples = [
        Sample(prompt, response.token_ids, response.logprobs, advantage=1.0)
        for prompt, group in zip(prompts, responses, strict=True)
        for response in group
    ]
    algorithm = AlgorithmConfig(logprob_chunk=16)
    gaps: list[float] = []
    reports: list[Any] = []
    batches = micro_batches(samples, 3, 0)
    with torch.no_grad():
        for batch in batches:
            evaluate: Callable[..., Any] = logprobs_head(batch, temperature, 16, pg.tp)
            logprobs, _ = forward_head(model, batch.tokens, batch.position_ids, evaluate)
            gaps += (logprobs - batch.rollout_logprobs)[batch.loss_mask].abs().tolist()
            head = policy_head(batch, algorithm, temperature, pg.tp)
            loss, tokens, report = forward_head(model, batch.tokens, batch.position_ids, head)
            assert float(loss) == pytest.approx(-float(tokens), rel=1e-5)
            reports.append(report)
    assert max(gaps) < 2e-5
    sums, bad = total(reports, batches)
    assert sums["ratio"] == sums["tokens"] == len(gaps)
    assert sums["truncated"] == sums["clipped"] == sums["clamped"] == 0
    assert abs(sums["mismatch"]) / sums["mismatch_tokens"] < 2e-5
    assert abs(sums["kl_rollout"]) < 1e-4
    assert not bad


def test_bf16_hidden_states_give_fp32_logprobs(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    batch = one_batch(random_samples(generator, 4))
    readout, hidden = Readout(generator), random_hidden(generator, batch).detach().bfloat16()
    readout.weight = readout.weight.bfloat16()
    hidden.requires_grad_()
    loss, _, report = policy_head(batch, AlgorithmConfig(), 1.3, pg.tp)(hidden, readout)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    logits = (hidden.detach() @ readout.weight).double() / 1.3
    entropy = torch.distributions.Categorical(logits=logits.transpose(0, 1)).entropy()
    expected = float(entropy[batch.loss_mask].sum())
    assert float(report.sums["entropy"]) == pytest.approx(expected, rel=1e-5)
