"""Losses as heads for `forward_head`: from final hidden states to a sum over tokens.

Only positions that carry loss ever reach the output layer, and at most `logprob_chunk` of them at
a time: with more, each chunk's logits are computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_logra.config import AlgorithmConfig
from megatron_logra.model.gpt import LogitsFn
from megatron_logra.rl.batch import MicroBatch

GAP_LIMIT = 20.0
"""Differences of logprobs are clamped to ±20 nats before exp: e²⁰ ≈ 5·10⁸ is still finite in
fp32, squares included."""
_ENTROPY_ROWS = 128  # rows of the vocabulary for which temporary copies exist


@dataclass(frozen=True)
class LossReport:
    """What one micro-batch tells about itself."""

    sums: dict[str, Tensor]
    """Sums over its loss-carrying tokens, each a scalar float64 tensor."""
    nonfinite: Tensor
    """[b] bool: rows with a logprob or a loss that is not finite."""


Loss = tuple[Tensor, Tensor, LossReport]
"""Sum of the loss over tokens (scalar float32), number of tokens (scalar int32), report: what
Megatron's schedules take from a loss function under `calculate_per_token_loss`."""


def policy_head(
    batch: MicroBatch,
    algorithm: AlgorithmConfig,
    temperature: float,
    tp_group: dist.ProcessGroup,
) -> Callable[[Tensor, LogitsFn], Loss]:
    """The clipped policy-gradient loss with truncated importance sampling.

    Per token, with A the advantage and all logprobs taken at the sampling temperature,

        loss = -w · min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A)
        ρ = exp(lp - lp_old)
        w = min(exp(lp_old - lp_rollout), importance_truncation), or 1 if that is null,

    where w carries no gradient. lp_old is the batch's `old_logprobs`; without them the batch is
    used for one update, lp_old is lp without its gradient, and ρ is 1.

    The report's sums: `tokens`, `loss`, `entropy`, `ratio`, `clipped` (tokens where the clip cuts
    off the gradient), `truncated` (tokens whose w was cut), `clamped` (tokens with a gap beyond
    `GAP_LIMIT`), `kl_rollout` (e^g - 1 - g with g = lp_old - lp_rollout, an estimate of
    KL(rollout ‖ trainer)), and over completed responses only `mismatch` (lp_rollout - lp_old,
    clamped) and `mismatch_tokens`.

    Args:
        tp_group: the tensor-parallel group, over which the vocabulary is divided.
    """

    def head(hidden: Tensor, logits_fn: LogitsFn) -> Loss:
        places = _places(batch.loss_mask)
        if places.numel() == 0:
            return _nothing(hidden, batch, logits_fn)
        rows = places % batch.tokens.shape[0]
        logprobs, entropy = token_logprobs(
            hidden,
            logits_fn,
            places,
            _at(batch.targets, places),
            temperature=temperature,
            chunk=algorithm.logprob_chunk,
            tp_group=tp_group,
        )
        current = logprobs.detach()
        old = current if batch.old_logprobs is None else _at(batch.old_logprobs, places)
        policy_gap = logprobs - old
        rollout_gap = old - _at(batch.rollout_logprobs, places)
        ratio = policy_gap.clamp(-GAP_LIMIT, GAP_LIMIT).exp()
        advantage = batch.advantages[rows]
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * advantage
        clamped_gap = rollout_gap.clamp(-GAP_LIMIT, GAP_LIMIT)
        importance = clamped_gap.exp()
        if algorithm.importance_truncation is None:
            weight = torch.ones_like(importance)
        else:
            weight = importance.clamp(max=algorithm.importance_truncation)
        losses = -weight * torch.minimum(ratio * advantage, clipped)
        completed = batch.completed[rows]
        truncated = importance > weight
        if algorithm.importance_truncation is None:
            truncated = torch.zeros_like(truncated)
        report = _report(
            batch,
            rows,
            losses,
            logprobs,
            entropy=entropy,
            ratio=ratio,
            clipped=clipped < ratio * advantage,
            truncated=truncated,
            clamped=(policy_gap.abs() > GAP_LIMIT) | (rollout_gap.abs() > GAP_LIMIT),
            kl_rollout=importance - 1 - clamped_gap,
            mismatch=-clamped_gap * completed,
            mismatch_tokens=completed,
        )
        return losses.sum(), _count(places), report

    return head


def sft_head(
    batch: MicroBatch,
    algorithm: AlgorithmConfig,
    tp_group: dist.ProcessGroup,
) -> Callable[[Tensor, LogitsFn], Loss]:
    """The supervised loss: minus the responses' logprobs. The report's sums: `tokens`, `loss`,
    `entropy`."""

    def head(hidden: Tensor, logits_fn: LogitsFn) -> Loss:
        places = _places(batch.loss_mask)
        if places.numel() == 0:
            return _nothing(hidden, batch, logits_fn)
        logprobs, entropy = token_logprobs(
            hidden,
            logits_fn,
            places,
            _at(batch.targets, places),
            temperature=1.0,
            chunk=algorithm.logprob_chunk,
            tp_group=tp_group,
        )
        rows = places % batch.tokens.shape[0]
        report = _report(batch, rows, -logprobs, logprobs, entropy=entropy)
        return -logprobs.sum(), _count(places), report

    return head


