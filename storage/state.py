"""State on its way to and from a checkpoint.

A snapshot has a synchronous part, `freeze`, that runs on the task's thread and must be short, and an asynchronous
part, `materialize`, that runs beside processing and produces the rows to be stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from tidegate.storage.codec import wire
from tidegate.storage.ids import OperatorUid
from tidegate.storage.metadata import StateKind


@wire
@dataclass(frozen=True, slots=True)
class StateTable:
    """Rows of one state. For keyed state rows are sorted by key group and `key_group_rows` are prefix sums.

    `key_group_rows` has `max_parallelism + 1` entries: `key_group_rows[g]:key_group_rows[g + 1]` are the rows of
    key group g.
    """

    state: str
    kind: StateKind
    rows: pa.RecordBatch
    key_group_rows: tuple[int, ...] = ()


class FrozenState(Protocol):
    """One state of one operator as it was when it was frozen; later changes do not show in it."""

    def materialize(self) -> StateTable:
        """Produce the rows. Called once, on any thread."""
        ...


@dataclass(frozen=True, slots=True)
class OperatorSnapshot:
    """The frozen states of one operator."""

    uid: OperatorUid
    states: tuple[FrozenState, ...]


def key_group_of_hash(hash64: int, max_parallelism: int) -> int:
    """Key group of an unsigned 64-bit key hash."""
    return hash64 % max_parallelism


def subtask_of_key_group(key_group: int, max_parallelism: int, parallelism: int) -> int:
    """Subtask that owns a key group (Flink's KeyGroupRangeAssignment)."""
    return key_group * parallelism // max_parallelism


def key_group_range(subtask: int, max_parallelism: int, parallelism: int) -> range:
    """Key groups that a subtask owns: contiguous, and together with the others' a partition of all of them."""
    start = (subtask * max_parallelism + parallelism - 1) // parallelism
    stop = ((subtask + 1) * max_parallelism + parallelism - 1) // parallelism
    return range(start, stop)
