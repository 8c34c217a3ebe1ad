"""What the tests of the configuration share: every setting with its keys, and a value that is not its default."""

from __future__ import annotations

KEYS: dict[str, tuple[str, ...]] = {
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
    "backend_directory": ("state.backend.rocksdb.localdir",),
    "local_copies": ("state.backend.local-recovery", "execution.checkpointing.local-backup.enabled"),
    "local_directory": ("taskmanager.state.local.root-dirs", "execution.checkpointing.local-backup.dirs"),
    "checkpoint_storage": ("state.checkpoint-storage", "execution.checkpointing.storage"),
    "debloat": ("taskmanager.network.memory.buffer-debloat.enabled",),
    "debloat_target": ("taskmanager.network.memory.buffer-debloat.target",),
    "lease": ("high-availability.lease-duration",),
}

GIVEN: dict[str, tuple[object, object]] = {
    "interval": ("1s", 1_000),
    "storage": ("s3://bucket/ckpt", "s3://bucket/ckpt"),
    "savepoints": ("s3://bucket/savepoints", "s3://bucket/savepoints"),
    "mode": ("AT_LEAST_ONCE", "at_least_once"),
    "timeout": ("2min", 120_000),
    "min_pause": ("250ms", 250),
    "max_concurrent": (3, 3),
    "unaligned": (True, True),
    "aligned_timeout": ("5s", 5_000),
    "tolerable_failed": (4, 4),
    "storage_outage": ("30s", 30_000),
    "retained": (7, 7),
    "retention": ("DELETE_ON_CANCELLATION", "delete_on_cancellation"),
    "inline_bytes": ("64kb", 65_536),
    "ignore_in_flight_of": (12, 12),
    "history": (50, 50),
    "backend": ("ROCKSDB", "rocksdb"),
    "incremental": (True, True),
    "changelog": (True, True),
    "compression": ("ZSTD", "zstd"),
    "backend_memory": ("256mb", 268_435_456),
    "backend_directory": ("/mnt/disk/state", "/mnt/disk/state"),
    "local_copies": (True, True),
    "local_directory": ("/mnt/disk/copies", "/mnt/disk/copies"),
    "checkpoint_storage": ("JOBMANAGER", "jobmanager"),
    "debloat": (False, False),
    "debloat_target": ("1s", 1_000),
    "lease": ("5s", 5_000),
}
"""Name to a value as people write it, and the value that is kept."""

NEEDS: dict[str, dict[str, object]] = {
    "aligned_timeout": {"unaligned": True},
    "backend_directory": {"backend": "rocksdb"},
    "local_directory": {"local_copies": True},
}
"""Settings that mean something only beside others."""
