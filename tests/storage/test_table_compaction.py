"""A table's log stays short however many commits there are, and nobody who is overtaken by truncation misreads it."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest
from plain_store import PlainStore

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import CodecError, CorruptionError, FencedError
from tidegate.storage.files.envelope import seal
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.tail import LOG_FOLDER, PARTS_FOLDER
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

_INFO = TableInfo.of(pa.schema([("k", pa.string())]), "append")
_A, _B = JobId("a-1"), JobId("b-1")
_COMMITS = 10_000


def _file(number: int) -> DataFile:
    return DataFile(f"data/a-1/000000/sink-0-{number:08d}.parquet", 1, 10, f"xxh3:{number:016x}")


def _commit(log: TableLog, number: int, job: JobId = _A) -> None:
    log.commit(job, CheckpointId(number), (_file(number),))


def _table(store: PlainStore, commits: int = 0, every: int = 3) -> TableLog:
    log = TableLog(store, entries_per_snapshot=every)
    log.create(_INFO)
    log.claim(_A)
    for number in range(1, commits + 1):
        _commit(log, number)
    return log


def _shown(store: PlainStore) -> list[int]:
    return [int(file.checksum.removeprefix("xxh3:"), 16) for file in TableLog(store).snapshot().files]


@pytest.fixture(scope="module")
def long_table() -> PlainStore:
    """A table after ten thousand commits; requests are those of all of them."""
    store = PlainStore()
    log = TableLog(store)
    log.create(_INFO)
    log.claim(_A)
    for number in range(1, _COMMITS + 1):
        _commit(log, number)
    return store


@pytest.mark.slow
def test_ten_thousand_commits_leave_few_files(long_table: PlainStore) -> None:
    """Entries and snapshots up to the one before the newest, and parts, ten of each size at most, twice."""
    names = [name for name in long_table.files if name.startswith("_tidegate/")]
    entries = [name for name in names if name.startswith(f"{LOG_FOLDER}/")]

    assert len(entries) <= 2 * 25 + 2
    assert len(names) <= 120
    assert sum(map(len, long_table.files.values())) <= 200 * _COMMITS


def test_a_commit_costs_a_few_requests_and_bytes(long_table: PlainStore) -> None:
    """Amortised over ten thousand, compaction and truncation included."""
    assert long_table.requests.total() <= 4 * _COMMITS
    assert long_table.written_bytes <= 1_500 * _COMMITS
    assert long_table.read_bytes <= 1_500 * _COMMITS


def test_opening_costs_the_same_however_many_commits_there_were(long_table: PlainStore) -> None:
    """A reader, which needs all files, and an owner that comes back, which needs none."""
    reading, committing = PlainStore(long_table.files), PlainStore(dict(long_table.files))

    assert _shown(reading) == list(range(1, _COMMITS + 1))
    assert reading.requests.total() <= 90
    _commit(TableLog(committing), _COMMITS + 1)
    assert committing.requests.total() <= 60
    assert committing.read_bytes <= 60_000


def test_a_restore_from_an_old_checkpoint_finds_what_it_covers(long_table: PlainStore) -> None:
    """Everything that was ever committed is known: an old savepoint is as good as the newest checkpoint."""
    store = PlainStore(dict(long_table.files))
    log = TableLog(store)
    log.claim(_B, (_A, CheckpointId(7)))
    _commit(log, _COMMITS + 1, _B)

    assert _shown(store) == [*range(1, 8), _COMMITS + 1]
    assert store.requests.total() <= 200
    assert len(TableLog(store).referenced_paths()) == _COMMITS + 1


def test_a_writer_that_was_overtaken_by_truncation_takes_its_entry_back() -> None:
    """It slept while others committed and truncated: the hole where it would go on is not the end of the log."""
    store = PlainStore()
    _table(store, 1)
    asleep = TableLog(store, entries_per_snapshot=3)
    asleep.commit(_A, CheckpointId(1), (_file(1),))
    others = TableLog(store, entries_per_snapshot=3)
    for number in range(2, 30):
        _commit(others, number)

    _commit(asleep, 30)

    assert _shown(store) == list(range(1, 31))


def test_a_writer_that_lost_the_table_meanwhile_is_fenced() -> None:
    """Also where the claim of the other job was truncated."""
    store = PlainStore()
    asleep = _table(store, 1)
    others = TableLog(store, entries_per_snapshot=3)
    others.claim(_B, if_exists="append")
    for number in range(2, 30):
        _commit(others, number, _B)

    with pytest.raises(FencedError, match="is owned by 'b-1'"):
        _commit(asleep, 30)
    assert _shown(store) == list(range(1, 30))


def test_a_reader_that_was_overtaken_begins_again() -> None:
    """It does not take the hole for the end, nor what a writer that was killed has left in it for an entry."""
    store = PlainStore()
    _table(store, 1)
    reader = TableLog(store)
    assert reader.rows() == 1
    stale = store.files[f"{LOG_FOLDER}/{2:012d}"]
    others = TableLog(store, entries_per_snapshot=3)
    for number in range(2, 30):
        _commit(others, number)
    assert f"{LOG_FOLDER}/{3:012d}" not in store.files
    store.files[f"{LOG_FOLDER}/{3:012d}"] = stale

    assert reader.rows() == 29
    assert _shown(store) == list(range(1, 30))


def test_damage_to_the_newest_snapshot_is_passed_over() -> None:
    """The one before it is there, with every entry since."""
    store = PlainStore()
    _table(store, 40)
    snapshots = sorted(name for name in store.files if "snapshot-" in name)
    assert len(snapshots) == 2
    store.files[snapshots[-1]] = store.files[snapshots[-1]][:-1]

    assert _shown(store) == list(range(1, 41))
    _commit(TableLog(store, entries_per_snapshot=3), 41)
    assert _shown(store) == list(range(1, 42))


@pytest.mark.parametrize("lost", ["part", "entry", "snapshots"])
def test_what_is_lost_is_damage(lost: str) -> None:
    """CorruptionError, never a shorter table."""
    store = PlainStore()
    _table(store, 40)
    gone = {
        "part": [name for name in store.files if name.startswith(PARTS_FOLDER)][:1],
        "entry": [sorted(name for name in store.files if name.startswith(f"{LOG_FOLDER}/0"))[-2]],
        "snapshots": [name for name in store.files if "snapshot-" in name],
    }[lost]
    for name in gone:
        del store.files[name]

    with pytest.raises(CorruptionError, match=r"missing|cannot be read"):
        TableLog(store).snapshot()


def test_a_log_of_another_version_is_refused() -> None:
    """With its version, and what to do."""
    store = PlainStore()
    store.files[f"{LOG_FOLDER}/{0:012d}"] = seal(b"TGTABLE", 1, b"")

    with pytest.raises(CodecError, match="has format version 1, and this tidegate reads version 3"):
        TableLog(store).snapshot()


class _Race:
    """A job whose two coordinators commit the same checkpoints in order, while others read; with truncation all along.

    Whatever one of them is about to ask of the store, the other may do a few commits first.
    """

    def __init__(self, seed: int) -> None:
        self.files: dict[str, bytes] = {}
        self._random = Random(seed)
        self._plain = PlainStore(self.files)
        _table(self._plain)
        self.done = 0
        self._other = TableLog(self._plain, entries_per_snapshot=3)
        self._acting = False

    def before(self, _: str) -> None:
        """The other coordinator acts, sometimes."""
        if self._acting:
            return
        self._acting = True
        for _step in range(self._random.choice((0, 0, 0, 0, 0, 0, 1, 2, 9))):
            self.done += 1
            _commit(self._other, self.done)
        self._acting = False

    def run(self) -> None:
        """One coordinator, and one reader, that are interrupted at every step."""
        store = PlainStore(self.files, self.before)
        log, reader = TableLog(store, entries_per_snapshot=3), TableLog(store, entries_per_snapshot=3)
        for _ in range(self._random.randint(1, 5)):
            number = self.done + 1
            _commit(log, number)
            self.done = max(self.done, number)
            shown = [int(f.checksum.removeprefix("xxh3:"), 16) for f in reader.snapshot().files]
            assert shown == list(range(1, len(shown) + 1))
            assert len(shown) >= number
        assert _shown(self._plain) == list(range(1, self.done + 1))


@pytest.mark.slow
def test_whatever_happens_in_between_each_checkpoint_is_shown_once() -> None:
    """In order, to every reader, and no commit that was acknowledged is missing afterwards."""
    for seed in range(40):
        _Race(seed).run()
