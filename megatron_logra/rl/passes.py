"""Passes of micro-batches through the model, and what their losses say about the global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron_logra import distributed, platform
from megatron_logra.model.gpt import forward_head
from megatron_logra.model.stages import through_stages
from megatron_logra.optimizer.learner import Learner
from megatron_logra.progress import Progress
from megatron_logra.rl import losses
from megatron_logra.rl.batch import MicroBatch, Sample, micro_batches
from megatron_logra.rl.policy import Policy


class Passes:
    """Runs a policy's model chunks on micro-batches, under its layout. Called by all ranks.

    Args:
        policy: the model and its configuration, which says what the loss is.
        progress: told how far they are.
    """

    def __init__(self, policy: Policy, progress: Progress) -> None:
        self.policy = policy
        self.config = policy.config
        self.progress = progress

    def train(
        self, learner: Learner, batches: list[MicroBatch]
    ) -> tuple[dict[str, float], list[int]]:
        """Run this rank's micro-batches through Megatron's schedule, forwards and backwards.

        Returns:
            Sums over the loss-carrying tokens of the global batch by name, and the places of its
            samples that are not finite.
        """
        done, passes = 0, len(batches) * len(learner.chunks)

        def forward_step(data: Iterator[MicroBatch], chunk: torch.nn.Module) -> Any:
            nonlocal done
            self.progress.phase("train", done, passes)
            done += 1
            return self._forward(self._own(next(data)))(chunk), _as_is

        reports = learner.forward_backward(
            forward_step, batches, max(batch.tokens.shape[1] for batch in batches)
        )
        return self._over_ranks(reports, batches)

    @torch.no_grad()
    def mean_loss(self, samples: Sequence[Sample]) -> float | None:
        """Mean loss per token of the samples' responses, nats; None without tokens."""
        policy = self.policy
        reports: list[losses.LossReport] = []
        for chunk in policy.chunks:
            chunk.eval()
        batches = micro_batches(
            samples,
            self.config.train.micro_batch_size,
            policy.tokenizer.pad_id,
            length_multiple=policy.length_multiple,
            share=policy.data_rank,
        )
        for batch in map(self._own, batches):
            self.progress.phase("eval", len(reports), len(batches))
            rows, length = batch.tokens.shape
            loss = through_stages(policy.chunks, policy.pg, self._forward(batch), (rows, length))
            if loss is not None:
                reports.append(loss[2])
        for chunk in policy.chunks:
            chunk.train()
        return losses.ratio(self._over_ranks(reports, batches)[0], "loss")

    def _own(self, batch: MicroBatch) -> MicroBatch:
        """This rank's positions of a micro-batch, on its device."""
        return batch.own_share(self.policy.pg.cp).to(platform.device())

    def _forward(self, batch: MicroBatch) -> Callable[[torch.nn.Module], Any]:
        """Runs a model chunk on a micro-batch, to the loss if it is the last one."""
        head = self._head(batch)
        return lambda chunk: forward_head(chunk, batch.tokens, batch.position_ids, head)

    def _head(self, batch: MicroBatch) -> Any:
        algorithm, tp_group = self.config.algorithm, self.policy.pg.tp
        if algorithm.name == "sft":
            return losses.sft_head(batch, algorithm, tp_group)
        temperature = self.config.rollout.sampling.temperature
        return losses.policy_head(batch, algorithm, temperature, tp_group)

    def _over_ranks(
        self, reports: list[losses.LossReport], batches: list[MicroBatch]
    ) -> tuple[dict[str, float], list[int]]:
        """`losses.total` over the global batch, the same on every rank."""
        # Only the last pipeline stage has losses.
        sums, bad = losses.total(reports, batches) if reports else ({}, [])
        # Ranks that hold the model together have computed the same sums; they count once.
        own = (sums if self.policy.first_of_replica else {}, bad)
        every = distributed.each(lambda: own)
        names = dict.fromkeys(name for sums, _ in every for name in sums)
        whole = {name: sum(sums.get(name, 0.0) for sums, _ in every) for name in names}
        return whole, sorted({place for _, bad in every for place in bad})


def _as_is(loss: losses.Loss) -> losses.Loss:
    """Megatron's loss function: the head has done its work."""
    return loss
