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
from tidegate.storage.table_log import LOG_FOLDER, TableInfo, TableLog

_SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
_INFO = TableInfo.of(_SCHEMA, "append")
_A, _B, _C = JobId("a-1"), JobId("b-1"), JobId("c-1")
_X, _Y = JobId("x-1"), JobId("y-1")


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
        TableError, match=r'shows 1 rows already; give if_exists="overwrite" .* if_exists="append"'
    ) as caught:
        TableLog(memory_store).claim(_B)
    assert memory_store.url in str(caught.value)
    TableLog(memory_store).claim(_B, if_exists="append")
    assert _shown(memory_store) == ["x"]
    TableLog(memory_store).claim(_C, if_exists="overwrite")
    assert _shown(memory_store) == ["x"]
    _commit(TableLog(memory_store), _C, 1, "c1")
    assert _shown(memory_store) == ["c1"]


def test_an_overwriting_job_without_rows_replaces_as_well(memory_store: FileSystemStore) -> None:
    """Its first completed checkpoint has nothing: the table shows nothing then, and one entry says so."""
    log = _table(memory_store)
    log.claim(_A)
    _commit(log, _A, 1, "x")
    log.claim(_B, if_exists="overwrite")
    for number in (1, 1, 2):
        _commit(log, _B, number)

    assert _shown(memory_store) == []
    assert log.rows() == 0
    assert len(log.entries()) == 5


def test_rows_that_a_claim_was_to_replace_stay_when_its_job_fails_at_once(memory_store: FileSystemStore) -> None:
    """Without a completed checkpoint nothing has changed for readers, nor for the next job."""
    log = _table(memory_store)
    log.claim(_A)
    _commit(log, _A, 1, "x")
    log.claim(_B, if_exists="overwrite")

    with pytest.raises(TableError, match="shows 1 rows already"):
        log.claim(_C)
    log.claim(_C, if_exists="append")
    _commit(log, _C, 1, "c1")
    assert _shown(memory_store) == ["x", "c1"]


def test_a_job_restored_before_the_first_commit_overwrites_in_the_stead_of_its_origin(
    memory_store: FileSystemStore,
) -> None:
    """What was to be overwritten is, with the first commit of the line; what others added since is not."""
    log = _table(memory_store)
    log.claim(_X)
    _commit(log, _X, 1, "x1")
    log.claim(_A, if_exists="overwrite")
    log.claim(_Y, if_exists="append")
    _commit(log, _Y, 1, "y1")
    log.claim(_B, (_A, _checkpoint(1)))
    assert _shown(memory_store) == ["x1", "y1"]

    _commit(log, _B, 1, "b1")
    assert _shown(memory_store) == ["y1", "b1"]


def test_rows_of_others_stay_when_a_job_is_restored(memory_store: FileSystemStore) -> None:
    """A runs, B appends, A is restored from an older checkpoint: B's rows stay, those of A are there once."""
    log = _table(memory_store)
    log.claim(_A)
    for number in (1, 2, 3):
        _commit(log, _A, number, f"a{number}")
    log.claim(_B, if_exists="append")
    _commit(log, _B, 1, "b1")

    log.claim(_C, (_A, _checkpoint(1)))
    assert _shown(memory_store) == ["a1", "a2", "a3", "b1"]
    _commit(log, _C, 1, "a2+a3 again")
    assert _shown(memory_store) == ["a1", "b1", "a2+a3 again"]


def test_what_a_checkpoint_covers_comes_back_after_an_overwrite(memory_store: FileSystemStore) -> None:
    """A restored job continues its own rows, and leaves those of the job that had overwritten them."""
    log = _table(memory_store)
    log.claim(_A)
    _commit(log, _A, 1, "a1")
    log.claim(_B, if_exists="overwrite")
    _commit(log, _B, 1, "b1")
    log.claim(_C, (_A, _checkpoint(1)))
    _commit(log, _C, 1, "c1")

    assert _shown(memory_store) == ["a1", "b1", "c1"]


