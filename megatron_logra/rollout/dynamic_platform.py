"""Lets megatron-core's dynamic inference engine run without a GPU, and without flash-attn.

Like `megatron_logra.platform`, whose stand-ins must be in place: plain replacements of functions,
which hold in every thread. They are made when the first dynamic engine is.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from megatron_logra import platform
from megatron_logra.rollout import paged_attention

LITERAL_CUDA = (
    "megatron.core.inference.contexts.dynamic_context",
    "megatron.core.inference.text_generation_controllers.text_generation_controller",
)
"""Modules of Megatron that make tensors in pinned memory."""

_installed = False


def install() -> None:
    """Put the stand-ins in place that this machine needs."""
    global _installed
    if _installed:
        return
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    stand_ins: list[tuple[Any, str, Any]] = [
        # No padding of steps that are no CUDA graphs.
        (DynamicInferenceContext, "TOKEN_ROUNDER", 1),
        (DynamicInferenceContext, "REQUEST_ROUNDER", 1),
    ]
    if not has_flash_attention():
        stand_ins += _attention()
    if not torch.cuda.is_available():
        stand_ins += _without_gpu()
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    _installed = True


def has_flash_attention() -> bool:
    """Whether one of the packages is here whose kernels Megatron's engine calls."""
    from megatron.core.transformer import attention

    kernels = attention.HAVE_FA4 or attention.HAVE_FA3
    return kernels or importlib.util.find_spec("flash_attn") is not None


def _attention() -> list[tuple[Any, str, Any]]:
    from megatron.core.transformer import attention

    return [
        # Asked for nothing but whether the next two functions are recent enough.
        (attention, "is_fa_min_version", lambda *_args, **_kwargs: True),
        (attention, "flash_attn_varlen_func", paged_attention.flash_attn_varlen_func),
        (attention, "flash_attn_with_kvcache", paged_attention.flash_attn_with_kvcache),
    ]


def _without_gpu() -> list[tuple[Any, str, Any]]:
    from megatron.core.inference import communication_utils
    from megatron.core.inference.contexts import dynamic_context
    from megatron.core.inference.engines import dynamic_engine
    from megatron.core.inference.text_generation_controllers import text_generation_controller

    torch_on_cpu = platform.torch_on_cpu()
    return [
        *[(importlib.import_module(name), "torch", torch_on_cpu) for name in LITERAL_CUDA],
        # Steps and copies mark when the device has done them.
        (torch.cuda, "Event", _NoEvent),
        # Suspending and resuming report what they freed.
        (torch.cuda, "memory_stats", _memory_stats),
        # Suspending deletes CUDA graphs, and takes the time to collect all garbage for it.
        (dynamic_engine, "delete_cuda_graphs", lambda: None),
        # Keys and values are written by a Triton kernel, or by torch where there is none.
        (dynamic_context, "triton_append_key_value_cache", None),
        # Marks for a profiler.
        (text_generation_controller, "range_push", lambda *_args: None),
        (text_generation_controller, "range_pop", lambda *_args: None),
        # Pipeline stages make sure that they send from the device.
        (communication_utils, "_is_cuda", lambda tensor: None),
    ]


class _NoEvent:
    """An event of the CPU, on which everything that was started is done."""

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream: Any = None) -> None:
        """Nothing to mark."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _memory_stats(device: Any = None) -> dict[str, int]:
    return {"allocated_bytes.all.current": 0, "reserved_bytes.all.current": 0}
