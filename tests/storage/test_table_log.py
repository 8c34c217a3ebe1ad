"""What a table shows is the fold of its log, whoever claims, commits, falls back and races."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
import pytest
from faulty_store import FaultyStore
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidegate.storage.errors import CorruptionError, FencedError, StorageError, TableError
from tidegate.storage.filesystem import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.metadata import DataFile
from tidegate.storage.table_log import TableInfo, TableLog

_SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
_INFO = TableInfo.of(_SCHEMA, "append")
_A, _B, _C = JobId("a-1"), JobId("b-1"), JobId("c-1")


def _file(name: str, rows: int = 1) -> DataFile:
    return DataFile(f"data/{name}.parquet", rows, 10, "xxh3:0")


def _checkpoint(number: int) -> CheckpointId:
    return CheckpointId(number)


def _table(store: FileSystemStore) -> TableLog:
    log = TableLog(store)
    log.create(_INFO)
    return log


def _shown(store: FileSystemStore) -> list[str]:
    return [file.path.removeprefix("data/").removesuffix(".parquet") for file in TableLog(store).snapshot().files]


def _commit(log: TableLog, job: JobId, number: int, *names: str) -> None:
    log.commit(job, _checkpoint(number), tuple(map(_file, names)))


def test_shows_committed_files_in_order(store: FileSystemStore) -> None:
    """On every store, another reader sees the files of the commits, in the order of the commits."""
    log = _table(store)
    log.claim(_A)
    _commit(log, _A, 1, "x", "y")
    _commit(log, _A, 3, "a")

    snapshot = TableLog(store).snapshot()
    assert [file.path for file in snapshot.files] == [f"data/{name}.parquet" for name in ("x", "y", "a")]
    assert (snapshot.info, snapshot.seq, snapshot.rows) == (_INFO, 3, 3)


def test_there_is_no_table_before_it_is_created(memory_store: FileSystemStore) -> None:
    """Reading or claiming what is no table says so."""
    log = TableLog(memory_store)

    for use in (log.snapshot, lambda: log.claim(_A)):
        with pytest.raises(TableError, match="there is no table"):
            use()
    assert log.entries() == ()


def test_creating_twice_is_one_table(memory_store: FileSystemStore) -> None:
    """A second job that describes the same table finds it; metadata of the schema makes no difference."""
    _table(memory_store)
    TableLog(memory_store).create(TableInfo.of(_SCHEMA.with_metadata({"made": "elsewhere"}), "append"))

    assert len(TableLog(memory_store).entries()) == 1


@pytest.mark.parametrize(
    ("info", "named"),
    [
        (TableInfo.of(_SCHEMA, "upsert", ("k",)), "mode 'append', the job writes with 'upsert'"),
        (
            TableInfo.of(pa.schema([("k", pa.string()), ("v", pa.int32())]), "append"),
            "'v' is int64 .* int32 in the job",
        ),
        (TableInfo.of(pa.schema([("k", pa.string())]), "append"), "only the table has a column 'v'"),
        (TableInfo.of(_SCHEMA.append(pa.field("w", pa.int8())), "append"), "only the job has a column 'w'"),
        (TableInfo.of(pa.schema(reversed(list(_SCHEMA))), "append"), "in order"),
        (
            TableInfo.of(_SCHEMA.set(0, pa.field("k", pa.string(), nullable=False)), "append"),
            "string not null in the job",
        ),
    ],
)
def test_another_description_is_refused_by_its_difference(
    memory_store: FileSystemStore, info: TableInfo, named: str
) -> None:
    """A job that would write something else into the table is told what differs."""
    _table(memory_store)

    with pytest.raises(TableError, match=named):
        TableLog(memory_store).create(info)


@pytest.mark.parametrize(
    ("mode", "keys", "schema"),
    [
        ("append", ("k",), _SCHEMA),
        ("upsert", (), _SCHEMA),
        ("upsert", ("missing",), _SCHEMA),
        ("append", (), pa.schema([("x", pa.int8()), ("x", pa.int8())])),
    ],
)
def test_a_table_that_cannot_be_is_refused(
    mode: Literal["append", "upsert"], keys: tuple[str, ...], schema: pa.Schema
) -> None:
    """Keys belong to upsert tables and to their columns, and columns are told apart by name."""
    with pytest.raises(TableError):
        TableInfo.of(schema, mode, keys)


def test_commits_once(memory_store: FileSystemStore) -> None:
    """A repeated commit changes nothing, also from another process."""
    log = _table(memory_store)
    log.claim(_A)
    for committer in (log, log, TableLog(memory_store)):
        _commit(committer, _A, 1, "x")

    assert _shown(memory_store) == ["x"]


def test_one_checkpoint_has_one_content(memory_store: FileSystemStore) -> None:
    """Committing other files for a committed checkpoint would lose or double rows, and is refused."""
    log = _table(memory_store)
    log.claim(_A)
    _commit(log, _A, 1, "x")

    with pytest.raises(TableError, match="other files"):
        _commit(log, _A, 1, "y")


def test_nothing_to_commit_makes_no_entry_but_is_fenced(memory_store: FileSystemStore) -> None:
    """A checkpoint without files costs no entry; a job that lost the table learns it all the same."""
    log = _table(memory_store)
    log.claim(_A)
    _commit(log, _A, 1)
    assert len(log.entries()) == 2

    TableLog(memory_store).claim(_B)
    with pytest.raises(FencedError):
        _commit(log, _A, 2)


def test_only_the_owner_commits(memory_store: FileSystemStore) -> None:
    """Nobody commits before a claim, and nobody after another job's claim, not even by claiming again."""
    log = _table(memory_store)
    with pytest.raises(FencedError, match="owned by no job"):
        _commit(log, _A, 1, "x")
    log.claim(_A)
    TableLog(memory_store).claim(_B)

    for late in (lambda: _commit(log, _A, 1, "x"), lambda: log.claim(_A)):
        with pytest.raises(FencedError, match="owned by 'b-1', not by 'a-1'"):
            late()
    assert _shown(memory_store) == []


