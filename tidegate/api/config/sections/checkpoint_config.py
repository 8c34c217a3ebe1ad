"""`CheckpointConfig`: settings of a job's checkpoints, under Python names and under the keys that Flink users know.

Rules:

- A value is checked where it is given, so a job never starts with one that it cannot keep.
- Nothing is ignored silently: a setting that is unknown, doubled, or pointless because of another one is refused.
- Every refusal is a ConfigurationError.
- A setting that Flink has under two keys is known under both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tidegate.actors.coordinator.job.job_spec import ADOPTION_TIMEOUT_MS, DEPLOY_TIMEOUT_MS
from tidegate.actors.coordinator.job.outages import STORAGE_OUTAGE_MS
from tidegate.actors.drivers.heartbeat_settings import INTERVAL_MS, TIMEOUT_MS
from tidegate.actors.drivers.process_settings import SLOT_REQUEST_TIMEOUT_MS
from tidegate.actors.task.channels.output_gate import DEBLOAT_TARGET_MS
from tidegate.api.config.sections import setting_values as of
from tidegate.api.config.sections.section import Section, SettingError
from tidegate.api.config.sections.setting_names import KEYS
from tidegate.state.common.options import CACHE_BYTES, MEMORY_BYTES, UNDO_BYTES
from tidegate.storage.checkpoints.lease import LEASE_MS_DEFAULT
from tidegate.storage.checkpoints.memory_limit import STATE_BYTES_MAX_DEFAULT
from tidegate.storage.rocksdb.tuning import BLOCK_BYTES, OPEN_FILES_MAX, THREADS
from tidegate.storage.state.state_file import INLINE_BYTES_MAX


class CheckpointConfig(Section):
    """When checkpoints are taken and how, where they are stored, and how many may fail.

    Durations are strings (`"10s"`, `"5min"`), timedeltas, or milliseconds as int; kept as milliseconds.
    Sizes are strings (`"20kb"`) or bytes as int; kept as bytes. Choices may be in capitals, as Flink has them.
    Raises ConfigurationError for a wrong or unknown setting, and for two that contradict each other.
    """

    interval: Annotated[int | None, BeforeValidator(of.interval)] = Field(default=None, alias=KEYS["interval"][0])
    """Milliseconds between two triggers. None, or below 10 ms (kept as None): no periodic checkpoints."""

    storage: Annotated[str | None, BeforeValidator(of.place)] = Field(default=None, alias=KEYS["storage"][0])
    """Folder or URL (`s3://bucket/ckpt`) under which each job has its folder."""

    savepoints: Annotated[str | None, BeforeValidator(of.place)] = Field(default=None, alias=KEYS["savepoints"][0])
    """Folder or URL under which a savepoint gets its folder when none is named with the request."""

    mode: Annotated[Literal["exactly_once", "at_least_once"], BeforeValidator(of.mode)] = Field(
        default="exactly_once", alias=KEYS["mode"][0]
    )
    """With at_least_once no channel waits for another at a barrier: rows may count twice after a failure."""

    timeout: Annotated[int, BeforeValidator(of.timeout)] = Field(default=600_000, alias=KEYS["timeout"][0])
    """Milliseconds after which an unfinished checkpoint, or the copy of a savepoint, is given up; at least 10."""

    min_pause: Annotated[int, BeforeValidator(of.duration)] = Field(default=0, alias=KEYS["min_pause"][0])
    """Milliseconds between the end of a checkpoint and the next trigger; may exceed the interval."""

    max_concurrent: Annotated[int, BeforeValidator(of.at_least_one)] = Field(default=1, alias=KEYS["max_concurrent"][0])
    """Checkpoints that may be under way at the same time; at least 1."""

    unaligned: Annotated[bool, BeforeValidator(of.switch)] = Field(default=False, alias=KEYS["unaligned"][0])
    """Whether barriers may overtake the data in flight, which then belongs to the checkpoint."""

    aligned_timeout: Annotated[int, BeforeValidator(of.duration)] = Field(default=0, alias=KEYS["aligned_timeout"][0])
    """Milliseconds after which an aligned checkpoint continues unaligned; 0: unaligned from the start."""

    tolerable_failed_checkpoints: Annotated[int, BeforeValidator(of.any_number)] = Field(
        default=0, alias=KEYS["tolerable_failed_checkpoints"][0]
    )
    """Checkpoints that may fail in a row before the job does."""

    storage_outage: Annotated[int, BeforeValidator(of.duration)] = Field(
        default=STORAGE_OUTAGE_MS, alias=KEYS["storage_outage"][0]
    )
    """Milliseconds that the job continues while storage does not answer or takes nothing; then it fails."""

    retained: Annotated[int, BeforeValidator(of.at_least_one)] = Field(default=1, alias=KEYS["retained"][0])
    """Completed checkpoints to keep; at least 1."""

    retention: Annotated[
        Literal["retain_on_cancellation", "delete_on_cancellation", "no_externalized_checkpoints"],
        BeforeValidator(of.retention),
    ] = Field(default="retain_on_cancellation", alias=KEYS["retention"][0])
    """Of which jobs the retained checkpoints stay: those that failed or were cancelled; those that failed; neither."""

    inline_bytes: Annotated[int, BeforeValidator(of.size)] = Field(
        default=INLINE_BYTES_MAX, alias=KEYS["inline_bytes"][0]
    )
    """State of a subtask up to this size goes into the checkpoint's metadata, not into a file of its own."""

    ignore_in_flight_of: Annotated[int | None, BeforeValidator(of.checkpoint_id)] = Field(
        default=None, alias=KEYS["ignore_in_flight_of"][0]
    )
    """Number of a checkpoint whose data in flight is left out when it is restored: that data is lost."""

    history: Annotated[int, BeforeValidator(of.any_number)] = Field(default=10, alias=KEYS["history"][0])
    """Checkpoints that the statistics keep in detail."""

    keep_events: Annotated[bool, BeforeValidator(of.switch)] = Field(default=False, alias=KEYS["keep_events"][0])
    """Whether all events of the job are kept, for `recovery.history`. Else old ones are folded into a snapshot."""

    backend: Annotated[Literal["columnar", "rocksdb"], BeforeValidator(of.backend)] = Field(
        default="columnar", alias=KEYS["backend"][0]
    )
    """Where keyed state lives while the job runs: in memory (`"hashmap"` is kept as `"columnar"`), or on local disk."""

    incremental: Annotated[bool, BeforeValidator(of.switch)] = Field(default=False, alias=KEYS["incremental"][0])
    """Whether a checkpoint writes only the keyed state that has changed since the one before it. With `rocksdb` it
    does in any case."""

    changelog: Annotated[bool, BeforeValidator(of.switch)] = Field(default=False, alias=KEYS["changelog"][0])
    """Whether changes of keyed state are written all the time, so that little is left to write at a checkpoint. Implies
    `incremental`."""

    compression: Annotated[Literal["lz4", "zstd"] | None, BeforeValidator(of.compression)] = Field(
        default=None, alias=KEYS["compression"][0]
    )
    """How state is compressed in checkpoints; True, as in Flink, is `"lz4"`."""

    backend_memory: Annotated[int, BeforeValidator(of.size)] = Field(
        default=MEMORY_BYTES, alias=KEYS["backend_memory"][0]
    )
    """Bytes that each operator of a subtask may use for the caches and buffers of a backend on disk; at least 1 MiB."""

    backend_cache: Annotated[int, BeforeValidator(of.size)] = Field(default=CACHE_BYTES, alias=KEYS["backend_cache"][0])
    """Bytes that each state of an operator of a subtask may use to keep aggregates, windows, and the rows of joins and
    rankings whose keys come often in memory, as columns, in front of a backend on disk. 0: each batch reads and writes
    its keys there."""

    rocksdb_threads: Annotated[int, BeforeValidator(of.positive)] = Field(
        default=THREADS, alias=KEYS["rocksdb_threads"][0]
    )
    """Flushes and compactions of each database of RocksDB that may run at the same time."""

    rocksdb_write_buffer: Annotated[int | None, BeforeValidator(of.optional_size)] = Field(
        default=None, alias=KEYS["rocksdb_write_buffer"][0]
    )
    """Bytes that RocksDB collects before it writes a file, at most half of `backend_memory`. None: a sixth of that."""

    rocksdb_block_size: Annotated[int, BeforeValidator(of.positive_size)] = Field(
        default=BLOCK_BYTES, alias=KEYS["rocksdb_block_size"][0]
    )
    """Bytes, about, that RocksDB reads, compresses and caches together; at most `backend_memory`."""

    rocksdb_open_files: Annotated[int, BeforeValidator(of.positive)] = Field(
        default=OPEN_FILES_MAX, alias=KEYS["rocksdb_open_files"][0]
    )
    """Files that each database of RocksDB keeps open."""

    undo_memory: Annotated[int, BeforeValidator(of.size)] = Field(default=UNDO_BYTES, alias=KEYS["undo_memory"][0])
    """Bytes that each operator of a subtask may use to go back to a checkpoint in memory, beside what a snapshot holds
    until it is written. 0: it reads state again."""

    backend_directory: Annotated[str | None, BeforeValidator(of.place)] = Field(
        default=None, alias=KEYS["backend_directory"][0]
    )
    """Local folder of each machine where a backend on disk works. None: a folder among its temporary files."""

    local_copies: Annotated[bool, BeforeValidator(of.switch)] = Field(default=False, alias=KEYS["local_copies"][0])
    """Whether each task keeps a copy of its newest state on the local disk, to restore from that after a failure."""

    local_directory: Annotated[str | None, BeforeValidator(of.place)] = Field(
        default=None, alias=KEYS["local_directory"][0]
    )
    """Local folder of each machine for these copies. None: a folder among its temporary files."""

    checkpoint_storage: Annotated[Literal["filesystem", "jobmanager"], BeforeValidator(of.checkpoint_storage)] = Field(
        default="filesystem", alias=KEYS["checkpoint_storage"][0]
    )
    """`"jobmanager"`: state goes into the coordinator's memory (and metadata), so much of it as `state_size` allows."""

    state_size: Annotated[int, BeforeValidator(of.state_size)] = Field(
        default=STATE_BYTES_MAX_DEFAULT, alias=KEYS["state_size"][0]
    )
    """Bytes that each file of state may have with `checkpoint_storage="jobmanager"`; from 1 to 64 MiB."""

    debloat: Annotated[bool, BeforeValidator(of.switch)] = Field(default=True, alias=KEYS["debloat"][0])
    """Whether a slow task has only so much data in flight to it as it can process soon, so that barriers arrive."""

    debloat_target: Annotated[int, BeforeValidator(of.debloat_target)] = Field(
        default=DEBLOAT_TARGET_MS, alias=KEYS["debloat_target"][0]
    )
    """Milliseconds that a task should need for what is in flight to it; at least 10."""

    failover: Annotated[Literal["region", "full"], BeforeValidator(of.failover)] = Field(
        default="region", alias=KEYS["failover"][0]
    )
    """What restarts when a task has failed: its pipelined region (all that channels join to it), or the whole job."""

    lease: Annotated[int, BeforeValidator(of.lease)] = Field(default=LEASE_MS_DEFAULT, alias=KEYS["lease"][0])
    """Milliseconds without a sign of life after which the job counts as dead; at least 1,000."""

    heartbeat_interval: Annotated[int, BeforeValidator(of.heartbeat)] = Field(
        default=INTERVAL_MS, alias=KEYS["heartbeat_interval"][0]
    )
    """Milliseconds between two questions to a process of the job whether it lives; at least 100."""

    heartbeat_timeout: Annotated[int, BeforeValidator(of.heartbeat)] = Field(
        default=TIMEOUT_MS, alias=KEYS["heartbeat_timeout"][0]
    )
    """Milliseconds without an answer before a process is asked once more, or counts as hung; more than the interval."""

    call_timeout: Annotated[int | None, BeforeValidator(of.call_timeout)] = Field(
        default=None, alias=KEYS["call_timeout"][0]
    )
    """Milliseconds that one call of a task may take. None: half of `timeout`, no limit without periodic checkpoints."""

    adoption_timeout: Annotated[int | None, BeforeValidator(of.call_timeout)] = Field(
        default=ADOPTION_TIMEOUT_MS, alias=KEYS["adoption_timeout"][0]
    )
    """Milliseconds in which tasks have to answer the successor of a lost coordinator. None: all of them start anew."""

    deploy_timeout: Annotated[int, BeforeValidator(of.timeout)] = Field(
        default=DEPLOY_TIMEOUT_MS, alias=KEYS["deploy_timeout"][0]
    )
    """Milliseconds in which all tasks of an attempt have to be ready: room found, state read, functions open."""

    standbys: Annotated[int | Literal["auto", "warm"] | None, BeforeValidator(of.standbys)] = Field(
        default=None, alias=KEYS["standbys"][0]
    )
    """Spare processes of the job. `"auto"`: as many as there is room for. `"warm"`: one more for each keyed task, which
    holds that task's state. None: as the environment says."""

    slot_request_timeout: Annotated[int, BeforeValidator(of.timeout)] = Field(
        default=SLOT_REQUEST_TIMEOUT_MS, alias=KEYS["slot_request_timeout"][0]
    )
    """Milliseconds that an attempt waits for room in the cluster before it fails; at least 10."""

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        _check_together(self)


