"""What each rank does in the planner's tests: hold a learner, and count what it holds and sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
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
from training import make_learner, probe_of

from megatron_logra import distributed
from megatron_logra.config import Config
from megatron_logra.model.gpt import forward_head
from megatron_logra.optimizer.learner import Learner

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
    configs = [tiny_config(**arguments) for arguments in configurations]
    pg = distributed.initialize(configs[0].parallel, 0)
    return [_count_traffic(cfg, pg, smallest) for cfg in configs]


def _count_traffic(cfg: Config, pg: ProcessGroupCollection, smallest: int) -> dict[str, int]:
    learner = make_learner(cfg, pg)
    generator = torch.Generator().manual_seed(0)
    length, size = cfg.train.seq_length, cfg.train.micro_batch_size
    shape = (size, length)
    batches = [
        Batch(torch.randint(0, 100, shape, generator=generator), torch.ones(shape))
        for _ in range(cfg.train.prompts_per_step // size)
    ]
    probe = probe_of(
        Batch(*(torch.cat(parts) for parts in zip(*map(_fields, batches), strict=True)))
    )
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
    sent: Counter[str] = Counter()
    with ExitStack() as stack:
        counting = _counting_sends(P2PCommunicator._communicate, sent)
        stack.enter_context(mock.patch.object(P2PCommunicator, "_communicate", counting))
        for owner, name, collective in COLLECTIVES:
            counting = _counting(getattr(owner, name), collective, groups, smallest, sent)
            stack.enter_context(mock.patch.object(owner, name, counting))
        backward(learner, batches)
        assert learner.step(probe).applied
    return {key: round(size) for key, size in sent.items()}


def _fields(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.tokens, batch.weights


def _counting(
    function: Callable[..., Any],
    collective: str,
    groups: dict[str, str],
    smallest: int,
    sent: Counter[str],
) -> Callable[..., Any]:
    """`function`, counted into `sent`."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")  # None: a flag among all ranks
        largest = max(filter(torch.is_tensor, args), key=torch.Tensor.numel)
        if group is not None and group.size() > 1 and largest.numel() >= smallest:
            passes = 2 if collective == "all_reduce" else 1
            share = (group.size() - 1) / group.size()
            key = f"{groups[group.group_name]}/{collective}"
            sent[key] += passes * share * largest.numel() * largest.element_size()
        return function(*args, **kwargs)

    return counted


def _counting_sends(function: Callable[..., Any], sent: Counter[str]) -> Callable[..., Any]:
    """Megatron's exchange with the neighbouring stages, counted into `sent`."""

    def counted(self: P2PCommunicator, **kwargs: Any) -> Any:
        for name in ("tensor_send_next", "tensor_send_prev"):
            if kwargs[name] is not None:
                sent["pipeline/send"] += kwargs[name].nbytes
        return function(self, **kwargs)

    return counted


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
