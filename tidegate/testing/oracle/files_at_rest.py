"""Checks the checkpoints, the event log and the tables of a job by observing created and deleted files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

import msgpack

from tidegate.actors.task.incremental_base import IncrementalBase
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.layout import CHANGELOG_NAME, SINKS_NAME, CheckpointLayout
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, StateHandle, decode_metadata
from tidegate.storage.errors import CorruptionError, NotFoundError
from tidegate.storage.files.envelope import HEADER_BYTES
from tidegate.storage.ids import JobId
from tidegate.storage.state.state_file import verify_native, verify_state
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.output_tables import TablesOracle, data_files_of
from tidegate.testing.world.disk import SimulatedDisk, SimulatedStore


class FilesOracle:
    """Checks the files of one job.

    `completes` is called for each checkpoint that completes, after its files were checked.
    """

    def __init__(
        self,
        disk: SimulatedDisk,
        root: str,
        job_id: JobId,
        completes: Callable[[CheckpointMetadata], None],
        tables: TablesOracle,
    ) -> None:
        self._disk = disk
        self._root = root.rstrip("/")
        self._store = SimulatedStore(disk, root)
        self._layout = CheckpointLayout(job_id)
        self._job_id = job_id
        self._folder = f"{self._root}/{self._layout.job_dir()}/"
        self._completes = completes
        self._tables = tables
        self.completed = 0
        """Number of completed checkpoints."""
        self.newest: int | None = None
        """Number of the newest completed checkpoint, or None."""
        self.newest_whole: int | None = None
        """Number of the newest completed checkpoint that is not damaged, or None."""
        self.damaged: set[int] = set()
        """Completed checkpoints that were damaged afterwards."""
        self.passed_over: set[int] = set()
        """Damaged checkpoints for which an older one was restored."""
        self._tombstones: set[str] = set()
        """Names of the metadata of voided checkpoints."""
        self._unreadable: set[int] = set()
        self.numbers: set[int] = set()
        """The numbers of all completed checkpoints."""
        self.present: dict[int, CheckpointMetadata] = {}
        """Metadata of completed checkpoints whose metadata file exists."""
        self._referenced: dict[str, set[int]] = {}
        self._built_on: dict[int, frozenset[str]] = {}
        """For each checkpoint in progress, the files of the checkpoint on which its tasks build."""
        self._covered: set[str] = set()
        self._generation = 0
        self._incarnations: dict[int, str] = {}
        """Incarnation that has written to the log as each generation."""
        self._newest_entry = -1
        self._log: deque[str] = deque(maxlen=100)
        disk.created.append(self._file_created)
        disk.deleted.append(self._file_deleted)

    def _file_created(self, name: str, data: bytes) -> None:
        if name.startswith(self._folder):
            if name.endswith("/_metadata"):
                metadata = decode_metadata(data)
                if metadata.void:
                    self._tombstones.add(name)
                else:
                    self._completed(name, metadata)
            elif "/events/" in name and "snapshot" not in name:
                self._logged(name, data)

    def _logged(self, name: str, data: bytes) -> None:
        # Only the outermost layer is decoded: the events of an entry are most of it.
        _, fields = msgpack.unpackb(msgpack.unpackb(memoryview(data)[HEADER_BYTES:]).data)
        generation = fields["generation"]
        index = _number_of_entry(name)
        # What is created below the newest entry fills a hole of the truncated log: its writer notices, and is fenced.
        if generation < self._generation and index > self._newest_entry:
            raise InvariantViolated(
                8, f"coordinator generation {generation} wrote {name} after generation {self._generation}"
            )
        incarnation = self._incarnations.setdefault(generation, fields["nonce"])
        if incarnation != fields["nonce"] and index > self._newest_entry:
            raise InvariantViolated(
                8, f"two coordinators, {incarnation} and {fields['nonce']}, both write as generation {generation}"
            )
        if name in self._log:
            raise InvariantViolated(8, f"{name} was written twice, the second time by generation {generation}")
        self._log.append(name)
        self._generation = max(generation, self._generation)
        self._newest_entry = max(index, self._newest_entry)

    def _completed(self, name: str, metadata: CheckpointMetadata) -> None:
        number = metadata.checkpoint_id
        if number in self.present:
            raise InvariantViolated(4, f"checkpoint {number} was completed twice")
        self.completed += 1
        self.newest = self.newest_whole = max(number, self.newest or 0)
        self.numbers.add(number)
        self.present[number] = metadata
        self._check_present(metadata)
        self._check_lineage(metadata)
        self._built_on.pop(number, None)
        for name in self._names_of(metadata):
            self._referenced.setdefault(name, set()).add(number)
        self._covered |= data_files_of(metadata)
        self._tables.completed(metadata)
        self._completes(metadata)

    def _there(self) -> list[int]:
        """Returns the numbers of the completed checkpoints that were not deleted."""
        names = ((n, f"{self._root}/{self._layout.metadata(m.checkpoint_id)}") for n, m in self.present.items())
        return [number for number, name in names if name in self._disk.files]

    def own_names(self, number: int) -> list[str]:
        """Returns the path of a checkpoint's metadata, followed by the state files to which only this checkpoint
        refers.
        """
        metadata = self.present[number]
        handles = (subtask.handle for subtask in metadata.subtasks)
        states = [f"{self._root}/{h.path}" for h in handles if h is not None and h.path is not None]
        own = [name for name in states if self._referenced.get(name) == {number}]
        return [f"{self._root}/{self._layout.metadata(metadata.checkpoint_id)}", *own]

    def damage(self, number: int, unreadable: bool) -> None:
        """Records that a checkpoint can no longer be restored.

        `unreadable`: its metadata is damaged, so it is unknown which files belong to it.
        """
        self.damaged.add(number)
        if unreadable:
            self._unreadable.add(number)
        self.newest_whole = max(self.numbers - self.damaged, default=None)

    def _check_present(self, metadata: CheckpointMetadata) -> None:
        reliable = self._disk.reliable
        self._disk.reliable = True
        try:
            for handle in handles_of(metadata):
                if handle.path is not None:
                    verify_state(self._store, handle)
            for subtask in metadata.subtasks:
                for file in subtask.native_files:
                    verify_native(self._store, file)
            for name in data_files_of(metadata):
                if name not in self._disk.files:
                    raise NotFoundError(f"{name} does not exist")
        except (NotFoundError, CorruptionError) as error:
            raise InvariantViolated(
                5, f"checkpoint {metadata.checkpoint_id} is complete, but a file of it is missing or damaged: {error}"
            ) from error
        finally:
            self._disk.reliable = reliable

    def _file_deleted(self, name: str) -> None:
        needed = name in self._covered or self._tables.is_merged(name)
        if needed and not self._tables.may_go(name, self._there()):
            raise InvariantViolated(5, f"{name} was deleted, although its table or a completed checkpoint needs it")
        numbers = self._referenced.get(name)
        if numbers:
            raise InvariantViolated(5, f"{name} was deleted while checkpoint {min(numbers)} refers to it")
        for number, names in self._built_on.items():
            if name in names:
                raise InvariantViolated(5, f"{name} was deleted while checkpoint {number} is based on it")
        if name in self._log and _number_of_entry(name) < self._newest_entry - 1:
            self._log.remove(name)  # A writer that repeats it because the answer was lost fills a hole.
        if name.startswith(self._folder) and name.endswith("/_metadata"):
            gone = self.present.pop(_number(name), None)
            if gone is not None:
                for referenced in self._names_of(gone):
                    self._referenced[referenced].discard(int(gone.checkpoint_id))
                    if not self._referenced[referenced]:
                        del self._referenced[referenced]

    # --- layers ---------------------------------------------------------------------------------------------------

    def built_on(self, number: int, lineage: IncrementalBase) -> None:
        """Records that a snapshot builds on files of an older checkpoint, which must stay until this checkpoint has
        ended.
        """
        names = frozenset(f"{self._root}/{path}" for path in lineage.paths)
        gone = names - self._disk.files.keys()
        if gone:
            raise InvariantViolated(5, f"checkpoint {number} is based on {min(gone)}, which no longer exists")
        self._built_on[number] = self._built_on.get(number, frozenset()) | names

    def given_up(self, number: int) -> None:
        """Records that a checkpoint was aborted. The files on which it was built may be deleted."""
        self._built_on.pop(number, None)

    def attempt_is_over(self) -> None:
        """Records that the attempt has ended: its pending checkpoints no longer need the files on which they build."""
        self._built_on.clear()

    def writers_of(self, metadata: CheckpointMetadata) -> set[int]:
        """Returns the numbers of the checkpoints for which this checkpoint's shared files were written."""
        start = len(self._layout.shared_dir()) + 1
        log = f"{self._layout.changelog_dir()}/"
        paths = (path for s in metadata.subtasks for path in s.shared_paths if not path.startswith(log))
        return {int(path[start:].partition("/")[0].removeprefix("chk-")) for path in paths}

    def unneeded_folders(self) -> int:
        """Returns the number of shared folders, older than the newest checkpoint, to which no checkpoint refers."""
        needed = {f"chk-{number}" for metadata in self.present.values() for number in self.writers_of(metadata)}
        folders = self._disk.names(f"{self._root}/{self._layout.shared_dir()}")
        newest = self.newest or 0
        own = (name for name in folders if name not in needed and name not in (CHANGELOG_NAME, SINKS_NAME))
        return sum(int(name.removeprefix("chk-")) < newest for name in own)

    def _check_lineage(self, metadata: CheckpointMetadata) -> None:
        """Checks that shared files belong to the checkpoint itself or to a completed one.

        Any other file could be deleted at any time.
        """
        layout = self._layout
        own = f"{layout.shared_checkpoint_dir(metadata.checkpoint_id)}/", f"{layout.changelog_dir()}/"
        for subtask in metadata.subtasks:
            for path in subtask.shared_paths:
                if not path.startswith(own) and f"{self._root}/{path}" not in self._referenced:
                    raise InvariantViolated(
                        5,
                        f"checkpoint {metadata.checkpoint_id} is based on {path}, but no completed checkpoint refers "
                        "to it",
                    )

    def _names_of(self, metadata: CheckpointMetadata) -> frozenset[str]:
        return frozenset(f"{self._root}/{path}" for subtask in metadata.subtasks for path in subtask.paths)

    # --- the end --------------------------------------------------------------------------------------------------

    def check_end(self, retained: Iterable[int], tables: Iterable[str], undecided: Collection[int] = ()) -> None:
        """Checks at the end of the job that all retained files exist and that no other files are left (invariant 5).

        `tables` are the tables for which all commits of this job are done. `undecided` are checkpoints that may still
        complete, because the job has given up.
        """
        keep = set()
        retained = list(retained)
        unknown: tuple[str, ...] = ()
        if undecided or not self._unreadable.isdisjoint(retained):
            # Files that an unreadable checkpoint may need stay.
            folders = (f"{self._folder}chk-{n}/" for n in (*retained, *undecided))
            unknown = f"{self._root}/{self._layout.shared_dir()}/", *folders
        for number in retained:
            metadata = self.present.get(number)
            if metadata is None:
                raise InvariantViolated(5, f"checkpoint {number} is retained, but its metadata file does not exist")
            keep.add(f"{self._root}/{self._layout.metadata(metadata.checkpoint_id)}")
            keep |= self._names_of(metadata)
        # Tombstones outlive their job: a coordinator that was cut off may still be about to complete such a checkpoint.
        keep |= self._tombstones
        missing = keep - self._disk.files.keys()
        if missing:
            raise InvariantViolated(
                5, f"{min(missing)} no longer exists, but is a tombstone, or a retained checkpoint refers to it"
            )
        own = (f"{self._folder}events/", f"{self._folder}taskowned/", *unknown)
        data = tuple(f"{table.rstrip('/')}/data/{self._job_id}/" for table in tables)
        shown = {name for table in tables for name in self._tables.referenced(table.rstrip("/"))}
        for name in self._disk.files:
            if name.startswith(self._folder) and name not in keep and not name.startswith(own):
                raise InvariantViolated(5, f"{name} remains after the end of the job, but no checkpoint refers to it")
            if name.startswith(data) and name not in shown:
                raise InvariantViolated(5, f"{name} remains after the end of the job, but no commit refers to it")


