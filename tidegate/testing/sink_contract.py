"""Checks that a sink follows the contract of sinks: `check_sink` and `check_committing_sink`.

Each call uses a fresh copy of the sink, as if it ran in its own process. Earlier calls have effects only in the system
to which the sink writes. A violated rule raises AssertionError with the rows that readers saw.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

import cloudpickle
import pyarrow as pa

from tidegate.connectors.committing_sink import (
    Committable,
    Committer,
    CommittingContext,
    CommittingSink,
    CommittingWriter,
    CommitToken,
)
from tidegate.connectors.sink import CommitContext, Sink, SinkContext
from tidegate.storage.errors import NotFoundError
from tidegate.storage.state.key_groups import key_group_range

log = logging.getLogger(__name__)

Row = dict[str, object]
Visible = Callable[[], Iterable[Row]]


def check_sink(sink: Sink, batches: Sequence[pa.RecordBatch], visible: Visible, *, keys: Sequence[str] = ()) -> None:
    """Checks a `tg.Sink` that has not written anything yet.

    - `batches`: at least two batches that the sink can write.
    - `visible`: returns the rows that readers see, in any order.
    - `keys`: the key columns of a sink that keeps the newest row of each key. Both batches need rows with the same keys
      and other values, so that a commit that is repeated too late has a visible effect.

    Raises AssertionError if rows are visible before their commit, are lost, or are written twice.
    """
    first = batches[0]
    second = batches[1]
    fresh = cloudpickle.dumps(sink)
    seen = _Seen(visible, keys)

    def writer(job: str, subtask: int, attempt: int) -> Sink:
        made: Sink = cloudpickle.loads(fresh)
        made.open(SinkContext(job, "a job", "sink", subtask, 2, attempt))
        return made

    def commit(job: str, checkpoint: int, *prepared: bytes) -> None:
        cloudpickle.loads(fresh).commit(list(prepared), CommitContext(job, checkpoint, "sink"))

    lost = writer("job-1", 0, 0)
    lost.write(first)
    abandoned = list(lost.prepare())
    lost.write(second)
    seen.check("rows were prepared, and their checkpoint never completed")
    lost.close()
    seen.check("a writer was closed after a failure")

    one = writer("job-1", 0, 1)
    two = writer("job-1", 1, 1)
    one.write(first)
    one.write(second)
    two.write(first)
    seen.check("rows were written")
    prepared = [*one.prepare(), *two.prepare()]
    seen.check("rows were prepared")
    commit("job-1", 1, *prepared)
    seen.check("a checkpoint was committed", first, second, first)
    commit("job-1", 1, *prepared)
    seen.check("the commit was repeated")

    nothing = list(one.prepare())
    if nothing:
        commit("job-1", 2, *nothing)
    seen.check("a checkpoint without rows was committed")
    one.write(second)
    later = list(one.prepare())
    one.close()
    two.close()
    seen.check("the writers were closed before a commit")
    commit("job-1", 3, *later)
    seen.check("the next checkpoint was committed", second)
    commit("job-1", 1, *prepared)
    seen.check("a job was restored from the first checkpoint, and has committed it once more")

    other = writer("job-2", 0, 0)
    other.write(first)
    theirs = list(other.prepare())
    cloudpickle.loads(fresh).abort("job-1")
    seen.check("the first job has ended")
    commit("job-2", 1, *theirs)
    other.close()
    seen.check("the second job has committed what it had prepared before", first)
    assert abandoned != prepared, (
        "two attempts must not use one name: the later one would commit rows of the earlier one"
    )


def check_committing_sink(sink: CommittingSink, batches: Sequence[pa.RecordBatch], visible: Visible) -> None:
    """Checks a `tg.CommittingSink` that has not written anything yet.

    - `batches`: at least two batches that the sink can write.
    - `visible`: returns the rows that readers see, in any order.

    The checks kill the sink after each step, repeat commits, abort a checkpoint, change the parallelism between prepare
    and commit, and let a lost subtask commit at the same time as its successor. Files of the sink are in memory.

    Raises AssertionError if rows are visible before their commit, are lost, or are written twice.
    """
    _Check(sink, batches, visible).run()


class _Seen:
    """The rows that readers of the sink must see at the current point of the checks."""

    def __init__(self, visible: Visible, keys: Sequence[str] = ()) -> None:
        self._visible = visible
        self._keys = keys
        self._expected: list[Row] = []

    def check(self, when: str, *more: pa.RecordBatch) -> None:
        """Checks that readers see exactly the rows committed so far and the rows of these batches."""
        self._expected.extend(row for batch in more for row in batch.to_pylist())
        if self._keys:
            newest = {tuple(row[key] for key in self._keys): row for row in self._expected}
            self._expected = list(newest.values())
        found = list(self._visible())
        assert sorted(found, key=repr) == sorted(self._expected, key=repr), (
            f"after {when}, readers see {len(found)} rows, and there must be {len(self._expected)}: the sink has "
            f"{_difference(found, self._expected)}"
        )


def _difference(found: Sequence[Row], expected: Sequence[Row]) -> str:
    missing = len(expected) - len(found)
    if missing > 0:
        return f"lost {missing} rows"
    return f"written {-missing} rows too many" if missing else "written other rows"


class _MemoryFiles:
    """The files of a sink under test. They outlive the copies of the sink."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def write(self, chunks: Iterable[bytes | memoryview]) -> str:
        """Writes a new file and returns its path."""
        data = b"".join(bytes(chunk) for chunk in chunks)
        path = f"sinks/{len(self._files):08d}"
        self._files[path] = data
        return path

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Returns bytes of a file. Raises NotFoundError if it does not exist."""
        if path not in self._files:
            raise NotFoundError(f"there is no file {path}")
        return self._files[path][offset:][:length]


class _Check:
    def __init__(self, sink: CommittingSink, batches: Sequence[pa.RecordBatch], visible: Visible) -> None:
        assert len(batches) > 1, "give two batches at least"
        assert sink.buckets > 1, "the checks need two buckets at least"
        self._fresh = cloudpickle.dumps(sink)
        self._buckets = sink.buckets
        self._first = batches[0]
        self._second = batches[1]
        self._seen = _Seen(visible)
        self._files: dict[str, bytes] = {}

    def run(self) -> None:
        """Runs all checks. Each one continues from the state after the previous one."""
        self._nothing_before_a_commit()
        self._commits_are_repeated()
        self._aborted_checkpoint()
        self._some_are_committed()
        self._rescaled()
        self._zombies()
        self._other_jobs()

    def _nothing_before_a_commit(self) -> None:
        lost = self._writer("job-1", 0, 1, attempt=0)
        lost.write(self._first)
        self._seen.check("rows were written")
        self._prepared(lost, 1, range(self._buckets))
        self._seen.check("rows were prepared, and their checkpoint never completed")
        lost.write(self._second)
        lost.close()
        self._seen.check("a writer was closed after a failure")

    def _commits_are_repeated(self) -> None:
        writer = self._writer("job-1", 0, 1, attempt=1)
        writer.write(self._first)
        two = self._prepared(writer, 2, range(self._buckets))
        self._commit("job-1", 2, two)
        self._seen.check("a checkpoint was committed", self._first)
        self._commit("job-1", 2, two)
        self._seen.check("the commit was repeated, as after an answer that was lost")
        writer.write(self._second)
        writer.write(self._first)
        three = self._prepared(writer, 3, range(self._buckets))
        writer.close()
        self._seen.check("the writer was closed before a commit")
        self._commit("job-1", 3, three)
        self._seen.check("the next checkpoint was committed", self._second, self._first)
        self._commit("job-1", 2, two)
        self._commit("job-1", 3, three)
        self._seen.check("a restored job has committed both checkpoints again")

    def _aborted_checkpoint(self) -> None:
        writer = self._writer("job-1", 0, 1, attempt=2)
        writer.write(self._first)
        aborted = self._prepared(writer, 4, range(self._buckets))
        writer.write(self._second)
        next_one = self._prepared(writer, 5, range(self._buckets))
        writer.close()
        self._seen.check("a checkpoint was aborted")
        together = [(CommitToken("job-1", 4), aborted), (CommitToken("job-1", 5), next_one)]
        self._commit_all(together)
        self._seen.check("the next checkpoint has committed its rows as well", self._first, self._second)
        self._commit_all(together)
        self._commit("job-1", 4, aborted)
        self._commit("job-1", 5, next_one)
        self._seen.check("rows that were committed together were committed again, together and one by one")

    def _some_are_committed(self) -> None:
        writer = self._writer("job-1", 0, 1, attempt=7)
        prepared = []
        for checkpoint, batch in ((6, self._first), (7, self._second), (8, self._first)):
            writer.write(batch)
            prepared.append(
                (CommitToken("job-1", checkpoint), self._prepared(writer, checkpoint, range(self._buckets)))
            )
        writer.close()
        self._commit_all(prepared[:1])
        self._seen.check("the first of three checkpoints was committed", self._first)
        self._commit_all(prepared)
        self._seen.check("all three were committed together", self._second, self._first)

    def _rescaled(self) -> None:
        prepared: list[Committable] = []
        for subtask, batch in enumerate((self._first, self._second)):
            writer = self._writer("job-1", subtask, 2, attempt=3)
            writer.write(batch)
            prepared += self._prepared(writer, 9, key_group_range(subtask, self._buckets, 2))
            writer.close()
        self._seen.check("two subtasks have prepared")
        prepared.sort(key=lambda committable: committable.bucket)
        self._commit("job-1", 9, prepared)
        self._seen.check("one subtask has taken over the buckets of both", self._first, self._second)

        writer = self._writer("job-1", 0, 1, attempt=4)
        writer.write(self._first)
        prepared = self._prepared(writer, 10, range(self._buckets))
        writer.close()
        for subtask in range(2):
            own = key_group_range(subtask, self._buckets, 2)
            mine = [committable for committable in prepared if committable.bucket in own]
            if mine:
                self._commit("job-1", 10, mine, subtask, 2)
        self._seen.check("two subtasks have taken over the buckets of one", self._first)

    def _zombies(self) -> None:
        writer = self._writer("job-1", 0, 1, attempt=5)
        writer.write(self._first)
        prepared = self._prepared(writer, 11, range(self._buckets))
        zombie = self._committer("job-1", 0, 1, attempt=5)
        self._commit("job-1", 11, prepared)
        self._seen.check("the successor of a lost subtask has committed", self._first)
        _late(zombie, CommitToken("job-1", 11), prepared)
        self._seen.check("the lost subtask has come back and committed the same rows")
        writer.write(self._second)
        writer.write(self._first)
        prepared = self._prepared(writer, 12, range(self._buckets))
        writer.close()
        calls = [threading.Thread(target=self._late_commit, args=(prepared,)) for _ in range(2)]
        for call in calls:
            call.start()
        for call in calls:
            call.join(timeout=120)
            assert not call.is_alive(), "two commits of one bucket at the same time wait for each other"
        self._commit("job-1", 12, prepared)
        self._seen.check("two subtasks have committed one bucket at the same time", self._second, self._first)

    def _other_jobs(self) -> None:
        writer = self._writer("job-2", 0, 1, attempt=0)
        writer.write(self._second)
        prepared = self._prepared(writer, 1, range(self._buckets))
        writer.close()
        self._commit("job-2", 1, prepared)
        self._seen.check("another job has committed its first checkpoint, in buckets with later tokens", self._second)

    def _late_commit(self, prepared: Sequence[Committable]) -> None:
        _late(self._committer("job-1", 0, 1, attempt=6), CommitToken("job-1", 12), prepared)

    def _prepared(self, writer: CommittingWriter, checkpoint: int, buckets: range) -> list[Committable]:
        found = list(writer.prepare(checkpoint))
        for committable in found:
            assert committable.bucket in buckets, f"{committable} is not in a bucket of its subtask, {buckets}"
            assert isinstance(committable.data, bytes), f"the data of {committable} are not bytes"
        assert found, "prepare returned nothing for rows that were written"
        return found

    def _context(self, job: str, subtask: int, parallelism: int, attempt: int) -> CommittingContext:
        buckets = key_group_range(subtask, self._buckets, parallelism)
        files = _MemoryFiles(self._files)
        return CommittingContext(job, "a job", "sink", "sink", subtask, parallelism, attempt, buckets, files)

    def _writer(self, job: str, subtask: int, parallelism: int, *, attempt: int) -> CommittingWriter:
        made: CommittingSink = cloudpickle.loads(self._fresh)
        return made.open_writer(self._context(job, subtask, parallelism, attempt))

    def _committer(self, job: str, subtask: int, parallelism: int, *, attempt: int) -> Committer:
        made: CommittingSink = cloudpickle.loads(self._fresh)
        return made.open_committer(self._context(job, subtask, parallelism, attempt))

    def _commit(
        self, job: str, checkpoint: int, committables: Sequence[Committable], subtask: int = 0, parallelism: int = 1
    ) -> None:
        self._commit_all([(CommitToken(job, checkpoint), committables)], subtask, parallelism)

    def _commit_all(
        self,
        prepared: Sequence[tuple[CommitToken, Sequence[Committable]]],
        subtask: int = 0,
        parallelism: int = 1,
    ) -> None:
        committer = self._committer(prepared[0][0].job_id, subtask, parallelism, attempt=9)
        committer.commit_all(prepared)
        committer.close()


def _late(committer: Committer, token: CommitToken, committables: Sequence[Committable]) -> None:
    """Commits as a lost subtask. The system may refuse the commit (fencing); that error is ignored."""
    try:
        committer.commit(token, committables)
    except Exception as error:  # noqa: BLE001 (whatever the system of the sink raises for a fenced caller)
        log.info("the system of the sink has refused the commit of a lost subtask: %s", error)
    finally:
        committer.close()
