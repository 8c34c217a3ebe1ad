"""Row tables of every backend: what the random programs of the contract tests would meet too seldom."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from backend_model import (
    BACKENDS,
    KEYS,
    MAX_PARALLELISM,
    WITH_INCREMENTS,
    MakeBackend,
    composed,
    key_batch,
    key_of,
    tables,
)
from row_model import ROW_VALUES, RowsOfKeys

from tidegate.state.columnar import row_table
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.common.backend import RowTable
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import CorruptionError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, StateTable
from tidegate.storage.state.stored_rows import ROW_SEQUENCE


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest) -> MakeBackend:
    """Makes an empty backend."""
    return BACKENDS[request.param]


@pytest.fixture(params=WITH_INCREMENTS)
def of_increments(request: pytest.FixtureRequest) -> MakeBackend:
    """Makes an empty backend with increments."""
    return BACKENDS[request.param]


def test_an_increment_tells_of_rows_that_came_and_went(of_increments: MakeBackend) -> None:
    """Of 3,000 rows, the second snapshot tells of one that came and one that went, and of no other."""
    rows = RowsOfKeys(of_increments, True)
    rows.batch([(key, "append", 1) for key in range(3000)])
    tables(rows.backend.freeze(Cut(CheckpointId(1))))
    rows.batch([(3000, "append", 2), (17, "remove", 0)])
    stored = tables(rows.backend.freeze(Cut(CheckpointId(2), CheckpointId(1))), layer=1)
    told = {
        removed: [k for t in stored if t.removed == removed for k in t.rows.column("k").to_pylist()]
        for removed in (False, True)
    }
    assert told == {False: [3000], True: [17]}
    rows.backend.close()


def test_an_increment_after_a_restore_tells_of_rows_that_went(of_increments: MakeBackend) -> None:
    """Of those that came with the restored increment, beside others that came and went after its base: these have slots
    as well, and all get new numbers, in the order in which rows came."""
    rows = RowsOfKeys(of_increments, True)
    rows.batch([(key, "append", 1) for key in range(20)])
    stored = tables(rows.backend.freeze(Cut(CheckpointId(1))))
    rows.batch([(key, "append", 1) for key in range(20, 40)])
    tables(rows.backend.freeze(Cut(CheckpointId(2), CheckpointId(1))))
    rows.batch([(key, "remove", 0) for key in range(20, 40)] + [(key, "append", 1) for key in range(40, 60)])
    stored += tables(rows.backend.freeze(Cut(CheckpointId(3), CheckpointId(1))), layer=1)
    again = RowsOfKeys(of_increments, True, stored)
    again.batch([(key, "remove", 0) for key in range(40, 60, 2)])
    stored += tables(again.backend.freeze(Cut(CheckpointId(4), CheckpointId(3))), layer=2)

    assert composed(stored) == again.expected()
    rows.backend.close()
    again.backend.close()


def test_rows_after_a_restore_come_after_those_before(make: MakeBackend) -> None:
    """Numbers go on after the greatest one that was stored; rows of a key stay in order, more than 256 of them."""
    rows = RowsOfKeys(make, False)
    for _ in range(3):
        rows.batch([(1, "append", number % 6) for number in range(150)])
    stored = tables(rows.backend.freeze(Cut(CheckpointId(1))))
    again = RowsOfKeys(make, False, stored)
    again.batch([(1, "append", 3), (2, "append", 4)])
    again.check()
    (whole,) = tables(again.backend.freeze(Cut(CheckpointId(2), canonical=True)))
    assert sorted(whole.rows.column(ROW_SEQUENCE).to_pylist()) == list(range(452))
    assert composed([whole]) == again.expected()
    for each in (rows, again):
        each.backend.close()


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("source", sorted(BACKENDS))
def test_rows_of_a_key_come_as_they_arrived(make: MakeBackend, source: str, canonical: bool) -> None:
    """Found, and scanned in pieces, before and after a restore: stored rows are in the order of the numbers' bytes."""
    values = pa.schema([("i", pa.int64())])

    def append(table: RowTable, numbers: range) -> None:
        batch = pa.record_batch([pa.array(numbers, pa.int64())], schema=values)
        table.append(key_batch([number % 3 for number in numbers]), batch)

    def check(table: RowTable, rows: int) -> None:
        scanned = pa.Table.from_batches(part for part, _ in table.scan(["k", "i"], 70)).to_pylist()
        for key in range(3):
            arrived = list(range(key, rows, 3))
            assert table.take(table.find(key_batch([key])).refs, ["i"]).column(0).to_pylist() == arrived
            assert [row["i"] for row in scanned if row["k"] == key_of(key)[0]] == arrived
        table.done()

    before, after = BACKENDS[source](False), make(False)
    (former, table) = (backend.rows("r", values) for backend in (before, after))
    for backend in (before, after):
        backend.fix_keys(KEYS)
    append(former, range(900))
    check(former, 900)
    for stored in tables(before.freeze(Cut(CheckpointId(1), canonical=canonical))):
        after.load(stored)
    after.loaded()
    append(table, range(900, 950))
    check(table, 950)
    for backend in (before, after):
        backend.close()


