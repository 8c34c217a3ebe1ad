"""`JobFeeds`: what feeds the sources of an environment's jobs, from the submission of each job to its end.

Rule: a feed ends with its job, however that ends, and before the next job that may go on with its input begins to feed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.actors.runtimes.running_job import Feed, RunningJob


@dataclass(frozen=True, slots=True)
class _Fed:
    feeds: Sequence[Feed]
    watcher: threading.Thread
    over: threading.Event


class JobFeeds:
    """The feeds of all jobs of one environment."""

    def __init__(self) -> None:
        self._fed: list[_Fed] = []

    def begin(self, job: RunningJob, feeds: Sequence[Feed]) -> None:
        """Feed a job that was submitted."""
        if not feeds:
            return
        for before in self._fed:
            if before.over.is_set():
                before.watcher.join()
        over = threading.Event()

        def watch() -> None:
            try:
                job.wait(None)
            finally:
                over.set()
                _stop(feeds)

        fed = _Fed(feeds, threading.Thread(target=watch, name="tidegate feeds", daemon=True), over)
        self._fed = [before for before in self._fed if before.watcher.is_alive()] + [fed]
        for feed in feeds:
            feed.start()
        fed.watcher.start()

    def close(self) -> None:
        """End all feeds."""
        fed, self._fed = self._fed, []
        for each in fed:
            _stop(each.feeds)


def _stop(feeds: Sequence[Feed]) -> None:
    for feed in feeds:
        feed.stop()
