"""The hash by which the key indexes find one word or two: no part of any format, so it may change.

Two rounds of shift, xor and multiply, as in the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), with its multipliers: those of "Mix13" in David Stafford's "Better bit
mixing" (2011). The shifts are others. An entry's home needs the high half of the hash alone (`entries.py`), so the last
step carries the low half up there, where the finalizer carries the high half down.
"""

from __future__ import annotations

import numpy as np

from tidegate.state.kernels.jit import kernel

WORD_MASK = (1 << 64) - 1
"""The low 64 bits of a Python number: an int64 below zero as kernels see it when they take it for unsigned."""
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@kernel
def mix(word: np.uint64) -> np.uint64:
    """The hash of one word."""
    h = (word ^ (word >> np.uint64(32))) * _MIX_1
    h = (h ^ (h >> np.uint64(29))) * _MIX_2
    return h ^ (h << np.uint64(32))


@kernel
def mix_pair(first: np.uint64, second: np.uint64) -> np.uint64:
    """The hash of two words, whose order counts."""
    h = first * _MIX_2
    return mix((h ^ (h >> np.uint64(32))) + second)
