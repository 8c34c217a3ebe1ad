"""Names of the settings: in Python, and the keys that Flink users know."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from tidegate.storage.errors import ConfigurationError

KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "interval": ("execution.checkpointing.interval",),
        "storage": ("state.checkpoints.dir", "execution.checkpointing.dir"),
        "savepoints": ("state.savepoints.dir", "execution.checkpointing.savepoint-dir"),
        "mode": ("execution.checkpointing.mode",),
        "timeout": ("execution.checkpointing.timeout",),
        "min_pause": ("execution.checkpointing.min-pause",),
        "max_concurrent": ("execution.checkpointing.max-concurrent-checkpoints",),
        "unaligned": ("execution.checkpointing.unaligned", "execution.checkpointing.unaligned.enabled"),
        "aligned_timeout": ("execution.checkpointing.aligned-checkpoint-timeout",),
        "tolerable_failed": ("execution.checkpointing.tolerable-failed-checkpoints",),
        "storage_outage": ("execution.checkpointing.storage-outage",),
        "retained": ("state.checkpoints.num-retained", "execution.checkpointing.num-retained"),
        "retention": ("execution.checkpointing.externalized-checkpoint-retention",),
        "inline_bytes": ("state.storage.fs.memory-threshold", "execution.checkpointing.data-inline-threshold"),
        "ignore_in_flight_of": ("execution.checkpointing.recover-without-channel-state.checkpoint-id",),
        "history": ("web.checkpoints.history",),
        "backend": ("state.backend.type",),
        "incremental": ("state.backend.incremental", "execution.checkpointing.incremental"),
        "changelog": ("state.changelog.enabled",),
        "compression": ("execution.checkpointing.snapshot-compression",),
        "backend_memory": ("state.backend.rocksdb.memory.fixed-per-slot",),
        "undo_memory": ("state.backend.undo-memory",),
        "backend_directory": ("state.backend.rocksdb.localdir",),
        "local_copies": ("state.backend.local-recovery", "execution.checkpointing.local-backup.enabled"),
        "local_directory": ("taskmanager.state.local.root-dirs", "execution.checkpointing.local-backup.dirs"),
        "checkpoint_storage": ("state.checkpoint-storage", "execution.checkpointing.storage"),
        "debloat": ("taskmanager.network.memory.buffer-debloat.enabled",),
        "debloat_target": ("taskmanager.network.memory.buffer-debloat.target",),
        "failover": ("jobmanager.execution.failover-strategy",),
        "lease": ("high-availability.lease-duration",),
        "heartbeat_interval": ("heartbeat.interval",),
        "heartbeat_timeout": ("heartbeat.timeout",),
        "call_timeout": ("task.call-timeout",),
        "adoption_timeout": ("jobmanager.adoption-timeout",),
        "standbys": ("slotmanager.redundant-taskmanager-num",),
        "slot_request_timeout": ("slot.request.timeout",),
    }
)
"""Keys of each setting. Where there are two, the second is the one that Flink 2 documents; the older one holds too."""


def setting_keys(name: str) -> tuple[str, ...]:
    """Every key of the setting that Python knows as `name`; the older one first."""
    return KEYS[name]


def titled(name: str) -> str:
    """Name of a setting as people look for it: the Python name and the keys."""
    return f"{name} ({' or '.join(setting_keys(name))})"


def unknown_setting(name: str, known: Iterable[str]) -> ConfigurationError:
    """The error for a setting that is none of `known`. It names the nearest one."""

    def likeness(other: str) -> float:
        # People remember the last part of a key best, so it alone counts as much as the whole.
        parts = name.rpartition(".")[2].replace("_", "-"), other.rpartition(".")[2].replace("_", "-")
        return max(difflib.SequenceMatcher(None, name, other).ratio(), difflib.SequenceMatcher(None, *parts).ratio())

    return ConfigurationError(f"unknown setting {name!r}; the nearest known one is {max(known, key=likeness)!r}")
