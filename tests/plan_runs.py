"""What each rank does in the planner's tests: hold a learner, and count what it holds and sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from helpers import tiny_config
from layout_runs import backward
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers, mappings
from reference import Batch
from torch import distributed as dist
from training import make_learner

from megatron_logra import distributed
from megatron_logra.config import Config
from megatron_logra.model.gpt import forward_head
from megatron_logra.optimizer.learner import Learner
from megatron_logra.optimizer.predicted_kl import ProbeBatch

COLLECTIVES: list[tuple[Any, str, str]] = [
    (dist, "all_reduce", "all_reduce"),
    (dist, "broadcast", "broadcast"),
    *[
        (owner, name, collective)
        for names, owners in (
            (("all_gather_into_tensor", "reduce_scatter_tensor"), [dist]),
            (
                ("dist_all_gather_func", "dist_reduce_scatter_func"),
                [mappings, layers, param_and_grad_buffer],
            ),
        )
        for owner in owners
        for name, collective in zip(names, ("all_gather", "reduce_scatter"), strict=True)
    ],
]
"""Where the functions are by which Megatron and this package send: owner, name, what it is."""


def count_bytes(configurations: list[dict[str, Any]]) -> list[dict[str, int]]:
    """This rank's bytes by kind under each of several sets of arguments to `tiny_config`.

    All have the same layout.
    """
    configs = [tiny_config(**arguments) for arguments in configurations]
    pg = distributed.initialize(configs[0].parallel, 0)
    return [make_learner(cfg, pg).memory_bytes() for cfg in configs]


def count_traffic(configurations: list[dict[str, Any]], smallest: int) -> list[dict[str, int]]:
    """Bytes sent in one step (ring convention) as `group/collective`, for each configuration.

    Args:
        configurations: arguments to `tiny_config`, of the same layout. All sequences have the full
            length.
        smallest: numbers of a tensor below which it does not count.
    """
    found = []
    for collectives, _ in record_collectives(configurations):
        sent: Counter[str] = Counter()
        for collective in collectives:
            if collective.elements >= smallest:
                sent[f"{collective.group}/{collective.name}"] += collective.sent
        found.append({key: round(size) for key, size in sent.items()})
    return found


@dataclass(frozen=True)
class Collective:
    """One that took part in a step."""

    group: str
    """tensor, data (and context), or another."""
    name: str
    elements: int
    """Of the whole tensor, before scattering or after gathering."""
    sent: float
    """Bytes that this rank sent, in a ring."""


def record_collectives(
    configurations: list[dict[str, Any]],
) -> list[tuple[list[Collective], dict[str, int]]]:
    """All collectives of one step between several ranks, and what the learner says it has sent."""
    configs = [tiny_config(**arguments) for arguments in configurations]
    pg = distributed.initialize(configs[0].parallel, 0)
    return [_record_collectives(cfg, pg) for cfg in configs]


def _record_collectives(
    cfg: Config, pg: ProcessGroupCollection
) -> tuple[list[Collective], dict[str, int]]:
    learner = make_learner(cfg, pg)
    generator = torch.Generator().manual_seed(0)
    length, size = cfg.train.seq_length, cfg.train.micro_batch_size
    shape = (size, length)
    batches = [
        Batch(torch.randint(0, 100, shape, generator=generator), torch.ones(shape))
        for _ in range(cfg.train.prompts_per_step // size)
    ]
    # Each position counts, as in the plan; none is cut off behind the last one.
    tokens = torch.cat([batch.tokens for batch in batches])
    probe = ProbeBatch(
        tokens, torch.arange(length).expand_as(tokens), torch.ones_like(tokens, dtype=torch.bool)
    )
    if learner.predictor is not None and cfg.step_control.mode == "kl_budget":
        backward(learner, batches)  # the first step tries out the estimator
        assert learner.step(probe).applied
    groups = {
        group.group_name: name
        for name, group in (
            ("pipeline", pg.pp),
            ("pipeline", pg.embd),
            ("context", pg.cp),
            ("tensor", pg.tp),
            ("data", pg.dp_cp),
        )
        if group is not None
    }
    if cfg.parallel.optimizer_instances > 1:
        groups |= {group.group_name: "data" for group in (pg.intra_dp_cp, pg.inter_dist_opt)}
    found: list[Collective] = []
    with ExitStack() as stack:
        sending = _recording_sends(P2PCommunicator._communicate, found)
        stack.enter_context(mock.patch.object(P2PCommunicator, "_communicate", sending))
        for owner, name, collective in COLLECTIVES:
            recording = _recording(getattr(owner, name), collective, groups, found)
            stack.enter_context(mock.patch.object(owner, name, recording))
        backward(learner, batches)
        assert learner.step(probe).applied
    return found, learner.comm_bytes()


def _recording(
    function: Callable[..., Any], collective: str, groups: dict[str, str], found: list[Collective]
) -> Callable[..., Any]:
    """`function`, recorded in `found`."""

    def recorded(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")  # None: a flag among all ranks
        largest = max(filter(torch.is_tensor, args), key=torch.Tensor.numel)
        if group is not None and group.size() > 1:
            passes = 2 if collective == "all_reduce" else 1
            share = (group.size() - 1) / group.size()
            size = passes * share * largest.numel() * largest.element_size()
            name = groups.get(group.group_name, "other")
            found.append(Collective(name, collective, largest.numel(), size))
        return function(*args, **kwargs)

    return recorded


def _recording_sends(function: Callable[..., Any], found: list[Collective]) -> Callable[..., Any]:
    """Megatron's exchange with the neighbouring stages, recorded in `found`."""

    def recorded(self: P2PCommunicator, **kwargs: Any) -> Any:
        for name in ("tensor_send_next", "tensor_send_prev"):
            tensor = kwargs[name]
            if tensor is not None:
                found.append(Collective("pipeline", "send", tensor.numel(), tensor.nbytes))
        return function(self, **kwargs)

    return recorded


def kept_for_backward(learner: Learner, cfg: Config) -> int:
    """Bytes of tensors, parameters aside, that a micro-batch's forward pass leaves to autograd."""
    learner.zero_grad()
    module = learner.chunks[0].module
    for name, parameter in module.named_parameters():
        if "norm" in name:  # torch's norm on the CPU keeps more for them than fused ones do
            parameter.requires_grad_(False)
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # alive, so that its address stays its own
        return tensor

    shape = (cfg.train.micro_batch_size, cfg.train.seq_length)
    tokens = torch.randint(0, 100, shape)
    positions = torch.arange(shape[1]).expand(shape)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward_head(module, tokens, positions, lambda hidden, _: hidden * hidden)
    assert output.requires_grad
    return sum(storage.nbytes() for storage in storages.values())
