"""`FrozenKeyedTable`: keyed state for tests that write checkpoints without a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.state.snapshot import StateChunk


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
