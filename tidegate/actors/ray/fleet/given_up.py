"""`GivenUp`: processes of a job that get no task any more, and are ended once the event log says so.

A coordinator that was cut off hears nobody: it takes all processes for hung, and Ray keeps what it asks for until its
link is back. By then a successor may have adopted the same processes. Rules:

- No process of a job that goes on is ended by this coordinator but through here: it is given up, that becomes an entry
  of the event log, and the instruction that follows ends it. A coordinator that was replaced cannot write the entry.
- A process gets no task any more from the moment on in which it is given up.
- A successor adopts none that was given up. It ends those that still live, in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tidegate.actors.coordinator.messages import events as co
from tidegate.actors.coordinator.messages.events import CoordinatorEvent
from tidegate.actors.ray.fleet.fleet import Fleet
from tidegate.actors.ray.fleet.member import Member
from tidegate.actors.ray.process.stacks import kill_process
from tidegate.protocol.failure_reasons import bounded_text
from tidegate.storage.clock import now_ms

log = logging.getLogger(__name__)


class GivenUp:
    """Those of one job. Everything runs on the coordinator's mailbox."""

    def __init__(self, fleet: Fleet, tell_coordinator: Callable[[CoordinatorEvent], None]) -> None:
        self._fleet = fleet
        self._tell_coordinator = tell_coordinator
        self._waiting: dict[str, Member] = {}
        """Processes that are ended once the log says that they were given up, by their ids."""

    def give_up(self, member: Member, why: str) -> None:
        """A process is of no use any more. `why` says which it is."""
        member.given_up = True
        if member.process_id not in self._waiting:
            self._waiting[member.process_id] = member
            log.warning("a process is given up: %s", why)
            self._tell_coordinator(co.ProcessGivenUp(now_ms(), member.process_id, bounded_text(why)))

    def kill(self, process: str) -> None:
        """The log says that a process was given up: end it."""
        member = self._waiting.pop(process, None)
        if member is None:
            return
        self._fleet.kill(member)
        info = member.info
        if info is None:
            return
        # Ray asks a process to end itself, and a stopped one does not hear it.
        neighbour: Any = self._fleet.neighbour_of(member)
        if info.node_id == self._fleet.node_id:
            kill_process(info.pid, info.stack_descriptor)
        elif neighbour is not None:
            neighbour.handle.kill_beside.remote(info)
