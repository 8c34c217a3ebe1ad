"""Commits the sink files of completed checkpoints.

`completion.py` hands `SinkCommitter` each completed checkpoint. Rules:

- Checkpoints are committed one at a time, in the order of their numbers (invariant 6).
- After each commit older checkpoints that nobody needs any more are subsumed (`subsumption.py`).
- What a commit has seen of a table's log is remembered, and stored with later checkpoints (`table_heads`). A log
  without it has lost entries, which `TableLog` reports to whoever commits next or restores the job.
- A checkpoint that completes while commits are outstanding stores which ones (`open_commits`): a restore from it finds
  each in the table's log, or commits it again, or is refused.
- The first completed checkpoint of an attempt is committed to every output table, even without files. If a table has a
  new owner, or one that went back to an older checkpoint, this commit changes what the table shows.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.checkpoints.discards import Discarder
from tidegate.actors.coordinator.checkpoints.subsumption import subsume
from tidegate.actors.coordinator.messages import events as ev
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.state.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.state.coordinator_state import SinkCommit
from tidegate.storage.checkpoints.metadata import Committable, OpenCommits, is_own_sink
from tidegate.storage.ids import CheckpointId


def open_commits(commits: Iterable[SinkCommit]) -> tuple[OpenCommits, ...]:
    """Which of these checkpoints have files for which table, ordered by url."""
    found: dict[str, dict[CheckpointId, None]] = {}
    for commit in commits:
        for committable in commit.committables:
            if committable.files and not is_own_sink(committable.table):
                found.setdefault(committable.table, {})[commit.checkpoint_id] = None
    return tuple(OpenCommits(url, tuple(checkpoints)) for url, checkpoints in sorted(found.items()))


class SinkCommitter:
    """The sink commits of one job."""

    def __init__(self, context: CoordinatorContext, discards: Discarder) -> None:
        self._context = context
        self._discards = discards

    def add(self, checkpoint_id: CheckpointId, attempt: int, committables: tuple[Committable, ...]) -> None:
        """A checkpoint of an attempt is complete. Its turn comes after those before it."""
        state = self._context.state
        tables = self._context.spec.tables if attempt != state.told_attempt else ()
        state.told_attempt = attempt
        state.commits = (*state.commits, SinkCommit(checkpoint_id, committables, tables=tables))
        if len(state.commits) == 1:
            self._next()

    def take_over(self) -> None:
        """Order again what the lost coordinator had ordered."""
        if self._context.state.commits:
            self._next()

    def repeat(self, checkpoint_id: CheckpointId) -> None:
        """The timer of the retry has fired."""
        if self._is_first(checkpoint_id):
            self._next()

    def committed(self, event: ev.SinksCommitted) -> None:
        """The sink files of a checkpoint are visible. Remember how far the logs of its tables have got."""
        self._context.state.know_tables(event.heads)
        self._done(event.checkpoint_id)

    def _done(self, checkpoint_id: CheckpointId) -> None:
        if not self._is_first(checkpoint_id):
            return
        state = self._context.state
        state.commits = state.commits[1:]
        subsume(self._context, self._discards)
        if state.commits:
            self._next()

    def failed(self, event: ev.SinkCommitFailed) -> None:
        """Try again: a commit is idempotent. After too long the job fails, and a job restored from it commits."""
        if not self._is_first(event.checkpoint_id):
            return
        spec = self._context.spec
        commit = self._context.state.commits[0]
        commit.failures += 1
        if event.fenced:
            # A job restored from this one would take the table from its new owner in turn.
            self._context.state.superseded = True
            self._context.storage_failure = (
                f"the sink files of checkpoint {event.checkpoint_id} are not committed, because a newer job is in "
                f"charge of their table ({event.error})"
            )
            return
        if event.permanent or event.away_ms >= spec.storage_outage_ms:
            self._context.storage_failure = (
                f"the sink files of checkpoint {event.checkpoint_id} could not be committed in "
                f"{commit.failures} attempts ({event.error}); a job restored from it commits them"
            )
            return
        self._context.retry_later(f"commit:{event.checkpoint_id}", event.at_ms, commit.failures)

    def _is_first(self, checkpoint_id: CheckpointId) -> bool:
        commits = self._context.state.commits
        return bool(commits) and commits[0].checkpoint_id == checkpoint_id

    def _next(self) -> None:
        commit = self._context.state.commits[0]
        permit = invariants.permit_commit(self._context.state, commit.checkpoint_id)
        if commit.committables or commit.tables:
            heads = self._context.state.known_tables
            self._context.instruct(
                do.CommitSinks(commit.checkpoint_id, commit.committables, commit.tables, heads, permit=permit)
            )
        else:
            self._done(commit.checkpoint_id)
