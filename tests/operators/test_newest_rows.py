"""`NewestRows` makes changes of newest versions, as a plain model does, with any batches, backends and restores."""

from __future__ import annotations

import tempfile
from typing import Any

import pyarrow as pa
import pytest
from change_view import ChangeView
from hypothesis import given, settings
from hypothesis import strategies as st
from ranking_harness import Running

from tidegate.connectors.formats.row_versions import UNCHANGED, version_schema
from tidegate.operators.ranking.newest_rows import NewestRows
from tidegate.protocol.failures import OperatorError

_COLUMNS = pa.schema([("k", pa.string()), ("v", pa.int64()), ("t", pa.string()), ("l", pa.list_(pa.int64()))])
_SCHEMA = version_schema(_COLUMNS)
_ROW = st.tuples(st.sampled_from("abc"), st.none() | st.integers(0, 2), st.sampled_from([None, "x", "y"]))
_UPSERT = st.tuples(st.just("+U"), _ROW)
_DELETE = st.tuples(st.just("-D"), st.sampled_from("abcd"))
_BATCH = st.lists(_UPSERT | _DELETE, min_size=1, max_size=6)
_RESTART = st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "incremental", "rocksdb", "crowded"]))


def _batch(steps: list[Any]) -> pa.RecordBatch:
    rows = []
    for kind, what in steps:
        if kind == "+U":
            key, v, t = what
            rows.append({"k": key, "v": v, "t": t, "l": None if v is None else [v], "row_kind": kind})
        else:
            rows.append({"k": what if kind == "-D" else None, "row_kind": kind})
    return pa.RecordBatch.from_pylist(rows, _SCHEMA)


@settings(max_examples=25)
@given(st.lists(_BATCH | _RESTART, max_size=9))
def test_it_comes_to_what_a_model_comes_to(steps: list[Any]) -> None:
    """Only rows that are there are retracted, and a version that is there already changes nothing."""
    model: dict[str, tuple[Any, ...]] = {}
    view = ChangeView()
    with tempfile.TemporaryDirectory() as directory:
        running = Running(lambda: NewestRows(("k",), _SCHEMA, "advice"), directory)
        for step in steps:
            if isinstance(step, tuple):
                running.restart(*step)
                continue
            before = dict(model)
            for kind, what in step:
                if kind == "+U":
                    key, v, t = what
                    model[key] = (key, v, t, None if v is None else [v])
                else:
                    model.pop(what, None)
            found = running.process(_batch(step))
            view.apply({name: str(value) for name, value in row.items()} for row in found)
            expected = sorted(tuple(map(str, row)) for row in model.values())
            assert sorted(view.rows.elements()) == expected
            moved = sum(before.get(key) != model.get(key) for key in {*before, *model})
            assert len({row["k"] for row in found}) == moved
        assert sum(table.rows.num_rows for table in running.stored()) == len(model)
        running.close()


@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
def test_a_truncate_retracts_all_rows_between_others(backend: str) -> None:
    """Rows before it in the same batch are gone after it, and rows after it are there."""
    with tempfile.TemporaryDirectory() as directory:
        running = Running(lambda: NewestRows(("k",), _SCHEMA, "advice"), directory)
        running.restart(1, backend)
        view = ChangeView()
        for steps in (
            [("+U", (f"k{i}", i, "x")) for i in range(500)],
            [("+U", ("new", 1, None)), ("truncate", None), ("+U", ("k1", 7, "y")), ("+U", ("z", 8, "y"))],
        ):
            found = running.process(_batch(steps))
            view.apply({name: str(value) for name, value in row.items()} for row in found)
        assert sorted(row[:2] for row in view.rows.elements()) == [("k1", "7"), ("z", "8")]
        running.process(_batch([("truncate", None), ("truncate", None)]))
        assert sum(table.rows.num_rows for table in running.stored()) == 0
        running.close()


def test_an_unchanged_value_comes_from_the_version_before() -> None:
    """In the same batch or in the state. Without one, or behind a deletion, the job fails and names the column."""

    def update(key: str, v: int | None, unchanged: list[str] | None, kind: str = "+U") -> dict[str, Any]:
        return {"k": key, "v": v, "t": f"{v}", "l": None, "row_kind": kind, UNCHANGED: unchanged}

    with tempfile.TemporaryDirectory() as directory:
        running = Running(lambda: NewestRows(("k",), _SCHEMA, "Do this."), directory)

        def process(*rows: dict[str, Any]) -> list[tuple[Any, ...]]:
            found = running.process(pa.RecordBatch.from_pylist(list(rows), _SCHEMA))
            return [(row["k"], row["v"], row["t"], row["row_kind"]) for row in found]

        assert process(update("a", 1, None), update("b", 2, None), update("a", None, ["v"])) == [
            ("a", 1, "None", "+I"),
            ("b", 2, "2", "+I"),
        ]
        assert process(update("b", 9, ["t", "l"]), update("a", None, ["v", "t"])) == [
            ("b", 2, "2", "-U"),
            ("b", 9, "2", "+U"),
        ]
        assert process(update("b", 0, ["v"]), update("b", 5, ["t"])) == [("b", 9, "2", "-U"), ("b", 5, "0", "+U")]
        with pytest.raises(OperatorError, match=r"column .*v.* has come. Do this"):
            process(update("c", None, ["v"]))
        with pytest.raises(OperatorError, match=r"no value in column .*'t'"):
            process(update("a", 1, None, "-D"), update("a", 1, ["t"]))
        running.close()


def test_rows_with_keys_alone() -> None:
    """A table without other columns."""
    schema = version_schema(pa.schema([("k", pa.string())]))
    with tempfile.TemporaryDirectory() as directory:
        running = Running(lambda: NewestRows(("k",), schema, ""), directory)
        rows = [{"k": "a", "row_kind": "+U"}, {"k": "b", "row_kind": "+U"}, {"k": "a", "row_kind": "-D"}]
        assert running.process(pa.RecordBatch.from_pylist(rows, schema)) == [{"k": "b", "row_kind": "+I"}]
        assert running.process(pa.RecordBatch.from_pylist(rows[1:2], schema)) == []
        running.close()