def test_a_claim_that_slips_in_fences_the_commit(memory_store: FileSystemStore) -> None:
    """Between the look at the owner and the commit another job claims: the commit must not show."""
    store = FaultyStore(memory_store.url)
    log = _table(store)
    log.claim(_A)
    store.before_create = lambda: TableLog(memory_store).claim(_B)

    with pytest.raises(FencedError):
        _commit(log, _A, 1, "x")
    assert _shown(memory_store) == []


def test_a_commit_that_slips_in_is_part_of_what_a_claim_finds(memory_store: FileSystemStore) -> None:
    """A job that claims an empty table, and finds rows when it gets it, is refused like any other."""
    store = FaultyStore(memory_store.url)
    owner = _table(memory_store)
    owner.claim(_A)
    store.before_create = lambda: _commit(owner, _A, 1, "x")

    with pytest.raises(TableError, match="shows 1 rows already"):
        TableLog(store).claim(_B)
    assert _shown(memory_store) == ["x"]


def test_a_lost_answer_may_be_repeated(memory_store: FileSystemStore) -> None:
    """Claims and commits that succeeded without our learning of it are repeated without effect."""
    store = FaultyStore(memory_store.url)
    log = _table(store)
    for act in (lambda: log.claim(_A), lambda: _commit(log, _A, 1, "x")):
        store.lose_next_answer = True
        with pytest.raises(StorageError):
            act()
        act()
    _commit(log, _A, 2, "y")

    assert _shown(memory_store) == ["x", "y"]
    assert len(log.entries()) == 4


def test_rows_that_are_there_need_a_word(memory_store: FileSystemStore) -> None:
    """A new job on a table with rows is told what it can do, and each of these does what it says."""
    log = _table(memory_store)
    log.claim(_A)
    _commit(log, _A, 1, "x")

    with pytest.raises(
        TableError, match=r'shows 1 rows already; give if_exists="append" .* if_exists="overwrite"'
    ) as caught:
        TableLog(memory_store).claim(_B)
    assert memory_store.url in str(caught.value)
    TableLog(memory_store).claim(_B, if_exists="append")
    assert _shown(memory_store) == ["x"]
    TableLog(memory_store).claim(_C, if_exists="overwrite")
    assert _shown(memory_store) == []


