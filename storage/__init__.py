"""Where bytes rest: stores, checkpoint layout and metadata, state files, the event log, output tables.

Everything here is about bytes and names; nothing knows of actors, Spark or graphs. Every file is checksummed,
every conditional create decides something exactly once, and every fault of the storage is a StorageError.
"""

from __future__ import annotations

from tidegate.storage.create_check import check_conditional_create
from tidegate.storage.errors import (
    AlreadyExistsError,
    CodecError,
    ConfigurationError,
    CorruptionError,
    FencedError,
    NotFoundError,
    StorageError,
    TableError,
    TidegateError,
)
from tidegate.storage.event_log import EventLog, LogEntry
from tidegate.storage.filesystem import FileSystemStore, open_store
from tidegate.storage.layout import CheckpointLayout, parse_pointer
from tidegate.storage.metadata import CheckpointMetadata, DataFile, StateHandle, StateKind
from tidegate.storage.metadata_file import create_metadata, read_metadata
from tidegate.storage.state import StateTable
from tidegate.storage.state_directory import read_footer
from tidegate.storage.state_file import read_state, write_state
from tidegate.storage.store import Store
from tidegate.storage.table_files import VERSION_COLUMN, delete_unreferenced, read_table, write_data_file
from tidegate.storage.table_log import TableEntry, TableInfo, TableLog, TableSnapshot
from tidegate.storage.units import parse_duration_ms, parse_size_bytes
from tidegate.storage.verification import verify_state

__all__ = [
    "VERSION_COLUMN",
    "AlreadyExistsError",
    "CheckpointLayout",
    "CheckpointMetadata",
    "CodecError",
    "ConfigurationError",
    "CorruptionError",
    "DataFile",
    "EventLog",
    "FencedError",
    "FileSystemStore",
    "LogEntry",
    "NotFoundError",
    "StateHandle",
    "StateKind",
    "StateTable",
    "StorageError",
    "Store",
    "TableEntry",
    "TableError",
    "TableInfo",
    "TableLog",
    "TableSnapshot",
    "TidegateError",
    "check_conditional_create",
    "create_metadata",
    "delete_unreferenced",
    "open_store",
    "parse_duration_ms",
    "parse_pointer",
    "parse_size_bytes",
    "read_footer",
    "read_metadata",
    "read_state",
    "read_table",
    "verify_state",
    "write_data_file",
    "write_state",
]
