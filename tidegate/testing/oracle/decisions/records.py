"""The oracle of records: checks the coordinator's statistics, and the savepoints that users are given.

Rules:

- Counts of checkpoints agree with each other and with what was completed; no duration is negative.
- Sizes of a completed checkpoint are those of the files in its metadata: in-flight bytes are more than 0 exactly when
  something was in flight. What was written for it is no less than its own files, and no more than all of them.
- A savepoint that a user was told of is whole in its own folder, and says what the checkpoint says that it is a copy
  of; a folder that nobody was told of is deleted again, also when its copy ends after the job.
"""

from __future__ import annotations

from dataclasses import replace

from tidegate.actors.coordinator.checkpoint_statistics import CheckpointRecord
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.instructions import CompleteRequest
from tidegate.actors.coordinator.job_spec import JobSpec
from tidegate.storage.checkpoints.layout import METADATA_NAME, CheckpointLayout, savepoint_name
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, SnapshotKind, SubtaskState, decode_metadata
from tidegate.storage.errors import CorruptionError, NotFoundError
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.state.state_file import verify_native, verify_state
from tidegate.testing.oracle.files.files_at_rest import handles_of
from tidegate.testing.oracle.violation import InvariantViolated
from tidegate.testing.world.disk import SimulatedDisk, SimulatedStore

REMEMBERED = 100
"""Completed checkpoints whose sizes are known: more than a history has."""


class RecordsOracle:
    """Compares what one job's coordinator tells with what was seen."""

    def __init__(self, disk: SimulatedDisk, spec: JobSpec) -> None:
        self._disk = disk
        self._spec = spec
        self._completed: dict[int, CheckpointMetadata] = {}
        self._savepoints: set[str] = set()
        self._plain_savepoints = 0
        self._given: set[str] = set()

    def completed(self, metadata: CheckpointMetadata) -> None:
        """A checkpoint is complete."""
        self._completed[int(metadata.checkpoint_id)] = metadata
        self._plain_savepoints += metadata.kind is SnapshotKind.SAVEPOINT
        if len(self._completed) > REMEMBERED:
            del self._completed[next(iter(self._completed))]

    def answered(self, answer: CompleteRequest) -> None:
        """A user is told of a savepoint: all of it is there."""
        path, number = answer.path, answer.checkpoint_id
        original = None if number is None else self._completed.get(int(number))
        if path is None or original is None:
            return
        self._savepoints.add(path)
        if original.kind is SnapshotKind.SAVEPOINT:
            self._given.add(path)
        store = SimulatedStore(self._disk, path)
        reliable, self._disk.reliable = self._disk.reliable, True
        try:
            copy = decode_metadata(store.read(METADATA_NAME), path)
            for handle in handles_of(copy):
                if handle.path is not None:
                    verify_state(store, handle)
            for file in (file for subtask in copy.subtasks for file in subtask.native_files):
                verify_native(store, file)
        except (NotFoundError, CorruptionError) as error:
            raise InvariantViolated(5, f"savepoint {path} was given to the user and is not whole: {error}") from error
        finally:
            self._disk.reliable = reliable
        if _without_places(copy) != _without_places(original):
            raise InvariantViolated(5, f"savepoint {path} is not a copy of checkpoint {number}")

    def ended(self, state: CoordinatorState) -> None:
        """The job is over."""
        statistics = state.statistics
        counts = (statistics.triggered, statistics.completed, statistics.failed, statistics.in_progress)
        if statistics.triggered != statistics.completed + statistics.failed + statistics.in_progress:
            raise InvariantViolated(
                4, f"the statistics do not add up (triggered, completed, failed, pending): {counts}"
            )
        known = (state.completed_checkpoints, state.failed_checkpoints, len(state.pending) + len(state.copies))
        if known != counts[1:] or statistics.completed != sum(statistics.by_kind.values()):
            raise InvariantViolated(4, f"the statistics tell of {counts[1:]} checkpoints, and there were {known}")
        for record in statistics.history:
            self._check_record(record)

    def savepoints_not_given(self) -> int:
        """How many savepoints of a running job have completed as checkpoints without a copy that a user was told of."""
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
            raise InvariantViolated(4, f"the statistics tell of checkpoint {number}, which never completed")
        in_flight_bytes = sum(s.in_flight.size_bytes for s in metadata.subtasks if s.in_flight is not None)
        seen = (metadata.size_bytes - in_flight_bytes, in_flight_bytes)
        if seen != (record.state_bytes, record.in_flight_bytes):
            raise InvariantViolated(
                4,
                f"checkpoint {number} has {seen} bytes of state and in flight, the statistics tell of "
                f"{(record.state_bytes, record.in_flight_bytes)}",
            )
        own_bytes = sum(_own_bytes(self._spec.job_id, metadata.checkpoint_id, subtask) for subtask in metadata.subtasks)
        if not own_bytes <= record.incremental_bytes <= record.state_bytes:
            raise InvariantViolated(
                4,
                f"checkpoint {number} has files of {own_bytes} bytes of its own, the statistics tell of "
                f"{record.incremental_bytes}, and of {record.state_bytes} in all",
            )

    def check_folders(self) -> None:
        """The job is over, and so are all copies of savepoints. A coordinator that was lost may still be copying."""
        mark = f"/{savepoint_name(self._spec.job_id, CheckpointId(0)).removesuffix('0')}"
        for name in self._disk.files:
            before, found, rest = name.partition(mark)
            folder = f"{before}{mark}{rest.partition('/')[0]}"
            if found and folder not in self._savepoints:
                raise InvariantViolated(5, f"{name} is left of a savepoint that nobody was told of")


def _own_bytes(job_id: JobId, checkpoint_id: CheckpointId, subtask: SubtaskState) -> int:
    """Bytes of state that were certainly written for a checkpoint: an inlined layer may be an older one's."""
    own = f"{CheckpointLayout(job_id).shared_checkpoint_dir(checkpoint_id)}/"
    sizes = [(layer.path, layer.size_bytes) for layer in subtask.layers]
    sizes += [(file.path, file.size_bytes) for file in subtask.native_files]
    exclusive_bytes = 0 if subtask.handle is None else subtask.handle.size_bytes
    return exclusive_bytes + sum(size for path, size in sizes if path is not None and path.startswith(own))


def _without_places(metadata: CheckpointMetadata) -> CheckpointMetadata:
    """What a checkpoint and its savepoint have in common."""
    subtasks = tuple(subtask.moved(lambda _: "") for subtask in metadata.subtasks)
    return replace(metadata, subtasks=subtasks, origin_root=None)
