"""`CheckpointConfig`: the settings of a job's checkpoints, state and failures.

A value is checked when the object is created. Settings that are unknown, given twice, or without effect because of
another setting raise an error.
"""

from __future__ import annotations

from typing import Literal

from tidegate.actors.coordinator.job_spec import ADOPTION_TIMEOUT_MS, DEPLOY_TIMEOUT_MS, STORAGE_OUTAGE_MS
from tidegate.actors.drivers.job_context import INTERVAL_MS, SLOT_REQUEST_TIMEOUT_MS, TIMEOUT_MS, HeartbeatSettings
from tidegate.actors.task.turn_pacer import DEBLOAT_TARGET_MS
from tidegate.api.config.setting import Section, setting
from tidegate.api.config.setting_kinds import (
    BACKEND,
    COMPRESSION,
    INTERVAL,
    INTERVAL_MS_MIN,
    NUMBER_OF_CHECKPOINTS,
    PLACE,
    STANDBYS,
    SWITCH,
    choice,
    duration,
    number,
    size,
)
from tidegate.state.common.options import CACHE_BYTES, MEMORY_BYTES, UNDO_BYTES
from tidegate.storage.checkpoints.lease import LEASE_MS_DEFAULT
from tidegate.storage.checkpoints.memory_limit import STATE_BYTES_MAX_DEFAULT
from tidegate.storage.state.rocksdb.tuning import BLOCK_BYTES, OPEN_FILES_MAX, THREADS
from tidegate.storage.state.state_file import INLINE_BYTES_MAX

HEARTBEAT_MS_MIN = 100
"""Shortest interval of heartbeats, in ms. With a shorter interval a busy machine would look like a hung process."""
LEASE_MS_MIN = 1_000
"""Shortest duration of the coordinator's lease, in ms. With a shorter duration a slow renewal would come too late."""
_TIMEOUT = duration(INTERVAL_MS_MIN)
_HEARTBEAT = duration(HEARTBEAT_MS_MIN)
_RETENTION_OF_FLINK = {
    "retain_on_failure": "to keep only the checkpoints of failed jobs write DELETE_ON_CANCELLATION",
    "never_retain_after_termination": "write NO_EXTERNALIZED_CHECKPOINTS",
}


