"""`Answers`: a coordinator's answers to requests for checkpoints and savepoints, until drivers have fetched them.

Rules: an answer stays after it was given, because the reply may get lost and the driver then asks again; of those that
were given the newest are kept. Requests that a predecessor had written down are known by what became of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from tidegate.actors.coordinator.state.checkpoint_statistics import CheckpointStatistics
from tidegate.actors.runtimes.running_job import Answer, JobProgress
from tidegate.actors.runtimes.vertex_metrics import VertexMetrics

KEPT_MAX = 100
"""More than drivers ask for within the time in which they repeat a question."""

LOST = Answer(None, "the coordinator that was asked for it was lost before it had written that down")


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as its coordinator's process sees it.

    `started`: the log was replayed; `ended`: nothing changes any more; `broken`: why the coordinator cannot go on.
    """

    progress: JobProgress
    started: bool
    ended: bool
    broken: str | None
    statistics: CheckpointStatistics | None = None
    """Of the checkpoints, once the job has ended: then nobody can be asked for them any more."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """To requests, likewise."""
    vertices: tuple[VertexMetrics, ...] = ()
    """What the tasks told of themselves last, likewise."""


class Answers:
    """Those of one coordinator. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, Future[Answer]] = {}

    def expect(self, request: str) -> bool:
        """There will be an answer to this request; whether the request is new."""
        with self._lock:
            if request in self._futures:
                return False
            given = [name for name, future in self._futures.items() if future.done()]
            for name in given[: max(0, len(given) - KEPT_MAX)]:
                del self._futures[name]
            self._futures[request] = Future()
            return True

    def give(self, request: str, answer: Answer) -> None:
        """The answer, unless nobody asked here, or it was given before."""
        with self._lock:
            future = self._futures.get(request)
            if future is not None and not future.done():
                future.set_result(answer)

    def inherit(self, known: Mapping[str, Answer | None]) -> None:
        """What a predecessor has left: its answers, and what is still to be answered (None)."""
        for request, answer in known.items():
            self.expect(request)
            if answer is not None:
                self.give(request, answer)

    def knows(self, request: str) -> bool:
        """Whether there is, or will be, an answer."""
        with self._lock:
            return request in self._futures

    def wait(self, request: str, wait_s: float) -> Answer | None:
        """The answer, None if it takes longer; `LOST` for a request that is not known."""
        with self._lock:
            future = self._futures.get(request)
        if future is None:
            return LOST
        try:
            return future.result(wait_s)
        except TimeoutError:
            return None

    def given(self) -> dict[str, Answer]:
        """All answers that are kept."""
        with self._lock:
            return {request: future.result() for request, future in self._futures.items() if future.done()}
