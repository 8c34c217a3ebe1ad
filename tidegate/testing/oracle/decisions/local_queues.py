"""The oracle of local queues (1): what subtasks of one process send each other comes as it was sent.

It keeps for each process what its subtasks have sent to others beside them, and has not come. Rules:

- A frame comes once, in the order in which it was sent, in the process in which it was sent, and in its attempt.
- It comes before a subtask of that process takes its next turn, unless its receiver is over.
- With the process goes what is in its queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from tidegate.actors.graph.job_graph import JobGraph, vertex_labels
from tidegate.actors.graph.slot_plan import slot_plan
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.storage.ids import AttemptNumber
from tidegate.testing.oracle.violation import InvariantViolated


class _Frame(NamedTuple):
    """A frame that was sent and has not come."""

    attempt: AttemptNumber
    channel: ChannelId
    first_sequence: int

    def __str__(self) -> str:
        return f"frame {self.first_sequence} of {self.channel} in attempt {self.attempt}"


class LocalQueuesOracle:
    """Watches the processes of one job."""

    def __init__(self, graph: JobGraph) -> None:
        workers = slot_plan(graph, vertex_labels(graph)).workers
        channels = (channel for edge in graph.edges for channel in graph.channels(edge))
        self._receivers = {
            channel: graph.receiver(channel)
            for channel in channels
            if workers[graph.sender(channel)] == workers[graph.receiver(channel)]
        }
        """Of each channel between subtasks of one worker."""
        self._sent: dict[str, deque[_Frame]] = {}

    def sent(self, process: str, frame: do.SendFrame) -> bool:
        """A subtask sends a frame. Returns whether it stays in its process."""
        if frame.channel not in self._receivers:
            return False
        self._sent.setdefault(process, deque()).append(_Frame(frame.attempt, frame.channel, frame.first_sequence))
        return True

    def arrived(self, process: str, event: ev.FrameArrived) -> None:
        """A frame reaches its receiver. What was sent before it to another attempt does not come any more."""
        if event.channel not in self._receivers:
            return
        frame = _Frame(event.attempt, event.channel, event.first_sequence)
        sent = self._sent.get(process, deque())
        if frame not in sent:
            raise InvariantViolated(1, f"{frame} comes in {process}, which has not sent it, or not only once")
        while (before := sent.popleft()) != frame:
            if before.attempt == frame.attempt and before.channel == frame.channel:
                raise InvariantViolated(1, f"{frame} comes in {process} before {before}, which was sent before it")

    def turn(self, process: str, running: Mapping[TaskId, AttemptNumber]) -> None:
        """A subtask takes its turn. `running`: the subtasks of its process, with their attempts."""
        sent = self._sent.get(process)
        if not sent:
            return
        for frame in sent:
            if running.get(self._receivers[frame.channel]) == frame.attempt:
                raise InvariantViolated(1, f"a turn is taken in {process} before {frame} has come")
        sent.clear()

    def ended(self, process: str) -> bool:
        """A process ends. Returns whether something was in its queue."""
        return bool(self._sent.pop(process, None))
