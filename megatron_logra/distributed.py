"""The ranks of a run and Megatron's process groups over them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_logra import platform
from megatron_logra.config import ParallelConfig
from megatron_logra.errors import UserError

_LONGEST_JOIN = timedelta(minutes=5)
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank() -> int:
    """This process's rank; 0 before `initialize`."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 before `initialize`."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join(parallel: ParallelConfig) -> None:
    """Join the run's ranks; does nothing the second time.

    They come from the launcher's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without them this
    process is the only one, and opens no store; gloo listens at GLOO_SOCKET_IFNAME, else where this
    host's name leads.

    Raises:
        UserError: `parallel` does not fit the number of ranks, or there are too few GPUs.
    """
    platform.install()
    ranks = _launched_ranks()
    check_layout(parallel, ranks)
    if not dist.is_initialized():
        _join(timedelta(seconds=parallel.timeout_s))


def initialize(parallel: ParallelConfig, seed: int) -> ProcessGroupCollection:
    """Join the run's ranks, build Megatron's groups and seed its random states.

    May be called again, with the same sizes (the groups stay as they are) or with others.

    Raises:
        UserError: `parallel` asks for more ranks than there are, or for a layout that is not
            supported.
    """
    join(parallel)
    return make_groups(parallel, seed)


def make_groups(
    parallel: ParallelConfig, seed: int, *, gloo: bool = True
) -> ProcessGroupCollection:
    """`initialize`, once the ranks have joined; `gloo`: whether to make gloo groups beside them."""
    if not _has_groups_of(parallel):
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=_virtual(parallel),
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            num_distributed_optimizer_instances=parallel.optimizer_instances,
            create_gloo_process_groups=gloo,
            distributed_timeout_minutes=parallel.timeout_s / 60,  # type: ignore[arg-type]
        )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return ProcessGroupCollection.use_mpu_process_groups()


def check_layout(parallel: ParallelConfig, ranks: int) -> None:
    """Raise `UserError` unless `ranks` ranks can hold the layout."""
    sizes = {name: getattr(parallel, name) for name in ("tensor", "pipeline", "context")}
    needed = parallel.tensor * parallel.pipeline * parallel.context
    keys = ", ".join(f"parallel.{name}={size}" for name, size in sizes.items() if size > 1)
    if needed > ranks or ranks % needed:
        raise UserError(f"{keys}: need a multiple of {needed} ranks, but this run has {ranks}")
    if parallel.expert > ranks // needed * parallel.context:
        raise UserError(
            f"parallel.expert={parallel.expert}: needs as many data-parallel ranks, "
            f"but this run has {ranks // needed}"
        )
    shards = ranks // needed * parallel.context
    if shards % parallel.optimizer_instances:
        raise UserError(
            f"parallel.optimizer_instances={parallel.optimizer_instances}: does not divide the "
            f"{shards} data-parallel ranks of this run"
        )


def _has_groups_of(parallel: ParallelConfig) -> bool:
    """Whether Megatron's groups are already those of this layout."""
    if not parallel_state.model_parallel_is_initialized():
        return False
    shards = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    instance = parallel_state.get_data_parallel_world_size(
        with_context_parallel=True, partial_data_parallel=True
    )
    present = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        shards // instance,
    )
    return present == (
        parallel.tensor,
        parallel.pipeline,
        _virtual(parallel),
        parallel.context,
        parallel.expert,
        parallel.optimizer_instances,
    )


def _virtual(parallel: ParallelConfig) -> int | None:
    return parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None


def shutdown() -> None:
    """Leave the groups; does nothing if there are none."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def all_reduce(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over a group's ranks, in place; returns `values`."""
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def first[T](make: Callable[[], T]) -> T:
    """`make()` of rank 0, on all ranks; called by all.

    Raises:
        UserError: on all ranks, if it raised one.
    """
    if world_size() == 1:
        return make()
    box = [_attempt(make) if rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return _result(box[0])


def each[T](make: Callable[[], T]) -> list[T]:
    """`make()` of every rank in their order, on all ranks; called by all.

    Raises:
        UserError: on all ranks, if one rank raised one; that of the lowest such rank.
    """
    if world_size() == 1:
        return [make()]
    outcomes: list[tuple[T | None, str | None]] = [(None, None)] * world_size()
    dist.all_gather_object(outcomes, _attempt(make))
    return [_result(outcome) for outcome in outcomes]


def any_reason(reason: str | None) -> str | None:
    """The reason of the lowest rank that has one, on all ranks; called by all."""
    return next((found for found in each(lambda: reason) if found is not None), None)


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on any rank; called by all."""
    if world_size() == 1:
        return flag
    flags = torch.tensor([int(flag)], device=platform.device())
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def _attempt[T](make: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result, or the text of a `UserError`."""
    try:
        return make(), None
    except UserError as error:
        return None, str(error)


def _result[T](outcome: tuple[T | None, str | None]) -> T:
    value, complaint = outcome
    if complaint is not None:
        raise UserError(complaint)
    return cast(T, value)


def hosted_store(
    host: str, port: int, timeout: timedelta, *, ranks: int | None = None
) -> dist.TCPStore:
    """The store of `torch.distributed` that this process serves to the others of its job.

    On this machine alone if `host` is: whoever reaches a store can write to it. By any other name
    it listens on all addresses, for a host need not know its own.

    Args:
        host: by which the others find it.
        port: 0 for a free one.
        ranks: how many to wait for, this one among them; None waits for nobody.

    Raises:
        OSError: the port is taken.
        torch.distributed.DistError: not all have come in time.
    """
    wait = ranks is not None
    if host != "127.0.0.1":
        return dist.TCPStore(host, port, ranks, True, timeout, wait_for_workers=wait)
    with socket.create_server(("127.0.0.1", port)) as listener:
        port, place = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(
        host, port, ranks, True, timeout, wait_for_workers=wait, master_listen_fd=place
    )


def shared_store(
    host: str, port: int, ranks: int, timeout: timedelta, *, serve: bool
) -> dist.TCPStore:
    """The store at which all ranks meet; this one serves it if `serve`. See `hosted_store`."""
    if serve:
        return hosted_store(host, port, timeout, ranks=ranks)
    return dist.TCPStore(host, port, ranks, timeout=timeout)


def _launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _launched_ranks() -> int:
    if not _launched():
        return 1
    given = os.environ["WORLD_SIZE"]
    if not given.isdecimal() or int(given) < 1:
        raise UserError(f"WORLD_SIZE={given}: expected the number of ranks")
    for name in ("RANK", "MASTER_PORT"):
        if not os.environ.get(name, "0").isdecimal():
            raise UserError(f"{name}={os.environ[name]}: expected a number")
    return int(given)


def _join(timeout: timedelta) -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= gpus:
            raise UserError(f"LOCAL_RANK={local}: expected a GPU for each rank; {gpus} are here")
        torch.cuda.set_device(local)
    if not _launched():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise UserError(f"{missing[0]}: not set although RANK and WORLD_SIZE are")
    patience = min(timeout, _LONGEST_JOIN)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves it
    try:
        store = shared_store(host, port, ranks, patience, serve=rank == 0 and not agent)
    except (OSError, dist.DistError) as error:
        raise UserError(
            f"WORLD_SIZE={ranks}: not all ranks have joined at {host}:{port} within "
            f"{patience.total_seconds():.0f} s: {str(error).splitlines()[0]}"
        ) from None
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
