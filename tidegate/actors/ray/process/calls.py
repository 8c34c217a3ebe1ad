"""Calls on Ray that must not get lost unnoticed, for every process of a job.

Ray repeats frames and grants of credit that did not arrive: these have numbers, and may come twice, and late. It
repeats no other call (`max_task_retries=0`), and says so only to somebody who asks for its result. So the caller asks.
A receiver that has died is noticed at once by the coordinator, so a lost call has consequences only after a while, when
the attempt that it belonged to should be gone: what is left then is a connection that broke while both ends live.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from tidegate.actors.ray.process.mailbox import Mailbox

NAMESPACE = "tidegate"
"""Ray's namespace for named actors: those of jobs, of sessions, and of checkpoints in memory."""
CONCURRENCY_GROUPS = {"control": 1, "ask": 8, "live": 1}
"""Threads of a coordinator's actor: for its tasks, for drivers, and for calls that stay pending."""
LOST_CALL_GRACE_MS = 5_000


class Watched(Protocol):
    """What has to arrive: Ray's reference to a call, say."""

    def future(self) -> Future[Any]:
        """Done when it is there, or with an error."""


def watch_call(reference: Watched, mailbox: Mailbox, lost: Callable[[BaseException], object]) -> Future[Any]:
    """Have `lost` run on the mailbox, after a while, if the call fails. Returns what is done when the call is."""

    def done(future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            mailbox.post(lambda: mailbox.call_later(LOST_CALL_GRACE_MS, lambda: lost(error)))

    future: Future[Any] = reference.future()
    future.add_done_callback(done)
    return future
