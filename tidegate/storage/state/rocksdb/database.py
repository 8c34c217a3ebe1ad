"""Opens RocksDB databases with their options, and converts errors of RocksDB to errors of tidegate.

Rules: there is no write-ahead log, because checkpoints make state durable. The block cache and the write buffers of a
database share one memory limit. Every fault of RocksDB is raised as a StorageError that names the folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import rocksdict

from tidegate.storage.errors import CorruptionError, StorageError
from tidegate.storage.state.rocksdb.tuning import DatabaseTuning
from tidegate.storage.state.rocksdb.value_layout import HEAD

MEMORY_BYTES_MIN = 1024 * 1024
_FILE_BYTES = 32 * 1024 * 1024
_LOG_BYTES_MAX = 1024 * 1024
_MANIFEST_BYTES_MAX = 1024 * 1024
"""Size in bytes at which RocksDB starts a new manifest. A manifest grows with every checkpoint."""
_BLOOM_BITS = 10
_TUNING = DatabaseTuning()


@contextmanager
def reported(what: str, folder: str) -> Iterator[None]:
    """Returns a context that converts errors of RocksDB to StorageError, or to CorruptionError for damaged files.

    `what` names the operation, for the error text.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {what} in the local folder {folder}: {error}{_advice(str(error))}") from error
    except Exception as error:
        # RocksDB raises plain `Exception`. An exception of any other class does not come from RocksDB.
        if type(error) is not Exception and not isinstance(error, rocksdict.DbClosedError):
            raise
        kind = CorruptionError if str(error).startswith("Corruption") else StorageError
        raise kind(f"cannot {what} in the local folder {folder}: {error}{_advice(str(error))}") from error


def open_database(folder: str, memory_bytes: int, tuning: DatabaseTuning = _TUNING) -> rocksdict.Rdict:
    """Opens the database in a folder, or creates the database. RocksDB uses at most about `memory_bytes` of memory.

    Raises StorageError for a folder that cannot be used, CorruptionError for files that are damaged.
    """
    options = _options(memory_bytes, tuning)
    options.create_if_missing(True)
    with reported("open RocksDB", folder):
        database = rocksdict.Rdict(folder, options)
        database.set_write_options(unlogged_writes())
    return database


def unflushed_bytes_max(memory_bytes: int, tuning: DatabaseTuning = _TUNING) -> int:
    """Returns how many bytes can be written to the active write buffer before RocksDB starts a flush by itself.

    RocksDB flushes a buffer when it is full, or when all buffers together are full and this one has a quarter of the
    memory.
    """
    memory_bytes = max(memory_bytes, MEMORY_BYTES_MIN)
    return min(write_buffer_bytes(memory_bytes, tuning) * 3 // 4, memory_bytes // 5)


def open_files(folder: str, memory_bytes: int) -> rocksdict.Rdict:
    """Opens a stored database read-only. A missing file raises an error only when it is read.

    A prefix of keys, for cursors that stop at its end, is a key group with the number of a state.

    Raises StorageError, CorruptionError.
    """
    options = _options(memory_bytes, _TUNING)
    options.set_paranoid_checks(False)
    options.set_prefix_extractor(rocksdict.SliceTransform.create_fixed_prefix(HEAD.size))
    with reported("open RocksDB files", folder):
        return rocksdict.Rdict(folder, options, access_type=rocksdict.AccessType.read_only(False))


def fetch(database: rocksdict.Rdict, keys: Sequence[bytes], folder: str) -> list[bytes | None]:
    """Returns the values of keys, with None for each key that does not exist. Raises StorageError, CorruptionError."""
    with reported("read RocksDB", folder):
        found: list[bytes | None] | None = database.get(list(keys))
    assert found is not None
    return found


def unlogged_writes() -> rocksdict.WriteOptions:
    """Returns the RocksDB options of all writes, which disable the write-ahead log."""
    options = rocksdict.WriteOptions()
    options.disable_wal = True  # type: ignore[method-assign,assignment]  # a property, which the stub declares as a method
    return options


def moved_files() -> rocksdict.IngestExternalFileOptions:
    """Returns the RocksDB options for ingesting files, which move the files into the database instead of copying
    them.
    """
    options = rocksdict.IngestExternalFileOptions()
    options.set_move_files(True)
    return options


def write_buffer_bytes(memory_bytes: int, tuning: DatabaseTuning) -> int:
    """Returns the size in bytes of a write buffer, which RocksDB writes to a file when it is full."""
    memory_bytes = max(memory_bytes, MEMORY_BYTES_MIN)
    return tuning.write_buffer_bytes or max(MEMORY_BYTES_MIN // 2, memory_bytes // 6)


def _options(memory_bytes: int, tuning: DatabaseTuning) -> rocksdict.Options:
    memory_bytes = max(memory_bytes, MEMORY_BYTES_MIN)
    # Readers of this cache take no lock. 0: it estimates the size of an entry by itself, because sizes of blocks vary.
    cache = rocksdict.Cache.new_hyper_clock_cache(memory_bytes, 0)
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(cache)
    blocks.set_block_size(tuning.block_bytes)
    blocks.set_bloom_filter(_BLOOM_BITS, False)
    blocks.set_cache_index_and_filter_blocks(True)
    blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
    blocks.set_checksum_type(rocksdict.ChecksumType.xxh3())
    options = rocksdict.Options(raw_mode=True)
    options.set_block_based_table_factory(blocks)
    # Write buffers are charged to the cache: together they stay within the bound.
    options.set_write_buffer_manager(
        rocksdict.WriteBufferManager.new_write_buffer_manager_with_cache(memory_bytes // 2, False, cache)
    )
    options.set_write_buffer_size(write_buffer_bytes(memory_bytes, tuning))
    # One buffer is written to, one is being flushed, and a snapshot can flush a third without waiting.
    options.set_max_write_buffer_number(3)
    options.set_max_background_jobs(tuning.threads)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_target_file_size_base(_FILE_BYTES)
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_max_open_files(tuning.open_files_max)
    options.set_max_manifest_file_size(_MANIFEST_BYTES_MAX)
    options.set_max_log_file_size(_LOG_BYTES_MAX)
    options.set_keep_log_file_num(2)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options


def _advice(fault: str) -> str:
    if "No space left" in fault:
        return ". The disk is full: free some space, or set the local folder to a larger disk"
    if "Read-only file system" in fault or "Permission denied" in fault:
        return ". The folder is not writable: set the local folder to a writable one"
    return ""
