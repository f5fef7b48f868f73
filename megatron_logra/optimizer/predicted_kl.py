"""Predicted and realised KL of a step on a few probe responses (method, section 4).

The prediction is one forward-mode pass: with ż the derivative of the logits along the whole
proposed update, KL(p_θ ‖ p_θ+Δ) ≈ ½ Var_p(ż/T), averaged over the probe's generated positions. It
reads weights and proxies and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import distributed as dist

from megatron_logra.distributed import all_reduce
from megatron_logra.model.gpt import Head, LogitsFn, forward_head
from megatron_logra.optimizer import forward_ad as rules
from megatron_logra.sketch.capture import SketchCapture


@dataclass(frozen=True)
class ProbeBatch:
    """Responses on which a step's KL is measured: those of the global batch, on every rank."""

    tokens: torch.Tensor
    """[b, s] int64, right-padded."""
    position_ids: torch.Tensor
    """[b, s] int64."""
    mask: torch.Tensor
    """[b, s] bool: positions whose next token was generated."""


class PredictedKL:
    """Measures steps of one model on probes.

    Args:
        model: the model chunk (wrapped or not).
        capture: the sketch hooks of its targets.
        temperature: softmax temperature T of the policy.
        chunk: positions whose logits exist at once.
        rows: responses in one forward pass.
        pg: process groups. Data-parallel ranks share the responses; tensor-parallel ranks share
            the vocabulary, of which only sums per position cross.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        capture: SketchCapture,
        *,
        temperature: float,
        chunk: int,
        rows: int,
        pg: ProcessGroupCollection,
    ) -> None:
        rules.install()
        self.model = model
        self.capture = capture
        self.temperature = temperature
        self.chunk = chunk
        self.rows = rows
        self.pg = pg

    @torch.no_grad()
    def predict(self, probe: ProbeBatch) -> float:
        """Predicted KL, nats per token, of the step W ← W - D A with D in the proxies.

        Raises:
            ValueError: the probe has no generated position.
        """
        total = torch.zeros(1, dtype=torch.float64, device=probe.tokens.device)
        for part in self._parts(probe):

            def head(hidden: torch.Tensor, logits_fn: LogitsFn, mask=part.mask) -> torch.Tensor:  # type: ignore[no-untyped-def]
                found = torch.zeros((), dtype=torch.float64, device=hidden.device)
                for positions in _select(hidden, mask).split(self.chunk):
                    dual = forward_ad.unpack_dual(logits_fn(positions))
                    if dual.tangent is not None:
                        found += self._half_variance(dual.primal, dual.tangent).sum()
                return found

            with forward_ad.dual_level(), self.capture.tangent():
                total += self._run(part, head)
        return self._mean(total, probe)

    def _mean(self, total: torch.Tensor, probe: ProbeBatch) -> float:
        """The mean over the whole probe's positions, of sums over this rank's responses."""
        return float(all_reduce(total, self.pg.dp_cp) / probe.mask.sum())

    def _half_variance(self, logits: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        """½ Var_p(ż/T) of each position, float64 [n]; logits and tangent [n, 1, vocab/tp]."""
        weights = torch.softmax(logits.float() / self.temperature, dim=-1)
        if self.pg.tp.size() > 1:
            weights *= self._share_of_mass(logits.float() / self.temperature)
        change = tangent.float() / self.temperature
        mean = all_reduce((weights * change).sum(dim=-1, keepdim=True), self.pg.tp)
        spread = all_reduce((weights * (change - mean).square()).sum(dim=-1), self.pg.tp)
        return 0.5 * spread.double()

    def _share_of_mass(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's share of the softmax's mass at each position, [n, 1, 1]."""
        own = logits.logsumexp(dim=-1, keepdim=True)
        return (own - self._log_normaliser(own)).exp()

    def _log_normaliser(self, own: torch.Tensor) -> torch.Tensor:
        """The vocabulary's logsumexp from those of the ranks' parts."""
        largest = own.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.pg.tp)
        return largest + all_reduce((own - largest).exp(), self.pg.tp).log()

    @torch.no_grad()
    def hidden(self, probe: ProbeBatch) -> torch.Tensor:
        """The last hidden states at the probe's generated positions, [n, 1, h]."""
        parts = []
        for part in self._parts(probe):

            def head(hidden: torch.Tensor, _: LogitsFn, mask=part.mask) -> torch.Tensor:  # type: ignore[no-untyped-def]
                return _select(hidden, mask)

            parts.append(self._run(part, head))
        return torch.cat(parts) if parts else torch.empty(0, device=probe.tokens.device)

    @torch.no_grad()
    def realised(self, probe: ProbeBatch, old_hidden: torch.Tensor) -> float:
        """Exact KL(old ‖ new), nats per token, from hidden states kept before the step.

        The output layer must be the same before and after the step, as it is where non-targets
        are frozen and it is no target.
        """
        total = torch.zeros(1, dtype=torch.float64, device=probe.tokens.device)
        done = 0
        for part in self._parts(probe):
            count = int(part.mask.sum())
            old = old_hidden[done : done + count]
            done += count

            def head(hidden: torch.Tensor, logits_fn: LogitsFn, mask=part.mask, old=old):  # type: ignore[no-untyped-def]
                found = torch.zeros((), dtype=torch.float64, device=hidden.device)
                pairs = zip(
                    old.split(self.chunk), _select(hidden, mask).split(self.chunk), strict=True
                )
                for before, after in pairs:
                    old_logprobs = self._log_softmax(logits_fn(before))
                    new_logprobs = self._log_softmax(logits_fn(after))
                    found += (old_logprobs.exp() * (old_logprobs - new_logprobs)).sum()
                return all_reduce(found.unsqueeze(0), self.pg.tp)

            total += self._run(part, head)
        return self._mean(total, probe)

    def _log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        # In float64: a step's KL of 1e-5 is a difference of numbers of order 1.
        scaled = logits.double() / self.temperature
        own = scaled.logsumexp(dim=-1, keepdim=True)
        return scaled - (own if self.pg.tp.size() == 1 else self._log_normaliser(own))

    def _parts(self, probe: ProbeBatch) -> Iterator[ProbeBatch]:
        """This data-parallel rank's responses, some at a time."""
        if not bool(probe.mask.any()):
            raise ValueError("the probe has no generated token")
        own = range(self.pg.dp_cp.rank(), len(probe.tokens), self.pg.dp_cp.size())
        for start in range(0, len(own), self.rows):
            rows = list(own[start : start + self.rows])
            if bool(probe.mask[rows].any()):
                yield ProbeBatch(probe.tokens[rows], probe.position_ids[rows], probe.mask[rows])

    def _run(self, part: ProbeBatch, head: Head) -> Any:
        """Run the model over `part` with `head` on its last hidden states; returns head's result.

        In evaluation mode: no dropout, and no recomputation (which has no forward-mode rule).
        """
        training = self.model.training
        self.model.eval()
        try:
            return forward_head(self.model, part.tokens, part.position_ids, head)
        finally:
            self.model.train(training)


def _select(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Hidden states [s, b, h] at mask [b, s], as [n, 1, h]."""
    return hidden.transpose(0, 1)[mask].unsqueeze(1)
