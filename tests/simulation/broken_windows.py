"""Rules of windows, broken on purpose. Each is a patch that holds while a seed runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from random_jobs import window_topologies
from random_jobs.window_topologies import PROGRAMS, Program

from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.windows.count_windows import ROWS
from tidegate.operators.windows.function_windows import FunctionSessions, KeptWindows
from tidegate.operators.windows.process_windows import WindowLife
from tidegate.operators.windows.row_windows import KEPT_STATE, RESULTS_STATE, WindowBuffer
from tidegate.operators.windows.session_windows import END, START, SessionWindows
from tidegate.operators.windows.slices import CumulatingSlices, Merge
from tidegate.operators.windows.window_operator import FiredGroups, WindowOperator
from tidegate.operators.windows.window_specs import Count, Cumulating, Session, Sliding, Tumbling
from tidegate.operators.windows.window_state import AggregateWindows
from tidegate.state.columnar.row_table import ColumnarRows
from tidegate.storage.state.snapshot import StateTable

Patch = Callable[[], AbstractContextManager[Any]]

_merges, _open, _change_batches = CumulatingSlices.merges, AggregateWindows.open, SessionWindows.change_batches
_load_table, _emit = WindowBuffer.load_table, FunctionSessions.emit_changes


def _left_behind(self: CumulatingSlices, nodes: Any, fired_ms: int, until_ms: int) -> list[Merge]:
    """Breaks: a slice counts once. Here it stays after it was merged into another."""
    return [merge._replace(taken=False) for merge in _merges(self, nodes, fired_ms, until_ms)]


def _only_what_comes(self: SessionWindows, parts: Sequence[tuple[str, pa.RecordBatch]]) -> list[pa.RecordBatch]:
    """Breaks: an emitted result is retracted when a session grows. Here it stays."""
    return _change_batches(self, [(kind, rows) for kind, rows in parts if kind.startswith("+")])


def _restored_with(column: str, of: str, more: int) -> Callable[..., None]:
    """Returns an `open` that copies one column of each stored row to another column."""

    def opened(self: AggregateWindows, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        tables = []
        for table in restored:
            names = table.rows.schema.names
            if column in names:
                values = np.full(table.rows.num_rows, more) + (0 if of == "" else table.rows.column(of).to_numpy())
                rows = table.rows.set_column(names.index(column), table.rows.schema.field(column), pa.array(values))
                table = replace(table, rows=rows)
            tables.append(table)
        _open(self, context, tables)

    return opened


def _without_a_word(self: WindowOperator, batch: pa.RecordBatch, late: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Breaks: rows that are late for windows go to the side output. Here they are dropped."""
    return np.flatnonzero(~late)


def _alone(
    self: KeptWindows, rows: pa.RecordBatch, keys: pa.RecordBatch, ends: NDArray[np.int64], waiting: bool, emit: Emit
) -> None:
    """Breaks: a late row is given with all rows of its key and window. Here it is alone."""
    self._keep_given(rows, keys, ends)
    self._call_for(rows, ends, emit)


def _without(state: str) -> Callable[[WindowBuffer, StateTable], None]:
    """A `load_table` that loses what a function has got, or what it has returned."""

    def load_table(self: WindowBuffer, table: StateTable) -> None:
        if table.state != state:
            _load_table(self, table)

    return load_table


def _nothing_back(self: FunctionSessions, parts: Sequence[tuple[str, pa.RecordBatch]], emit: Emit) -> None:
    """Breaks: what came out of a session is taken back when it grows. Here it stays."""
    _emit(self, [part for part in parts if part[0].startswith("+")], emit)


_LASTING = Program(Session(13), lateness_ms=300, applied=True)
"""A program whose sessions grow long enough that an emitted one almost always grows after a restore."""


@contextmanager
def _forgetting_what_was_returned() -> Iterator[None]:
    """Breaks: a restore includes which sessions were emitted. Here it does not, in a program of its own.

    Sessions of drawn programs grow within a few rows, or never.
    """
    with (
        patch.object(window_topologies, "PROGRAMS", (_LASTING,)),
        patch.object(WindowBuffer, "load_table", _without(RESULTS_STATE)),
    ):
        yield


