"""Frozen state for tests: `FrozenKeyedTable` without a backend, and `tables_of`, a restore without storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.state.snapshot import FrozenState, StateChunk, StateTable


@dataclass(frozen=True, slots=True)
class FrozenKeyedTable:
    """A `FrozenState` of keyed state that is small: one chunk, made by `chunk` when it is written."""

    state: str
    chunk: Callable[[], StateChunk]
    removed: bool = False
    kind: StateKind = StateKind.KEYED

    def chunks(self) -> Iterator[StateChunk]:
        """The one chunk."""
        yield self.chunk()


def tables_of(frozen: FrozenState, layer: int = 0) -> list[StateTable]:
    """What an operator is restored from: a table a chunk that has rows, as reading it from a checkpoint would give."""
    chunks = (chunk.rows for chunk in frozen.chunks() if chunk.rows.num_rows)
    return [StateTable(frozen.state, frozen.kind, rows, frozen.removed, layer) for rows in chunks]
