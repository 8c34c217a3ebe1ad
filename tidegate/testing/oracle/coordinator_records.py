"""Checks the coordinator's statistics, the savepoints that users receive, and the limits on pending checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tidegate.actors.coordinator.checkpoint_requests import REQUESTS_MAX
from tidegate.actors.coordinator.checkpoint_statistics import CheckpointRecord
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.instructions import CompleteRequest
from tidegate.actors.coordinator.job_spec import CheckpointSettings, JobSpec
from tidegate.actors.task import events as ev
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.storage.checkpoints.layout import METADATA_NAME, CheckpointLayout, savepoint_name
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, SnapshotKind, SubtaskState, decode_metadata
from tidegate.storage.errors import CorruptionError, NotFoundError
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.state.state_file import verify_native, verify_state
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.files_at_rest import handles_of
from tidegate.testing.world.disk import SimulatedDisk, SimulatedStore

REMEMBERED = 100
"""Number of completed checkpoints whose metadata is remembered. The coordinator's history has fewer."""


class RecordsOracle:
    """Checks the coordinator's statistics for one job, and the savepoints that users receive. Rules:

    - Counts of checkpoints agree with each other and with the completed checkpoints, and no duration is negative.
    - Sizes of a completed checkpoint agree with the files in its metadata. In-flight bytes are more than 0 exactly when
      there was in-flight data. The bytes written for the checkpoint are at least the size of its own files, and at most
      the size of all its files.
    - A savepoint that a user has received is complete in its own folder, and equals its checkpoint. A savepoint folder
      that no user has received is deleted, also if its copy ends after the job.
    """

    def __init__(self, disk: SimulatedDisk, spec: JobSpec) -> None:
        self._disk = disk
        self._spec = spec
        self._completed: dict[int, CheckpointMetadata] = {}
        self._savepoints: set[str] = set()
        self._plain_savepoints = 0
        self._given: set[str] = set()

    def completed(self, metadata: CheckpointMetadata) -> None:
        """Records a completed checkpoint."""
        self._completed[int(metadata.checkpoint_id)] = metadata
        self._plain_savepoints += metadata.kind is SnapshotKind.SAVEPOINT
        if len(self._completed) > REMEMBERED:
            del self._completed[next(iter(self._completed))]

    def answered(self, answer: CompleteRequest) -> None:
        """Checks that a savepoint whose path a user receives is complete."""
        path = answer.path
        number = answer.checkpoint_id
        original = None if number is None else self._completed.get(int(number))
        if path is None or original is None:
            return
        self._savepoints.add(path)
        if original.kind is SnapshotKind.SAVEPOINT:
            self._given.add(path)
        store = SimulatedStore(self._disk, path)
        reliable = self._disk.reliable
        self._disk.reliable = True
        try:
            copy = decode_metadata(store.read(METADATA_NAME), path)
            for handle in handles_of(copy):
                if handle.path is not None:
                    verify_state(store, handle)
            for file in (file for subtask in copy.subtasks for file in subtask.native_files):
                verify_native(store, file)
        except (NotFoundError, CorruptionError) as error:
            raise InvariantViolated(
                5, f"the user has received savepoint {path}, which cannot be read: {error}"
            ) from error
        finally:
            self._disk.reliable = reliable
        if _without_places(copy) != _without_places(original):
            raise InvariantViolated(5, f"savepoint {path} differs from checkpoint {number}, of which it is a copy")

    def ended(self, state: CoordinatorState) -> None:
        """Checks the statistics at the end of the job."""
        statistics = state.statistics
        counts = (statistics.triggered, statistics.completed, statistics.failed, statistics.in_progress)
        if statistics.triggered != statistics.completed + statistics.failed + statistics.in_progress:
            raise InvariantViolated(
                4, f"the statistics do not add up (triggered, completed, failed, pending): {counts}"
            )
        known = (state.completed_checkpoints, state.failed_checkpoints, len(state.pending) + len(state.copies))
        if known != counts[1:] or statistics.completed != sum(statistics.by_kind.values()):
            raise InvariantViolated(4, f"the statistics report {counts[1:]} checkpoints, but there were {known}")
        for record in statistics.history:
            self._check_record(record)

    def savepoints_not_given(self) -> int:
        """Returns the number of savepoints that have completed as checkpoints, but whose path no user has received."""
        return self._plain_savepoints - len(self._given)

    def _check_record(self, record: CheckpointRecord) -> None:
        number = int(record.checkpoint_id)
        times_ms = [v.end_to_end_ms.min for v in record.vertices] + [v.alignment_ms.min for v in record.vertices]
        times_ms += [v.start_delay_ms.min for v in record.vertices] + [record.duration_ms]
        if min(times_ms) < 0:
            raise InvariantViolated(4, f"the statistics of checkpoint {number} have a negative time: {record}")
        if record.reason is not None:
            return
        metadata = self._completed.get(number)
        if metadata is None:
            raise InvariantViolated(
                4, f"the statistics report checkpoint {number} as completed, but it never completed"
            )
        in_flight_bytes = sum(s.in_flight.size_bytes for s in metadata.subtasks if s.in_flight is not None)
        seen = (metadata.size_bytes - in_flight_bytes, in_flight_bytes)
        if seen != (record.state_bytes, record.in_flight_bytes):
            raise InvariantViolated(
                4,
                f"checkpoint {number} has {seen} bytes of state and in-flight rows, but the statistics report "
                f"{(record.state_bytes, record.in_flight_bytes)}",
            )
        own_bytes = sum(_own_bytes(self._spec.job_id, metadata.checkpoint_id, subtask) for subtask in metadata.subtasks)
        if not own_bytes <= record.incremental_bytes <= record.state_bytes:
            raise InvariantViolated(
                4,
                f"checkpoint {number} has written files of {own_bytes} bytes, but the statistics report "
                f"{record.incremental_bytes}, and of {record.state_bytes} in all",
            )

    def check_folders(self) -> None:
        """Checks that only savepoints remain that users have received. A lost coordinator may still be copying one."""
        mark = f"/{savepoint_name(self._spec.job_id, CheckpointId(0)).removesuffix('0')}"
        for name in self._disk.files:
            before, found, rest = name.partition(mark)
            folder = f"{before}{mark}{rest.partition('/')[0]}"
            if found and folder not in self._savepoints:
                raise InvariantViolated(5, f"the file {name} remains of a savepoint that no user has received")


