"""RowAdam: one second moment per output row, no first moment (method, section 2).

    v ← β₂ v + (1-β₂) mean_j S²,   m = sqrt(v / (1-β₂ᵗ))

    norm_preserving   q = 1/(m + ε·mean(m)) scaled to unit RMS; D = (q ⊙ S) · ‖S‖/‖q ⊙ S‖
    plain             D = S / (m + ε)
    sgd               D = S

Every rule multiplies a row of S by one factor, so only [rows] vectors are computed here, in
float64, and a layer may be spread over ranks by rows: what crosses ranks are the per-layer sums
handed to `reduce_sums`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

Rule = Literal["norm_preserving", "plain", "sgd"]


def updated_moment(v: torch.Tensor, sketch: torch.Tensor, beta2: float) -> torch.Tensor:
    """The new second moment of rows: v [rows] float32 and S [rows, r] float32 → [rows] float32."""
    return v * beta2 + sketch.square().mean(dim=1) * (1 - beta2)


def row_factors(
    rule: Rule,
    sketches: list[torch.Tensor],
    moments: list[torch.Tensor],
    rows_in_layer: list[int],
    *,
    beta2: float,
    eps: float,
    step: int,
    reduce_sums: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Factors c with D = c ⊙ S, one [rows] float32 vector per layer.

    Args:
        rule: which rule.
        sketches: this rank's rows of each layer's S, [rows, r] float32.
        moments: their updated second moments, [rows] float32.
        rows_in_layer: rows of each whole layer, over all ranks.
        beta2: decay β₂ of the moments.
        eps: ε.
        step: t, the number of this update counted from 1.
        reduce_sums: adds a float64 tensor of per-layer sums [layers, n] over the ranks that share
            the layers; the identity on one rank.

    An all-zero S gives a zero factor, and so D = 0.
    """
    if rule == "sgd":
        return [torch.ones_like(v) for v in moments]
    correction = 1 - beta2**step
    roots = [(v.double() / correction).sqrt() for v in moments]
    if rule == "plain":
        return [(1 / (m + eps)).float() for m in roots]
    totals = reduce_sums(torch.stack([m.sum() for m in roots]).unsqueeze(1))[:, 0]
    means = [total / rows for total, rows in zip(totals, rows_in_layer, strict=True)]
    # A layer that never had a gradient has m = 0; its S is zero and so will be its D.
    inverses = [
        torch.where(mean > 0, 1 / (m + eps * mean), 0.0)
        for m, mean in zip(roots, means, strict=True)
    ]
    squares = [torch.linalg.vector_norm(s, dim=1, dtype=torch.float64).square() for s in sketches]
    # Of each layer ‖S‖² and ‖q ⊙ S‖². That q is scaled to unit RMS cancels between them.
    sums = reduce_sums(
        torch.stack(
            [
                torch.stack([s2.sum(), (q.square() * s2).sum()])
                for q, s2 in zip(inverses, squares, strict=True)
            ]
        )
    )
    return [
        (q * (s2 / d2).sqrt().nan_to_num(posinf=0.0)).float()
        for q, (s2, d2) in zip(inverses, sums, strict=True)
    ]
