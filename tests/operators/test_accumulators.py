"""Accumulators that are merged hold what one that took in all the rows would hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from aggregate_cases import AGGREGATES, SCHEMA, batch_of, expected, rows
from aggregate_model import same_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import context

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates.accumulators import Accumulator, make_accumulator, value_specs
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.state.keys import key_columns
from tidegate.operators.state.operator_backend import make_backend
from tidegate.state.common.backend import VectorTable


class Accumulators:
    """One table with the accumulators of some aggregates."""

    def __init__(self, what: Mapping[str, Aggregate] = AGGREGATES) -> None:
        self._fields = {name: a.state_fields(name, SCHEMA) for name, a in what.items()}
        backend = make_backend(context(), ("k",))
        specs = [spec for name, a in what.items() for spec in value_specs(a, self._fields[name])]
        self._table: VectorTable = backend.table("aggregate", specs)
        backend.fix_keys(pa.schema([SCHEMA.field("k")]))
        self._accumulators: dict[str, Accumulator] = {
            name: make_accumulator(a, self._fields[name], self._table) for name, a in what.items()
        }

    def update(self, batch: pa.RecordBatch) -> None:
        """Take in rows."""
        slots = self._table.upsert(key_columns(batch, ("k",))).slots
        for accumulator in self._accumulators.values():
            accumulator.update(batch, slots)
        self._table.done()

    def parts(self) -> list[tuple[pa.RecordBatch, dict[str, list[pa.Array]]]]:
        """Keys, and the stored columns of each aggregate."""
        return [
            (keys, {n: [self._table.column(f.name).take(slots) for f in fields] for n, fields in self._fields.items()})
            for keys, slots in self._table.scan(2)
        ]

    def merge(self, keys: pa.RecordBatch, parts: Mapping[str, list[pa.Array]]) -> None:
        """Merge parts into the slots of some keys."""
        slots = self._table.upsert(keys).slots
        for name, accumulator in self._accumulators.items():
            accumulator.merge(slots, parts[name])
        self._table.done()

    def results(self) -> list[dict[str, Any]]:
        """The results of each key."""
        found: list[dict[str, Any]] = []
        for keys, slots in self._table.scan(100):
            columns = {name: accumulator.results(slots) for name, accumulator in self._accumulators.items()}
            found += pa.table({"k": keys.column("k"), **columns}).to_pylist()
        return found


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=4))
def test_merged_parts_are_the_whole(parts: list[list[dict[str, Any]]]) -> None:
    """Each part of the rows in a table of its own, merged one after the other: the results are those of all rows."""
    whole, merged = Accumulators(), Accumulators()
    for part in filter(None, parts):
        whole.update(batch_of(part))
        of_part = Accumulators()
        of_part.update(batch_of(part))
        for keys, columns in of_part.parts():
            merged.merge(keys, columns)
    wanted = expected([row for part in parts for row in part])
    assert same_rows(whole.results(), wanted, "k")
    assert same_rows(merged.results(), wanted, "k")


def test_slots_of_one_table_are_merged() -> None:
    """A slot may come several times, and from the table itself: two sessions become one."""
    what = {"n": tg.count(), "total": tg.sum("i"), "last": tg.last("i"), "spread": tg.var_pop("i")}
    table = Accumulators(what)
    blank = dict.fromkeys(SCHEMA.names)
    values = [(0, 1), (1, 2), (2, None), (2, 4)]
    table.update(batch_of([{**blank, "k": key, "i": value} for key, value in values]))
    for keys, columns in table.parts():
        table.merge(pa.record_batch({"k": pa.array([9] * keys.num_rows, pa.int64())}), columns)
    (found,) = (row for row in table.results() if row["k"] == 9)
    assert found == {"k": 9, "n": 4, "total": 7, "last": 4, "spread": pytest.approx(14 / 9)}


def test_merged_sums_overflow_like_others() -> None:
    """What each side could hold and both together cannot is an error."""
    one = Accumulators({"total": tg.sum("u")})
    one.update(batch_of([{**dict.fromkeys(SCHEMA.names), "k": 0, "u": 2**63 - 1}]))
    ((keys, parts),) = one.parts()
    with pytest.raises(OverflowError, match="column 'u' does not fit into int64"):
        one.merge(keys, parts)