def test_a_restored_job_starts_from_its_checkpoint(memory_store: FileSystemStore) -> None:
    """Rows committed after the checkpoint are hidden; a later restore from a later checkpoint shows them again."""
    log = _table(memory_store)
    log.claim(_A)
    for number in (1, 2, 4):
        _commit(log, _A, number, f"a{number}")

    TableLog(memory_store).claim(_B, (_A, _checkpoint(3)))
    assert _shown(memory_store) == ["a1", "a2"]
    _commit(TableLog(memory_store), _B, 1, "b1")
    assert _shown(memory_store) == ["a1", "a2", "b1"]

    TableLog(memory_store).claim(_C, (_A, _checkpoint(4)))
    assert _shown(memory_store) == ["a1", "a2", "a4"]
    assert TableLog(memory_store).referenced_paths() == {f"data/{n}.parquet" for n in ("a1", "a2", "a4", "b1")}


def test_restored_from_before_the_first_commit(memory_store: FileSystemStore) -> None:
    """A checkpoint older than any commit of its job covers what the job found when it claimed."""
    log = _table(memory_store)
    log.claim(_A)
    _commit(log, _A, 1, "a1")
    log.claim(_B, if_exists="append")
    _commit(log, _B, 5, "b5")

    log.claim(_C, (_B, _checkpoint(4)))

    assert _shown(memory_store) == ["a1"]


def test_a_job_that_did_not_know_the_table_covers_nothing_of_it(memory_store: FileSystemStore) -> None:
    """Restoring from a job without this sink says nothing about the table's rows: `if_exists` decides."""
    log = _table(memory_store)
    log.claim(_A)
    _commit(log, _A, 1, "a1")

    with pytest.raises(TableError, match="if_exists"):
        log.claim(_C, (_B, _checkpoint(1)))


def test_an_owner_falls_back_to_its_own_checkpoint(memory_store: FileSystemStore) -> None:
    """After a fallback the rows beyond the checkpoint are hidden, and each checkpoint covers what it saw."""
    log = _table(memory_store)
    log.claim(_A)
    for number in (1, 2, 3):
        _commit(log, _A, number, f"a{number}")
    for _ in range(2):
        log.claim(_A, (_A, _checkpoint(1)))
    assert len(log.entries()) == 6
    _commit(log, _A, 3, "a3")
    assert _shown(memory_store) == ["a1"]
    _commit(log, _A, 5, "a5")
    assert _shown(memory_store) == ["a1", "a5"]

    for number, expected in ((2, ["a1", "a2"]), (4, ["a1"]), (5, ["a1", "a5"])):
        log.claim(JobId(f"restored-{number}"), (_A, _checkpoint(number)))
        assert _shown(memory_store) == expected


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_hole_in_the_log_is_damage(memory_store: FileSystemStore, missing: int) -> None:
    """A lost entry is CorruptionError, never a shorter table."""
    log = _table(memory_store)
    log.claim(_A)
    for number in (1, 2):
        _commit(log, _A, number, f"a{number}")
    memory_store.delete(f"_tidegate/log/{missing:012d}")

    with pytest.raises(CorruptionError, match=f"{missing:012d} is missing"):
        TableLog(memory_store).snapshot()


def test_damage_in_the_log_is_found(memory_store: FileSystemStore) -> None:
    """A flipped bit or another entry's file is CorruptionError."""
    log = _table(memory_store)
    log.claim(_A)
    _commit(log, _A, 1, "a1")
    path = f"_tidegate/log/{1:012d}"
    whole = bytearray(memory_store.read(path))
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])

    for damaged in (flipped, whole[:-1], memory_store.read(f"_tidegate/log/{2:012d}")):
        memory_store.write(path, [damaged])
        with pytest.raises(CorruptionError):
            TableLog(memory_store).snapshot()


