"""Opens the backend that a job asks for. Operators call it through `make_backend` in `operator_backend.py`."""

from __future__ import annotations

import os

from tidegate.actors.state_backends.columnar.columnar_backend import ColumnarBackend
from tidegate.actors.state_backends.common.backend import KeyedBackend
from tidegate.actors.state_backends.common.options import BackendPlace, StateBackendOptions
from tidegate.storage.checkpoints.layout import escape
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid


def open_backend(options: StateBackendOptions, place: BackendPlace) -> KeyedBackend:
    """The keyed state of one operator in one subtask, empty."""
    if options.kind == "columnar":
        # With a changelog it is frozen for segments of that, and not for checkpoints.
        undo_bytes = 0 if options.changelog else options.undo_bytes
        return ColumnarBackend(
            place.max_parallelism, place.key_names, options.incremental, undo_bytes, options.restore_threads
        )
    if options.directory is None:
        raise ConfigurationError("the rocksdb backend needs a local folder to work in; this runtime has none")
    # Imported late: a job in memory does not pay for loading RocksDB.
    from tidegate.actors.state_backends.rocksdb.rocksdb_backend import RocksBackend

    folder = backend_folder(options.directory, place.uid)
    return RocksBackend(place, folder, options.memory_bytes, keeps_changes=options.changelog)


def backend_folder(directory: str, uid: OperatorUid) -> str:
    """Where the backend of an operator works, and expects the files with which it is to go on."""
    return os.path.join(directory, escape(uid))
