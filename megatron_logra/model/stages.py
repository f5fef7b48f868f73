"""Forward passes through all pipeline stages, outside Megatron's training schedules.

Generation and the KL's probes take one batch from the first stage to the last, in turn. What goes
from stage to stage goes through Megatron's own `P2PCommunicator`; in forward mode, a tangent
follows its tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model


def through_stages(
    chunks: Sequence[torch.nn.Module],
    pg: ProcessGroupCollection,
    run: Callable[[torch.nn.Module], Any],
    shape: tuple[int, int],
    *,
    tangents: bool = False,
) -> Any:
    """Call `run` on every model chunk in the order of the model's layers; called by all ranks.

    With several chunks a rank (interleaved stages), the last rank hands on to the first.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        pg: process groups.
        run: runs one chunk and returns its output. Hidden states [s, b, h] of the previous chunk
            have been set as its input.
        shape: of the tokens that are fed, [b, s].
        tangents: whether hidden states are dual tensors.

    Returns:
        What `run` returns for the model's last chunk; None on ranks that do not hold it.
    """
    if pg.pp.size() == 1:
        return run(chunks[0])
    first_rank, last_rank = pg.pp.rank() == 0, pg.pp.rank() == pg.pp.size() - 1
    inner = unwrap_model(list(chunks))
    pipe = P2PCommunicator(pg.pp, inner[0].config)
    for number, (chunk, bare) in enumerate(zip(chunks, inner, strict=True)):
        if not (first_rank and number == 0):
            bare.set_input_tensor(_receive(pipe, bare, shape, tangents))
        output = run(chunk)
        if last_rank and number == len(chunks) - 1:
            return output
        _send(pipe, output, tangents)
    return None


def _receive(
    pipe: P2PCommunicator, chunk: GPTModel, shape: tuple[int, int], tangents: bool
) -> torch.Tensor:
    config, (rows, positions) = chunk.config, shape
    if config.sequence_parallel:
        positions //= config.tensor_model_parallel_size
    size = [positions, rows, config.hidden_size]
    primal = pipe.recv_forward(size, is_first_stage=False).detach()
    if not tangents:
        return primal
    return forward_ad.make_dual(primal, pipe.recv_forward(size, is_first_stage=False).detach())


def _send(pipe: P2PCommunicator, output: torch.Tensor, tangents: bool) -> None:
    if not tangents:
        pipe.send_forward(output, is_last_stage=False)
        return
    primal, tangent = forward_ad.unpack_dual(output)
    pipe.send_forward(primal, is_last_stage=False)
    still = torch.zeros_like(primal) if tangent is None else tangent.contiguous()
    pipe.send_forward(still, is_last_stage=False)