def _own_bytes(job_id: JobId, checkpoint_id: CheckpointId, subtask: SubtaskState) -> int:
    """Returns the bytes of state that were certainly written for a checkpoint.

    An inlined layer may belong to an older one.
    """
    own = f"{CheckpointLayout(job_id).shared_checkpoint_dir(checkpoint_id)}/"
    sizes = [(layer.path, layer.size_bytes) for layer in subtask.layers]
    sizes += [(file.path, file.size_bytes) for file in subtask.native_files]
    exclusive_bytes = 0 if subtask.handle is None else subtask.handle.size_bytes
    return exclusive_bytes + sum(size for path, size in sizes if path is not None and path.startswith(own))


def _without_places(metadata: CheckpointMetadata) -> CheckpointMetadata:
    """Returns the metadata without the paths of files, so that a checkpoint can be compared with its savepoint."""
    subtasks = tuple(subtask.moved(lambda _: "") for subtask in metadata.subtasks)
    return replace(metadata, subtasks=subtasks, origin_root=None)


def check_limits(
    settings: CheckpointSettings, number: int, kind: SnapshotKind, pending: Sequence[SnapshotKind]
) -> bool:
    """Checks that a checkpoint may start while others are pending (invariant 10).

    `pending` are the kinds of pending checkpoints, observed from the barriers that start them. Rules:

    - A checkpoint waits while the maximum number of checkpoints and savepoints is pending.
    - A savepoint waits only for other savepoints. With unaligned checkpoints it waits for everything that is pending.
    - The savepoint of a stop waits for nothing, because the stop has aborted everything that was pending.

    Returns whether the savepoint has overtaken a pending checkpoint. Raises InvariantViolated.
    """
    if kind.stops:
        return False
    goes_ahead = kind.is_savepoint and not settings.unaligned
    counted = [each for each in pending if each.is_savepoint or not goes_ahead]
    if len(counted) >= settings.max_concurrent:
        raise InvariantViolated(
            10,
            f"{kind.value} {number} starts while {len(counted)} earlier ones are pending; the limit is "
            f"{settings.max_concurrent}",
        )
    return len(pending) >= settings.max_concurrent


def check_held(machine: TaskMachine, abort: ev.CheckpointAborted) -> None:
    """Checks that a task blocks no channel for a checkpoint whose abort it has received. Raises InvariantViolated."""
    obeyed = abort.attempt == machine.attempt and abort.generation == machine.fence.generation
    if obeyed and abort.checkpoint_id in machine.checkpoints.held:
        raise InvariantViolated(
            10,
            f"{machine.descriptor.task} still blocks channels for checkpoint {abort.checkpoint_id}, which is aborted",
        )


def check_requests(waiting: int) -> None:
    """Checks that the coordinator queues no more requests than its limit. Raises InvariantViolated."""
    if waiting > REQUESTS_MAX:
        raise InvariantViolated(10, f"the coordinator queues {waiting} requests; the limit is {REQUESTS_MAX}")
