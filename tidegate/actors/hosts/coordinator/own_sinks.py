"""`OwnSinks`: calls the committing half of the sinks of the user's, for a coordinator or a submission.

Rules:

- Each sink has one committer, a copy that is never opened. Its calls do not overlap.
- What a sink raises is a `SinkFailedError`, which says which sink, and why. Whoever calls tries again: commits are
  idempotent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping

from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.actors.operators.operator_errors import is_failure
from tidegate.actors.operators.own_copies import own_copy
from tidegate.actors.operators.sinks.sink import CommitContext, Sink
from tidegate.actors.protocol.failure_reasons import error_text, log_failure
from tidegate.storage.checkpoints.metadata import Committable
from tidegate.storage.errors import TidegateError
from tidegate.storage.ids import CheckpointId, JobId

log = logging.getLogger(__name__)


class SinkFailedError(TidegateError):
    """A sink of the user's could not commit."""


class OwnSinks:
    """The sinks of the user's in one job, by their places. Every method may run on any thread."""

    def __init__(self, specs: Mapping[str, OperatorSpec]) -> None:
        self._specs = specs
        self._committers: dict[str, Sink] = {}
        self._lock = threading.Lock()

    def __contains__(self, place: object) -> bool:
        return place in self._specs

    def commit(self, job_id: JobId, checkpoint_id: CheckpointId, asked: Iterable[Committable]) -> None:
        """Commit what a completed checkpoint covers. SinkFailedError; those before the one that fails are done."""
        found: dict[str, list[bytes]] = {}
        for committable in asked:
            prepared = (item for file in committable.files for item in file.committables)
            found.setdefault(committable.table, []).extend(prepared)
        with self._lock:
            for place, committables in found.items():
                if not committables:
                    continue
                spec = self._specs[place]
                context = CommitContext(str(job_id), checkpoint_id, str(spec.uid))
                try:
                    self._committer(place).commit(committables, context)
                except BaseException as error:
                    if not is_failure(error):
                        raise
                    raise SinkFailedError(
                        f"sink {spec.name!r} (uid {spec.uid!r}) failed to commit {len(committables)} committables of "
                        f"checkpoint {checkpoint_id}: {error_text(error)}"
                    ) from error

    def abort(self, job_id: JobId) -> None:
        """The job is over: each sink drops what it has not committed. What fails is left behind, with a warning."""
        with self._lock:
            for place, spec in self._specs.items():
                try:
                    self._committer(place).abort(str(job_id))
                except BaseException as error:
                    if not is_failure(error):
                        raise
                    log_failure(log, f"sink {spec.name!r} could not drop what was never committed", error)

    def _committer(self, place: str) -> Sink:
        if place not in self._committers:
            sink = self._specs[place].sink
            assert sink is not None
            self._committers[place] = own_copy(sink)
        return self._committers[place]
