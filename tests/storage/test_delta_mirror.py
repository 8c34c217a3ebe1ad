"""A Delta table that follows a table's log: by a model with jobs that die in between, races, and files of others."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from table_logs import SCHEMA, A, B, C, commit
from test_table_model import CompactedTableMachine

from tidegate.storage.errors import ConfigurationError, TableError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId
from tidegate.storage.tables.delta_mirror import DeltaChange, DeltaMirror, check_delta_schema
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

DELTA = TableInfo.of(SCHEMA, "append", delta_id="tidegate-test")


class DyingLog(TableLog):
    """A writer that sometimes dies between its commit and the Delta table."""

    dies = False
    behind = False
    """Whether Delta was left behind by any writer."""

    def _follow(self) -> None:
        DyingLog.behind = DyingLog.dies
        if not DyingLog.dies:
            super()._follow()


class DeltaTableMachine(CompactedTableMachine):
    """Jobs claim, restore, fall back, commit and compact; Delta shows what the log shows, or showed a moment ago."""

    @initialize()
    def create(self) -> None:
        """An empty table, and two writers that know it."""
        self.folder = tempfile.mkdtemp()
        DyingLog.dies = DyingLog.behind = False
        self.store = open_store(self.folder)
        self.logs = [DyingLog(self.store, entries_per_snapshot=3, now_ms=lambda: self.clock_ms) for _ in range(2)]
        self.reader = TableLog(self.store)
        self.shown_once: list[list[str]] = [[]]
        for log in self.logs:
            log.create(DELTA)

    @rule(dies=st.booleans())
    def writers_die(self, dies: bool) -> None:
        """From now on, or no longer."""
        DyingLog.dies = dies

    @invariant()
    def delta_shows_it_too(self) -> None:
        """Unless the last writer died; then it shows something that the table has shown."""
        if not hasattr(self, "reader"):
            return
        self.shown_once.append(self._paths(self.reader.snapshot().files))
        shown = active_in(DeltaTable(self.folder))
        if DyingLog.behind:
            assert self._expanded_paths(shown) in self.shown_once
        else:
            assert shown == sorted(file.path for file in self.reader.snapshot().files)

    def teardown(self) -> None:
        """Each version of the Delta table is something that the table has shown: whole checkpoints."""
        super().teardown()
        if not hasattr(self, "reader"):
            return
        table = DeltaTable(self.folder)
        for version in range(table.version() + 1):
            table.load_as_version(version)
            assert self._expanded_paths(active_in(table)) in self.shown_once
        shutil.rmtree(self.folder)

    def _expanded_paths(self, paths: list[str]) -> list[str]:
        names = [path.removeprefix("data/").removesuffix(".parquet") for path in paths]
        return sorted(f"data/{one}.parquet" for name in names for one in self.merged.get(name, [name]))


TestDeltaTableMachine = DeltaTableMachine.TestCase
# Each step reads a real Delta table: shortening a failure would take minutes.
TestDeltaTableMachine.settings = settings(max_examples=25, stateful_step_count=30, phases=[Phase.generate])


def active_in(table: DeltaTable) -> list[str]:
    """Paths of the files that a Delta table has, in order."""
    return sorted(pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist())


def delta_log(url: str) -> TableLog:
    """The log of a table that is a Delta table too."""
    log = TableLog(open_store(url))
    log.create(DELTA)
    return log


def names(url: Path | str) -> list[str]:
    """Names of the files that Delta shows."""
    return [path.removeprefix("data/").removesuffix(".parquet") for path in active_in(DeltaTable(str(url)))]


def test_a_repeated_commit_mends_what_a_killed_one_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has the commit, Delta has not; whoever repeats it brings Delta up to date, once."""
    log = delta_log(str(tmp_path))
    log.claim(A)
    with monkeypatch.context() as patched:
        patched.setattr(DeltaMirror, "show", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            commit(log, A, 1, "a")
    assert names(tmp_path) == []
    commit(TableLog(open_store(str(tmp_path))), A, 1, "a")
    assert names(tmp_path) == ["a"]
    assert DeltaTable(str(tmp_path)).version() == 1


def raise_interrupt(*_: object) -> None:
    """The process ends here."""
    raise KeyboardInterrupt


def test_of_two_that_mirror_at_once_one_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one has read the Delta table before the first one committed to it."""
    log, other = delta_log(str(tmp_path)), delta_log(str(tmp_path))
    log.claim(A)
    show = DeltaMirror.show
    raced = []

    def shown_late(mirror: DeltaMirror, change_since: Callable[[int | None], DeltaChange | None]) -> None:
        def late(since: int | None) -> DeltaChange | None:
            change = change_since(since)
            if not raced:
                raced.append(since)
                monkeypatch.setattr(DeltaMirror, "show", show)
                commit(other, A, 1, "a")
                commit(other, A, 2, "b")
            return change

        show(mirror, late)

    monkeypatch.setattr(DeltaMirror, "show", shown_late)
    commit(log, A, 1, "a")
    assert names(tmp_path) == ["a", "b"]
    table = DeltaTable(str(tmp_path))
    table.load_as_version(1)
    assert active_in(table) == ["data/a.parquet"]
    assert DeltaTable(str(tmp_path)).version() == 2


def test_rows_of_others_stay(tmp_path: Path) -> None:
    """Files that tidegate has not written stay, also where a restored job hides its own."""
    log = delta_log(str(tmp_path))
    log.claim(A)
    commit(log, A, 1, "a")
    write_deltalake(str(tmp_path), pa.table({"k": ["x"], "v": [1]}, schema=SCHEMA), mode="append")
    commit(log, A, 2, "b")
    log.claim(B, (A, CheckpointId(1)))
    commit(log, B, 1, "c")
    assert [name for name in names(tmp_path) if len(name) == 1] == ["a", "c"]
    assert len(names(tmp_path)) == 3


def test_a_new_job_finds_rows_of_others(tmp_path: Path) -> None:
    """As it would find rows of the table itself; only adding to them is possible."""
    write_deltalake(str(tmp_path), pa.table({"k": ["x"], "v": [1]}, schema=SCHEMA))
    log = TableLog(open_store(str(tmp_path)))
    for if_exists in ("error", "overwrite"):
        with pytest.raises(TableError, match="has 1 files that tidegate has not written"):
            log.check_claim(DELTA, A, None, if_exists)
    log.check_claim(DELTA, A, None, "append")
    log.check_claim(DELTA, A, (C, CheckpointId(1)), "error")


def test_rows_that_others_have_rewritten_cannot_be_hidden(tmp_path: Path) -> None:
    """Such as by OPTIMIZE: what was in the file is somewhere else now."""
    log = delta_log(str(tmp_path))
    log.claim(A)
    commit(log, A, 1, "a")
    commit(log, A, 2, "b")
    write_deltalake(str(tmp_path), pa.table({"k": ["x"], "v": [1]}, schema=SCHEMA), mode="overwrite")
    log.claim(B, (A, CheckpointId(1)))
    with pytest.raises(TableError, match=r"1 files of the Delta table .* \(the first is data/b.parquet\).*RESTORE"):
        commit(log, B, 1, "c")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (pa.schema([("k", pa.string()), ("v", pa.int32())]), "has the columns k string, v int32, the job writes"),
        (pa.schema([("k", pa.string())]), "has the columns k string, the job writes k string, v int64"),
    ],
)
def test_a_delta_table_of_other_columns_is_refused(tmp_path: Path, schema: pa.Schema, text: str) -> None:
    """Both lists of columns are named, also to a restored job, and nothing is left behind."""
    write_deltalake(str(tmp_path), schema.empty_table())
    log = TableLog(open_store(str(tmp_path)))
    for attempt in (lambda: log.check_claim(DELTA, A, (C, CheckpointId(1))), lambda: log.create(DELTA)):
        with pytest.raises(TableError, match=text):
            attempt()
    assert not log.exists()


def test_columns_that_change_while_the_job_runs_end_it(tmp_path: Path) -> None:
    """The next commit says so, instead of writing files that do not fit."""
    log = delta_log(str(tmp_path))
    log.claim(A)
    commit(log, A, 1, "a")
    more = pa.table({"k": ["x"], "v": [1], "w": [1]}, schema=SCHEMA.append(pa.field("w", pa.int64())))
    write_deltalake(str(tmp_path), more, mode="append", schema_mode="merge")
    with pytest.raises(TableError, match="has the columns k string, v int64, w int64, the job writes"):
        commit(log, A, 2, "b")


def test_other_partitions_are_refused(tmp_path: Path) -> None:
    """Both partitionings are named."""
    write_deltalake(str(tmp_path), SCHEMA.empty_table(), partition_by=["k"])
    with pytest.raises(TableError, match=r"partitioned by \['k'\], the job partitions by \[\]"):
        delta_log(str(tmp_path))


def test_a_table_in_memory_cannot_be_one() -> None:
    """Nobody else could read it."""
    with pytest.raises(ConfigurationError, match="cannot be in memory"):
        delta_log("memory://delta-in-memory")


@pytest.mark.parametrize(
    ("field", "text"),
    [
        (pa.field("a", pa.timestamp("ns")), r"cast it to microseconds, timestamp\[us\]"),
        (pa.field("a", pa.timestamp("us", "Europe/Berlin")), "time zone must be UTC"),
        (pa.field("a", pa.list_(pa.struct([("x", pa.uint8())]))), "signed integer"),
        (pa.field("a", pa.map_(pa.string(), pa.float16())), "float32"),
        (pa.field("a", pa.time64("us")), "cast it to a number"),
        (pa.field("a b", pa.int64()), "has ' ' in its name"),
        (pa.field("K", pa.int64()), "differ by case alone"),
    ],
)
def test_what_delta_cannot_hold_is_refused_by_name(field: pa.Field, text: str) -> None:
    """With the cast to make."""
    with pytest.raises(TableError, match=text):
        check_delta_schema(SCHEMA.append(field))


def test_what_delta_can_hold() -> None:
    """Nothing is refused that Delta takes."""
    types = [pa.bool_(), pa.int8(), pa.float64(), pa.large_string(), pa.binary(), pa.date32(), pa.decimal128(38, 9)]
    types += [pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.dictionary(pa.int8(), pa.string()), pa.list_(pa.int8())]
    check_delta_schema(pa.schema([(f"c{i}", data_type) for i, data_type in enumerate(types)]))
