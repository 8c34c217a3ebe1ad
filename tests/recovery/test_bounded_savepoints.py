"""Rows that come one batch after the other make the same savepoint as a table in memory, and are not held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidegate as tg
from tidegate import recovery
from tidegate.recovery.state_processor import state_rows

SEEN = tg.ListState("seen", pa.int64())
ROWS = st.lists(st.tuples(st.integers(0, 200), st.none() | st.lists(st.integers(0, 9), max_size=3)), max_size=40)


def reader(rows: Sequence[tuple[int, Any]], size: int) -> pa.RecordBatchReader:
    """The rows in batches of so many, with narrower types than the state has."""
    keys, seen = [key for key, _ in rows], [value for _, value in rows]
    table = pa.table({"k": pa.array(keys, pa.int64()), "seen": pa.array(seen, pa.list_(pa.int32()))})
    return pa.RecordBatchReader.from_batches(table.schema, table.to_batches(size))


def written(target: Path, rows: Any, parallelism: int) -> pl.DataFrame:
    """A savepoint of these rows, read back."""
    with recovery.SavepointWriter(str(target), job="spilled", max_parallelism=16, parallelism=parallelism) as writer:
        writer.with_keyed_state(uid="op", keys=["k"], state=SEEN, rows=rows)
    assert recovery.verify(writer.path).ok
    found = pl.from_arrow(recovery.read_state(writer.path, uid="op", state="seen"))
    assert isinstance(found, pl.DataFrame)
    return found.sort("k")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For savepoints, which all have names of their own."""
    return tmp_path_factory.mktemp("savepoints")


@pytest.fixture(scope="module", autouse=True)
def nothing_is_held() -> Iterator[None]:
    """All rows of a reader wait on the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_rows, "MEMORY_BYTES", 0)
        yield


@settings(max_examples=8)
@given(rows=ROWS, size=st.integers(1, 7), parallelism=st.integers(1, 5))
def test_rows_of_a_reader_are_those_of_a_table(
    folder: Path, rows: list[tuple[int, Any]], size: int, parallelism: int
) -> None:
    """In any batches, at any parallelism; what is no state is left out."""
    distinct = list({**dict(rows), 201: [1]}.items())

    found = written(folder, reader(distinct, size), parallelism)

    assert found.rows() == sorted((key, seen) for key, seen in distinct if seen)


def test_a_key_that_comes_twice_is_found_in_any_batch(tmp_path: Path) -> None:
    """While the savepoint is written: then there is none."""
    with pytest.raises(tg.ConfigurationError, match=r"1 rows have a key that came before, such as \{'k': 7\}"):
        written(tmp_path, reader([(7, [1]), (8, [1]), (7, [2])], 1), 2)
    assert recovery.list_checkpoints(str(tmp_path)) == []


def test_nothing_is_left_of_rows_that_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the block fails."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    written(tmp_path, reader([(1, [1])], 1), 1)
    with pytest.raises(ValueError, match="as told"):
        fail_within(tmp_path)
    assert not list((tmp_path / "temporary").iterdir())


def fail_within(target: Path) -> None:
    """A block that ends with an error, when rows wait."""
    with recovery.SavepointWriter(str(target), job="spilled") as writer:
        writer.with_keyed_state(uid="op", keys=["k"], state=SEEN, rows=reader([(1, [1])], 1))
        assert list((target / "temporary").iterdir())
        raise ValueError("as told")
