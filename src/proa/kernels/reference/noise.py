"""Gumbel noise of a key and token ids: the same pair gives the same noise, whoever asks. No generator, no state.

The hash is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) used by
counter: draw i of a key is the finaliser of key + (i + 1) * golden gamma, so any id can be drawn alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

# Ids hashed at once: two buffers of 256 KiB stay in the cache of a core. 152,000 ids in one go take four times as long.
_BLOCK = 32768


def gumbel(key: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Gumbel noise [vocab] float64 of ids 0 .. vocab - 1."""
    return gumbel_of(key, torch.arange(vocab, dtype=torch.int64, device=device))


def gumbel_of(key: int | torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise [k] float64 of the int64 `ids` [k]: those entries of the full noise.

    Keys as an int64 tensor broadcast against the ids.
    """
    bits = _mix_tensor((ids + 1) * _signed(GAMMA) + (_signed(key) if isinstance(key, int) else key))
    # int64 reads the upper half of the unsigned values as negative. Rounding to float64 is relative, so small values,
    # which become the large noise that wins, keep their resolution: the smallest uniform is 2^-65.
    unsigned = bits.to(torch.float64)
    unsigned += (bits < 0) * 2.0**64
    uniform = ((unsigned + 0.5) * 2.0**-64).clamp_(max=1 - 2.0**-53)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def uniform_floors(key: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """For each id at most the uniform number that its Gumbel noise is made of: its upper 31 bits, zeros below.

    2 ns an id, where the noise itself takes 20: enough to tell which ids have noise worth computing. (float32 rounds
    the 31 bits to 24, so a floor may be too high by 2^-24 of itself.)
    """
    floors = np.empty(ids.size, np.float32)
    for start in range(0, ids.size, _BLOCK):
        words = (ids[start : start + _BLOCK] + 1).view(np.uint64)
        words *= np.uint64(GAMMA)
        words += np.uint64(key)
        words ^= words >> np.uint64(30)
        words *= np.uint64(_FIRST)
        words ^= words >> np.uint64(27)
        words *= np.uint64(_SECOND)
        words >>= np.uint64(33)  # the last step of the mix changes the lower 33 bits only
        floors[start : start + _BLOCK] = words.view(np.int64)  # signed, which converts faster
    floors *= np.float32(2.0**-31)
    return floors


def mix(word: int) -> int:
    """The finaliser of SplitMix64 on one unsigned word."""
    word = ((word ^ (word >> 30)) * _FIRST) & MASK
    word = ((word ^ (word >> 27)) * _SECOND) & MASK
    return word ^ (word >> 31)


def _mix_tensor(words: torch.Tensor) -> torch.Tensor:
    """The same on int64 tensors, whose products wrap around."""
    words = (words ^ _shift(words, 30)) * _signed(_FIRST)
    words = (words ^ _shift(words, 27)) * _signed(_SECOND)
    return words ^ _shift(words, 31)


def _shift(words: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right: torch's keeps the sign."""
    return (words >> count) & (2 ** (64 - count) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
