"""A restore holds each stored table until the operator has taken it in, and no longer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from frozen_tables import tables_of
from operator_harness import CUT, context

from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.actors.task.operator_chain import OperatorChain
from tidegate.operators.aggregates import aggregate as aggregates
from tidegate.operators.aggregates import keyed_aggregate
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.operator import Operator
from tidegate.operators.state.keyed_state import ListState, ValueState
from tidegate.state.columnar import paged_state
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.state import handover
from tidegate.storage.state.handover import Handover, keys_at_most, merge_small_tables, taken
from tidegate.storage.state.snapshot import StateTable

_KEYS = 2_000


class _Remembers(ProcessFunction):
    """Has a state for each key, and one for itself."""

    def open(self, context: ProcessContext) -> None:
        self.last = context.state(ValueState("last", pa.int64()))
        self.all = context.list_state(ListState("all", pa.int64()))

    def process(self, row: dict[str, Any], context: ProcessContext) -> None:
        self.last.update(row["v"])
        self.all.add(row["v"])


def _aggregate() -> Operator:
    return KeyedAggregate(("k",), {"n": aggregates.count(), "s": aggregates.sum("v")})


def _function() -> Operator:
    return ProcessOperator(_Remembers(), (("k",),))


def _stored(make: Callable[[], Operator]) -> list[StateTable]:
    operator = make()
    operator.open(context(), ())
    batch = pa.record_batch({"k": pa.array(range(_KEYS)), "v": pa.array(range(_KEYS))})
    operator.process(batch, lambda _: None)
    snapshot = operator.snapshot(CUT)
    assert snapshot is not None
    return [table for state in snapshot.states for table in tables_of(state)]


@pytest.mark.parametrize("make", [_aggregate, _function], ids=["aggregate", "function"])
def test_tables_are_let_go_of_as_they_are_taken_in(
    make: Callable[[], Operator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one table of keyed state is taken in, those before it are gone, although the task holds the event."""
    monkeypatch.setattr(paged_state, "CHUNK_ROWS_MIN", 100)
    monkeypatch.setattr(paged_state, "CHUNK_BYTES_MIN", 0)
    monkeypatch.setattr(keyed_aggregate, "_RESTORED_ROWS", 1)
    tables = _stored(make)
    assert len(tables) > 10
    rows = [weakref.ref(table.rows) for table in tables]
    handed = {OperatorUid("op-uid"): Handover(tables)}
    del tables
    alive: list[int] = []
    load = ColumnarBackend.load

    def counted(backend: ColumnarBackend, table: StateTable) -> None:
        load(backend, table)
        alive.append(sum(of() is not None for of in rows))

    monkeypatch.setattr(ColumnarBackend, "load", counted)
    chain = OperatorChain([OperatorSpec(OperatorUid("op-uid"), "op", make)], SubtaskIndex(0), 1, 16, lambda _: None)

    chain.open(handed)

    assert alive == sorted(alive, reverse=True)
    assert alive[-1] <= 2, "those of operator state, and the last one"
    assert not handed[OperatorUid("op-uid")]


def test_a_handover_is_a_sequence_until_it_is_taken() -> None:
    """What is not taken yet can be looked at again and again; other sequences are not emptied."""
    one, two = _stored(_function)[:2]
    handover = Handover((one, two))
    assert (list(handover), handover[1], handover[:1], len(handover)) == ([one, two], two, (one,), 2)

    assert next(taken(handover)) is one
    assert list(handover) == [two]
    assert list(taken([one, two])) == [one, two]


def table(state: str, layer: int, *numbers: int) -> StateTable:
    """Stored rows with these keys."""
    rows = pa.record_batch({"k": pa.array(numbers, pa.int64())})
    return StateTable(state, StateKind.KEYED, rows, layer=layer)


def test_chunks_are_taken_in_together_up_to_a_bound() -> None:
    """Neighbours that are alike become one table; nothing is lost, and no order changes."""
    tables = [table("a", 0, 1, 2), table("a", 0, 3), table("a", 0, 4, 5, 6, 7), table("a", 1, 1), table("b", 1, 9)]

    found = [(t.state, t.layer, t.rows.column("k").to_pylist()) for t in merge_small_tables(iter(tables), 3)]

    assert found == [("a", 0, [1, 2, 3]), ("a", 0, [4, 5, 6, 7]), ("a", 1, [1]), ("b", 1, [9])]
    assert keys_at_most(tables) == 7


def test_chunks_of_large_rows_are_taken_in_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows they have: 131,072 rows of 16 kB are more than a column of strings can have."""
    monkeypatch.setattr(handover, "TOGETHER_BYTES_MAX", 3 * 8)
    tables = [table("a", 0, *numbers) for numbers in ((1,), (2, 3), (4,), (5, 6, 7, 8), (9,), (10, 11), (12,))]

    found = [t.rows.column("k").to_pylist() for t in merge_small_tables(iter(tables), 1_000)]

    assert found == [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10, 11], [12]]
