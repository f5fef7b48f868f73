"""Predicted and realised KL of a step on a few probe responses (method, section 4).

With ż the derivative of the logits along the whole proposed update, KL(p_θ ‖ p_θ+Δ) ≈ ½ Var_p(ż/T),
averaged over the probe's generated positions. There are two ways to ż; neither writes a weight:

- `forward_ad`: one forward-mode pass, by the rules of `optimizer.forward_ad`. Where the model's own
  layers have no rules and are Transformer Engine's, through a twin of local layers (`model.twin`).
- `finite_difference`: two passes with the low-rank update as a side path of length ±ε in every
  target. The last hidden states' half difference over ε is their derivative up to O(ε²), and the
  output layer is differentiated exactly, so that no small difference of rounded logits is taken.
  ε is chosen such that the KL at ε is near `AIM`: far above rounding noise and far below where the
  curve bends. It starts from the KL that is expected, and is corrected if that was far off.
  In bf16 no length is both, so that two more passes are taken at the same ±ε, which round
  otherwise. The KL is half the covariance of the two slopes: rounding has no part in it, being
  independent from pass to pass, and ε may be shorter than one slope alone would need.

The prediction is of the targets' update alone: where non-targets are trained by Adam, their part of
the step is in the realised KL only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any, Literal

import torch
import torch.autograd.forward_ad as forward_ad
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import distributed as dist

from megatron_logra import distributed
from megatron_logra.distributed import all_reduce
from megatron_logra.errors import UserError
from megatron_logra.model.context_parallel import length_multiple, own_share
from megatron_logra.model.gpt import Head, LogitsFn, forward_head
from megatron_logra.model.stages import through_stages
from megatron_logra.model.twin import has_twin, local_twin
from megatron_logra.optimizer import forward_ad as rules
from megatron_logra.sketch.capture import SketchCapture

AIM = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
"""KL at ε of finite differences, nats per token, by the activations' type."""
PAIRS = {torch.float32: 1, torch.bfloat16: 2}
"""How often passes at ±ε are taken, likewise."""
BAND = {torch.float32: 2.0, torch.bfloat16: 1.5}
"""Factor by which the KL at ε may miss `AIM` without another try, likewise."""
TRIES = 6
"""Most lengths ε that are tried."""
_LOGITS = 2**23
"""Most logits of a rank that exist at once: a dozen tensors of their size do, some in float64."""

Estimator = Literal["auto", "forward_ad", "finite_difference"]


@dataclass(frozen=True)
class ProbeBatch:
    """Responses on which a step's KL is measured: those of the global batch, on every rank."""

    tokens: torch.Tensor
    """[b, s] int64, right-padded."""
    position_ids: torch.Tensor
    """[b, s] int64."""
    mask: torch.Tensor
    """[b, s] bool: positions whose next token was generated."""

    def to(self, device: torch.device) -> ProbeBatch:
        """The same on a device."""
        return ProbeBatch(
            self.tokens.to(device), self.position_ids.to(device), self.mask.to(device)
        )

    def require_tokens(self) -> None:
        """Raise `ValueError` if no position carries loss."""
        if not bool(self.mask.any()):
            raise ValueError("the probe has no generated token: no position to measure the KL at")


@dataclass(frozen=True)
class Policy:
    """What a policy's distributions on a probe can be made from once the weights have changed."""

    hidden: torch.Tensor
    """The last hidden states at this rank's generated positions of the probe, [n, 1, h]; empty on
    pipeline stages that are not the last."""
    output_weight: torch.Tensor | None
    """A copy of the output layer's weight, if it is trained."""


@dataclass(frozen=True)
class Realised:
    """How far a step has moved the policy on a probe, nats per token."""

    kl: float
    """Exact KL(old ‖ new)."""
    along: float | None
    """The part of it along the predicted change of the logits; None if nothing was predicted."""


