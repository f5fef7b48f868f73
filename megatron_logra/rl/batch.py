"""From sampled responses to the tensors of micro-batches.

Everything here is a function of the list of samples of the whole global batch, in its order;
layouts and micro-batch sizes change which sequences share a tensor, never what a sequence adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_logra.model.context_parallel import own_share
from megatron_logra.optimizer.predicted_kl import ProbeBatch


@dataclass(frozen=True)
class Sample:
    """A prompt with a response: token ids exactly as they were sampled (or given, for sft)."""

    prompt_ids: Sequence[int]
    """At least one token."""
    response_ids: Sequence[int]
    rollout_logprobs: Sequence[float] = ()
    """Of the response's tokens under the sampling distribution, in nats; empty for sft."""
    advantage: float = 1.0
    """Of all tokens of the response; not used by sft."""
    completed: bool = True
    """Whether the response ended by itself and was not cut off."""
    old_logprobs: Sequence[float] | None = None
    """Of the response's tokens under the policy before the first of several updates on one batch;
    None if the batch is used for one update."""

    @property
    def carries_loss(self) -> bool:
        """Whether the sample takes part in the loss.

        One whose advantage is exactly 0 adds nothing to the gradient, so it costs no forward and
        backward pass and its tokens do not count in the normalisation: the batch's mean is one
        over the tokens that carry a signal.
        """
        return len(self.response_ids) > 0 and self.advantage != 0.0


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded sequences without their last token, which predicts nothing.

    Position t of a row holds token t, has token t+1 as its target, and carries loss if token t+1
    is the response's.
    """

    tokens: Tensor
    """[b, s] int64."""
    position_ids: Tensor
    """[b, s] int64, counting from 0 in every row."""
    targets: Tensor
    """[b, s] int64."""
    loss_mask: Tensor
    """[b, s] bool."""
    advantages: Tensor
    """[b] float32."""
    rollout_logprobs: Tensor
    """[b, s] float32, of the targets; 0 where `loss_mask` is False."""
    completed: Tensor
    """[b] bool."""
    old_logprobs: Tensor | None
    """[b, s] float32, of the targets; None if no sample has them."""
    places: tuple[int, ...]
    """Place of each row in the global batch."""

    def own_share(self, group: dist.ProcessGroup) -> MicroBatch:
        """The positions that this context-parallel rank holds."""
        if group.size() == 1:
            return self
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in mine.items():
            if isinstance(value, Tensor) and value.dim() == 2:
                mine[name] = own_share(value, group)
        return MicroBatch(**mine)

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on a device."""
        moved = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in moved.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device)
        return MicroBatch(**moved)


def micro_batches(
    samples: Sequence[Sample],
    micro_batch_size: int,
    pad_id: int,
    *,
    length_multiple: int = 1,
    count_multiple: int = 1,
    uniform: bool = False,
    share: tuple[int, int] = (0, 1),
) -> list[MicroBatch]:
    """The loss-carrying samples in micro-batches, the longest sequences first.

    Sorting by length keeps the padding small; ties go by place in the global batch. The last
    micro-batch may be smaller. Without loss-carrying samples the list is empty.

    Data-parallel ranks take turns, so that their sequences are about as long; each has equally
    many micro-batches, the last of which may carry no loss.

    Args:
        samples: of the whole global batch.
        micro_batch_size: rows of a micro-batch.
        pad_id: token id that fills rows up; what it is has no effect on the loss.
        length_multiple: s is a multiple of this (sequence parallelism divides s).
        count_multiple: each share has a multiple of so many micro-batches, the last of which may
            carry no loss.
        uniform: all micro-batches have the same shape.
        share: which of so many shares.
    """
    number, shares = share
    places = [place for place, sample in enumerate(samples) if sample.carries_loss]
    places.sort(key=lambda place: (-_length(samples[place]), place))
    starts = range(0, len(places), micro_batch_size)
    chosen = [places[start : start + micro_batch_size] for start in starts[number::shares]]
    wanted = -(-len(starts) // shares)
    wanted = -(-wanted // count_multiple) * count_multiple
    chosen += [[]] * (wanted - len(chosen))
    rows = micro_batch_size if uniform else 1
    longest = _length(samples[places[0]]) - 1 if uniform and places else 0
    return [
        _micro_batch(
            [samples[place] for place in some] + [_without_loss(pad_id)] * (rows - len(some)),
            (*some, *[_NOWHERE] * (rows - len(some))),
            pad_id,
            length_multiple,
            longest,
        )
        for some in chosen
    ]


def probe_batch(
    samples: Sequence[Sample],
    n: int,
    max_tokens: int,
    pad_id: int,
    *,
    length_multiple: int = 1,
) -> ProbeBatch:
    """`n` responses evenly spaced over the global batch by place, whatever their advantages.

    Responses without a token are passed over; with fewer than `n` others, all of them are taken.

    Args:
        max_tokens: generated tokens of a response that count; the rest is cut off.
    """
    generated = [sample for sample in samples if len(sample.response_ids) > 0]
    if not generated:
        raise ValueError("a probe needs at least one response with a token")
    count = min(n, len(generated))
    chosen = [
        Sample(sample.prompt_ids, sample.response_ids[:max_tokens])
        for sample in (generated[i * len(generated) // count] for i in range(count))
    ]
    batch = _micro_batch(chosen, tuple(range(count)), pad_id, length_multiple)
    return ProbeBatch(batch.tokens, batch.position_ids, batch.loss_mask)


_NOWHERE = -1  # the place of a row of padding


def _without_loss(pad_id: int) -> Sample:
    """A row of padding."""
    return Sample([pad_id, pad_id], [])


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)


def _micro_batch(
    samples: Sequence[Sample],
    places: tuple[int, ...],
    pad_id: int,
    length_multiple: int,
    shortest: int = 0,
) -> MicroBatch:
    longest = max(shortest, *(_length(sample) - 1 for sample in samples))
    shape = (len(samples), -(-longest // length_multiple) * length_multiple)
    tokens = torch.full(shape, pad_id, dtype=torch.int64)
    targets = torch.full(shape, pad_id, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    rollout_logprobs = torch.zeros(shape, dtype=torch.float32)
    with_old = any(sample.old_logprobs is not None for sample in samples)
    old_logprobs = torch.zeros(shape, dtype=torch.float32) if with_old else None
    for row, sample in enumerate(samples):
        if not sample.prompt_ids:
            raise ValueError("a sample needs at least one prompt token")
        ids = torch.tensor([*sample.prompt_ids, *sample.response_ids], dtype=torch.int64)
        tokens[row, : len(ids) - 1] = ids[:-1]
        targets[row, : len(ids) - 1] = ids[1:]
        response = slice(len(sample.prompt_ids) - 1, len(ids) - 1)
        loss_mask[row, response] = True
        if len(sample.rollout_logprobs) > 0:
            rollout_logprobs[row, response] = torch.tensor(sample.rollout_logprobs)
        if old_logprobs is not None:
            if sample.old_logprobs is None:
                raise ValueError("either all samples of a batch have old_logprobs or none")
            old_logprobs[row, response] = torch.tensor(sample.old_logprobs)
    return MicroBatch(
        tokens=tokens,
        position_ids=torch.arange(shape[1]).expand(shape).contiguous(),
        targets=targets,
        loss_mask=loss_mask,
        advantages=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        rollout_logprobs=rollout_logprobs,
        completed=torch.tensor([sample.completed for sample in samples]),
        old_logprobs=old_logprobs,
        places=places,
    )
