"""The normalisation layer of the local layer specification."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from megatron_logra import platform


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dimension, by `config.normalization`.

    Computed in float32 whatever the input's type is, returned in the input's type. Unlike
    Megatron's wrapper around torch's norms it allows sequence parallelism: its parameters carry the
    mark by which Megatron sums their gradients over the tensor-parallel ranks. All operations have
    forward-mode derivatives.

    Args:
        config: gives normalization, params_dtype, sequence_parallel, layernorm_zero_centered_gamma.
        hidden_size: length of the last dimension.
        eps: added to the mean square (or variance).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        place = {"dtype": config.params_dtype, "device": platform.device()}
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, **place))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, **place))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] in any floating type; same shape and type out."""
        shape = (self.hidden_size,)
        values: torch.Tensor = x
        weight: torch.Tensor = self.weight
        if self.zero_centered:  # in float32: 1 + γ would lose most of a small γ in bf16
            values, weight = x.float(), self.weight.float() + 1
        if self.bias is None:
            return functional.rms_norm(values, shape, weight, self.eps).to(x.dtype)
        bias = self.bias.to(weight.dtype)
        return functional.layer_norm(values, shape, weight, bias, self.eps).to(x.dtype)
