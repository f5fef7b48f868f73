"""Counter-based random numbers: every number is a hash of its own coordinates.

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), in integer
torch operations, so the same bits come out on every device, in any order and for any slice.
Projections and sampling noise both come from here; `domain` keeps their streams apart.
"""

from __future__ import annotations

import hashlib

import torch

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # Philox multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # Weyl key increments
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox4x32(
    counter: tuple[torch.Tensor | int, torch.Tensor | int, torch.Tensor | int, torch.Tensor | int],
    key: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 of a block counter.

    Args:
        counter: four 32-bit words, each an int or an int64 tensor of values in [0, 2³²); tensors
            broadcast against each other, and at least one word is a tensor.
        key: two 32-bit words.

    Returns:
        Four int64 tensors of values in [0, 2³²).
    """
    device = next(word.device for word in counter if isinstance(word, torch.Tensor))
    words = [torch.as_tensor(word, dtype=torch.int64, device=device) for word in counter]
    c0, c1, c2, c3 = torch.broadcast_tensors(*words)
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The 64-bit product wraps around in int64; its two halves are still exact.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def domain(name: str) -> tuple[int, int]:
    """Two 32-bit counter words that stand for a name (the first 64 bits of its BLAKE2b)."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def to_unit_interval(word: torch.Tensor) -> torch.Tensor:
    """Map 32-bit words to float64 in the open interval (0, 1), centred in their 2³² cells."""
    return (word.double() + 0.5) * 2.0**-32
