"""Opens the backend that a job is configured to use. `make_backend` in `operator_backend.py` calls it."""

from __future__ import annotations

import os

from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.common.backend import KeyedBackend
from tidegate.state.common.options import BackendPlace, StateBackendOptions
from tidegate.storage.checkpoints.layout import escape
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import need
from tidegate.storage.ids import OperatorUid


def open_backend(options: StateBackendOptions, place: BackendPlace) -> KeyedBackend:
    """Opens a backend for the keyed state of one operator in one subtask. It is empty, or has the state in the files of
    its folder.
    """
    if options.kind == "columnar":
        # With a changelog, freezes are for segments and not for checkpoints, so there is nothing to go back to.
        undo_bytes = 0 if options.changelog else options.undo_bytes
        return ColumnarBackend(
            place.max_parallelism,
            place.key_names,
            options.incremental,
            undo_bytes,
            options.restore_threads,
            place.namespace,
        )
    if options.directory is None:
        raise ConfigurationError(
            "the rocksdb state backend needs a local folder, which this runtime does not provide; use the columnar "
            "backend"
        )
    need("the rocksdb backend", "rocksdb")
    # Imported late: a job with state in memory should not pay for loading RocksDB.
    from tidegate.state.rocksdb.rocksdb_backend import RocksBackend

    folder = backend_folder(options.directory, place.uid)
    # A segment of a changelog has what was written to the database. With rows in memory, each would first write them.
    cache_bytes = 0 if options.changelog else options.cache_bytes
    return RocksBackend(place, folder, options.memory_bytes, options.changelog, cache_bytes, options.database)


def backend_folder(directory: str, uid: OperatorUid) -> str:
    """Returns the folder in which an operator's backend stores its files.

    A restore puts the files of the checkpoint there first.
    """
    return os.path.join(directory, escape(uid))