def logprobs_head(
    batch: MicroBatch,
    temperature: float,
    chunk: int,
    tp_group: dist.ProcessGroup,
) -> Callable[[Tensor, LogitsFn], tuple[Tensor, Tensor]]:
    """Logprobs of the targets and entropies, [b, s] float32 each; 0 where there is no loss."""

    def head(hidden: Tensor, logits_fn: LogitsFn) -> tuple[Tensor, Tensor]:
        places = _places(batch.loss_mask)
        found = token_logprobs(
            hidden,
            logits_fn,
            places,
            _at(batch.targets, places),
            temperature=temperature,
            chunk=chunk,
            tp_group=tp_group,
        )
        b, s = batch.tokens.shape
        logprobs, entropy = (
            torch.zeros(s * b, dtype=torch.float32, device=values.device)
            .index_copy(0, places, values)
            .view(s, b)
            .t()
            for values in found
        )
        return logprobs, entropy

    return head


def total(
    reports: Sequence[LossReport], batches: Sequence[MicroBatch]
) -> tuple[dict[str, float], list[int]]:
    """Sums over the micro-batches, and the places of sequences with non-finite numbers."""
    names = list(dict.fromkeys(name for report in reports for name in report.sums))
    sums = {
        name: sum(report.sums[name].item() for report in reports if name in report.sums)
        for name in names
    }
    bad = [
        place
        for report, batch in zip(reports, batches, strict=True)
        for place, is_bad in zip(batch.places, report.nonfinite.tolist(), strict=True)
        if is_bad
    ]
    return sums, sorted(bad)


def ratio(sums: dict[str, float], name: str, over: str = "tokens") -> float | None:
    """The mean that two of `total`'s sums make; None if there is none."""
    count = sums.get(over, 0.0)
    return sums[name] / count if name in sums and count else None


def token_logprobs(
    hidden: Tensor,
    logits_fn: LogitsFn,
    places: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    tp_group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` under softmax(logits / temperature), and that distribution's entropy.

    Args:
        hidden: [s, b, h].
        logits_fn: [n, 1, h] → [n, 1, vocab/tp].
        places: [n] int64, indices into hidden.view(s·b, h).
        targets: [n] int64.
        chunk: positions whose logits exist at once.

    Returns:
        Two [n] float32; the logprobs carry the gradient, the entropies (nats) do not.
    """
    chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places)
    entropies: dict[int, Tensor] = {}

    def logprobs(start: int, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = logits_fn(hidden.unsqueeze(1)).float()
        if temperature != 1.0:
            logits = logits / temperature
        if start not in entropies:  # otherwise this is the second time, for the backward pass
            entropies[start] = _entropy(logits.detach().squeeze(1), tp_group)
        # Megatron's cross entropy overwrites the logits.
        return -vocab_parallel_cross_entropy(logits, targets.unsqueeze(1), 0.0, tp_group).squeeze(1)

    starts = range(0, len(places), chunk)
    if len(starts) <= 1:
        return logprobs(0, chosen, targets), entropies[0]
    parts = [
        checkpoint(
            logprobs,
            start,
            chosen[start : start + chunk],
            targets[start : start + chunk],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start in starts
    ]
    return torch.cat(parts), torch.cat([entropies[start] for start in starts])


@torch.no_grad()
def _entropy(logits: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """[n, vocab/tp] float32 → [n] float32, leaving the logits as they are."""
    largest = logits.amax(-1)
    _all_reduce(largest, dist.ReduceOp.MAX, tp_group)
    mass, moment = torch.empty_like(largest), torch.empty_like(largest)
    for start in range(0, len(logits), _ENTROPY_ROWS):
        rows = slice(start, start + _ENTROPY_ROWS)
        shifted = logits[rows] - largest[rows, None]
        weights = shifted.exp()
        mass[rows] = weights.sum(-1)
        moment[rows] = weights.mul_(shifted).sum(-1)
    for partial in (mass, moment):
        _all_reduce(partial, dist.ReduceOp.SUM, tp_group)
    return mass.log() - moment / mass


def _all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(values, op=op, group=group)


def _places(loss_mask: Tensor) -> Tensor:
    """Indices of the loss-carrying positions into a flattened [s, b]."""
    return loss_mask.t().reshape(-1).nonzero().squeeze(1)


def _at(values: Tensor, places: Tensor) -> Tensor:
    """[b, s] → [n]."""
    return values.t().reshape(-1).index_select(0, places)


def _count(places: Tensor) -> Tensor:
    return torch.tensor(places.numel(), dtype=torch.int32, device=places.device)


def _nothing(hidden: Tensor, batch: MicroBatch, logits_fn: LogitsFn) -> Loss:
    """The loss of no tokens: 0, with a gradient of 0 whatever the hidden states are.

    All weights take part, the output layer's too: gradients are reduced once each has come.
    """
    logits = logits_fn(hidden.new_zeros(1, 1, hidden.shape[-1]))
    zero = hidden[:0].float().sum() + logits[:0].float().sum()
    nonfinite = torch.zeros_like(batch.completed)
    return zero, _count(hidden.new_empty(0)), LossReport({}, nonfinite)


def _report(
    batch: MicroBatch, rows: Tensor, losses: Tensor, logprobs: Tensor, **values: Tensor
) -> LossReport:
    losses, logprobs = losses.detach(), logprobs.detach()
    sums = {"tokens": torch.ones_like(losses), "loss": losses, **values}
    bad = ~(losses.isfinite() & logprobs.isfinite())
    return LossReport(
        {name: value.detach().double().sum() for name, value in sums.items()},
        torch.zeros_like(batch.completed).index_put((rows[bad],), bad[bad]),
    )
