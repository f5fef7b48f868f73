"""Memory by kind: counted from live tensors, and the peak that was measured."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

if TYPE_CHECKING:
    from megatron_logra.optimizer.sketch_optimizer import SketchDistributedOptimizer

KINDS = ("weights", "master", "gradients", "optimizer", "sketches", "projections")
"""What a rank holds between steps; `static` is their sum."""


def count(
    chunks: list[DistributedDataParallel],
    sketch_ddps: list[DistributedDataParallel],
    sketch: SketchDistributedOptimizer | None,
    adam: DistributedOptimizer | None,
) -> dict[str, int]:
    """Bytes of this rank by kind, and their sum `static`.

    weights: the parameters of the model, with the padding of Megatron's buffers; master: fp32
    copies or remainders; gradients: Megatron's fp32 gradient buffers; optimizer: moments;
    sketches: the buffers of S (fp32) and of the proxies (factor type); projections: A.
    """
    sizes = dict.fromkeys(KINDS, 0)
    sizes["weights"] = storage_bytes(p for chunk in chunks for p in chunk.module.parameters())
    sizes["gradients"] = sum(_bytes(b.grad_data) for chunk in chunks for b in chunk.buffers)
    if adam is not None:
        main = [p for group in adam.shard_fp32_from_float16_groups for p in group]
        sizes["master"] += sum(map(_bytes, main))
        for state in adam.optimizer.state.values():
            sizes["optimizer"] += sum(_bytes(t) for k, t in state.items() if k != "step")
    if sketch is not None:
        sizes["master"] += sum(master.nbytes for master in sketch.masters)
        sizes["optimizer"] += sum(map(_bytes, sketch.moments))
        sizes["sketches"] = sum(
            _bytes(b.grad_data) + _bytes(b.param_data) for ddp in sketch_ddps for b in ddp.buffers
        )
        sizes["projections"] = sketch.capture.projections.nbytes
    return sizes | {"static": sum(sizes.values())}


def peak_bytes() -> int:
    """Largest memory so far: of the GPU's allocator, else the process's resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes behind these tensors, each storage once."""
    # By the storage itself, and not its address: a dry run's tensors have none.
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
