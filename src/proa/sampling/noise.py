"""Keys of noise: the same position gives the same noise, in whatever batch, row or step.

A key is (request seed, choice, absolute position of the token, purpose); a draw is a key and a vocabulary id
(kernels/reference/noise.py). No generator, no state.
"""

from __future__ import annotations

from enum import IntEnum

from proa.kernels.reference.noise import GAMMA, MASK, mix


class Purpose(IntEnum):
    """Draws for different purposes at one position are independent."""

    TOKEN = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def noise_key(seed: int, choice: int, position: int, purpose: Purpose) -> int:
    """64 bits from the four words, each mixed in before the next."""
    key = 0
    for word in (seed, choice, position, purpose):
        key = mix(((key ^ word) + GAMMA) & MASK)
    return key


def uniform(key: int) -> float:
    """One draw in (0, 1) with 53 random bits."""
    return ((mix((key + GAMMA) & MASK) >> 11) + 0.5) * 2.0**-53