class TableLogMachine(RuleBasedStateMachine):
    """Jobs claim, restore, fall back and commit through two handles, one of which is always behind.

    The model does not know the log: it keeps what the table shows, and what it showed at each checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []
        self.owner: JobId | None = None
        self.jobs: list[JobId] = []
        self.cuts: dict[JobId, dict[int, list[str]]] = {}
        self.found: dict[JobId, list[str]] = {}
        self.next_checkpoint: dict[JobId, int] = {}

    @initialize()
    def create(self) -> None:
        """An empty table, and two writers that know it."""
        store = open_store("memory://table-log-machine")
        store.delete_tree("")
        self.logs = [TableLog(store), TableLog(store)]
        self.reader = TableLog(store)
        for log in self.logs:
            log.create(_INFO)

    @rule(log=st.integers(0, 1), if_exists=st.sampled_from(["error", "append", "overwrite"]))
    def claim_fresh(self, log: int, if_exists: Literal["error", "append", "overwrite"]) -> None:
        """A new job takes the table as it is, empties it, or is refused."""
        job = JobId(f"job-{len(self.jobs)}")
        if self.shown and if_exists == "error":
            with pytest.raises(TableError):
                self.logs[log].claim(job, None, if_exists)
            return
        self.logs[log].claim(job, None, if_exists)
        self._claimed(job, [] if if_exists == "overwrite" else self.shown)

    @precondition(lambda self: self.jobs)
    @rule(log=st.integers(0, 1), data=st.data())
    def claim_restored(self, log: int, data: st.DataObject) -> None:
        """A new job restores any checkpoint that any job ever took, or one before its first commit."""
        source = data.draw(st.sampled_from(self.jobs))
        number = data.draw(st.sampled_from([0, *self.cuts[source]]))
        job = JobId(f"job-{len(self.jobs)}")
        self.logs[log].claim(job, (source, _checkpoint(number)))
        self._claimed(job, self.cuts[source].get(number, self.found[source]))

    @precondition(lambda self: self.owner is not None)
    @rule(log=st.integers(0, 1), files=st.integers(0, 2))
    def commit(self, log: int, files: int) -> None:
        """The owner completes a checkpoint, sometimes without output."""
        assert self.owner is not None
        number = self.next_checkpoint[self.owner]
        names = [f"{self.owner}.{number}.{i}" for i in range(files)]
        _commit(self.logs[log], self.owner, number, *names)
        self.next_checkpoint[self.owner] += 1
        self.shown = self.shown + names
        self.cuts[self.owner][number] = self.shown

    @precondition(lambda self: self.jobs)
    @rule(log=st.integers(0, 1), data=st.data())
    def repeat(self, log: int, data: st.DataObject) -> None:
        """Any job repeats its claim and its last commit: nothing changes, and only the owner is not fenced."""
        job = data.draw(st.sampled_from(self.jobs))
        number = max(self.cuts[job], default=None)
        names = [n for n in self.cuts[job].get(number or 0, []) if n.startswith(f"{job}.{number}.")]
        if job == self.owner:
            self.logs[log].claim(job, None, "overwrite")
            if number is not None:
                _commit(self.logs[log], job, number, *names)
            return
        with pytest.raises(FencedError):
            self.logs[log].claim(job, None, "append")
        with pytest.raises(FencedError):
            _commit(self.logs[log], job, 10**6, "late")

    @precondition(lambda self: self.owner is not None and self.cuts[self.owner])
    @rule(log=st.integers(0, 1), data=st.data())
    def fall_back(self, log: int, data: st.DataObject) -> None:
        """The owner restarts from an older checkpoint of its own; the newer ones were damaged and are gone."""
        assert self.owner is not None
        cuts = self.cuts[self.owner]
        number = data.draw(st.sampled_from(sorted(cuts)))
        self.logs[log].claim(self.owner, (self.owner, _checkpoint(number)))
        self.shown = cuts[number]
        self.cuts[self.owner] = {n: cut for n, cut in cuts.items() if n <= number}

    @invariant()
    def shows_what_the_model_shows(self) -> None:
        """A reader of its own sees the model's rows, in order."""
        if hasattr(self, "reader"):
            paths = [file.path for file in self.reader.snapshot().files]
            assert paths == [f"data/{name}.parquet" for name in self.shown]

    def _claimed(self, job: JobId, shown: list[str]) -> None:
        self.jobs.append(job)
        self.owner = job
        self.shown = shown
        self.found[job] = shown
        self.cuts[job] = {}
        self.next_checkpoint[job] = 1


TestTableLogMachine = TableLogMachine.TestCase
TestTableLogMachine.settings = settings(max_examples=50, stateful_step_count=20)