class CheckpointConfig(Section):
    """When checkpoints are taken and how, where they are stored, and how many may fail.

    Durations are strings (`"10s"`, `"5min"`), timedeltas, or milliseconds as int. They are stored as milliseconds.
    Sizes are strings (`"20kb"`) or bytes as int. They are stored as bytes. Choices may be in capitals, as in Flink.
    Raises ConfigurationError for a wrong or unknown setting, and for two that contradict each other.
    """

    interval: int | None = setting(
        "execution.checkpointing.interval",
        kind=INTERVAL,
        default=None,
        doc="Milliseconds between two triggers, at least 10. None or 0 (kept as None): no periodic checkpoints.",
    )
    storage: str | None = setting(
        "state.checkpoints.dir",
        "execution.checkpointing.dir",
        kind=PLACE,
        default=None,
        doc="Folder or URL (`s3://bucket/ckpt`) under which each job has its folder.",
    )
    savepoints: str | None = setting(
        "state.savepoints.dir",
        "execution.checkpointing.savepoint-dir",
        kind=PLACE,
        default=None,
        doc="Folder or URL under which a savepoint gets its folder if its request names none.",
    )
    mode: Literal["exactly_once", "at_least_once"] = setting(
        "execution.checkpointing.mode",
        kind=choice("exactly_once", "at_least_once"),
        default="exactly_once",
        doc="With at_least_once no channel waits for another at a barrier: rows may count twice after a failure.",
    )
    timeout: int = setting(
        "execution.checkpointing.timeout",
        kind=_TIMEOUT,
        default=600_000,
        doc="Milliseconds after which an unfinished checkpoint, or the copy of a savepoint, is given up; at least 10.",
    )
    min_pause: int = setting(
        "execution.checkpointing.min-pause",
        kind=duration(),
        default=0,
        doc="Milliseconds between the end of a checkpoint and the next trigger; may exceed the interval.",
    )
    max_concurrent: int = setting(
        "execution.checkpointing.max-concurrent-checkpoints",
        kind=number("number of checkpoints"),
        default=1,
        doc="Checkpoints that may be in progress at the same time; at least 1.",
    )
    unaligned: bool = setting(
        "execution.checkpointing.unaligned",
        "execution.checkpointing.unaligned.enabled",
        kind=SWITCH,
        default=False,
        doc="Whether barriers may overtake the data in flight, which then belongs to the checkpoint.",
        more="checkpoints.md",
    )
    aligned_timeout: int = setting(
        "execution.checkpointing.aligned-checkpoint-timeout",
        kind=duration(),
        default=0,
        doc="Milliseconds after which an aligned checkpoint continues unaligned; 0: unaligned from the start.",
    )
    tolerable_failed_checkpoints: int = setting(
        "execution.checkpointing.tolerable-failed-checkpoints",
        kind=NUMBER_OF_CHECKPOINTS,
        default=0,
        doc="Checkpoints that may fail in a row before the job does.",
    )
    storage_outage: int = setting(
        "execution.checkpointing.storage-outage",
        kind=duration(),
        default=STORAGE_OUTAGE_MS,
        doc="Milliseconds for which the job continues while storage does not answer or is full; then it fails.",
    )
    num_retained: int = setting(
        "state.checkpoints.num-retained",
        "execution.checkpointing.num-retained",
        kind=number("number of checkpoints"),
        default=1,
        doc="Completed checkpoints to keep; at least 1.",
    )
    retention: Literal["retain_on_cancellation", "delete_on_cancellation", "no_externalized_checkpoints"] = setting(
        "execution.checkpointing.externalized-checkpoint-retention",
        kind=choice(
            "retain_on_cancellation",
            "delete_on_cancellation",
            "no_externalized_checkpoints",
            advice=_RETENTION_OF_FLINK,
        ),
        default="retain_on_cancellation",
        doc="Which jobs keep their retained checkpoints when they end: failed and cancelled ones, failed ones, or "
        "none.",
        more="configuration.md#retention",
    )
    inline_threshold: int = setting(
        "state.storage.fs.memory-threshold",
        "execution.checkpointing.data-inline-threshold",
        kind=size(),
        default=INLINE_BYTES_MAX,
        doc="State of a subtask up to this size goes into the checkpoint's metadata, and not into a file of its own.",
    )
    ignore_in_flight_of: int | None = setting(
        "execution.checkpointing.recover-without-channel-state.checkpoint-id",
        kind=number("number of a checkpoint (the N of chk-N)").or_none(),
        default=None,
        doc="Number of a checkpoint whose data in flight is not restored: that data is lost.",
    )
    history: int = setting(
        "web.checkpoints.history",
        kind=NUMBER_OF_CHECKPOINTS,
        default=10,
        doc="Checkpoints that the statistics keep in detail.",
    )
    keep_events: bool = setting(
        "jobmanager.keep-events",
        kind=SWITCH,
        default=False,
        doc="Whether all events of the job are kept, for `recovery.history`. Otherwise old ones are folded into a "
        "snapshot.",
        more="state-as-data.md",
    )
    backend: Literal["columnar", "rocksdb"] = setting(
        "state.backend",
        "state.backend.type",
        kind=BACKEND,
        default="columnar",
        doc='Where keyed state is kept while the job runs: in memory (`"hashmap"` is kept as `"columnar"`), or on '
        "local disk.",
    )
    incremental: bool = setting(
        "state.backend.incremental",
        "execution.checkpointing.incremental",
        kind=SWITCH,
        default=False,
        doc="Whether a checkpoint writes only the keyed state that has changed since the one before. With `rocksdb` it "
        "always does.",
        more="checkpoints.md",
    )
    changelog: bool = setting(
        "state.changelog.enabled",
        kind=SWITCH,
        default=False,
        doc="Whether changes of keyed state are written continuously, so that a checkpoint has little left to write. "
        "Implies `incremental`.",
    )
    compression: Literal["lz4", "zstd"] | None = setting(
        "execution.checkpointing.snapshot-compression",
        kind=COMPRESSION,
        default=None,
        doc='How state is compressed in checkpoints; True, as in Flink, is `"lz4"`.',
    )
    backend_memory: int = setting(
        "state.backend.rocksdb.memory.fixed-per-slot",
        kind=size(),
        default=MEMORY_BYTES,
        doc="Bytes that each operator of a subtask may use for the caches and buffers of a backend on disk; at least "
        "1 MiB.",
    )
    backend_cache: int = setting(
        "state.backend.rocksdb.row-cache-size",
        kind=size(),
        default=CACHE_BYTES,
        doc="Bytes of memory in front of a backend on disk, for each state of an operator of a subtask. They hold "
        "aggregates, windows, and the rows of joins and rankings with frequent keys, as columns. 0: each batch reads "
        "and writes its keys on disk.",
    )
    rocksdb_threads: int = setting(
        "state.backend.rocksdb.thread.num",
        kind=number(),
        default=THREADS,
        doc="Flushes and compactions of each RocksDB database that may run at the same time.",
    )
    rocksdb_write_buffer: int | None = setting(
        "state.backend.rocksdb.writebuffer.size",
        kind=size(1).or_none(),
        default=None,
        doc="Bytes that RocksDB collects before it writes a file, at most half of `backend_memory`. None: a sixth of "
        "that.",
    )
    rocksdb_block_size: int = setting(
        "state.backend.rocksdb.block.blocksize",
        kind=size(1),
        default=BLOCK_BYTES,
        doc="Bytes, approximately, that RocksDB reads, compresses and caches together; at most `backend_memory`.",
    )
    rocksdb_open_files: int = setting(
        "state.backend.rocksdb.files.open",
        kind=number(),
        default=OPEN_FILES_MAX,
        doc="Files that each RocksDB database keeps open.",
    )
    rewind_memory: int = setting(
        "state.backend.rewind-memory",
        kind=size(),
        default=UNDO_BYTES,
        doc="Bytes that each operator of a subtask may use to go back to a checkpoint in memory, in addition to what a "
        "snapshot holds until it is written. 0: it reads state again.",
        more="failures.md#what-survivors-do",
    )
    backend_directory: str | None = setting(
        "state.backend.rocksdb.localdir",
        kind=PLACE,
        default=None,
        doc="Local folder of each machine where a backend on disk works. None: a folder among its temporary files.",
    )
    local_copies: bool = setting(
        "state.backend.local-recovery",
        "execution.checkpointing.local-backup.enabled",
        kind=SWITCH,
        default=False,
        doc="Whether each task keeps a copy of its newest state on the local disk, to restore from it after a failure.",
    )
    local_directory: str | None = setting(
        "taskmanager.state.local.root-dirs",
        "execution.checkpointing.local-backup.dirs",
        kind=PLACE,
        default=None,
        doc="Local folder of each machine for these copies. None: a folder among its temporary files.",
    )
    checkpoint_storage: Literal["filesystem", "jobmanager"] = setting(
        "state.checkpoint-storage",
        "execution.checkpointing.storage",
        kind=choice("filesystem", "jobmanager"),
        default="filesystem",
        doc='With `"jobmanager"` state goes into the coordinator\'s memory (and metadata), up to `max_state_size`.',
        more="state.md#what-a-checkpoint-writes",
    )
    max_state_size: int = setting(
        "state.checkpoint-storage.jobmanager.max-state-size",
        # The coordinator holds the states of all subtasks, of all retained checkpoints.
        kind=size(1, 64 * 2**20, "; choose a file system for checkpoints"),
        default=STATE_BYTES_MAX_DEFAULT,
        doc='The most bytes of a file of state with `checkpoint_storage="jobmanager"`; from 1 to 64 MiB.',
    )
    debloat: bool = setting(
        "taskmanager.network.memory.buffer-debloat.enabled",
        kind=SWITCH,
        default=True,
        doc="Whether a slow task has only as much data in flight as it can process soon, so that barriers arrive.",
        more="batches.md#how-much-is-in-flight",
    )
    debloat_target: int = setting(
        "taskmanager.network.memory.buffer-debloat.target",
        # A receiver must not run dry before the sender gets its credit.
        kind=duration(10, ", or debloat: false"),
        default=DEBLOAT_TARGET_MS,
        doc="Milliseconds in which a task should be able to process the data in flight to it; at least 10.",
    )
    failover: Literal["region", "full"] = setting(
        "jobmanager.execution.failover-strategy",
        kind=choice("region", "full"),
        default="region",
        doc="What restarts when a task has failed: its pipelined region (all tasks that channels join to it), or the "
        "whole job.",
        more="recovery.md#what-restarts",
    )
    lease: int = setting(
        "high-availability.lease-duration",
        kind=duration(LEASE_MS_MIN),
        default=LEASE_MS_DEFAULT,
        doc="Milliseconds without a renewal after which the job counts as dead; at least 1,000.",
    )
    heartbeat_interval: int = setting(
        "heartbeat.interval",
        kind=_HEARTBEAT,
        default=INTERVAL_MS,
        doc="Milliseconds between two heartbeat requests to a process of the job; at least 100.",
        more="failures.md#processes-that-hang",
    )
    heartbeat_timeout: int = setting(
        "heartbeat.timeout",
        kind=_HEARTBEAT,
        default=TIMEOUT_MS,
        doc="Milliseconds without an answer before a process gets a second request, or counts as hung; more than the "
        "interval.",
    )
    call_timeout: int | None = setting(
        "task.call-timeout",
        kind=_HEARTBEAT.or_none(),
        default=None,
        doc="Milliseconds that one call of a task may take. None: half of `timeout`, and no limit without periodic "
        "checkpoints.",
    )
    takeover_timeout: int | None = setting(
        "jobmanager.takeover-timeout",
        kind=_HEARTBEAT.or_none(),
        default=ADOPTION_TIMEOUT_MS,
        doc="Milliseconds in which tasks have to answer the successor of a lost coordinator. None: all of them "
        "restart.",
        more="failures.md#the-coordinator-is-lost",
    )
    deploy_timeout: int = setting(
        "jobmanager.deploy-timeout",
        kind=_TIMEOUT,
        default=DEPLOY_TIMEOUT_MS,
        doc="Milliseconds in which all tasks of an attempt have to be ready: slots found, state read, functions open.",
        more="troubleshooting.md#it-is-never-ready",
    )
    standbys: int | Literal["auto", "warm"] | None = setting(
        "slotmanager.redundant-taskmanager-num",
        kind=STANDBYS,
        default=None,
        doc='Spare processes of the job. `"auto"`: as many as there is room for. `"warm"`: one more for each keyed '
        "task, which holds the state of that task. None: as in the environment.",
        more="failures.md#spare-processes",
    )
    slot_request_timeout: int = setting(
        "slot.request.timeout",
        kind=_TIMEOUT,
        default=SLOT_REQUEST_TIMEOUT_MS,
        doc="Milliseconds for which an attempt waits for slots of the cluster before it fails; at least 10.",
        more="failures.md#nodes-that-are-lost",
    )

    def check(self) -> None:
        """Raises SettingError for settings that contradict each other."""
        refuse = self.contradiction
        if self.unaligned and self.mode == "at_least_once":
            raise refuse("unaligned", "mode", "only exactly-once checkpoints can be unaligned; remove one of the two")
        if self.unaligned and self.max_concurrent > 1:
            raise refuse("unaligned", "max_concurrent", "unaligned checkpoints are taken one at a time; set it to 1")
        if self.max_concurrent > 1 and self.min_pause > 0:
            why = "with a pause between checkpoints there is one at a time; set max_concurrent to 1, or min_pause to 0"
            raise refuse("max_concurrent", "min_pause", why)
        if self.aligned_timeout > 0 and not self.unaligned:
            why = "a checkpoint whose alignment takes too long continues unaligned; enable that, or remove the timeout"
            raise refuse("aligned_timeout", "unaligned", why)
        if self.aligned_timeout >= self.timeout:
            why = "a checkpoint would be given up before it continues unaligned; make the first one shorter"
            raise refuse("aligned_timeout", "timeout", why)
        if self.local_directory is not None and not self.local_copies:
            raise refuse("local_directory", "local_copies", "no copies are made; enable them, or remove the folder")
        if self.max_state_size != STATE_BYTES_MAX_DEFAULT and self.checkpoint_storage != "jobmanager":
            why = "files of state have no limit; remove it, or choose 'jobmanager'"
            raise refuse("max_state_size", "checkpoint_storage", why)
        if self.debloat_target != DEBLOAT_TARGET_MS and not self.debloat:
            why = "without it all buffers are used, however slow a task is; enable it, or remove the time"
            raise refuse("debloat_target", "debloat", why)
        if self.heartbeat_interval >= self.heartbeat_timeout:
            why = "every process would count as hung before the next request; make the interval shorter"
            raise refuse("heartbeat_interval", "heartbeat_timeout", why)
        if self.slot_request_timeout != SLOT_REQUEST_TIMEOUT_MS and self.slot_request_timeout >= self.deploy_timeout:
            why = "the attempt would be given up before the wait for slots is over; make the second one longer"
            raise refuse("slot_request_timeout", "deploy_timeout", why)
        self._check_backend()
        if self.standbys == "warm" and self.backend == "columnar":
            self._check_warm_standbys()

    def _check_backend(self) -> None:
        refuse = self.contradiction
        if self.backend_directory is not None and self.backend != "rocksdb":
            why = "state in memory needs no folder; remove it, or use 'rocksdb'"
            raise refuse("backend_directory", "backend", why)
        for name in ("rocksdb_threads", "rocksdb_write_buffer", "rocksdb_block_size", "rocksdb_open_files"):
            if self.backend != "rocksdb" and getattr(self, name) != type(self).model_fields[name].default:
                raise refuse(name, "backend", "there is no RocksDB; remove it, or use 'rocksdb'")
        if self.rocksdb_write_buffer is not None and 2 * self.rocksdb_write_buffer > self.backend_memory:
            why = "write buffers may use half of it; make the buffer smaller, or the memory larger"
            raise refuse("rocksdb_write_buffer", "backend_memory", why)
        if self.rocksdb_block_size > self.backend_memory:
            why = "a block must fit into the cache; make the block smaller, or the memory larger"
            raise refuse("rocksdb_block_size", "backend_memory", why)

    def _check_warm_standbys(self) -> None:
        """Raises SettingError if another setting prevents a warm standby process from keeping the state of a task in
        memory.
        """
        refuse = self.contradiction
        if not self.incremental:
            why = "it would read the whole state at each checkpoint; enable incremental, or use 'auto'"
            raise refuse("standbys", "incremental", why)
        if self.changelog:
            why = "with a changelog a task cannot go back in memory; remove one of the two"
            raise refuse("standbys", "changelog", why)
        if not self.rewind_memory:
            why = "without this memory no state is held for a checkpoint; remove it, or use 'auto'"
            raise refuse("standbys", "rewind_memory", why)

    def heartbeats(self) -> HeartbeatSettings:
        """Returns the settings that decide when a process of the job is treated as hung.

        Without `call_timeout` a call may take half of a checkpoint's timeout. Barriers wait for the call, so a longer
        call would probably fail the checkpoint. Without periodic checkpoints no barrier waits, and calls have no time
        limit.
        """
        limit_ms = self.call_timeout
        if limit_ms is None and self.interval is not None:
            limit_ms = max(self.heartbeat_interval, self.timeout // 2)
        return HeartbeatSettings(self.heartbeat_interval, self.heartbeat_timeout, limit_ms)
