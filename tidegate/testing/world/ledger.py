"""`Ledger`: an external system to which a sink commits in its tasks. A commit with the same token has no further
effect.

It survives every crash, and all copies of its sink commit to it. With the probability of storage faults, the request or
the answer of a commit is lost. It works like Kafka. Rules:

- Rows and the token of a bucket become visible in one transaction.
- Every second transaction with a lost answer is visible at once. The remaining ones stay open. They become visible
  later: when the next commit of their bucket fences them, or at the end of the run.
- So a commit first fences earlier commits of its bucket, and then reads the newest token of the bucket.
- The rows of several checkpoints become visible in one transaction of each bucket, with the newest token.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa

from tidegate.connectors.committing_sink import (
    Committable,
    Committer,
    CommittingContext,
    CommittingSink,
    CommittingWriter,
    CommitToken,
)
from tidegate.testing.world.virtual_time import World

BUCKETS = 5
"""Number of buckets. It is small and odd, so that subtasks have different numbers of buckets."""


_Lane = tuple[str, int]
"""A job and a bucket."""


class Ledger:
    """The rows that a `LedgerSink` has made visible, and the commit tokens of each job and bucket."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._visible: Counter[str] = Counter()
        self._tokens: dict[_Lane, list[CommitToken]] = {}
        """The tokens of visible transactions, oldest first."""
        self._open: dict[_Lane, list[tuple[CommitToken, list[str]]]] = {}
        """Transactions that were committed and are not visible yet, with their tokens and rows."""
        self._answers_lost = 0
        self.repeated = 0
        """How many commits went to a bucket that already had the token."""

    def __deepcopy__(self, memo: object) -> Ledger:
        return self

    @property
    def rows(self) -> Counter[str]:
        """Returns the rows at the end of a run, after all open transactions have become visible."""
        for lane in tuple(self._open):
            self._end_open(lane)
        return self._visible

    def commit(self, prepared: Sequence[tuple[CommitToken, dict[int, list[str]]]]) -> None:
        """Adds the rows of each bucket together with the newest token, except for rows whose token is covered.

        Raises ConnectionError if the request or the answer is lost.
        """
        if self._world.chance("storage"):
            raise ConnectionError("the ledger cannot be reached")
        written: dict[_Lane, tuple[CommitToken, list[str]]] = {}
        for token, rows in prepared:
            for bucket, found in rows.items():
                lane = (token.job_id, bucket)
                self._fence(lane)
                if token.is_covered_by(self._read_token(lane)):
                    self.repeated += 1
                else:
                    _, earlier = written.get(lane, (token, []))
                    written[lane] = token, earlier + found
        loses_answer = self._world.chance("storage")
        self._answers_lost += loses_answer
        for lane, (token, found) in written.items():
            self._open.setdefault(lane, []).append((token, found))
            if not loses_answer or self._answers_lost % 2 == 0:
                self._end_open(lane)
        if loses_answer:
            raise ConnectionError("the answer of the ledger is lost")

    def _fence(self, lane: _Lane) -> None:
        """Ends the open transactions of earlier committers of a lane (one bucket of a job)."""
        self._end_open(lane)

    def _read_token(self, lane: _Lane) -> CommitToken | None:
        """Returns the newest visible token of a lane (one bucket of a job), or None if there is none."""
        tokens = self._tokens.get(lane)
        return tokens[-1] if tokens else None

    def _end_open(self, lane: _Lane) -> None:
        """Makes the rows of a lane's open transactions visible."""
        for token, rows in self._open.pop(lane, ()):
            self._visible.update(rows)
            self._tokens.setdefault(lane, []).append(token)


class LedgerSink(CommittingSink):
    """Writes rows to a ledger.

    Rows of even buckets are in files in checkpoint storage until the commit, all others in committables.
    """

    buckets = BUCKETS

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def open_writer(self, context: CommittingContext) -> CommittingWriter:
        """Returns the writer of one subtask."""
        return _LedgerWriter(context)

    def open_committer(self, context: CommittingContext) -> Committer:
        """Returns the committer of one subtask."""
        return _LedgerCommitter(self._ledger, context)

    @property
    def ledger(self) -> Ledger:
        """Returns the ledger, which stays usable after the sink was closed."""
        return self._ledger


class _LedgerWriter(CommittingWriter):
    def __init__(self, context: CommittingContext) -> None:
        self._context = context
        self._rows: dict[int, list[str]] = {}
        self._next = 0

    def write(self, batch: pa.RecordBatch) -> None:
        buckets = self._context.buckets
        for row in batch.to_pylist():
            self._rows.setdefault(buckets[self._next % len(buckets)], []).append(repr(tuple(row.values())))
            self._next += 1

    def prepare(self, checkpoint_id: int) -> Sequence[Committable]:
        rows = self._rows
        self._rows = {}
        return [self._prepared(bucket, json.dumps(found).encode()) for bucket, found in sorted(rows.items())]

    def _prepared(self, bucket: int, data: bytes) -> Committable:
        if bucket % 2:
            return Committable(bucket, data)
        return Committable(bucket, b"", (self._context.files.write([data]),))


class _LedgerCommitter(Committer):
    def __init__(self, ledger: Ledger, context: CommittingContext) -> None:
        self._ledger = ledger
        self._context = context

    def commit(self, token: CommitToken, committables: Sequence[Committable]) -> None:
        self.commit_all([(token, committables)])

    def commit_all(self, prepared: Sequence[tuple[CommitToken, Sequence[Committable]]]) -> None:
        self._ledger.commit([(token, self._rows(committables)) for token, committables in prepared])

    def _rows(self, committables: Sequence[Committable]) -> dict[int, list[str]]:
        rows: dict[int, list[str]] = {}
        for committable in committables:
            data = committable.data or self._context.files.read(committable.files[0])
            rows.setdefault(committable.bucket, []).extend(json.loads(data))
        return rows