def _check_together(config: CheckpointConfig) -> None:
    """Refuse settings that contradict each other."""
    refuse = config.contradiction
    if config.unaligned and config.mode == "at_least_once":
        raise refuse("unaligned", "mode", "only exactly-once checkpoints can be unaligned; give up one of the two")
    if config.unaligned and config.max_concurrent > 1:
        raise refuse("unaligned", "max_concurrent", "unaligned checkpoints are taken one at a time; set it to 1")
    if config.max_concurrent > 1 and config.min_pause > 0:
        why = "with a pause between checkpoints there is one at a time; set max_concurrent to 1, or min_pause to 0"
        raise refuse("max_concurrent", "min_pause", why)
    if config.aligned_timeout > 0 and not config.unaligned:
        why = "an alignment that takes too long continues unaligned; switch that on, or leave the timeout out"
        raise refuse("aligned_timeout", "unaligned", why)
    if config.backend_directory is not None and config.backend != "rocksdb":
        raise refuse("backend_directory", "backend", "state in memory needs no folder; leave it out, or use 'rocksdb'")
    _check_rocksdb(config, refuse)
    if config.local_directory is not None and not config.local_copies:
        raise refuse("local_directory", "local_copies", "no copies are made; switch them on, or leave the folder out")
    if config.state_size != STATE_BYTES_MAX_DEFAULT and config.checkpoint_storage != "jobmanager":
        why = "files of state have no limit; leave it out, or choose 'jobmanager'"
        raise refuse("state_size", "checkpoint_storage", why)
    if config.debloat_target != DEBLOAT_TARGET_MS and not config.debloat:
        why = "without it all buffers are used, however slow a task is; switch it on, or leave the time out"
        raise refuse("debloat_target", "debloat", why)
    if config.standbys == "warm" and config.backend == "columnar":
        _check_warm(config, refuse)
    if config.heartbeat_interval >= config.heartbeat_timeout:
        why = "every process would count as hung before it is asked; make the interval shorter"
        raise refuse("heartbeat_interval", "heartbeat_timeout", why)
    if config.slot_request_timeout != SLOT_REQUEST_TIMEOUT_MS and config.slot_request_timeout >= config.deploy_timeout:
        why = "the attempt would be given up before the wait for room is over; make the second one longer"
        raise refuse("slot_request_timeout", "deploy_timeout", why)
    if config.aligned_timeout >= config.timeout:
        why = "a checkpoint would be given up before it could go on unaligned; make the first one shorter"
        raise refuse("aligned_timeout", "timeout", why)


