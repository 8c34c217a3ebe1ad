"""A process function goes on with the files that its RocksDB backend left in a checkpoint, also when it has changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from process_harness import Driven, Row

from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction
from tidegate.operators.state.keyed_state import KeyedState, MapState, ValueState
from tidegate.operators.state.state_types import Pickled
from tidegate.operators.state.ttl import StateTtl
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.layout import escape
from tidegate.storage.checkpoints.metadata import NativeState
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.backend_files import fetch_native, write_native
from tidegate.storage.state.snapshot import Cut


class Keeps(ProcessFunction):
    """Keeps the last `x` of each key, and tells the one before."""

    def __init__(self, declared: KeyedState) -> None:
        self.declared = declared

    def open(self, context: ProcessContext) -> None:
        self.last: Any = context.state(self.declared)

    def process(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        if isinstance(self.last, ValueState):
            yield {"k": row["k"], "was": repr(self.last.value())}
            self.last.update(row["x"])
        else:
            yield {"k": row["k"], "was": repr(self.last.get("x"))}
            self.last.put("x", row["x"])


class Files:
    """Attempts of a job on RocksDB, and the files between them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = open_store(str(folder / "store"))
        self._number = 0
        self._started: list[Driven] = []

    def started(
        self, declared: KeyedState, native: NativeState | None = None, key: str = "k", now_ms: int = 0
    ) -> Driven:
        """A job, new or on the files of a checkpoint."""
        self._number += 1
        directory = self._folder / str(self._number)
        if native is not None:
            fetch_native(self._store, native, str(directory / "0" / escape("op-uid")))
        options = StateBackendOptions(kind="rocksdb", directory=str(directory))
        self._started.append(Driven(Keeps(declared), keys=((key,),), backend=options, now_ms=now_ms))
        return self._started[-1]

    def taken(self, driven: Driven) -> NativeState:
        """A checkpoint; the job ends."""
        (operator,) = driven.operators
        snapshot = operator.snapshot(Cut(CheckpointId(self._number)))
        assert snapshot is not None
        assert snapshot.native is not None
        native = write_native(self._store, f"chk-{self._number}", snapshot.native, None)
        operator.close()
        return native

    def close(self) -> None:
        """End every attempt."""
        for driven in self._started:
            for operator in driven.operators:
                operator.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    """A place for attempts, which are over when the test is."""
    files = Files(tmp_path)
    yield files
    files.close()


def row(x: Any, schema: pa.DataType | None = None) -> pa.RecordBatch:
    """A row of the key `a`."""
    return pa.record_batch({"k": ["a"], "x": pa.array([x], schema or pa.int64())})


def test_state_is_there_without_a_row(files: Files) -> None:
    """A checkpoint that is taken before a row has come holds what the files held: state is not lost twice removed."""
    first = files.started(ValueState("v", int))
    first.batch(row(1))
    second = files.started(ValueState("v", int), files.taken(first))
    third = files.started(ValueState("v", int), files.taken(second))

    assert third.batch(row(2)) == [{"k": "a", "was": "1"}]


def test_state_of_files_is_migrated(files: Files) -> None:
    """To a wider type, and to one with a time to live, which counts from the restore; as rows of checkpoints are."""
    first = files.started(ValueState("v", pa.int32()))
    first.batch(row(1))
    ttl = StateTtl(100)
    second = files.started(ValueState("v", int, ttl=ttl), files.taken(first), now_ms=1000)
    second.clock(1099)
    assert second.batch(row(2)) == [{"k": "a", "was": "1"}]
    third = files.started(ValueState("v", int, ttl=ttl), files.taken(second), now_ms=1199)
    assert third.batch(row(3)) == [{"k": "a", "was": "None"}]


@pytest.mark.parametrize(
    ("was", "now", "text"),
    [
        (ValueState("v", int), ValueState("v", str), r"state 'v' of operator 'op-uid'.*int64.*string"),
        (ValueState("v", int, ttl=StateTtl(9)), ValueState("v", int), "was written with a time to live"),
        (ValueState("v", Pickled), ValueState("v", bytes), "pickled"),
        (MapState("v", str, bytes), MapState("v", str, Pickled), "pickled"),
        (ValueState("v", int), MapState("v", str, int), "give the state a new name"),
        (ValueState("v", int), ValueState("w", int), "'v' .*not bind"),
    ],
)
def test_state_of_files_that_does_not_fit_is_refused(files: Files, was: KeyedState, now: KeyedState, text: str) -> None:
    """By name, with advice, at the restore or with the first row."""
    first = files.started(was)
    first.batch(row(b"x", pa.binary()) if "inary" in str(was.column_type) else row(1))
    native = files.taken(first)

    with pytest.raises(ConfigurationError, match=f"(?s){text}"):
        files.started(now, native).batch(row(1))


def test_other_key_columns_are_refused(files: Files) -> None:
    """Their state would never be seen again."""
    first = files.started(ValueState("v", int))
    first.batch(row(1))
    native = files.taken(first)

    with pytest.raises(ConfigurationError, match=r"is keyed by \['id'\], but the state of the checkpoint has columns"):
        files.started(ValueState("v", int), native, key="id")
