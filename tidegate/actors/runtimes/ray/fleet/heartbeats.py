"""`Heartbeats`: finds the processes of a job that live and do not get on, says what they are doing, and gives them up.

What counts as hung is decided by `HeartbeatMonitor`; here are the calls. Rules:

- A process that counts as hung gets no task any more from that moment on.
- First it is found out what it is doing, then the failure is told, then it is given up (`given_up.py`): so the failure
  names the task that hangs, and what follows from its end belongs to an attempt that has failed already.
- Looking takes a bounded time. Where nobody can look, that is said.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from tidegate.actors.hosts.heartbeat_settings import HeartbeatSettings
from tidegate.actors.hosts.threads import WorkerPool
from tidegate.actors.runtimes.ray.fleet.fleet import Fleet
from tidegate.actors.runtimes.ray.fleet.heartbeat_monitor import HeartbeatMonitor, Hung
from tidegate.actors.runtimes.ray.fleet.member import Member
from tidegate.actors.runtimes.ray.process.mailbox import Mailbox
from tidegate.actors.runtimes.ray.process.stacks import UNKNOWN, stack_of
from tidegate.storage.clock import monotonic_ms, now_ms

log = logging.getLogger(__name__)

LOOK_MS_MAX = 5_000

Told = Callable[[str], object]


class Heartbeats:
    """Those of one job. Everything runs on the coordinator's mailbox.

    `found` is told of a process when it counts as hung, and gives what takes the text of the failure. `silent` is told
    before, of the node of one that does not answer, and for how long the others there have not.
    """

    def __init__(
        self,
        settings: HeartbeatSettings,
        fleet: Fleet,
        mailbox: Mailbox,
        found: Callable[[Member], Told],
        give_up: Callable[[Member, str], object],
        silent: Callable[[str, Sequence[int]], object],
    ) -> None:
        self._settings = settings
        self._monitor = HeartbeatMonitor(settings)
        self._fleet = fleet
        self._mailbox = mailbox
        self._found = found
        self._give_up = give_up
        self._silent = silent
        self._answers: queue.SimpleQueue[tuple[str, Future[int | None]]] = queue.SimpleQueue()
        """At most one for each process."""
        self._pool = WorkerPool(
            1, "tidegate-look", lambda error: log.warning("nobody can look at processes: %s", error)
        )
        self._closed = False

    def start(self) -> None:
        """Begin, and go on until `close`."""
        self._tick()

    def close(self) -> None:
        """The job is over."""
        self._closed = True
        self._pool.close()

    def _tick(self) -> None:
        if self._closed:
            return
        self._mailbox.call_later(self._settings.tick_ms, self._tick)
        while not self._answers.empty():
            name, future = self._answers.get_nowait()
            if future.exception() is None:
                self._monitor.answered(name, future.result())
            else:
                self._monitor.not_answered(name)
        living = {member.name: member for member in self._fleet.started()}
        for name in self._monitor.watched - living.keys():
            self._monitor.forget(name)
        for name in living.keys() - self._monitor.watched:
            self._monitor.watch(name)
        asked, hung = self._monitor.tick(monotonic_ms())
        for name in asked:
            self._ask(living[name])
        silent = {one.name: one.for_ms for one in hung if one.kind == "silent"}
        for one in hung:
            self._is_hung(living[one.name], one, silent)

    def _ask(self, member: Member) -> None:
        def answered(answer: Future[int | None]) -> None:
            if answer.exception() is None:
                member.heard_at_ms = now_ms()
            self._answers.put((member.name, answer))

        member.handle.pulse.remote().future().add_done_callback(answered)

    def _is_hung(self, member: Member, hung: Hung, silent: Mapping[str, int]) -> None:
        info = member.info
        assert info is not None
        member.given_up = True
        if hung.kind == "silent":
            beside = [m.name for m in self._fleet.started() if m.is_on((info.node_id,))]
            self._silent(info.node_id, [silent.get(name) or self._monitor.silent_ms(name) for name in beside])
        tell = self._found(member)
        what = (
            f"has not answered for {hung.for_ms} ms (heartbeat.timeout)"
            if hung.kind == "silent"
            else f"has been busy with one call for {hung.for_ms} ms (task.call-timeout)"
        )
        concluded = False

        def conclude(doing: str) -> None:
            nonlocal concluded
            if concluded:
                return
            concluded = True
            text = f"it hangs: the process {member.name}, pid {info.pid}, {what}; {doing}"
            tell(text)
            self._give_up(member, text)

        self._look(member, hung, lambda doing: self._mailbox.post(lambda: conclude(doing)))
        self._mailbox.call_later(LOOK_MS_MAX, lambda: conclude(UNKNOWN))

    def _look(self, member: Member, hung: Hung, seen: Callable[[str], object]) -> None:
        info = member.info
        assert info is not None

        def take(answer: Future[str]) -> None:
            seen(UNKNOWN if answer.exception() is not None else answer.result())

        if hung.kind == "busy":
            member.handle.stack.remote().future().add_done_callback(take)
        elif info.node_id == self._fleet.node_id:
            self._pool.submit(lambda: stack_of(info.pid, info.stack_descriptor, info.mailbox_thread), take)
        elif (neighbour := self._fleet.neighbour_of(member)) is not None:
            neighbour.handle.look_beside.remote(info).future().add_done_callback(take)
        else:
            seen(UNKNOWN)