def _check_rocksdb(config: CheckpointConfig, refuse: Callable[[str, str, str], SettingError]) -> None:
    """Refuse settings of RocksDB where there is none, and those that its memory has no room for."""
    for name in ("rocksdb_threads", "rocksdb_write_buffer", "rocksdb_block_size", "rocksdb_open_files"):
        if config.backend != "rocksdb" and getattr(config, name) != type(config).model_fields[name].default:
            raise refuse(name, "backend", "there is no RocksDB; leave it out, or use 'rocksdb'")
    if config.rocksdb_write_buffer is not None and 2 * config.rocksdb_write_buffer > config.backend_memory:
        raise refuse("rocksdb_write_buffer", "backend_memory", "half of it is for write buffers; give more, or less")
    if config.rocksdb_block_size > config.backend_memory:
        raise refuse("rocksdb_block_size", "backend_memory", "a block has no room in the cache; make one of them other")


def _check_warm(config: CheckpointConfig, refuse: Callable[[str, str, str], SettingError]) -> None:
    """Refuse settings without which a warm standby cannot hold the state of a task in memory."""
    if not config.incremental:
        why = "it would read the whole state at each checkpoint; switch incremental on, or use 'auto'"
        raise refuse("standbys", "incremental", why)
    if config.changelog:
        raise refuse("standbys", "changelog", "there is nothing to go back to with a changelog; give up one of the two")
    if not config.undo_memory:
        raise refuse("standbys", "undo_memory", "without it no state is held in memory for a checkpoint; leave it out")
