"""`WatermarkAnswers`: tells source tasks how far their group is in event time. `CoordinatorHost` hands it the reports.

This goes past the event log and past the machine: no decision that lasts follows from it, and it goes on while storage
is away. So only a coordinator that is in charge answers.
"""

from __future__ import annotations

from tidegate.actors.coordinator.alignment import Alignment
from tidegate.actors.coordinator.messages.watermarks import WatermarkReported
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.actors.drivers.ports import CoordinatorPort
from tidegate.actors.task.messages.events import WatermarkAnnounced
from tidegate.storage.ids import Generation


class WatermarkAnswers:
    """Of one coordinator incarnation."""

    def __init__(self, port: CoordinatorPort, generation: Generation) -> None:
        self._port, self._generation = port, generation
        self._alignment = Alignment()

    def answer(self, state: CoordinatorState, event: WatermarkReported) -> None:
        """A task has told how far it is."""
        for told in self._alignment.reported(state, event):
            at_ms = self._port.now_ms()
            announced = WatermarkAnnounced(at_ms, told.attempt, told.watermark_ms, self._generation)
            self._port.tell(told.task, announced)
