"""CUDA graphs of a model's layers while Megatron's dynamic engine generates.

One token of a request is little work for a GPU: starting its kernels takes longer than running
them. A graph starts those of all layers at once. Megatron's engine captures one for each of some
numbers of requests, when its cache has been laid out, and fills a step up to the next of them.
Steps that read prompts run as ever. A model that trains must not be captured: what Megatron looks
for, the manager of graphs and two fields of the configuration, is there within `capturing` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.enums import InferenceCudaGraphScope

from megatron_logra.errors import UserError
from megatron_logra.rollout.dynamic_platform import has_flash_attention

_KEY = "rollout.dynamic.cuda_graphs"


@contextmanager
def capturing(model: GPTModel, pg: ProcessGroupCollection) -> Iterator[None]:
    """Within: Megatron's dynamic engine captures this model's layers, all in one graph.

    Args:
        model: this rank's; nothing may be trained or drawn at random within.
        pg: its process groups.

    Raises:
        UserError: this machine has no GPU, or no flash-attn.
    """
    require_graphs()
    config, decoder = model.config, model.decoder
    before = config.cuda_graph_impl, config.inference_cuda_graph_scope
    config.cuda_graph_impl = "local"
    config.inference_cuda_graph_scope = InferenceCudaGraphScope.block
    stream = torch.cuda.current_stream()
    try:
        with _no_random_states():
            # It may go on with a stream of its own, where nothing waits for what came before.
            decoder.cudagraph_manager = CudaGraphManager(
                config, need_backward=False, pg_collection=pg
            )
            torch.cuda.current_stream().wait_stream(stream)
            yield
    finally:
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
        if hasattr(decoder, "cudagraph_manager"):
            del decoder.cudagraph_manager
        config.cuda_graph_impl, config.inference_cuda_graph_scope = before


def require_graphs() -> None:
    """Raise `UserError` where graphs cannot be captured."""
    if not torch.cuda.is_available():
        raise UserError(f"{_KEY}: this machine shows no GPU; expected 0")
    if not has_flash_attention():
        # `paged_attention` asks the device for lengths, which a graph cannot wait for.
        raise UserError(f"{_KEY}: needs flash-attn, which is not installed; expected 0")


@contextmanager
def _no_random_states() -> Iterator[None]:
    """Megatron's tracker of random states as it is for inference: a graph would keep its states."""
    names = ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED")
    before = [getattr(megatron_random, name) for name in names]
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(megatron_random, name, value)
