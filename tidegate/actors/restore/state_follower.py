"""`StateFollower`: keeps a copy of a task's keyed state in a standby process, as of the newest checkpoint.

A warm standby has one follower for each followed task. It is notified of every completed checkpoint, and reads the
changes. When the task is deployed in its process, the task gets the state backends of the follower, and reads almost
nothing (docs/decisions/0021). Rules:

- Layers of state never change. If a checkpoint's layers begin with the layers already read, only the other layers are
  read. For any other checkpoint (an older one, or one with a new base) the follower first drops its state, because
  there is memory for only one copy, and then reads everything.
- A backend stores the id of its checkpoint. A restore from another checkpoint does not find that id, and reads from
  storage. So does a restore at another parallelism.
- Operators are created and opened as in a task, because only they define their states. They get no rows.
- A failure drops everything, and the next checkpoint is read from the beginning. After `FAILURES_MAX` consecutive
  failures the follower gives up. A checkpoint that was deleted meanwhile is no failure. The task itself never notices.
- Only state in layers is followed: keyed state of the columnar backend, written incrementally. A task's other state is
  small, and read at restore.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.graph.job_graph import JobGraph, OperatorSpec
from tidegate.actors.restore.restore_task import part_of
from tidegate.actors.task.incremental_base import IncrementalBase
from tidegate.operators.operator import Operator, OperatorContext, ProcessingTime
from tidegate.protocol.failures import error_text
from tidegate.protocol.identity import TaskId
from tidegate.state.common.backend import KeyedBackend
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import SectionRef, StateHandle, StateKind, SubtaskState, read_metadata
from tidegate.storage.errors import NotFoundError
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import CheckpointId, OperatorUid
from tidegate.storage.state.handover import Handover
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.local_copies import LocalFirstStore, NodeFolder
from tidegate.storage.state.subtask_state import read_subtask_state

log = logging.getLogger(__name__)

FAILURES_MAX = 3
TAKE_TIMEOUT_S = 60.0
"""Seconds that a task waits for a running read of the follower. A read from the beginning would take as long."""


def can_follow(backend: StateBackendOptions) -> bool:
    """Returns whether a `StateFollower` can copy keyed state with these backend options: the state must be stored in
    layers.
    """
    return backend.kind == "columnar" and backend.incremental and not backend.changelog and backend.undo_bytes > 0


@dataclass(frozen=True, slots=True)
class _Held:
    """The state of one operator that a follower has copied."""

    operator: Operator
    backend: KeyedBackend
    layers: tuple[StateHandle, ...]
    """The layers that were read, oldest first."""


class StateFollower:
    """Copies the state of one task from its checkpoints, in a standby process.

    `follow` runs on one thread at a time. Any thread may call `take` and `close`.
    """

    def __init__(
        self,
        task: TaskId,
        graph: JobGraph,
        backend: StateBackendOptions,
        open_store: OpenStore,
        now_ms: Callable[[], int],
        local_copies: NodeFolder | None = None,
        readers: int = 1,
    ) -> None:
        self.task = task
        self._vertex = graph.vertex(task.vertex)
        self._max_parallelism = graph.max_parallelism
        self._backend = backend
        self._open_store = open_store
        self._now_ms = now_ms
        self._local_copies = local_copies
        self._readers = readers
        self._lock = threading.Lock()
        self._closed = False
        self._failures = 0
        self._held: dict[OperatorUid, _Held] = {}
        self.checkpoint_id: CheckpointId | None = None
        """The checkpoint whose state is copied, or None. Any thread may read this."""

    def follow(self, restore: RestorePoint) -> None:
        """Copies the state of a checkpoint, in this call. Logs any failure."""
        with self._lock:
            if self._closed or self._failures >= FAILURES_MAX:
                return
            try:
                self._advance(restore, anew=True)
            except NotFoundError as error:
                self._drop()
                log.info("checkpoint %d of %s has gone meanwhile: %s", restore.checkpoint_id, self.task, error)
            except Exception as error:  # noqa: BLE001 (user functions are opened; nothing depends on this)
                self._failures += 1
                self._drop()
                log.warning(
                    "the state of %s at checkpoint %d is not held%s: %s",
                    self.task,
                    restore.checkpoint_id,
                    " and never will be" if self._failures >= FAILURES_MAX else "",
                    error_text(error),
                )
            else:
                self._failures = 0
            if self._closed:
                self._drop()

    def take(self, restore: RestorePoint) -> Mapping[OperatorUid, KeyedBackend]:
        """Returns the backends with the copied state to a task that starts from this checkpoint, by operator.

        Reads newer layers that are missing. Returns an empty mapping if older layers differ. Waits for a running read.
        Afterwards the follower has no state.
        """
        acquired = self._lock.acquire(timeout=TAKE_TIMEOUT_S)
        self._closed = True
        if not acquired:
            log.warning("the state of %s is not taken: it is still being read after %g s", self.task, TAKE_TIMEOUT_S)
            return {}
        try:
            if self._held:
                self._advance(restore, anew=False)
            backends = {uid: held.backend for uid, held in self._held.items()}
            for held in self._held.values():
                held.operator.hand_over()
        except Exception as error:  # noqa: BLE001 (as in `follow`; the task then reads from storage)
            log.warning("the state of %s that is held is of no use: %s", self.task, error_text(error))
            backends = {}
        finally:
            self._drop()
            self._lock.release()
        return backends

    def close(self) -> None:
        """Drops all state now or, if a read is running, after the read."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            self._drop()
            self._lock.release()

    def _advance(self, restore: RestorePoint, anew: bool) -> None:
        """Reads the missing layers of a checkpoint.

        With `anew`, an operator with different layers is read from the beginning. Without `anew`, the state of that
        operator is dropped.
        """
        store = self._open_store(restore.root)
        metadata = read_metadata(store, restore.job_id, restore.checkpoint_id, savepoint=restore.savepoint)
        part = part_of(metadata, self._vertex, self.task)
        if part is None:
            self._drop()
            return
        layers = IncrementalBase.of(restore.checkpoint_id, part).layers
        if anew and not layers:
            return  # a canonical savepoint has no layers; the next checkpoint builds on those from before it
        part = replace(part, handle=None, in_flight=None, layers=layers)
        if self._local_copies is not None:
            store = LocalFirstStore(store, self._local_copies, restore.job_id, metadata.subtasks)
        keyed = {s.uid for layer in part.layers for s in layer.sections if s.kind is StateKind.KEYED}
        self.checkpoint_id = None
        for uid in [uid for uid, held in self._held.items() if uid not in keyed or not _is_above(part, held)]:
            self._drop_one(uid)
        for spec in self._vertex.operators:
            if spec.uid in self._held:
                self._go_on(store, part, self._held[spec.uid], spec.uid, restore.checkpoint_id)
            elif anew and spec.uid in keyed:
                self._begin(store, part, spec, restore.checkpoint_id)
        self.checkpoint_id = restore.checkpoint_id if self._held else None

    def _begin(self, store: Store, part: SubtaskState, spec: OperatorSpec, checkpoint_id: CheckpointId) -> None:
        context = OperatorContext(
            spec.uid,
            spec.name,
            self.task.subtask,
            self._vertex.parallelism,
            self._max_parallelism,
            ProcessingTime(self._now_ms()),
            backend=self._backend,
        )
        tables = self._read(store, part, spec.uid, 0)
        operator = spec.factory()
        try:
            operator.open(context, tables)
        except BaseException:
            operator.close()
            raise
        backend = operator.keyed_backend
        assert backend is not None, f"{spec.uid} has keyed state in a checkpoint and none in the program"
        self._held[spec.uid] = _Held(operator, backend, part.layers)
        backend.keep(checkpoint_id)

    def _go_on(self, store: Store, part: SubtaskState, held: _Held, uid: OperatorUid, number: CheckpointId) -> None:
        tables = self._read(store, part, uid, len(held.layers))
        # The previous checkpoint is not needed again, so these changes need no undo log.
        held.backend.completed(number)
        held.operator.load(tables)
        held.backend.leave()
        self._held[uid] = replace(held, layers=part.layers)
        held.backend.keep(number)

    def _read(self, store: Store, part: SubtaskState, uid: OperatorUid, first: int) -> Handover:
        """Returns the rows of one operator from the layers with index `first` and higher."""
        groups = key_group_range(self.task.subtask, self._max_parallelism, self._vertex.parallelism)
        above = replace(part, layers=part.layers[first:])
        tables = read_subtask_state(store, above, uid, groups, wanted=_is_keyed, readers=self._readers)
        return Handover(replace(table, layer=table.layer + first) for table in tables)

    def _drop(self) -> None:
        self.checkpoint_id = None
        for uid in list(self._held):
            self._drop_one(uid)

    def _drop_one(self, uid: OperatorUid) -> None:
        operator = self._held.pop(uid).operator
        try:
            operator.close()
        except Exception as error:  # noqa: BLE001 (user code, which is no longer needed)
            log.warning("closing %s of %s, which was only held, failed: %s", uid, self.task, error_text(error))


def _is_keyed(section: SectionRef) -> bool:
    return section.kind is StateKind.KEYED


def _is_above(part: SubtaskState, held: _Held) -> bool:
    """Returns whether the layers of a checkpoint are the copied layers, possibly with newer ones on top."""
    return part.layers[: len(held.layers)] == held.layers