class PredictedKL:
    """Measures steps of one model on probes.

    Args:
        chunks: this rank's model chunks (wrapped or not).
        capture: the sketch hooks of its targets.
        temperature: softmax temperature T of the policy.
        chunk: positions whose logits exist at once, if these are not too many.
        rows: responses in one forward pass.
        max_tokens: positions in one forward pass, unless a single response has more.
        estimator: how to predict; `auto` takes forward mode where every function has a rule.
        pg: process groups. Data-parallel ranks share the responses, context-parallel ranks their
            positions; tensor-parallel ranks share the vocabulary, of which only sums per position
            cross; pipeline stages pass hidden states and their tangents on.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        capture: SketchCapture,
        *,
        temperature: float,
        chunk: int,
        rows: int,
        max_tokens: int,
        estimator: Estimator,
        pg: ProcessGroupCollection,
    ) -> None:
        self.chunks = chunks
        self.capture = capture
        self.temperature = temperature
        weight = self._output_weight()
        columns = 1 if weight is None else weight.shape[0]
        self.chunk = max(1, min(chunk, _LOGITS // columns))
        self.rows = rows
        self.max_tokens = max_tokens
        self.wanted = estimator
        self.estimator: Estimator = "auto"
        """The one in use; `auto` until the first prediction has decided."""
        self.reason = ""
        """Why it is in use."""
        self.pg = pg
        self._twins: list[torch.nn.Module] = []
        # Derivatives of the last hidden states along the step, [n, 1, h] for each part of a probe:
        # those of the last prediction; None where no measurement will ask for them.
        self._slopes: list[torch.Tensor] | None = None

    @torch.no_grad()
    def predict(self, probe: ProbeBatch, expected: float) -> float:
        """Predicted KL, nats per token, of the step W ← W - D A with D in the proxies.

        Args:
            probe: where to predict it.
            expected: what it will be, roughly; finite differences begin there.

        Raises:
            ValueError: the probe has no generated position.
            UserError: forward mode is asked for, and a function has no rule.
        """
        probe.require_tokens()
        if self.estimator == "auto":
            self._choose_estimator(probe)
        if self.estimator == "forward_ad":
            return self._by_forward_mode(probe)
        return self._by_differences(probe, expected)

    def _by_forward_mode(self, probe: ProbeBatch) -> float:
        total = self._nothing(probe)
        self._keep_no_slopes()
        for part in self._parts(probe):

            def head(hidden: torch.Tensor, logits_fn: LogitsFn, mask=part.mask) -> torch.Tensor:  # type: ignore[no-untyped-def]
                own = _select(hidden, mask)
                self._keep_slope(forward_ad.unpack_dual(own).tangent)
                return self._half_covariances([own], logits_fn)

            with rules.forward_mode(), self.capture.tangent():
                found = self._run(part, head, tangents=True)
            total += 0 if found is None else found
        return self._means(total, probe)[0]

    def _by_differences(self, probe: ProbeBatch, expected: float) -> float:
        dtype = self.capture.targets[0].weight.dtype
        aim, band = AIM[dtype], BAND[dtype]
        step = math.sqrt(aim / expected)
        for _ in range(TRIES):
            kl = self._difference(probe, step, PAIRS[dtype])
            moved = kl * step**2
            if not math.isfinite(moved) or aim / band <= moved <= aim * band:
                break
            # At 0 nothing moves, or what moved was rounded away.
            step *= 100.0 if moved <= 0 else min(100.0, math.sqrt(aim / moved))
        return kl

    def _difference(self, probe: ProbeBatch, step: float, pairs: int) -> float:
        """KL, nats per token, from one or two pairs of passes at ±step."""
        sums = pairs * (pairs + 1) // 2
        total = torch.zeros(sums, dtype=torch.float64, device=probe.tokens.device)
        self._keep_no_slopes()
        *first, last = (step, -step) * pairs
        for part in self._parts(probe):
            before = [self._hidden_at(part, scale, seed) for seed, scale in enumerate(first)]

            def head(hidden: torch.Tensor, logits_fn: LogitsFn, mask=part.mask, before=before):  # type: ignore[no-untyped-def]
                ends = torch.stack([*before, _select(hidden, mask)]).float()
                slopes = (ends[::2] - ends[1::2]) / (2 * step)
                self._keep_slope(slopes.mean(dim=0))
                middle, slopes = ends.mean(dim=0).to(hidden.dtype), slopes.to(hidden.dtype)
                with rules.forward_mode():
                    changed = [forward_ad.make_dual(middle, slope) for slope in slopes]
                    return self._half_covariances(changed, logits_fn)

            with self.capture.side_path(last, seed=len(first)):
                found = self._run(part, head)
            total += 0 if found is None else found
        # Of the only slope with itself, or of the first with the second.
        return self._means(total, probe)[pairs - 1]

    def _keep_no_slopes(self) -> None:
        if self._slopes is not None:
            self._slopes.clear()

    def _keep_slope(self, slope: torch.Tensor | None) -> None:
        """Leave a pass's derivative of the hidden states to `realised`, if that will be asked."""
        if self._slopes is not None and slope is not None:
            self._slopes.append(slope.clone())

    def _hidden_at(self, part: ProbeBatch, scale: float, seed: int) -> Any:
        """The last hidden states at the mask, [n, 1, h], with a side path of length `scale`."""
        with self.capture.side_path(scale, seed):
            return self._run(part, _picker(part))

    def _half_covariances(
        self, changed: Sequence[torch.Tensor], logits_fn: LogitsFn
    ) -> torch.Tensor:
        """Σ ½ Cov_p(ż/T) over positions, [pairs].

        Args:
            changed: the same hidden states [n, 1, h] with a tangent each, in forward mode.
        """
        found: torch.Tensor | float = 0.0
        for pieces in zip(*(hidden.split(self.chunk) for hidden in changed), strict=True):
            duals = [forward_ad.unpack_dual(logits_fn(piece)) for piece in pieces]
            tangents = [dual.tangent for dual in duals if dual.tangent is not None]
            if len(tangents) < len(duals):
                raise rules.MissingRule("the output layer loses forward mode's tangent")
            found = found + self._half_covariance(duals[0].primal, tangents).sum(dim=-1)
        assert isinstance(found, torch.Tensor)
        return found

    # --- which estimator --------------------------------------------------------------------

    def _choose_estimator(self, probe: ProbeBatch) -> None:
        """Settle on an estimator, the same on all ranks, by trying forward mode on a few tokens."""
        if self.wanted == "finite_difference":
            self.estimator, self.reason = "finite_difference", "as configured"
            return
        lack = self._lack_of_rules(probe)
        through = ""
        if lack and any(map(has_twin, self.chunks)):
            self._twins = [local_twin(chunk) for chunk in self.chunks]
            self.capture.follow(self._twins)
            lack, through = self._lack_of_rules(probe), " through local layers"
        if not lack:
            self.estimator, self.reason = "forward_ad", f"every function has a rule{through}"
        elif self.wanted == "forward_ad":
            raise UserError(
                f"step_control.estimator=forward_ad: {lack}; expected auto or finite_difference"
            )
        else:
            self.estimator, self.reason = "finite_difference", lack

    def _lack_of_rules(self, probe: ProbeBatch) -> str | None:
        """What forward mode lacks in any chunk of any rank; None if nothing.

        Each chunk runs by itself, so that no pipeline stage waits for one that has found a lack.
        """
        count = length_multiple(self.pg.cp.size(), self.pg.tp.size())
        fields = (probe.tokens, probe.position_ids, probe.mask)
        few = ProbeBatch(*(own_share(field[:1, :count], self.pg.cp) for field in fields))

        def head(hidden: torch.Tensor, logits_fn: LogitsFn) -> torch.Tensor:
            return self._half_covariances([hidden[:1]], logits_fn)

        lack = None
        with self._probing():
            for chunk in self._viewed():
                try:
                    self._set_input(chunk, few)
                    with rules.forward_mode(), self.capture.tangent():
                        forward_head(chunk, few.tokens, few.position_ids, head)
                except rules.MissingRule as error:
                    lack = lack or str(error)
        return distributed.any_reason(lack)

    def _set_input(self, chunk: torch.nn.Module, part: ProbeBatch) -> None:
        """Give a later stage's chunk some hidden states [s, 1, h] for these tokens."""
        (bare,) = unwrap_model([chunk])
        if bare.pre_process:
            return
        positions = part.tokens.shape[1]
        if bare.config.sequence_parallel:
            positions //= self.pg.tp.size()
        weight = self.capture.targets[0].weight
        bare.set_input_tensor(weight.new_ones(positions, 1, bare.config.hidden_size))

    # --- sums over positions ----------------------------------------------------------------

    def _nothing(self, probe: ProbeBatch) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.float64, device=probe.tokens.device)

    def _means(self, totals: torch.Tensor, probe: ProbeBatch) -> list[float]:
        """Means over the whole probe's positions, of sums over this rank's responses, [sums]."""
        all_reduce(totals, self.pg.pp)  # zero everywhere but on the last stage
        return (all_reduce(totals, self.pg.dp_cp) / probe.mask.sum()).tolist()

    def _half_covariance(
        self, logits: torch.Tensor, tangents: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """½ Cov_p(ż/T) of each pair of tangents, float64 [pairs, n].

        Logits and tangents are [n, 1, vocab/tp].
        """
        weights = torch.softmax(logits.float() / self.temperature, dim=-1)
        if self.pg.tp.size() > 1:
            weights *= self._share_of_mass(logits.float() / self.temperature)
        changes = [tangent.float() / self.temperature for tangent in tangents]
        sums = torch.stack([(weights * change).sum(dim=-1, keepdim=True) for change in changes])
        for change, mean in zip(changes, all_reduce(sums, self.pg.tp), strict=True):
            change -= mean
        spread = torch.stack(
            [
                (weights * one * other).sum(dim=-1).squeeze(-1)
                for one, other in combinations_with_replacement(changes, 2)
            ]
        )
        return 0.5 * all_reduce(spread, self.pg.tp).double()

    def _share_of_mass(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's share of the softmax's mass at each position, [n, 1, 1]."""
        own = logits.logsumexp(dim=-1, keepdim=True)
        return (own - self._log_normaliser(own)).exp()

    def _log_normaliser(self, own: torch.Tensor) -> torch.Tensor:
        """The vocabulary's logsumexp from those of the ranks' parts."""
        largest = own.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.pg.tp)
        return largest + all_reduce((own - largest).exp(), self.pg.tp).log()

    # --- realised KL ------------------------------------------------------------------------

    @torch.no_grad()
    def remember(self, probe: ProbeBatch) -> Policy:
        """What `realised` needs of the policy as it is now, and of the prediction that follows."""
        found = [self._run(part, _picker(part)) for part in self._parts(probe)]
        parts = [hidden for hidden in found if hidden is not None]
        hidden = torch.cat(parts) if parts else torch.empty(0, device=probe.tokens.device)
        weight = self._output_weight()
        trained = weight is not None and weight.requires_grad
        self._slopes = []
        return Policy(hidden, weight.detach().clone() if weight is not None and trained else None)

    def forget(self) -> None:
        """Keep nothing more for `realised`, as after a step that was not taken."""
        self._slopes = None

    @torch.no_grad()
    def realised(self, probe: ProbeBatch, old: Policy) -> Realised:
        """The KL of a step that was taken, from what was kept before it.

        With Δz the change of the logits and ż the predicted one, the part along ż is
        ½ Cov_p(Δz, ż)² / Var_p(ż), from the means over the probe: to second order the whole, and
        without what rounding to bf16 adds, which has no such direction.
        """
        total = self._nothing(probe).repeat(3)
        done, slopes = 0, iter(self._slopes or ())
        self.forget()
        for part in self._parts(probe):
            count = int(part.mask.sum())
            kept = old.hidden[done : done + count]
            done += count

            def head(hidden: torch.Tensor, logits_fn: LogitsFn, mask=part.mask, kept=kept):  # type: ignore[no-untyped-def]
                slope = next(slopes, None)
                before, after = kept.split(self.chunk), _select(hidden, mask).split(self.chunk)
                ahead = [None] * len(before) if slope is None else slope.split(self.chunk)
                found = torch.zeros(3, dtype=torch.float64, device=hidden.device)
                for pieces in zip(before, ahead, after, strict=True):
                    found += self._realised(*pieces, logits_fn, old.output_weight)
                return found

            found = self._run(part, head)
            total += 0 if found is None else found
        kl, shared, predicted = self._means(total, probe)
        return Realised(kl, shared**2 / predicted if predicted > 0 else None)

    def _realised(
        self,
        before: torch.Tensor,
        slope: torch.Tensor | None,
        after: torch.Tensor,
        logits_fn: LogitsFn,
        output_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """KL, ½ Cov_p(Δz, ż) and ½ Var_p(ż), summed over positions: float64 [3].

        Args:
            before: hidden states [n, 1, h] of the old policy.
            slope: their predicted change, likewise, to some scale.
            after: hidden states of the new policy.
            logits_fn: the output layer as it is now.
            output_weight: its weight as it was, if it is trained.
        """
        with self._output_weight_as(output_weight), rules.forward_mode():
            dual = before if slope is None else forward_ad.make_dual(before, slope.to(before.dtype))
            old_logits, tangent = forward_ad.unpack_dual(logits_fn(dual))
        new_logits = logits_fn(after)
        old, new = self._log_softmax(old_logits), self._log_softmax(new_logits)
        kl = all_reduce((old.exp() * (old - new)).sum().unsqueeze(0), self.pg.tp)
        if tangent is None:
            return torch.cat((kl, torch.zeros_like(kl).repeat(2)))
        change = new_logits.float() - old_logits.float()
        pairs = self._half_covariance(old_logits, [tangent, change]).sum(dim=-1)
        return torch.cat((kl, pairs[1:2], pairs[:1]))

    def _output_weight(self) -> torch.nn.Parameter | None:
        """The output layer's weight; None on pipeline stages that are not the last."""
        model: Any = unwrap_model([self.chunks[-1]])[0]
        if not model.post_process:
            return None
        if model.share_embeddings_and_output_weights:
            return model.shared_embedding_or_output_weight()
        return model.output_layer.weight

    @contextmanager
    def _output_weight_as(self, values: torch.Tensor | None) -> Iterator[None]:
        """Within: the output layer uses other values, if any; none are written."""
        weight = self._output_weight()
        if weight is None or values is None:
            yield
            return
        own = weight.data
        weight.data = values
        try:
            yield
        finally:
            weight.data = own

    def _log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        # In float64: a step's KL of 1e-5 is a difference of numbers of order 1.
        scaled = logits.double() / self.temperature
        own = scaled.logsumexp(dim=-1, keepdim=True)
        return scaled - (own if self.pg.tp.size() == 1 else self._log_normaliser(own))

    # --- running the model ------------------------------------------------------------------

    def _parts(self, probe: ProbeBatch) -> Iterator[ProbeBatch]:
        """This rank's responses and positions, some responses at a time."""
        probe.require_tokens()
        own = list(range(self.pg.dp.rank(), len(probe.tokens), self.pg.dp.size()))
        own = [row for row in own if bool(probe.mask[row].any())]
        if not own:
            return
        length = probe.tokens.shape[1]
        if self.pg.cp.size() == 1:  # nothing counts that comes after the last generated token
            last = int(probe.mask[own].any(dim=0).nonzero().max()) + 1
            multiple = self.pg.tp.size() if self.capture.sequence_parallel else 1
            length = -(-last // multiple) * multiple
        rows = max(1, min(self.rows, self.max_tokens // length))
        for start in range(0, len(own), rows):
            place = own[start : start + rows], slice(0, length)
            fields = (probe.tokens[place], probe.position_ids[place], probe.mask[place])
            yield ProbeBatch(*(own_share(field, self.pg.cp) for field in fields))

    def _run(self, part: ProbeBatch, head: Head, *, tangents: bool = False) -> Any:
        """Run responses through the whole model; what `head` returns, None off the last stage."""
        with self._probing():
            return through_stages(
                self._viewed(),
                self.pg,
                lambda chunk: forward_head(chunk, part.tokens, part.position_ids, head),
                (len(part.tokens), part.tokens.shape[1]),
                tangents=tangents,
            )

    def _viewed(self) -> Sequence[torch.nn.Module]:
        """The chunks, or their twins."""
        return self._twins or self.chunks

    @contextmanager
    def _probing(self) -> Iterator[None]:
        """Evaluation mode: no dropout, and no recomputation (which has no forward-mode rule)."""
        training = [chunk.training for chunk in self.chunks]
        for chunk in self._viewed():
            chunk.eval()
        try:
            yield
        finally:
            for chunk, mode in zip(self._viewed(), training, strict=True):
                chunk.train(mode)


def _picker(part: ProbeBatch) -> Head:
    """A head that returns the hidden states at the mask, [n, 1, h]."""
    return lambda hidden, _: _select(hidden, part.mask)


def _select(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Hidden states [s, b, h] at mask [b, s], as [n, 1, h]."""
    return hidden.transpose(0, 1)[mask].unsqueeze(1)
