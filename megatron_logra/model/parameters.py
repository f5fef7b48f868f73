"""Parameters by their layout-independent names: random values, and slices of whole tensors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

EMBEDDING = "embedding.word_embeddings.weight"


def named_parameters(model: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters with the names that they have in the whole model.

    Inside a pipeline stage Megatron numbers its layers from 0; here a layer keeps its number in the
    model. A weight that is tied within the stage appears once, as the embedding.
    """
    for name, parameter in model.named_parameters():
        yield whole_name(model, name), parameter


def whole_name(model: GPTModel, name: str) -> str:
    """The name in the whole model of what is called `name` in this pipeline stage."""
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if match is None:
        return name
    number = model.decoder.layers[int(match[1])].layer_number - 1
    return f"decoder.layers.{number}.{name[match.end() :]}"


def whole_shape(parameter: torch.nn.Parameter, tp_size: int) -> tuple[int, ...]:
    """Shape of the tensor of which `parameter` is one rank's part, without padded vocabulary."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= tp_size  # type: ignore[attr-defined]
    shape[0] = getattr(parameter, "unpadded_rows", shape[0])
    return tuple(shape)


def local_part(whole: Tensor, parameter: torch.nn.Parameter, tp_rank: int, tp_size: int) -> Tensor:
    """The part of `whole` that belongs into `parameter`.

    A gated linear_fc1 has its gate rows first and its up rows after them; each rank holds a part of
    both (Megatron's partition_stride of 2). A vocabulary's padding is zeros.
    """
    if tp_size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    if hasattr(parameter, "unpadded_rows"):
        padding = parameter.shape[0] * tp_size - whole.shape[0]
        whole = torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])])
    dim, stride = parameter.partition_dim, parameter.partition_stride  # type: ignore[attr-defined]
    pieces = whole.chunk(stride * tp_size, dim)
    return torch.cat(pieces[tp_rank::tp_size], dim)


@torch.no_grad()
def initialise(model: GPTModel, seed: int | None) -> None:
    """Fill all matrices with random values (zeros without a seed), biases with zeros, not norms.

    The values of a matrix depend on the seed and its name in the model only: not on the layout, the
    device or the order of construction. They are drawn in float32 with Megatron's init methods.
    """
    config = model.config
    tp = model.pg_collection.tp
    with torch.random.fork_rng(devices=[]):
        for name, parameter in named_parameters(model):
            if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
                name = EMBEDDING  # the last pipeline stage's copy of a tied weight
            if parameter.dim() < 2 or seed is None:
                if "norm" not in name:
                    parameter.zero_()
                continue
            if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                draw = config.output_layer_init_method
            elif "embedding" in name:
                draw = config.embedding_init_method
            else:
                draw = config.init_method
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.random.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            whole = torch.empty(whole_shape(parameter, tp.size()))
            draw(whole)
            parameter.copy_(local_part(whole, parameter, tp.rank(), tp.size()))