def test_files_that_nobody_had_committed_come_with_the_first_commit(memory_store: FileSystemStore) -> None:
    """They count as covered by every checkpoint of the job that took them over, and are shown once."""
    log = _table(memory_store)
    log.claim(_A)
    _commit(log, _A, 1, "a1")
    assert log.uncommitted(_A, _checkpoint(3), [_checkpoint(n) for n in (1, 2, 3)]) == (2, 3)
    assert log.uncommitted(_B, _checkpoint(3), [_checkpoint(3)]) is None

    for job in (_B, _C):  # B fails at once
        log.claim(job, (_A, _checkpoint(2)), uncommitted=(_file("a2", 5),))
        assert _shown(memory_store) == ["a1"]
    _commit(log, _C, 1)
    assert _shown(memory_store) == ["a1", "a2"]
    assert log.rows() == 6
    _commit(log, _C, 2, "c2")

    log.claim(_X, (_C, _checkpoint(1)))
    _commit(log, _X, 1, "x1")
    assert _shown(memory_store) == ["a1", "a2", "x1"]


def test_a_fallback_hides_and_shows_in_one_step(memory_store: FileSystemStore) -> None:
    """Rows beyond the checkpoint stay until they are processed again, and their late commit changes nothing."""
    log = _table(memory_store)
    log.claim(_A, home="root")
    for number in (1, 2):
        _commit(log, _A, number, f"a{number}")
    for _ in range(2):
        log.claim(_A, (_A, _checkpoint(1)), next_checkpoint_id=4)
    assert len(log.entries()) == 5
    owner = log.owner()
    assert owner is not None
    assert (owner.job_id, owner.home) == (_A, "root")

    for number in (1, 2, 3):
        _commit(log, _A, number, f"a{number}")  # by a coordinator that does not know of the fallback
        assert _shown(memory_store) == ["a1", "a2"]
    _commit(log, _A, 4, "a2+a3 again")
    assert _shown(memory_store) == ["a1", "a2+a3 again"]
    assert log.uncommitted(_A, _checkpoint(5), [_checkpoint(n) for n in range(1, 6)]) == (5,)
    assert log.uncommitted(_A, _checkpoint(3), [_checkpoint(n) for n in range(1, 4)]) == (3,)


def test_a_fallback_to_a_checkpoint_that_is_not_committed_yet(memory_store: FileSystemStore) -> None:
    """The commit of the checkpoint itself is on its way, and comes; that of the damaged one after it does not."""
    log = _table(memory_store)
    log.claim(_A)
    _commit(log, _A, 1, "a1")
    log.claim(_A, (_A, _checkpoint(2)), next_checkpoint_id=4)
    assert log.uncommitted(_A, _checkpoint(2), [_checkpoint(1), _checkpoint(2)]) == (2,)
    for number in (2, 3):
        _commit(log, _A, number, f"a{number}")
    assert _shown(memory_store) == ["a1", "a2"]
    _commit(log, _A, 4, "a4")

    for number, expected in ((2, ["a1", "a2", "r"]), (4, ["a1", "a2", "a4", "r"])):
        job = JobId(f"restored-{number}")
        log.claim(job, (_A, _checkpoint(number)))
        _commit(log, job, 1, "r")
        assert _shown(memory_store) == expected


def test_a_fallback_to_where_the_job_was_started_from(memory_store: FileSystemStore) -> None:
    """All checkpoints of its own are damaged: it goes on from that of the job before it."""
    log = _table(memory_store)
    log.claim(_A)
    for number in (1, 2):
        _commit(log, _A, number, f"a{number}")
    log.claim(_B, (_A, _checkpoint(1)))
    log.claim(_B, (_A, _checkpoint(1)))
    _commit(log, _B, 1, "b1")
    for _ in range(2):
        log.claim(_B, (_A, _checkpoint(1)))
    assert _shown(memory_store) == ["a1", "b1"]

    _commit(log, _B, 2, "b2")
    assert _shown(memory_store) == ["a1", "b2"]


