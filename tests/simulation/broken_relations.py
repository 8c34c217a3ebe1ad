"""Rules of joins, changes, times to live, early results and calls, broken on purpose; patches while a seed runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from random_jobs.relation_topologies import PROGRAMS

from tidegate.operators.aggregates.expiring_aggregate import ExpiringAggregate
from tidegate.operators.aggregates.multisets import KeptValues
from tidegate.operators.changes import DELETE
from tidegate.operators.functions.async_map import AsyncMap
from tidegate.operators.joins.asof_join import AsOfJoin
from tidegate.operators.joins.join_operator import MOMENT, RIGHT, JoinOperator
from tidegate.operators.joins.regular_join import RegularJoin
from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.ranking.top_n import TopN
from tidegate.operators.state.operator_backend import RowsOperator
from tidegate.operators.windows.sliced_windows import EarlyResults
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.state.snapshot import StateTable

Patch = Callable[[], AbstractContextManager[Any]]

_open, _load, _begins = JoinOperator.open, RowsOperator.load, ExpiringAggregate.begins_anew
_early = EarlyResults.__init__
_joined, _pad_stored = AsOfJoin.advance_watermark, RegularJoin.pad_stored


def _one_side(self: RowsOperator, tables: Sequence[StateTable]) -> None:
    """Breaks: both sides of a join are restored. Here the left one alone."""
    _load(self, [table for table in tables if table.state != "right"])


def _as_it_was(self: KeptValues, state: pa.RecordBatch, *_: object) -> dict[str, pa.Array]:
    """Breaks: a value that is taken back goes. Here it stays."""
    return dict(zip(state.schema.names, state.columns, strict=True))


def _never_anew(self: ExpiringAggregate, *arguments: Any) -> NDArray[np.uint8]:
    """Breaks: the state of a key starts anew after its time to live. Here it continues."""
    return np.zeros_like(_begins(self, *arguments))


def _as_if_out(self: EarlyResults, every_ms: int, *, restored: bool) -> None:
    """Breaks: after a restore all results count as changed. Here as if all had come out."""
    _early(self, every_ms, restored=False)


def _all_versions(self: AsOfJoin, watermark_ms: int, emit: Emit) -> Iterator[None]:
    """Breaks: the newest version of a key stays. Here all go that event time has passed."""
    yield from _joined(self, watermark_ms, emit)
    versions = self.tables[RIGHT]
    for rows, refs in versions.scan([MOMENT], 1_000):
        versions.remove(refs[rows.column(MOMENT).to_numpy() <= watermark_ms])
    versions.done()


def _padded_for_ever(self: RegularJoin, side: int, refs: NDArray[Any], kind: str, emit: Emit) -> None:
    """Breaks: a row without a partner is retracted when one arrives. Here it stays in addition to the pairs."""
    if kind != DELETE:
        _pad_stored(self, side, refs, kind, emit)


def _no_moment(self: JoinOperator, context: OperatorContext, restored: Sequence[StateTable]) -> None:
    """Breaks: a join restores its event time. Here a late row is joined."""
    _open(self, context, [table for table in restored if table.kind is not StateKind.UNION])


def _no_ranking(self: TopN, tables: Sequence[StateTable]) -> None:
    """Breaks: a ranking continues after a restore. Here it starts anew."""
    _load(self, [])


RELATION_PATCHES: dict[str, tuple[int, Patch]] = {
    "joins: a side is forgotten at a restore": (6, lambda: patch.object(RowsOperator, "load", _one_side)),
    "joins: a late row is joined after a restore": (9, lambda: patch.object(JoinOperator, "open", _no_moment)),
    "joins: versions that hold are let go": (6, lambda: patch.object(AsOfJoin, "advance_watermark", _all_versions)),
    "joins: a row without a partner stays": (6, lambda: patch.object(RegularJoin, "pad_stored", _padded_for_ever)),
    "rankings: all is forgotten at a restore": (6, lambda: patch.object(TopN, "load", _no_ranking)),
    "changes: a value that was taken back stays": (6, lambda: patch.object(KeptValues, "retract", _as_it_was)),
    "ttl: a key does not begin anew": (6, lambda: patch.object(ExpiringAggregate, "begins_anew", _never_anew)),
    "early results: what has not come out is forgotten at a restore": (
        6,
        lambda: patch.object(EarlyResults, "__init__", _as_if_out),
    ),
    "calls: rows under way are in no checkpoint": (6, lambda: patch.object(AsyncMap, "snapshot", lambda *_: None)),
    "calls: a watermark overtakes rows": (6, lambda: patch.object(AsyncMap, "let_pass", lambda *_: True)),
}
"""Every such break: its invariant, and the patch."""

_PROGRAM_OF = {
    "joins: a side is forgotten at a restore": "near",
    "joins: a late row is joined after a restore": "near",
    "joins: versions that hold are let go": "versions",
    "changes: a value that was taken back stays": "multisets",
    "ttl: a key does not begin anew": "lives",
    "early results: what has not come out is forgotten at a restore": "early",
    "calls: rows under way are in no checkpoint": "calls",
    "calls: a watermark overtakes rows": "calls",
}
_NUMBERS = {program.build.__name__.strip("_"): number for number, program in enumerate(PROGRAMS)}
_RELATIONS: Mapping[str, Hashable] = {
    "topology": "relations",
    "mode": "exactly-once",
    "sources": "at once",
    "survivors": "read",
    "savepoints": "canonical",
    "state": "whole",
    "faults": "tasks",
}
"""State is read back from rows, which the breaks of restores change."""
RELATION_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    rule: {**_RELATIONS, "rows": 6 * len(PROGRAMS) + _NUMBERS[program]} for rule, program in _PROGRAM_OF.items()
} | {
    "joins: a row without a partner stays": {"topology": "matches", "mode": "exactly-once"},
    "rankings: all is forgotten at a restore": {**_RELATIONS, "topology": "ranks"},
}
"""Fixed values of the scenarios for these breaks. The number of rows selects the program of relations.

Rows of a table replace each other, so a row that stays shows in the counts behind the join.
"""
