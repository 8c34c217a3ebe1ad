"""Writes snapshots (the asynchronous part): what was frozen becomes files, each written once and never changed.

Rules: states that belong to one checkpoint alone go into one file; what is put on the layers of keyed state goes into
another one, which later checkpoints refer to; files of backends go into folders. A snapshot that cannot be written
leaves nothing behind, as far as it can be deleted, and never touches a file of what it is built on.
"""

from __future__ import annotations

from functools import partial

from tidegate.actors.drivers.deletions import delete_files
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.task.checkpoints.snapshots import Written
from tidegate.actors.task.incremental.lineage import LAYERS_MAX
from tidegate.actors.task.messages import instructions as do
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import NativeState, StateHandle
from tidegate.storage.errors import StorageError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import AttemptNumber
from tidegate.storage.state.state_file import write_state
from tidegate.storage.subtasks.backend_files import write_native


def write_snapshot(store: Store, context: JobContext, task: TaskId, snapshot: do.PersistSnapshot) -> Written:
    """Store everything that a subtask has frozen. Raises StorageError."""
    layout, options, number = context.layout, context.options, snapshot.checkpoint_id
    known = {} if snapshot.base is None else {state.uid: state for state in snapshot.base.native}
    inline_bytes = options.inline_bytes_max
    handle: StateHandle | None = None
    layer: StateHandle | None = None
    native: list[NativeState] = []

    write = partial(write_state, store, compression=options.backend.compression)
    try:
        exclusive = [(s.uid, state) for s in snapshot.snapshots for state in s.states]
        handle = write(layout.state_file(number, task.vertex, task.subtask), exclusive, inline_bytes_max=inline_bytes)
        put = [(s.uid, state) for s in snapshot.snapshots for state in s.layer]
        # All layers of a stack together are no more in the metadata than one file may be.
        layer_path = layout.layer_file(number, task.vertex, task.subtask)
        layer = write(layer_path, put, inline_bytes_max=inline_bytes // LAYERS_MAX)
        for s in snapshot.snapshots:
            if s.native is not None:
                folder = layout.native_dir(number, task.vertex, task.subtask, s.uid)
                native.append(write_native(store, folder, s.native, known.get(s.uid)))
    except StorageError:
        delete_files(store, Written(handle, layer, tuple(native)).files(snapshot.base))
        raise
    finally:
        for s in snapshot.snapshots:
            if s.native is not None:
                s.native.release()
    return Written(handle, layer, tuple(native))


def write_segment(
    store: Store, context: JobContext, task: TaskId, attempt: AttemptNumber, segment: do.PersistSegment
) -> StateHandle | None:
    """Store what a subtask has frozen for its changelog; None if that is nothing. Raises StorageError."""
    path = context.layout.changelog_file(task.vertex, task.subtask, attempt, segment.number, segment.whole)
    put = [(s.uid, state) for s in segment.snapshots for state in (*s.states, *s.layer)]
    inline_bytes = context.options.inline_bytes_max // LAYERS_MAX
    return write_state(store, path, put, inline_bytes_max=inline_bytes, compression=context.options.backend.compression)
