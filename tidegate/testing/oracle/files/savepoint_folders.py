"""The oracle of savepoints' folders: watches by the files that come and go which savepoints are whole, and stay so.

It hears what coordinators are told, also those that were replaced: they may still be copying. Rules:

- A savepoint of which a coordinator has heard that it was given up is not whole, and never becomes so (4).
- A tombstone stays: whoever is late has to find it (4).
- Both coordinators know which was first, the copy or the tombstone: nobody hears of a copy that was too late that it is
  whole, and who gives up what is whole is told so (4).
- When the job is over, a savepoint that is whole is that of a checkpoint that has completed (5), or its copy came whole
  when the job ended, which does not wait for that for long.
"""

from __future__ import annotations

from collections.abc import Container

from tidegate.actors.coordinator import events as co
from tidegate.storage.checkpoints.layout import METADATA_NAME, parse_savepoint_name
from tidegate.storage.checkpoints.metadata import decode_metadata
from tidegate.storage.ids import JobId
from tidegate.testing.oracle.coverage import Coverage
from tidegate.testing.oracle.violation import InvariantViolated
from tidegate.testing.world.disk import SimulatedDisk


class SavepointFoldersOracle:
    """Watches the savepoints of one job."""

    def __init__(self, disk: SimulatedDisk, job_id: JobId, coverage: Coverage) -> None:
        self._job_id = job_id
        self._coverage = coverage
        self._whole: set[int] = set()
        self._were_whole: set[int] = set()
        self._voided: set[int] = set()
        self._given_up: set[int] = set()
        self._told: set[int] = set()
        disk.created.append(self._file_created)
        disk.deleted.append(self._file_deleted)

    def _file_created(self, name: str, data: bytes) -> None:
        number = self._number(name)
        if number is None:
            return
        if decode_metadata(data).void:
            self._voided.add(number)
            self._whole.discard(number)
            return
        if number in self._voided or number in self._given_up:
            raise InvariantViolated(4, f"savepoint {number} becomes whole, and was given up before")
        self._whole.add(number)
        self._were_whole.add(number)

    def _file_deleted(self, name: str) -> None:
        number = self._number(name)
        if number in self._voided:
            raise InvariantViolated(4, f"the tombstone of savepoint {number} is deleted, and its copy may come late")
        self._whole.discard(-1 if number is None else number)

    def heard(self, event: co.CoordinatorEvent) -> None:
        """A coordinator, which may have been replaced, is told something."""
        if isinstance(event, co.SavepointDiscarded):
            self._discarded(int(event.checkpoint_id), event.exported)
        elif isinstance(event, co.SavepointWritten):
            if event.checkpoint_id not in self._were_whole:
                raise InvariantViolated(4, f"savepoint {event.checkpoint_id} is said to be whole, and never was")
            self._told.add(int(event.checkpoint_id))
        elif isinstance(event, co.SavepointWriteFailed) and event.checkpoint_id in self._voided:
            self._coverage.saw("savepoint_fenced")

    def _discarded(self, number: int, exported: bool) -> None:
        if number in self._whole:
            raise InvariantViolated(4, f"savepoint {number} was given up, and is whole")
        if number in self._voided and exported is not (number in self._were_whole):
            was = "was" if number in self._were_whole else "was not"
            raise InvariantViolated(4, f"savepoint {number} {was} whole when it was given up, and the other is said")
        self._given_up.add(number)

    def ended(self, completed: Container[int]) -> None:
        """The job is over; the numbers of the checkpoints that have completed."""
        for number in sorted(self._whole):
            if number not in completed and number not in self._told:
                raise InvariantViolated(5, f"savepoint {number} is whole, and its checkpoint has never completed")

    def _number(self, name: str) -> int | None:
        """Of the savepoint whose `_metadata` this is; None for any other file."""
        folder, _, last = name.rpartition("/")
        found = parse_savepoint_name(folder.rpartition("/")[2]) if last == METADATA_NAME else None
        return int(found[1]) if found is not None and found[0] == self._job_id else None