def test_a_restored_job_starts_from_its_checkpoint(memory_store: FileSystemStore) -> None:
    """Rows committed after the checkpoint are hidden with its first commit; a later restore shows them again."""
    log = _table(memory_store)
    log.claim(_A)
    for number in (1, 2, 4):
        _commit(log, _A, number, f"a{number}")

    TableLog(memory_store).claim(_B, (_A, _checkpoint(3)))
    assert _shown(memory_store) == ["a1", "a2", "a4"]
    _commit(TableLog(memory_store), _B, 1, "b1")
    assert _shown(memory_store) == ["a1", "a2", "b1"]

    TableLog(memory_store).claim(_C, (_A, _checkpoint(4)))
    assert _shown(memory_store) == ["a1", "a2", "b1"]
    _commit(TableLog(memory_store), _C, 1)
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
    _commit(log, _C, 1)

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
    assert _shown(memory_store) == ["a1", "a2", "a3"]
    _commit(log, _A, 5, "a5")
    assert _shown(memory_store) == ["a1", "a5"]

    for number, expected in ((2, ["a1", "a2"]), (4, ["a1"]), (5, ["a1", "a5"])):
        job = JobId(f"restored-{number}")
        log.claim(job, (_A, _checkpoint(number)))
        _commit(log, job, 1)
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


