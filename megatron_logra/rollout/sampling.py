"""From logits to tokens: temperature, top-k and top-p, then inverse-CDF sampling.

One uniform number decides one token, and it is a hash of the token's own coordinates. So a row's
token depends on that row's logits and on nothing else: not on the batch, its order or the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_logra.config import SamplingConfig
from megatron_logra.counter_rng import domain, philox4x32, to_unit_interval

_BLOCK = 256  # vocabulary entries per partial sum of the CDF
_CANDIDATES = 1024  # tokens among which a nucleus is sought first


def noise(positions: Tensor, samples: Tensor, *, seed: int, update: int, stream: str) -> Tensor:
    """The uniform numbers that decide tokens.

    Args:
        positions: [n] int64, positions in the responses, counted from 0.
        samples: [n] int64, global sample indices in [0, 2³²).
        seed: key word of the run, in [0, 2³²).
        update: key word of the policy version, in [0, 2³²).
        stream: keeps the noise of training, evaluation, … apart.

    Returns:
        [n] float64 in the open interval (0, 1).
    """
    word, *_ = philox4x32((positions, samples, *domain(stream)), (seed, update))
    return to_unit_interval(word)


def sample(logits: Tensor, uniforms: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Draw one token from every row.

    Args:
        logits: [n, vocabulary], any floating type; left as they are.
        uniforms: [n] float64 in (0, 1); not read at temperature 0.
        sampling: temperature, top_k and top_p. Top-k comes first, top-p counts what it left;
            equal logits are kept, and chosen at temperature 0, from the lowest token id on.

    Returns:
        Tokens [n] int64 and their log-probabilities [n] float64 under the distribution they were
        drawn from (after temperature and filters, renormalised). At temperature 0: under the
        unfiltered softmax at temperature 1.

    Raises:
        FloatingPointError: a row has no finite softmax (NaN, +inf, or -inf everywhere).
    """
    temperature = sampling.temperature
    largest = logits.amax(dim=-1, keepdim=True)
    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // _BLOCK)
    padded = torch.empty(rows, blocks * _BLOCK, dtype=torch.float32, device=logits.device)
    padded[:, vocabulary:] = 0.0
    weights = padded[:, :vocabulary]
    torch.sub(logits.float(), largest.float(), out=weights)
    if temperature not in (0.0, 1.0):
        weights.div_(temperature)
    weights.exp_()
    if temperature > 0:
        _filter(weights, logits, sampling)

    block_sums = padded.view(rows, blocks, _BLOCK).sum(dim=-1, dtype=torch.float64)
    cdf = block_sums.cumsum(dim=-1)
    total = cdf[:, -1:]
    if not bool(torch.isfinite(total).all()):
        row = int((~torch.isfinite(total)).nonzero()[0, 0])
        raise FloatingPointError(f"logits of row {row} have no finite softmax: cannot sample")
    if temperature == 0:
        tokens = logits.argmax(dim=-1, keepdim=True)  # the first of several largest ones
    else:
        tokens = _invert(padded.view(rows, blocks, _BLOCK), block_sums, cdf, uniforms[:, None])
    chosen = (logits.gather(1, tokens).double() - largest.double()) / (temperature or 1.0)
    return tokens[:, 0], (chosen - total.log())[:, 0]


def _filter(weights: Tensor, logits: Tensor, sampling: SamplingConfig) -> None:
    """Set the weights of tokens outside top-k or top-p to zero, in place."""
    vocabulary = logits.shape[-1]
    top_k = sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary
    if top_k == vocabulary and sampling.top_p == 1.0:
        return
    # A nucleus is mostly small: look among a few candidates before sorting the whole vocabulary.
    few = min(_CANDIDATES, vocabulary) if top_k == vocabulary else top_k
    for candidates in (few, top_k):
        best, order = logits.topk(candidates, dim=-1)  # largest first
        kept = torch.full_like(order[:, :1], candidates)
        if sampling.top_p == 1.0:
            break
        mass = weights.gather(1, order).double()
        total = (mass if candidates == top_k else weights).sum(-1, True, dtype=torch.float64)
        reached = mass.cumsum(dim=-1)
        kept = (reached - mass < sampling.top_p * total).sum(dim=-1, keepdim=True)
        if bool((reached[:, -1:] >= sampling.top_p * total).all()):
            break
    threshold = best.gather(1, kept - 1)
    tied = logits == threshold
    places = kept - (logits > threshold).sum(dim=-1, keepdim=True)
    if bool((tied.sum(dim=-1, keepdim=True) > places).any()):
        tied &= tied.cumsum(dim=-1) <= places
    weights.mul_(tied.logical_or_(logits > threshold))


def _invert(weights: Tensor, block_sums: Tensor, cdf: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulated weight exceeds uniform · total; never one of weight 0.

    Finds the block first and the token inside it second, so only one block a row is cumulated.

    Args:
        weights: [n, blocks, _BLOCK] float32, non-negative.
        block_sums: [n, blocks] float64, sums over the last dimension.
        cdf: [n, blocks] float64, cumulated block sums.
        uniforms: [n, 1] float64.

    Returns:
        [n, 1] int64 indices into the flattened last two dimensions.
    """
    target = uniforms * cdf[:, -1:]
    block = _first_above(cdf, target, block_sums)
    inside = weights.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double()
    rest = target - (cdf.gather(1, block) - block_sums.gather(1, block))
    return block * _BLOCK + _first_above(inside.cumsum(dim=-1), rest, inside)


def _first_above(cdf: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """[n, 1] first index with cdf > target; rounding cannot lead past the last positive weight."""
    last = weights.shape[-1] - 1 - (weights > 0).int().flip(-1).argmax(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cdf, target, right=True), last)
