"""Key groups: the units in which keyed state is distributed (Flink's `KeyGroupRangeAssignment`).

The hash of a key (`tidegate/state/kernels/hashing.py`) gives its key group. A job always has `max_parallelism` key
groups. Each subtask owns a contiguous range, which changes with the parallelism. Checkpoints store state by key group.

Never change these functions: stored state would go to subtasks that do not see its keys.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_PARALLELISM_LIMIT = 1 << 15
"""Largest allowed number of key groups of a job (2^15)."""


def key_groups_of(hashes: NDArray[np.uint64], max_parallelism: int) -> NDArray[np.uint16]:
    """Returns the key group of each key hash.

    `max_parallelism` is at most 32,768. `state/kernels` has a compiled version.
    """
    return (hashes % np.uint64(max_parallelism)).astype(np.uint16)


def subtask_of_key_group(key_group: int, max_parallelism: int, parallelism: int) -> int:
    """Returns the subtask that owns a key group (Flink's KeyGroupRangeAssignment)."""
    return key_group * parallelism // max_parallelism


def key_group_range(subtask: int, max_parallelism: int, parallelism: int) -> range:
    """Returns the contiguous key groups that a subtask owns. The ranges of all subtasks partition the key groups."""
    start = (subtask * max_parallelism + parallelism - 1) // parallelism
    stop = ((subtask + 1) * max_parallelism + parallelism - 1) // parallelism
    return range(start, stop)


def key_groups_meet(one: range, other: range) -> bool:
    """Returns whether two ranges of key groups overlap."""
    return one.start < other.stop and other.start < one.stop
