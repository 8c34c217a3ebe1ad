"""Helpers: the keyed states of one operator, seen through the key that is chosen, on any backend, with time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from frozen_tables import tables_of

from tidegate.operators.operator import OperatorContext, ProcessingTime
from tidegate.operators.state.keyed_state import S, StateNames
from tidegate.operators.state.keyed_state_store import KeyedStates
from tidegate.operators.state.keys import KeyCodec, KeyScope
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex
from tidegate.storage.state.snapshot import Cut, FrozenState, StateTable

COLUMNAR = StateBackendOptions()
WHOLE = Cut(CheckpointId(1))
_CODEC = KeyCodec(pa.schema({"k": pa.string()}))


class Keyed:
    """States of an operator that is keyed by the string `k`."""

    def __init__(self, options: StateBackendOptions = COLUMNAR, now_ms: int = 0) -> None:
        self.time = ProcessingTime(now_ms)
        self.scope = KeyScope()
        place = OperatorUid("op-uid"), "op", SubtaskIndex(0), 1, 8
        context = OperatorContext(*place, time=self.time, backend=options)
        self.states = KeyedStates(context, ("k",), self.scope, StateNames())
        self._begun = self._entered = False

    def bind(self, declared: S) -> S:
        """Bind a state."""
        return self.states.bind(declared)

    def key(self, key: str) -> None:
        """Work on this key from now on: a batch of its own."""
        self.leave()
        (ref,) = self.states.enter(None, [(key,)])
        self.scope.choose(0, ref)
        self._entered = True

    def leave(self, swept: int = 0) -> None:
        """End the batch, and look at so many keys for what has expired."""
        self._begin()
        if self._entered:
            self.states.leave(swept)
            self._entered = False

    def freeze(self, cut: Cut = WHOLE) -> list[FrozenState]:
        """Freeze all states."""
        self.leave()
        snapshot = self.states.freeze(cut)
        return [*snapshot.states, *snapshot.layer]

    def load(self, tables: Sequence[StateTable]) -> Keyed:
        """Take stored tables back."""
        self._begin()
        for table in tables:
            self.states.load(table)
        self.states.loaded()
        return self

    def _begin(self) -> None:
        if not self._begun:
            self.states.complete()
            self.states.fix_keys(_CODEC)
            self._begun = True


def stored(frozen: Sequence[FrozenState]) -> list[StateTable]:
    """Tables of what was frozen."""
    return [table for state in frozen for table in tables_of(state)]


def table(rows: pa.RecordBatch, state: str = "v") -> StateTable:
    """A stored table of one state."""
    return StateTable(state, StateKind.KEYED, rows)


def rows_of(frozen: Sequence[FrozenState]) -> dict[str, dict[str, Any]]:
    """What each frozen state holds for each key."""
    found: dict[str, dict[str, Any]] = {}
    for one in stored(frozen):
        for row in one.rows.to_pylist():
            found.setdefault(one.state, {})[row["k"]] = row[one.state]
    return found
