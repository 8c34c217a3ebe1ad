"""Opens RocksDB databases, and says what went wrong in words of tidegate.

Rules: there is no write-ahead log, because checkpoints are what is durable; block cache and write buffers of a database
share one bound of memory; every fault of RocksDB comes out as a StorageError that names the folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import rocksdict

from tidegate.storage.errors import CorruptionError, StorageError
from tidegate.storage.rocksdb.tuning import DatabaseTuning

MEMORY_BYTES_MIN = 1024 * 1024
_FILE_BYTES = 32 * 1024 * 1024
_LOG_BYTES_MAX = 1024 * 1024
_MANIFEST_BYTES_MAX = 1024 * 1024
"""It is written with every checkpoint; RocksDB begins a new one where it would grow beyond this."""
_BLOOM_BITS = 10
_TUNING = DatabaseTuning()


@contextmanager
def reported(what: str, folder: str) -> Iterator[None]:
    """Faults of RocksDB in the body as StorageError, damaged files as CorruptionError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {what} in the local folder {folder}: {error}{_advice(str(error))}") from error
    except Exception as error:
        # RocksDB's faults have no class of their own: anything else that was raised is none of them.
        if type(error) is not Exception and not isinstance(error, rocksdict.DbClosedError):
            raise
        kind = CorruptionError if str(error).startswith("Corruption") else StorageError
        raise kind(f"cannot {what} in the local folder {folder}: {error}{_advice(str(error))}") from error


def open_database(folder: str, memory_bytes: int, tuning: DatabaseTuning = _TUNING) -> rocksdict.Rdict:
    """The database in a folder, made if there is none; it keeps up to about `memory_bytes` in memory.

    Raises StorageError for a folder that cannot be used, CorruptionError for files that are damaged.
    """
    options = _options(memory_bytes, tuning)
    options.create_if_missing(True)
    with reported("open RocksDB", folder):
        database = rocksdict.Rdict(folder, options)
        database.set_write_options(unlogged())
    return database


def room_beside(memory_bytes: int, tuning: DatabaseTuning = _TUNING) -> int:
    """So much may be in the memory that RocksDB writes to, and it is sure not to make a file of it by itself.

    It does if its write buffer is full, or if all of them are and this one has a quarter of the memory.
    """
    memory_bytes = max(memory_bytes, MEMORY_BYTES_MIN)
    return min(write_buffer_bytes(memory_bytes, tuning) * 3 // 4, memory_bytes // 5)


def open_files(folder: str, memory_bytes: int) -> rocksdict.Rdict:
    """A stored database, to be read only; files that are missing are noticed when they are read.

    Raises StorageError, CorruptionError.
    """
    options = _options(memory_bytes, _TUNING)
    options.set_paranoid_checks(False)
    with reported("open RocksDB files", folder):
        return rocksdict.Rdict(folder, options, access_type=rocksdict.AccessType.read_only(False))


def fetch(database: rocksdict.Rdict, keys: Sequence[bytes], folder: str) -> list[bytes | None]:
    """The values of some keys, None where there is none. Raises StorageError, CorruptionError."""
    with reported("read RocksDB", folder):
        found: list[bytes | None] | None = database.get(list(keys))
    assert found is not None
    return found


def unlogged() -> rocksdict.WriteOptions:
    """How everything is written: without a write-ahead log."""
    options = rocksdict.WriteOptions()
    options.disable_wal = True  # type: ignore[method-assign,assignment]  # a property; its stub says otherwise
    return options


def moved() -> rocksdict.IngestExternalFileOptions:
    """How files are taken in: they become files of the database, without a copy."""
    options = rocksdict.IngestExternalFileOptions()
    options.set_move_files(True)
    return options


def write_buffer_bytes(memory_bytes: int, tuning: DatabaseTuning) -> int:
    """So much is collected in memory before it becomes a file."""
    memory_bytes = max(memory_bytes, MEMORY_BYTES_MIN)
    return tuning.write_buffer_bytes or max(MEMORY_BYTES_MIN // 2, memory_bytes // 6)


def _options(memory_bytes: int, tuning: DatabaseTuning) -> rocksdict.Options:
    memory_bytes = max(memory_bytes, MEMORY_BYTES_MIN)
    # Its readers take no lock. Blocks are of many sizes, so it finds out itself how many entries it has.
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
    # One is being written to, one waits for its file, and a snapshot may hand over a third without waiting.
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
        return ". It cannot be written to: set the local folder to one that can"
    return ""
