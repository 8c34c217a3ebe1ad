"""`Heartbeats`: finds the processes of a job that live and do not get on, says what they are doing, and gives them up.

What counts as hung is decided by `HeartbeatMonitor`; here are the calls. Rules:

- A process that is in doubt, or counts as hung, gets no task from that moment on.
- First it is found out what it is doing. One that was silent is asked a last question then, and nothing has happened if
  it answers. Else the failure is told, then it is given up (`given_up.py`): so the failure names the task that hangs,
  and what follows from its end belongs to an attempt that has failed already.
- One whose task went elsewhere while it was in doubt is given up too.
- Looking takes a bounded time. Where nobody can look, that is said.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Literal

from tidegate.actors.drivers.heartbeat_settings import HeartbeatSettings
from tidegate.actors.drivers.threads import WorkerPool
from tidegate.actors.ray.fleet.fleet import Fleet
from tidegate.actors.ray.fleet.heartbeat_monitor import HeartbeatMonitor, Hung
from tidegate.actors.ray.fleet.member import Member
from tidegate.actors.ray.process.mailbox import Mailbox
from tidegate.actors.ray.process.signs_of_life import Pulse
from tidegate.actors.ray.process.stacks import UNKNOWN, stack_of
from tidegate.storage.clock import monotonic_ms, now_ms

log = logging.getLogger(__name__)

LOOK_MS_MAX = 5_000

Told = Callable[[str], object]


class Heartbeats:
    """Those of one job. Everything runs on the coordinator's mailbox.

    `found` is told of a process when it counts as hung, and gives what takes the text of the failure. `silent` is told
    before, of the node of one in doubt, and for how long the others there have not answered.
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
        self._answers: queue.SimpleQueue[tuple[str, Future[Pulse]]] = queue.SimpleQueue()
        """At most two for each process."""
        self._in_doubt: dict[str, Member] = {}
        self._doing: dict[str, str] = {}
        """What those in doubt were doing, by name."""
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

    def busy_ms(self) -> dict[str, int]:
        """Return how long each process has been in its present call or waited for `map_async`, by its name."""
        return self._monitor.busy_ms()

    def _tick(self) -> None:
        if self._closed:
            return
        self._mailbox.call_later(self._settings.tick_ms, self._tick)
        while not self._answers.empty():
            name, future = self._answers.get_nowait()
            if future.exception() is None:
                pulse = future.result()
                self._monitor.answered(name, pulse.call, pulse.oldest_call)
            else:
                self._monitor.not_answered(name)
        living = {member.name: member for member in self._fleet.started()}
        for name in self._monitor.watched - living.keys():
            self._monitor.forget(name)
        for name in living.keys() - self._monitor.watched:
            self._monitor.watch(name, elsewhere=not living[name].is_on((self._fleet.node_id,)))
        asked, doubted, hung = self._monitor.tick(monotonic_ms())
        for name in asked:
            self._ask(living[name])
        for one in hung:
            living[one.name].given_up = True
        for one in hung:
            self._is_hung(living[one.name], one)
        self._tell_who_is_in_doubt(living)
        for name in doubted:
            self._is_in_doubt(living[name])

    def _tell_who_is_in_doubt(self, living: Mapping[str, Member]) -> None:
        before, names = self._in_doubt, self._monitor.doubted
        self._in_doubt = {name: living[name] for name in names}
        self._doing = {name: doing for name, doing in self._doing.items() if name in names}
        for name, member in before.items():
            member.doubted = False
            if member.usable and name not in living:
                self._give_up(member, f"{name} did not answer, and its task went elsewhere meanwhile")
            elif member.usable and name not in names:
                log.info("%s does not hang: it answers again, or was out of reach", name)
        for member in self._in_doubt.values():
            member.doubted = True

    def _ask(self, member: Member) -> None:
        def answered(answer: Future[Pulse]) -> None:
            if answer.exception() is None:
                member.heard_at_ms, member.acting = now_ms(), answer.result().task
            self._answers.put((member.name, answer))

        member.handle.pulse.remote().future().add_done_callback(answered)

    def _is_in_doubt(self, member: Member) -> None:
        info = member.info
        assert info is not None
        beside = [m.name for m in self._fleet.started() if m is not member and m.is_on((info.node_id,))]
        self._silent(info.node_id, [self._monitor.silent_ms(name) for name in beside])

        def looked(doing: str) -> None:
            self._doing[member.name] = doing
            self._monitor.looked(member.name)

        self._look(member, "silent", looked)

    def _is_hung(self, member: Member, hung: Hung) -> None:
        info = member.info
        assert info is not None
        tell = self._found(member)
        what = (
            f"has not answered for {hung.for_ms} ms (heartbeat.timeout)"
            if hung.kind == "silent"
            else f"has been busy with one call for {hung.for_ms} ms (task.call-timeout)"
        )

        def conclude(doing: str) -> None:
            text = f"it hangs: the process {member.name}, pid {info.pid}, {what}; {doing}"
            tell(text)
            self._give_up(member, text)

        if hung.kind == "silent":
            conclude(self._doing.get(member.name, UNKNOWN))
        else:
            self._look(member, "busy", conclude)

    def _look(self, member: Member, kind: Literal["silent", "busy"], seen: Callable[[str], object]) -> None:
        """Find out what a process is doing, and say it on the mailbox, once."""
        info = member.info
        assert info is not None
        over = False

        def end(doing: str) -> None:
            nonlocal over
            if not over:
                over = True
                seen(doing)

        def take(answer: Future[str]) -> None:
            doing = UNKNOWN if answer.exception() is not None else answer.result()
            self._mailbox.post(lambda: end(doing))

        if kind == "busy":
            member.handle.stack.remote().future().add_done_callback(take)
        elif info.node_id == self._fleet.node_id:
            self._pool.submit(lambda: stack_of(info.pid, info.stack_descriptor, info.mailbox_thread), take)
        elif (neighbour := self._fleet.neighbour_of(member)) is not None:
            neighbour.handle.look_beside.remote(info).future().add_done_callback(take)
        else:
            self._mailbox.post(lambda: end(UNKNOWN))
        self._mailbox.call_later(LOOK_MS_MAX, lambda: end(UNKNOWN))
