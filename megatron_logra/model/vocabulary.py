"""Vocabularies of any size: padded to a multiple of the tensor-parallel size, inside a model only.

Megatron divides the rows of the embedding and of the output layer over tensor-parallel ranks, so
there have to be as many on each. The rows that are added are zeros, no token has them, and their
logits say so: wherever logits come from, the output layer has already set the padding columns to a
number with no probability, no gradient and no tangent. So nothing behind it need know of them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_logra.errors import UserError
from megatron_logra.model.parameters import EMBEDDING

NO_LOGIT = -1e30
"""Logit of a padding column: no probability, and 0 · logit is still 0."""


def padded_size(vocab_size: int, tp_size: int) -> int:
    """The least multiple of `tp_size` that is no less than `vocab_size`."""
    return -(-vocab_size // tp_size) * tp_size


def require_same_padding(vocab_size: int, trained: int, generating: int) -> None:
    """Raise `UserError` if two tensor-parallel sizes pad a vocabulary differently.

    Megatron reshards weights of equal sizes only.
    """
    if padded_size(vocab_size, trained) != padded_size(vocab_size, generating):
        raise UserError(
            f"parallel.tensor={generating}: a vocabulary of {vocab_size} is padded to another size "
            f"than training pads it to at {trained}, and cannot be resharded; expected sizes that "
            "both divide it"
        )


def hide_padding(model: GPTModel, vocab_size: int) -> None:
    """Tell the vocabulary's weights how many rows are real, and take the others' logits away.

    Args:
        model: built with a padded `vocab_size`.
        vocab_size: without padding.
    """
    if model.vocab_size == vocab_size:
        return
    for name, weight in model.named_parameters():
        if name in (EMBEDDING, "output_layer.weight"):
            weight.unpadded_rows = vocab_size
    if not model.post_process:
        return
    group = model.pg_collection.tp

    def mask(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        logits, bias = output
        columns = logits.shape[-1]
        first = 0 if columns == model.vocab_size else group.rank() * columns  # gathered, or a part
        kept = min(max(vocab_size - first, 0), columns)
        return (without_columns(logits, kept), bias)

    model.output_layer.register_forward_hook(mask)


def without_columns(logits: Tensor, kept: int) -> Tensor:
    """`logits` [..., columns], in place, with `NO_LOGIT` from column `kept` on."""
    if kept < logits.shape[-1]:
        logits[..., kept:] = NO_LOGIT
    return logits