WINDOW_PATCHES: dict[str, tuple[int, Patch]] = {
    "windows: a slice counts twice": (6, lambda: patch.object(CumulatingSlices, "merges", _left_behind)),
    "windows: what has fired fires again after a restore": (
        6,
        lambda: patch.object(FiredGroups, "load", lambda self, table: None),
    ),
    "windows: a session does not grow together after a restore": (
        6,
        lambda: patch.object(AggregateWindows, "open", _restored_with(END, START, 1)),
    ),
    "windows: a window of so many rows has one row after a restore": (
        6,
        lambda: patch.object(AggregateWindows, "open", _restored_with(ROWS, "", 1)),
    ),
    "windows: a session that has grown is not taken back": (
        6,
        lambda: patch.object(SessionWindows, "change_batches", _only_what_comes),
    ),
    "windows: what the end of the input leaves open is dropped": (
        6,
        lambda: patch.object(WindowOperator, "finish", lambda self, emit: iter(())),
    ),
    "windows: a late row is dropped in silence": (
        6,
        lambda: patch.object(WindowOperator, "_drop_late", _without_a_word),
    ),
    "windows: rows that a function has got stay": (
        6,
        lambda: patch.object(ColumnarRows, "remove", lambda self, refs: None),
    ),
    "windows: a late row comes to a function without the others": (
        6,
        lambda: patch.object(KeptWindows, "give_again", _alone),
    ),
    "windows: what a function has got is not there after a restore": (
        6,
        lambda: patch.object(WindowBuffer, "load_table", _without(KEPT_STATE)),
    ),
    "windows: what a function has returned is not known after a restore": (
        6,
        _forgetting_what_was_returned,
    ),
    "windows: what a function has returned for a session is not taken back": (
        6,
        lambda: patch.object(FunctionSessions, "emit_changes", _nothing_back),
    ),
    "windows: a window goes before its timers": (
        6,
        lambda: patch.object(WindowLife, "last_ms", lambda self, ends: ends - 1),
    ),
}
"""Every such break: its invariant, and the patch."""

_WINDOWS: Mapping[str, Hashable] = {
    "topology": "windows",
    "mode": "exactly-once",
    "sources": "at once",
    "survivors": "read",
    "savepoints": "canonical",
    "state": "whole",
}
"""State is read back from rows, which the breaks of restores change."""


def _rows_for(program: Program) -> int:
    """Returns a number of rows that selects a program and is enough to break it."""
    return 4 * len(PROGRAMS) + PROGRAMS.index(program)


_LATE = Program(Sliding(45, 15), lateness_ms=20, applied=True)
_GROWING = Program(Session(13), lateness_ms=22, applied=True)
_WATCHED = Program(Tumbling(16), lateness_ms=25, watches=True)
_PROGRAM_OF = {
    "windows: a slice counts twice": Program(Cumulating(10, 30)),
    "windows: what has fired fires again after a restore": Program(Sliding(40, 10)),
    "windows: a session does not grow together after a restore": Program(Session(12)),
    "windows: a window of so many rows has one row after a restore": Program(Count(3)),
    "windows: a session that has grown is not taken back": Program(Session(9), lateness_ms=25),
    "windows: what the end of the input leaves open is dropped": Program(Sliding(60, 20), by_clock=True),
    "windows: rows that a function has got stay": Program(Sliding(35, 15), applied=True),
    "windows: a late row comes to a function without the others": _LATE,
    "windows: what a function has got is not there after a restore": _LATE,
    "windows: what a function has returned for a session is not taken back": _GROWING,
    "windows: a window goes before its timers": _WATCHED,
}
WINDOW_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    rule: {**_WINDOWS, "rows": _rows_for(program), **({"faults": "tasks"} if "after a restore" in rule else {})}
    for rule, program in _PROGRAM_OF.items()
} | {
    "windows: a late row is dropped in silence": {**_WINDOWS, "rows": 5 * len(PROGRAMS)},
    "windows: what a function has returned is not known after a restore": {
        **_WINDOWS,
        "rows": 100,
        "faults": "tasks",
        "sources": "trickling",
        "alignment": "aligned",
        "interval_ms": 60,
        "min_pause_ms": 0,
        "ending": "finish",
    },
}
"""Fixed values of the scenarios for these breaks. The number of rows selects the windows (`window_topologies.py`)."""
