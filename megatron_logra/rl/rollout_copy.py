"""The copy of the weights with which the training ranks generate in a layout of their own.

Pipeline stages, sequence parallelism and context parallelism serve training; decoding wants as few
ranks to a model as hold it. With `rollout.layout` the same ranks have both, and Megatron-Core's
resharding brings every update's weights from the one to the other.
"""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding import swap_model_weights
from megatron.core.resharding.copy_services.base import CopyService
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService
from megatron.core.resharding.refit import clear_plan_cache
from torch import distributed as dist

from megatron_logra import distributed
from megatron_logra.config import Config
from megatron_logra.errors import speaking_of
from megatron_logra.memory import storage_bytes
from megatron_logra.model.vocabulary import require_same_padding
from megatron_logra.rl.policy import Policy, build_copy


def copy_groups(config: Config) -> ProcessGroupCollection:
    """The groups of the copy's layout, which are to be made before the trainer's.

    Megatron keeps one layout's groups as the default ones: the last that was made.

    Raises:
        UserError: the layout does not fit the number of ranks.
    """
    parallel = config.generating.parallel
    with speaking_of("rollout.layout"):
        distributed.check_layout(parallel, distributed.world_size())
    return distributed.make_groups(parallel, config.train.seed, gloo=False)


class RolloutCopy:
    """All methods are called by all ranks.

    Args:
        config: the run's configuration, with a `rollout.layout`.
        source: what is trained; its weights are taken over at once.
        pg: what `copy_groups` has made.

    Raises:
        UserError: the copy does not fit the model.
    """

    def __init__(self, config: Config, source: Policy, pg: ProcessGroupCollection) -> None:
        with speaking_of("rollout.layout"):
            vocabulary = source.arguments.vocab_size
            require_same_padding(vocabulary, source.pg.tp.size(), pg.tp.size())
            self.policy = build_copy(config.generating, pg, source.tokenizer)
        self.bytes = storage_bytes(p for chunk in self.policy.chunks for p in chunk.parameters())
        """On this rank."""
        self._source = source
        ranks = dist.group.WORLD
        self._service: CopyService
        self._service = (
            NCCLCopyService(ranks) if torch.cuda.is_available() else GlooCopyService(ranks)
        )
        self._written = sum(distributed.each(lambda: self.bytes))
        clear_plan_cache()  # plans are kept by layouts, and not by models
        self.publish()

    @torch.no_grad()
    def publish(self) -> int:
        """Bring the copy to the weights that are trained; returns the bytes of all its ranks."""
        swap_model_weights(self._source.chunks, self.policy.chunks, self._service)
        return self._written