@pytest.mark.parametrize("unlisted", range(4))
def test_what_a_listing_leaves_out_is_no_hole(memory_store: FileSystemStore, unlisted: int) -> None:
    """A listing that is made while entries are created may show one without another: all of the table is read."""
    log = _table(memory_store)
    log.claim(_A)
    for number in (1, 2):
        _commit(log, _A, number, f"a{number}")
    store = FaultyStore(memory_store.url)
    store.unlisted = f"{unlisted:012d}"

    assert _shown(store) == ["a1", "a2"]


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

    The model does not know the log: it keeps what the table shows, what it is about to show, and for each job what its
    line had shown at each checkpoint. The log is compacted all the time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []
        self.next: list[str] | None = None
        """What is shown with the next commit, where that differs."""
        self.owner: JobId | None = None
        self.jobs: list[JobId] = []
        self.lines: dict[JobId, JobId] = {}
        self.line_of: dict[str, JobId] = {}
        self.order: list[str] = []
        self.to_overwrite: dict[JobId, list[str]] = {}
        """What a line is to hide with its first commit."""
        self.own: dict[JobId, list[str]] = {}
        self.cuts: dict[JobId, dict[int, list[str]]] = {}
        self.found: dict[JobId, list[str]] = {}
        self.next_checkpoint: dict[JobId, int] = {}

    @initialize()
    def create(self) -> None:
        """An empty table, and two writers that know it."""
        self.store = open_store("memory://table-log-machine")
        self.store.delete_tree("")
        self.logs = [TableLog(self.store, entries_per_snapshot=3) for _ in range(2)]
        self.reader = TableLog(self.store)
        for log in self.logs:
            log.create(_INFO)

    @rule(log=st.integers(0, 1), if_exists=st.sampled_from(["error", "append", "overwrite"]))
    def claim_fresh(self, log: int, if_exists: Literal["error", "append", "overwrite"]) -> None:
        """A new job takes the table as it is, is to empty it, or is refused."""
        job = JobId(f"job-{len(self.jobs)}")
        if self.shown and if_exists == "error":
            with pytest.raises(TableError):
                self.logs[log].claim(job, None, if_exists)
            return
        self.logs[log].claim(job, None, if_exists)
        if self.shown and if_exists == "overwrite":
            self.to_overwrite[job] = list(self.order)
        self._claimed(job, job, [])

    @precondition(lambda self: self.jobs)
    @rule(log=st.integers(0, 1), data=st.data(), files=st.integers(0, 1))
    def claim_restored(self, log: int, data: st.DataObject, files: int) -> None:
        """A new job restores any checkpoint that any job ever took; sometimes files of it were left behind."""
        source = data.draw(st.sampled_from(self.jobs))
        number = data.draw(st.sampled_from([0, *self.cuts[source]]))
        job = JobId(f"job-{len(self.jobs)}")
        names = [f"{job}.left.{i}" for i in range(files)]
        self.logs[log].claim(job, (source, _checkpoint(number)), uncommitted=tuple(map(_file, names)))
        self._written(names, self.lines[source])
        self._claimed(job, self.lines[source], self.cuts[source].get(number, self.found[source]) + names)

    @precondition(lambda self: self.owner is not None)
    @rule(log=st.integers(0, 1), files=st.integers(0, 2))
    def commit(self, log: int, files: int) -> None:
        """The owner completes a checkpoint, sometimes without output."""
        assert self.owner is not None
        number = self.next_checkpoint[self.owner]
        names = [f"{self.owner}.{number}.{i}" for i in range(files)]
        _commit(self.logs[log], self.owner, number, *names)
        self.next_checkpoint[self.owner] += 1
        self._written(names, self.lines[self.owner])
        if self.next is not None:
            self.shown, self.next = self.next, None
            self.to_overwrite.pop(self.lines[self.owner], None)
        self.shown = self.shown + names
        self.own[self.owner] = self.own[self.owner] + names
        self.cuts[self.owner][number] = self.own[self.owner]

    @precondition(lambda self: self.jobs)
    @rule(log=st.integers(0, 1), data=st.data())
    def repeat(self, log: int, data: st.DataObject) -> None:
        """Any job repeats its claim and its last commit: nothing changes, and only the owner is not fenced."""
        job = data.draw(st.sampled_from(self.jobs))
        number = self.next_checkpoint[job] - 1
        names = [n for n in self.order if n.startswith(f"{job}.{number}.")]
        if job == self.owner:
            self.logs[log].claim(job, None, "overwrite")
            if names:
                _commit(self.logs[log], job, number, *names)
            return
        with pytest.raises(FencedError):
            self.logs[log].claim(job, None, "append")
        with pytest.raises(FencedError):
            _commit(self.logs[log], job, 10**6, "late")

    @precondition(lambda self: self.owner is not None and self.cuts[self.owner])
    @rule(log=st.integers(0, 1), data=st.data(), damaged=st.integers(0, 2))
    def fall_back(self, log: int, data: st.DataObject, damaged: int) -> None:
        """The owner restarts from an older checkpoint of its own; some of the newer ones were never committed."""
        assert self.owner is not None
        cuts = self.cuts[self.owner]
        number = data.draw(st.sampled_from(sorted(cuts)))
        first_late = self.next_checkpoint[self.owner]
        self.next_checkpoint[self.owner] += damaged
        for _ in range(2):
            self.logs[log].claim(
                self.owner, (self.owner, _checkpoint(number)), next_checkpoint_id=self.next_checkpoint[self.owner]
            )
        for late in range(first_late, first_late + damaged):
            _commit(self.logs[1 - log], self.owner, late, "late")
        self._goes_on(self.owner, cuts[number])

    @invariant()
    def shows_what_the_model_shows(self) -> None:
        """A reader of its own, and one that has just come, see the model's rows, in order."""
        if hasattr(self, "reader"):
            expected = [f"data/{name}.parquet" for name in sorted(self.shown, key=self.order.index)]
            for reader in (self.reader, TableLog(self.store)):
                assert [file.path for file in reader.snapshot().files] == expected
                assert reader.rows() == len(expected)

    @invariant()
    def keeps_few_files_and_everything_that_was_written(self) -> None:
        """Hidden rows stay referred to: a restore may show them again."""
        if hasattr(self, "reader"):
            assert self.reader.referenced_paths() == {f"data/{name}.parquet" for name in self.order}
            assert len(self.store.list(LOG_FOLDER)) <= 3 * 3 + 2

    def _written(self, names: list[str], line: JobId) -> None:
        self.order += names
        self.line_of |= dict.fromkeys(names, line)

    def _claimed(self, job: JobId, line: JobId, own: list[str]) -> None:
        self.jobs.append(job)
        self.owner = job
        self.lines[job] = line
        self.found[job] = own
        self.cuts[job] = {}
        self.next_checkpoint[job] = 1
        self._goes_on(job, own)

    def _goes_on(self, job: JobId, own: list[str]) -> None:
        line = self.lines[job]
        self.own[job] = own
        hidden = self.to_overwrite.get(line, [])
        shown = own + [n for n in self.shown if self.line_of[n] != line and n not in hidden]
        self.next = shown if sorted(shown) != sorted(self.shown) else None


TestTableLogMachine = TableLogMachine.TestCase
TestTableLogMachine.settings = settings(max_examples=60, stateful_step_count=25)
