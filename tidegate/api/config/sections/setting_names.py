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
        "tolerable_failed_checkpoints": ("execution.checkpointing.tolerable-failed-checkpoints",),
        "storage_outage": ("execution.checkpointing.storage-outage",),
        "retained": ("state.checkpoints.num-retained", "execution.checkpointing.num-retained"),
        "retention": ("execution.checkpointing.externalized-checkpoint-retention",),
        "inline_bytes": ("state.storage.fs.memory-threshold", "execution.checkpointing.data-inline-threshold"),
        "ignore_in_flight_of": ("execution.checkpointing.recover-without-channel-state.checkpoint-id",),
        "history": ("web.checkpoints.history",),
        "keep_events": ("jobmanager.keep-events",),
        "backend": ("state.backend", "state.backend.type"),
        "incremental": ("state.backend.incremental", "execution.checkpointing.incremental"),
        "changelog": ("state.changelog.enabled",),
        "compression": ("execution.checkpointing.snapshot-compression",),
        "backend_memory": ("state.backend.rocksdb.memory.fixed-per-slot",),
        "backend_cache": ("state.backend.rocksdb.row-cache-size",),
        "rocksdb_threads": ("state.backend.rocksdb.thread.num",),
        "rocksdb_write_buffer": ("state.backend.rocksdb.writebuffer.size",),
        "rocksdb_block_size": ("state.backend.rocksdb.block.blocksize",),
        "rocksdb_open_files": ("state.backend.rocksdb.files.open",),
        "undo_memory": ("state.backend.undo-memory",),
        "backend_directory": ("state.backend.rocksdb.localdir",),
        "local_copies": ("state.backend.local-recovery", "execution.checkpointing.local-backup.enabled"),
        "local_directory": ("taskmanager.state.local.root-dirs", "execution.checkpointing.local-backup.dirs"),
        "checkpoint_storage": ("state.checkpoint-storage", "execution.checkpointing.storage"),
        "state_size": ("state.checkpoint-storage.jobmanager.max-state-size",),
        "debloat": ("taskmanager.network.memory.buffer-debloat.enabled",),
        "debloat_target": ("taskmanager.network.memory.buffer-debloat.target",),
        "failover": ("jobmanager.execution.failover-strategy",),
        "lease": ("high-availability.lease-duration",),
        "heartbeat_interval": ("heartbeat.interval",),
        "heartbeat_timeout": ("heartbeat.timeout",),
        "call_timeout": ("task.call-timeout",),
        "adoption_timeout": ("jobmanager.adoption-timeout",),
        "deploy_timeout": ("jobmanager.deploy-timeout",),
        "standbys": ("slotmanager.redundant-taskmanager-num",),
        "slot_request_timeout": ("slot.request.timeout",),
        "name": ("pipeline.name",),
        "restore": ("execution.savepoint.path", "execution.state-recovery.path"),
        "allow_non_restored_state": (
            "execution.savepoint.ignore-unclaimed-state",
            "execution.state-recovery.ignore-unclaimed-state",
        ),
        "detached": ("execution.detached",),
        "progress": ("progress",),
        "local_aggregation": ("table.optimizer.agg-phase-strategy",),
        "slot_sharing": ("slot.sharing",),
        "channel_credit": ("taskmanager.network.memory.channel-credit",),
        "channel_queue": ("taskmanager.network.memory.channel-queue",),
        "channel_shared": ("taskmanager.network.memory.channel-shared",),
        "channel_socket": ("taskmanager.network.channel-socket.enabled",),
        "frame_bytes_min": ("taskmanager.network.frame.min-size",),
        "frame_bytes_max": ("taskmanager.network.frame.max-size",),
        "frame_elements": ("taskmanager.network.frame.max-elements",),
        "buffer_timeout": ("execution.buffer-timeout", "execution.buffer-timeout.interval"),
        "credit_probe": ("taskmanager.network.credit-probe-interval",),
        "window_min": ("taskmanager.network.memory.buffer-debloat.min-window",),
        "in_flight": ("execution.checkpointing.unaligned.max-in-flight",),
        "turn_rows": ("task.turn-rows",),
        "merged_rows": ("task.merged-rows",),
        "source_rows": ("task.source-batch-rows",),
        "changelog_segment": ("state.changelog.segment-size",),
        "log_level": ("log.level",),
        "log_levels": ("log.levels",),
        "log_format": ("log.format",),
        "log_rows": ("log.rows",),
        "web": ("rest.enabled",),
        "web_address": ("rest.address", "rest.bind-address"),
        "web_port": ("rest.port",),
        "target": ("execution.target",),
        "parallelism": ("parallelism.default",),
        "max_parallelism": ("pipeline.max-parallelism",),
        "address": ("ray.address",),
        "slots": ("ray.slots",),
        "placement": ("ray.placement",),
        "include_dashboard": ("ray.include-dashboard",),
        "object_store_memory": ("ray.object-store-memory",),
        "ray_options": ("ray.options",),
        "cluster_options": ("ray.cluster-options",),
        "executors": ("spark.executor.instances",),
        "executor_cores": ("spark.executor.cores",),
        "executor_memory": ("spark.executor.memory",),
        "slots_per_executor": ("taskmanager.numberOfTaskSlots",),
        "app_name": ("spark.app.name",),
        "spark_configs": ("spark",),
    }
)
"""Keys of each setting. Where there are two, the second is the one that Flink 2 documents; the older one holds too."""

NAME_OF: Mapping[str, str] = MappingProxyType({key: name for name, keys in KEYS.items() for key in keys})
"""The setting that each key belongs to."""

OPEN = ("log.levels", "ray.options", "ray.cluster-options", "spark")
"""Keys of settings that hold others under names that are not tidegate's: any key below is one of these."""

VARIABLE_PREFIX = "TIDEGATE_"


def variable_of(key: str) -> str:
    """The variable of the environment that gives a key: `TIDEGATE_STATE_CHECKPOINTS_DIR`."""
    return VARIABLE_PREFIX + key.upper().replace(".", "_").replace("-", "_")


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