def handles_of(metadata: CheckpointMetadata) -> list[StateHandle]:
    """Returns all state handles of a checkpoint."""
    return [handle for subtask in metadata.subtasks for handle in subtask.handles]


def acknowledged_tasks(metadata: CheckpointMetadata) -> Mapping[TaskId, bool]:
    """Returns the tasks of a checkpoint, and whether each had finished its operators."""
    return {TaskId(s.vertex, s.subtask): s.finished for s in metadata.subtasks}


def _number(metadata_name: str) -> int:
    return int(metadata_name.rsplit("/", 2)[1].removeprefix("chk-"))


def _number_of_entry(name: str) -> int:
    return int(name.rpartition("/")[2])


RETAINED_MIN = 2


class Damager:
    """Damages completed checkpoints of one simulated job: their metadata, or a state file that belongs to one
    checkpoint only.

    Of the checkpoints that a restart could choose, the newest or the previous one stays undamaged, so that the job can
    continue.
    """

    def __init__(self, disk: SimulatedDisk, files: FilesOracle, retained: int) -> None:
        self._disk = disk
        self._files = files
        self._retained = retained

    def completed(self, number: int) -> None:
        """Damages a completed checkpoint with some probability, when the coordinator is notified of its completion."""
        files = self._files
        world = self._disk.world
        before = [n for n in files.present if n < number and n not in files.passed_over]
        if self._retained < RETAINED_MIN or number not in files.present or not before or max(before) in files.damaged:
            return
        if not world.chance("damage"):
            return
        metadata, *states = files.own_names(number)
        victim = metadata if not states or world.random.random() < 0.5 else world.random.choice(states)
        data = bytearray(self._disk.files[victim])
        data[world.random.randrange(len(data))] ^= 1
        self._disk.files[victim] = bytes(data)
        files.damage(number, unreadable=victim == metadata)
        world.note("damage:", victim)
