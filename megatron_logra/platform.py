"""Lets Megatron-Core run where no GPU is.

Megatron-Core names the device "cuda" in its optimizer, schedules, data parallelism, checkpoints and
random states. `install()` makes those few names mean the CPU. Everything is a plain replacement of
one function, so that it holds in every thread and costs nothing where it is not called; torch's own
tensor factories stay as they are for everybody but Megatron. With a GPU `install()` does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_logra.errors import UserError

CPU = torch.device("cpu")

LITERAL_CUDA = (
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.resharding.copy_services.gloo_copy_service",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
)
"""Modules of Megatron that make tensors with a literal device="cuda", or in pinned memory."""

_installed = False


def device() -> torch.device:
    """The device of this process's model: its current GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return CPU


def install() -> None:
    """Put the stand-ins in place; call it before anything of Megatron runs.

    Raises:
        UserError: Transformer Engine is installed although there is no GPU.
    """
    global _installed
    if _installed:
        return
    quieten()
    if not torch.cuda.is_available():
        if importlib.util.find_spec("transformer_engine") is not None:
            raise UserError(
                "transformer_engine is installed but this machine shows no GPU: Megatron-Core "
                "would build layers that cannot run here; uninstall it in this environment"
            )
        for owner, name, stand_in in _stand_ins():
            setattr(owner, name, stand_in)
    _installed = True


def _stand_ins() -> list[tuple[Any, str, Any]]:
    """All replacements: the owner of the name, the name, and what stands in for it."""
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.tensor_parallel import random as megatron_random

    cpu_torch = torch_on_cpu()
    return [
        # Where Megatron asks for "its" device: parameters, buffers, communication results.
        (torch.cuda, "current_device", lambda: CPU),
        # Checkpointing and timers wait for the device; the CPU is never behind.
        (torch.cuda, "synchronize", lambda device=None: None),
        # Gradient reduction has streams and events of CUDA graphs wait for each other.
        (torch.cuda, "current_stream", lambda device=None: _NoStream()),
        (torch.cuda, "Stream", _NoStream),
        # Gradient clipping and checkpoint loading move what they got to the device.
        (torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
        (torch.nn.Module, "cuda", lambda self, *args, **kwargs: self),
        # The optimizers tell parameter types apart by the name that the type has on a GPU.
        (torch.Tensor, "type", gpu_type_name(torch.Tensor.type)),
        # Scalars, norms and masks that Megatron makes with a literal device="cuda".
        *[(importlib.import_module(name), "torch", cpu_torch) for name in LITERAL_CUDA],
        # The random states behind dropout and activation recomputation. There is one generator on
        # the CPU, so both the "CPU state" and the "CUDA state" are the state of that one.
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", _get_rng_state),
        (megatron_random, "_get_cuda_rng_state", _get_rng_state),
        (megatron_random, "_set_cuda_rng_state", _set_rng_state),
        # What a single rank "reduces" and "gathers" in place stays as it is. Gloo would copy it on
        # a thread with OpenMP workers of its own; from then on this thread's would sleep between
        # any two operations, and waking them takes longer than most operations do.
        *[
            (buffers, name, _unless_alone(getattr(buffers, name)))
            for name in ("dist_reduce_scatter_func", "dist_all_gather_func")
        ],
        (buffers, "_coalescing_manager", _coalescing_manager),
    ]


class _NoStream:
    """A stream of the CPU, on which everything that was started is done."""

    def __init__(self, device: torch.device | None = None) -> None: ...

    def wait_stream(self, _stream: _NoStream) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _NoWork:
    """The handle of collectives among one rank."""

    def wait(self) -> None:
        """Nothing to wait for."""


def _unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective on parts of one flat buffer, which a group of one rank leaves out."""

    @functools.wraps(collective)
    def call(*args: Any, group: ProcessGroup, **kwargs: Any) -> Any:
        return collective(*args, group=group, **kwargs) if group.size() > 1 else None

    return call


@contextlib.contextmanager
def _coalescing_manager(group: ProcessGroup, async_ops: bool = False) -> Iterator[Any]:
    """torch's, or for one rank a handle of nothing."""
    if group.size() == 1:
        yield _NoWork()
        return
    with torch.distributed._coalescing_manager(group, async_ops=async_ops) as works:
        yield works


def torch_on_cpu() -> ModuleType:
    """The module torch, but for factories that take device="cuda" for the CPU, and pin nothing."""
    module = ModuleType("torch")
    vars(module).update(vars(torch))
    for name in ("tensor", "zeros", "ones", "empty", "full", "empty_like"):
        setattr(module, name, _on_cpu(getattr(torch, name)))
    return module


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs and "cuda" in str(kwargs["device"]):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def gpu_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type` whose answer is the name that the type has on a GPU."""

    @functools.wraps(original)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not isinstance(result, str):
            return result
        return f"torch.cuda.{result.rsplit('.', 1)[-1]}"

    return type_name


def _get_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.random.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.random.set_rng_state(state)


class _Misleading(logging.Filter):
    """Drops the records of Megatron that say nothing about this program's use of it."""

    TEXTS = (
        "GPTModel IS DEPRECATED",
        # Both states are one on the CPU (see above), so this is what must happen.
        "CPU RNG state changed within GPU RNG context",
    )

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(text in str(record.msg) for text in self.TEXTS)


def quieten() -> None:
    """Silence what Megatron says about optional packages that are deliberately not used."""
    for module, pattern in (
        ("megatron", ".*[Aa]pex.*"),
        ("megatron", ".*Transformer Engine.*"),
        ("megatron", ".*transformer_engine.*"),
        ("megatron", "full scope is deprecated"),
        ("megatron", ".*is experimental and still under active development"),
        ("megatron", ".*tp_group is None, using default tp group"),
        ("megatron", r"The \.grad attribute of a Tensor that is not a leaf"),
        ("torch", r".*is deprecated\. Please use `torch\.distributed"),
    ):
        warnings.filterwarnings("ignore", message=pattern, module=module)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # CUDA_HOME, no GPU
    for name in (
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.tensor_parallel.random",
    ):
        logging.getLogger(name).addFilter(_Misleading())
