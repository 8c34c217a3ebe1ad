"""`OwnSinks`: calls the committing half of the sinks of the user's, for a coordinator or a submission.

Rules:

- Each sink has one committer, a copy that is never opened. Its calls do not overlap.
- What a sink raises is a `SinkFailedError`, which says which sink, and why. Whoever calls tries again: commits are
  idempotent.
- A call that does not come back is waited for as long as storage may be away, a minute at least, and no longer. Nothing
  is asked of its sink after that, as calls must not overlap: the job fails, and a job that is restored commits with a
  new copy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from tidegate.actors.drivers.threads import NotBackError, call_within
from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.operators.operator_errors import is_failure, own_copy
from tidegate.operators.sinks.sink import CommitContext, Sink
from tidegate.protocol.failure_reasons import failure_text, log_failure
from tidegate.storage.checkpoints.metadata import Committable
from tidegate.storage.errors import TidegateError
from tidegate.storage.ids import CheckpointId, JobId

log = logging.getLogger(__name__)

CALL_LIMIT_MIN_MS = 60_000
"""A call may take so long, also where storage must not be away at all."""


class SinkFailedError(TidegateError):
    """A sink of the user's could not commit."""


class SinkHangsError(SinkFailedError):
    """A call of a sink of the user's has not come back. To call it again would not help."""


class OwnSinks:
    """The sinks of the user's in one job, by their places. Every method may run on any thread."""

    def __init__(self, specs: Mapping[str, OperatorSpec], limit_ms: int) -> None:
        self._specs = specs
        self._limit_ms = max(limit_ms, CALL_LIMIT_MIN_MS)
        self._committers: dict[str, Sink] = {}
        self._hung: set[str] = set()
        self._lock = threading.Lock()

    def __contains__(self, place: object) -> bool:
        return place in self._specs

    def commit(self, job_id: JobId, checkpoint_id: CheckpointId, asked: Iterable[Committable]) -> None:
        """Commit what a completed checkpoint covers. SinkFailedError; those before the one that fails are done.

        SinkHangsError if a sink does not come back from its call.
        """
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
                what = f"commit {len(committables)} committables of checkpoint {checkpoint_id}"
                try:
                    self._call(place, partial(self._committer(place).commit, committables, context))
                except NotBackError as error:
                    text = f"sink {spec.name!r} (uid {spec.uid!r}) was asked to {what}: {error}"
                    raise SinkHangsError(text) from None
                except BaseException as error:
                    if not is_failure(error):
                        raise
                    raise SinkFailedError(
                        f"sink {spec.name!r} (uid {spec.uid!r}) failed to {what}: {failure_text(error)}"
                    ) from error

    def abort(self, job_id: JobId) -> None:
        """The job is over: each sink drops what it has not committed. What fails is left behind, with a warning."""
        with self._lock:
            for place, spec in self._specs.items():
                try:
                    self._call(place, partial(self._committer(place).abort, str(job_id)))
                except BaseException as error:
                    if not is_failure(error):
                        raise
                    log_failure(log, f"sink {spec.name!r} could not drop what was never committed", error)

    def _call(self, place: str, call: Callable[[], None]) -> None:
        if place in self._hung:
            raise NotBackError("an earlier call of it has not come back")
        try:
            call_within(call, self._limit_ms / 1_000, "tidegate-sink")
        except NotBackError:
            self._hung.add(place)
            raise

    def _committer(self, place: str) -> Sink:
        if place not in self._committers:
            sink = self._specs[place].sink
            assert sink is not None
            self._committers[place] = own_copy(sink)
        return self._committers[place]
