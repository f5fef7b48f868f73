"""`megatron-logra train CONFIG --dry-run`: every rank of a run in turn, with shapes but no memory.

Each rank joins a group of ranks that are not there (torch's fake backend), builds its own model
chunks, buffers and optimizer on the meta device by the same code as a run, and says what it holds
and what it would save. So a layout that cannot be built, or a checkpoint whose shards overlap or
leave a gap, shows on one machine without a GPU. What is built is compared with the planner. Left
out are Adam's moments in a checkpoint: Megatron reads numbers of them.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_logra import checkpoint, distributed, platform
from megatron_logra.config import Config
from megatron_logra.errors import UserError
from megatron_logra.memory import storage_bytes
from megatron_logra.model.gpt import build_chunks, transformer_config
from megatron_logra.optimizer.learner import Learner
from megatron_logra.planner import report
from megatron_logra.planner.shapes import layout_of
from megatron_logra.sketch.projection import Projections
from megatron_logra.sync.receiver import Receiver

PLAN_FILE = "plan.json"
META = torch.device("meta")


def run(cfg: Config, ranks: int | None) -> dict[str, Any]:
    """Build and check all ranks, print the plan, and write it into the run directory.

    Args:
        cfg: the configuration.
        ranks: of the run; None means as few as `parallel` takes.

    Raises:
        UserError: the configuration does not fit the model or the ranks.
        RuntimeError: what was built is not what was planned, or cannot be saved whole.
    """
    layout = layout_of(cfg, ranks)
    planned = report.plan(cfg, layout.ranks)
    shards = Shards()
    started = time.perf_counter()
    for rank in range(layout.ranks):
        built = build_rank(cfg, rank, layout.ranks)
        _compare(rank, built.bytes_by_kind, planned["per_rank"][rank][cfg.optimizer.kind])
        shards.add(rank, built.tensors)
    shards.check()
    if planned["rollout_worker"] is not None:
        _check_worker(cfg, planned["rollout_worker"])
    if planned["rollout_copy"] is not None:
        _check_copy(cfg.generating, planned["rollout_copy"])
    file = Path(cfg.logging.run_dir) / PLAN_FILE
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(planned, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"logging.run_dir: {file}: {error.strerror or error}") from None
    print(report.table(planned, cfg, [cfg.optimizer.kind]))
    taken, size = time.perf_counter() - started, shards.bytes / 2**30
    print(f"\nbuilt {layout.ranks} ranks in {taken:.1f} s; their bytes are the planned ones")
    print(f"a checkpoint: {len(shards.shapes)} tensors, {size:.1f} GiB, each element saved once")
    print(f"the plan: {file}")
    return planned


@dataclass
class Built:
    """What one rank holds and saves."""

    bytes_by_kind: dict[str, int]
    tensors: list[ShardedTensor]


def build_rank(cfg: Config, rank: int, ranks: int) -> Built:
    """Build one of `ranks` ranks; leaves no process group behind."""
    with _as_rank(cfg, rank, ranks) as pg:
        tconfig, arguments = transformer_config(cfg)
        learner = Learner(build_chunks(tconfig, arguments, pg), tconfig, cfg, pg)
        state = checkpoint.weights_state(learner.chunks)
        if learner.sketch is not None:
            state["sketch"] = learner.sketch.sharded_state_dict()
        apply_factories(state)  # gate and up are saved apart
        tensors = [v for v in nested_values(state) if isinstance(v, ShardedTensor)]
        return Built(learner.memory_bytes(), tensors)


def _check_worker(cfg: Config, planned: dict[str, int]) -> None:
    """Build the ranks of a rollout worker; the largest holds what was planned."""
    own, workers = report.worker_config(cfg), cfg.rollout.workers
    held = []
    for rank in range(workers.ranks):
        with _as_rank(own, rank, workers.ranks) as pg:
            tconfig, arguments = transformer_config(own)
            chunks = build_chunks(tconfig, arguments, pg)
            receiver = Receiver(chunks, cfg.sketch, pg, exactness=workers.exactness)
            held.append(receiver.memory_bytes())
    if {kind: planned[kind] for kind in report.WORKER_KINDS} not in held:
        raise RuntimeError(f"a rollout worker holds other bytes than planned: {held}")


def _check_copy(cfg: Config, planned: dict[str, int]) -> None:
    """Build the ranks of a model that generates in a layout of its own; one is as planned."""
    held = []
    ranks = cfg.parallel.tensor * cfg.parallel.pipeline
    for rank in range(ranks):
        with _as_rank(cfg, rank, ranks) as pg:
            chunks = build_chunks(*transformer_config(cfg), pg, random=False)
            held.append(storage_bytes(p for chunk in chunks for p in chunk.parameters()))
    if planned["weights"] not in held:
        raise RuntimeError(f"a copy that generates holds other bytes than planned: {held}")


@contextmanager
def _as_rank(cfg: Config, rank: int, ranks: int) -> Iterator[ProcessGroupCollection]:
    """Within: this process is one of ranks that are not there, and nothing takes memory."""
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process without process groups")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        pg = distributed.make_groups(cfg.parallel, cfg.train.seed, gloo=False)
        with _without_memory():
            yield pg
    finally:
        distributed.shutdown()
        gc.collect()


@contextmanager
def _without_memory() -> Iterator[None]:
    """Within: this process's device is torch's meta device, and no projection is drawn."""
    with (
        mock.patch.object(platform, "device", return_value=META),
        mock.patch.object(torch.cuda, "current_device", return_value=META),
        # The optimizers tell types apart by the name that they have on a GPU.
        mock.patch.object(torch.Tensor, "type", platform.gpu_type_name(torch.Tensor.type)),
        mock.patch.object(Projections, "redraw"),
        META,
    ):
        yield


def _compare(rank: int, built: dict[str, int], planned: dict[str, Any]) -> None:
    different = [
        f"{kind} {size} instead of {planned[kind]}"
        for kind, size in built.items()
        if size != planned[kind]
    ]
    if different:
        raise RuntimeError(f"rank {rank} holds other bytes than planned: {', '.join(different)}")


@dataclass
class Shards:
    """The parts of a checkpoint's tensors that all ranks together write."""

    by_key: dict[str, dict[tuple[int, ...], tuple[tuple[int, ...], list[int]]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By name and place: the shape there, and the ranks that write it."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    bytes: int = 0
    """Of all tensors, each once."""

    def add(self, rank: int, tensors: list[ShardedTensor]) -> None:
        """Take up what one rank describes; those with replica 0 are written by it."""
        for tensor in tensors:
            shape = tuple(tensor.global_shape)
            if self.shapes.setdefault(tensor.key, shape) != shape:
                known = self.shapes[tensor.key]
                raise RuntimeError(f"{tensor.key}: {shape} in all on rank {rank}, else {known}")
            place, size = tuple(tensor.global_offset), tuple(tensor.local_shape)
            there, writers = self.by_key[tensor.key].setdefault(place, (size, []))
            if there != size:
                raise RuntimeError(f"{tensor.key} at {place}: shapes {there} and {size}")
            if _is_first(tensor.replica_id):
                writers.append(rank)
                self.bytes += math.prod(size) * tensor.dtype.itemsize

    def check(self) -> None:
        """Raise RuntimeError unless every element is written once."""
        for key, places in self.by_key.items():
            for place, (_, writers) in places.items():
                if len(writers) != 1:
                    raise RuntimeError(
                        f"{key} at {place}: written by ranks {writers}; expected one"
                    )
            whole = math.prod(self.shapes[key])
            covered = sum(math.prod(size) for size, _ in places.values())
            if covered != whole:
                raise RuntimeError(f"{key}: {covered} of {whole} elements are written")


def _is_first(replica: int | tuple[int, ...]) -> bool:
    return not any(replica) if isinstance(replica, tuple) else replica == 0
