"""Checks the invariants of `docs/architecture.md` from outside, without believing the machines.

It sees what goes over channels, what is taken from them, where snapshots cut them, and every change of a file.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.identity import ChannelId, TaskId
from tidegate.actors.simulation.store import SimulatedDisk, SimulatedStore
from tidegate.actors.task.instructions import PersistSnapshot, SendFrame
from tidegate.actors.task.machine import TaskMachine
from tidegate.storage.codec import decode
from tidegate.storage.envelope import HEADER_BYTES
from tidegate.storage.errors import CorruptionError, NotFoundError, TidegateError
from tidegate.storage.event_log import LogEntry
from tidegate.storage.layout import CheckpointLayout
from tidegate.storage.metadata import CheckpointMetadata
from tidegate.storage.metadata_file import decode_metadata
from tidegate.storage.state_file import verify_state
from tidegate.storage.table_log import TableEntry


class InvariantViolated(TidegateError):
    """An invariant does not hold; `number` is its number in the architecture."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"invariant {number}: {message}")
        self.number = number


Cut = dict[ChannelId, int]


class Oracle:
    """Watches one job."""

    def __init__(self, disk: SimulatedDisk, root: str, layout: CheckpointLayout, tasks: Iterable[TaskId]) -> None:
        self._disk = disk
        self._root = root
        self._store = SimulatedStore(disk, root)
        self._layout = layout
        self._tasks = frozenset(tasks)
        self._sent: dict[tuple[int, ChannelId], int] = {}
        self._taken: dict[tuple[int, ChannelId], int] = {}
        self._cuts: dict[int, dict[TaskId, tuple[Cut, Cut]]] = {}
        self._completed: dict[int, CheckpointMetadata] = {}
        self._committed: dict[tuple[str, str, int], TableEntry] = {}
        self._generation = 0
        self._attempt = 0
        disk.created.append(self._file_created)
        disk.deleted.append(self._file_deleted)

    @property
    def completed(self) -> int:
        """Checkpoints that were completed."""
        return len(self._completed)

    # --- channels -------------------------------------------------------------------------------------------------

    def sent(self, frame: SendFrame) -> None:
        """A frame leaves its sender."""
        key = (frame.attempt, frame.channel)
        due = self._sent.get(key, 0)
        if frame.first_sequence != due:
            raise InvariantViolated(1, f"{frame.channel} sends {frame.first_sequence} where {due} is due")
        self._sent[key] = due + len(frame.elements)

    def after_event(self, machine: TaskMachine) -> None:
        """A machine has handled an event: look at its queues."""
        limits = machine.descriptor.limits
        for channel, taken in machine._inputs.positions():
            key = (machine.attempt, channel)
            before = self._taken.get(key, 0)
            if not before <= taken <= before + 1 or taken > self._sent.get(key, 0):
                raise InvariantViolated(1, f"{channel} was at {before} and is at {taken}")
            self._taken[key] = taken
            queued = [e.nbytes for e in machine._inputs[channel].queue if hasattr(e, "nbytes")]
            if sum(queued) > limits.credit_bytes + max(queued, default=0):
                raise InvariantViolated(10, f"{channel} holds {sum(queued)} bytes, {limits.credit_bytes} were granted")

    def snapshot_taken(self, task: TaskId, snapshot: PersistSnapshot) -> None:
        """A task's synchronous part is done."""
        cuts = self._cuts.setdefault(snapshot.checkpoint_id, {})
        cuts[task] = (dict(snapshot.input_positions), dict(snapshot.output_positions))

    def deployed(self, attempt: int, restored: int | None) -> None:
        """An attempt starts from a checkpoint: it has to be the newest completed one."""
        newest = max(self._completed, default=None)
        if restored != newest:
            raise InvariantViolated(7, f"attempt {attempt} is restored from {restored}, and {newest} is complete")
        self._attempt = attempt

    # --- files ----------------------------------------------------------------------------------------------------

    def _file_created(self, name: str, data: bytes) -> None:
        if name.endswith("/_metadata"):
            self._metadata_created(name, decode_metadata(data))
        elif "/events/" in name and "snapshot" not in name:
            entry: LogEntry = decode(memoryview(data)[HEADER_BYTES:])
            if entry.generation < self._generation:
                raise InvariantViolated(
                    8, f"generation {entry.generation} appended entry {entry.index} after {self._generation}"
                )
            self._generation = entry.generation
        elif "/_tidegate/log/" in name:
            self._table_entry_created(name.split("/_tidegate/log/")[0], decode(memoryview(data)[HEADER_BYTES:]))

    def _metadata_created(self, name: str, metadata: CheckpointMetadata) -> None:
        if metadata.void:
            return
        number = metadata.checkpoint_id
        if number in self._completed:
            raise InvariantViolated(4, f"checkpoint {number} was completed twice")
        if metadata.attempt < self._attempt:
            raise InvariantViolated(
                7, f"checkpoint {number} of attempt {metadata.attempt} completed after attempt {self._attempt} began"
            )
        self._completed[number] = metadata
        acknowledged = {TaskId(s.vertex, s.subtask) for s in metadata.subtasks}
        if acknowledged != self._tasks:
            missing = sorted(str(t) for t in self._tasks - acknowledged)
            raise InvariantViolated(4, f"checkpoint {number} completed without {missing}")
        self._check_present(metadata)
        self._check_cut(number)

    def _check_present(self, metadata: CheckpointMetadata) -> None:
        reliable, self._disk.reliable = self._disk.reliable, True
        try:
            for subtask in metadata.subtasks:
                if subtask.handle is not None:
                    verify_state(self._store, subtask.handle)
                for committable in subtask.committables:
                    for file in committable.files:
                        if f"{committable.table.rstrip('/')}/{file.path}" not in self._disk.files:
                            raise NotFoundError(f"{file.path} does not exist")
        except (NotFoundError, CorruptionError) as error:
            raise InvariantViolated(
                5, f"checkpoint {metadata.checkpoint_id} is complete and refers to what is not there: {error}"
            ) from error
        finally:
            self._disk.reliable = reliable

    def _check_cut(self, number: int) -> None:
        cuts = self._cuts.get(number, {})
        unseen = self._tasks - set(cuts)
        if unseen:
            raise InvariantViolated(4, f"checkpoint {number} completed without a snapshot of {min(unseen)}")
        sent: Cut = {}
        for _, outputs in cuts.values():
            sent.update(outputs)
        for task, (inputs, _) in cuts.items():
            for channel, position in inputs.items():
                if sent.get(channel) != position:
                    raise InvariantViolated(
                        3,
                        f"checkpoint {number} cuts {channel} after element {sent.get(channel)} where it is sent and "
                        f"after {position} where {task} processes it",
                    )

    def _table_entry_created(self, table: str, entry: TableEntry) -> None:
        if not entry.files:
            return
        key = (table, str(entry.job_id), entry.checkpoint_id or 0)
        if key in self._committed:
            raise InvariantViolated(6, f"checkpoint {entry.checkpoint_id} was committed twice to {table}")
        self._committed[key] = entry
        metadata = self._completed.get(entry.checkpoint_id or 0)
        covered = {
            file.path
            for subtask in (metadata.subtasks if metadata is not None else ())
            for committable in subtask.committables
            for file in committable.files
        }
        extra = [file.path for file in entry.files if file.path not in covered]
        if extra:
            raise InvariantViolated(6, f"{table}: {extra[0]} was committed, and no completed checkpoint covers it")

    def _file_deleted(self, name: str) -> None:
        for number, metadata in self._completed.items():
            metadata_name = f"{self._root}/{self._layout.metadata(metadata.checkpoint_id)}"
            if metadata_name not in self._disk.files:
                continue
            paths = {f"{self._root}/{s.handle.path}" for s in metadata.subtasks if s.handle is not None}
            if name in paths:
                raise InvariantViolated(5, f"{name} was deleted while checkpoint {number} refers to it")

    def check_end(self, retained: Iterable[int]) -> None:
        """The job is over: nothing is left that nobody refers to (invariant 5)."""
        keep = {f"{self._root}/{self._layout.metadata(self._completed[n].checkpoint_id)}" for n in retained}
        for number in retained:
            keep |= {
                f"{self._root}/{s.handle.path}"
                for s in self._completed[number].subtasks
                if s.handle is not None and s.handle.path is not None
            }
        for name in self._disk.files:
            if name.startswith(self._root) and "/chk-" in name and name not in keep:
                raise InvariantViolated(5, f"{name} is left behind and nobody refers to it")