def test_going_back_finds_the_rows_of_the_checkpoint() -> None:
    """A row that was found, removed and gone back to is found again; one that came since is not."""
    backend = ColumnarBackend(MAX_PARALLELISM, tuple(KEYS.names), True, 1 << 20)
    rows = RowsOfKeys(lambda _: backend, True)
    rows.batch([(1, "append", 1), (2, "append", 2)])
    backend.freeze(Cut(CheckpointId(1)))
    expected = rows.expected()
    rows.batch([(1, "remove", 0), (2, "append", 3), (3, "append", 3)])
    backend.go_back(CheckpointId(1))
    again = RowsOfKeys(lambda _: backend, True, files=expected)
    again.batch([(1, "find", 0), (2, "find", 0), (3, "find", 0)])
    again.check()


def test_a_key_chooses_the_key_group_of_its_rows(make: MakeBackend) -> None:
    """Rows of one key are in one key group, whatever their numbers are: a rescaled job splits no key."""
    rows = RowsOfKeys(make, False)
    rows.batch([(key, "append", 1) for key in range(8) for _ in range(5)])
    for state in rows.backend.freeze(Cut(CheckpointId(1))):
        for chunk in state.chunks():
            groups = (hash_columns(chunk.rows, KEYS.names) % np.uint64(MAX_PARALLELISM)).astype(int)
            sizes = np.diff(chunk.group_rows)
            told = np.repeat(np.arange(chunk.first_group, chunk.first_group + len(sizes)), sizes)
            assert told.tolist() == groups.tolist()
    rows.backend.close()


def test_keys_without_rows_do_not_stay_in_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many keys are asked for that have no rows, the index in memory stays bounded."""
    monkeypatch.setattr(row_table, "_KEYS_MIN", 10)
    rows = RowsOfKeys(BACKENDS["columnar"], False)
    rows.batch([(1, "append", 1)])
    for start in range(0, 400, 20):
        rows.batch([(key, "find", 0) for key in range(start, start + 20)])
    index = rows.table._table._index
    assert index._keys.size <= 10 + 2 + 20
    rows.check()


def test_other_columns_of_rows_are_refused(make: MakeBackend) -> None:
    """Stored rows with other columns are refused, with those found and those expected; so is a row that comes twice."""
    rows = RowsOfKeys(make, False)
    rows.batch([(1, "append", 1)])
    (stored,) = tables(rows.backend.freeze(Cut(CheckpointId(1))))
    strange = stored.rows.rename_columns([*stored.rows.schema.names[:-1], "when"])
    with pytest.raises(CorruptionError, match=r"state 'r' have columns .*when: .*expects.*at: "):
        RowsOfKeys(make, False, (StateTable("r", StateKind.KEYED, strange),))
    with pytest.raises(CorruptionError, match="state 'r' holds a key twice"):
        RowsOfKeys(make, False, (stored, stored))
    rows.backend.close()


def test_values_come_back_bit_by_bit(make: MakeBackend) -> None:
    """Negative zero and NaN, unsigned numbers, nanoseconds, decimals, dictionaries and nested values."""
    table = pa.table(
        {
            "f": pa.array([-0.0, float("nan")], pa.float32()),
            "u": pa.array([2**64 - 1, None], pa.uint64()),
            "n": pa.array([1, None], pa.timestamp("ns", "UTC")),
            "d": pa.array(["1.50", None]).cast(pa.decimal128(9, 2)),
            "b": pa.array([b"\x00\xff", b""], pa.large_binary()),
            "st": pa.array([{"a": [1, None], "b": "x"}, None], pa.struct({"a": pa.list_(pa.int8()), "b": pa.string()})),
            "m": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
            "e": pa.array([None, None], pa.null()),
        }
    )
    (values,) = table.to_batches()
    backend = make(False)
    rows = backend.rows("r", values.schema)
    backend.fix_keys(KEYS)
    rows.append(key_batch([5, 5]), values)
    found = rows.take(rows.find(key_batch([5])).refs, values.schema.names)
    assert found.schema.equals(values.schema)
    assert found.drop_columns(["f"]).equals(values.drop_columns(["f"]))
    assert found.column("f").view(pa.int32()).equals(values.column("f").view(pa.int32()))
    backend.close()


def test_a_part_of_the_columns_is_taken(make: MakeBackend) -> None:
    """Those that are named, in this order, rows in the order of the refs and as often as they are given."""
    rows = RowsOfKeys(make, False)
    rows.batch([(1, "append", 1), (1, "append", 2)])
    refs = rows.table.find(key_batch([1])).refs
    taken = rows.table.take(refs[[1, 0, 1]], ["x", "k"])
    assert taken.to_pylist() == [{"x": 2.0, "k": 1}, {"x": 1.0, "k": 1}, {"x": 2.0, "k": 1}]
    assert rows.table.take(refs[:0]).schema == pa.schema([*KEYS, *ROW_VALUES])
    rows.backend.close()
