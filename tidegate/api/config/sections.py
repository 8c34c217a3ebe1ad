"""The sections of settings except checkpoints: a job, buffers, logs, the job page and REST, and where jobs run.

The defaults of these settings are here. The defaults of checkpoints are in `checkpoint_config.py`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from tidegate.actors.drivers.job_context import DataPlaneOptions
from tidegate.actors.drivers.log_lines import LogSettings, log_to, set_levels
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.api.config.setting import Section, setting
from tidegate.api.config.setting_kinds import (
    HOST,
    INTERVAL_MS_MIN,
    LEVEL,
    LEVELS,
    LOCAL_AGGREGATION,
    MAPPING,
    NAME,
    PORT,
    PROGRESS,
    RAY_OPTIONS,
    RESTORE,
    SPARK_CONFIGS,
    SWITCH,
    choice,
    duration,
    number,
    size,
)
from tidegate.operators.local_aggregation import CombiningMode
from tidegate.state.common.options import SEGMENT_BYTES
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state.key_groups import MAX_PARALLELISM_LIMIT
from tidegate.storage.user_values import show_rows_in_logs


class JobSettings(Section):
    """Settings of one job. `execute` takes them as arguments as well, and its arguments take precedence."""

    name: str | None = setting(
        "pipeline.name", kind=NAME.or_none(), default=None, doc="The job's name, if `execute` gives none."
    )
    restore: str | None = setting(
        "execution.savepoint.path",
        "execution.state-recovery.path",
        kind=RESTORE,
        default=None,
        doc="Where the job starts: a path, `latest` or `latest_or_fresh`. None: at the beginning.",
    )
    allow_non_restored_state: bool = setting(
        "execution.savepoint.ignore-unclaimed-state",
        "execution.state-recovery.ignore-unclaimed-state",
        kind=SWITCH,
        default=False,
        doc="Whether state may be dropped if its operator, aggregate or declaration is no longer in the program.",
    )
    detached: bool = setting(
        "execution.detached",
        kind=SWITCH,
        default=False,
        doc="Whether the job continues when its driver ends. On Ray only.",
    )
    progress: Literal["auto", "bar", "lines", "off"] = setting(
        "progress",
        kind=PROGRESS,
        default="auto",
        doc="How the progress of a job that ends by itself is shown: `auto` is a bar in a terminal, and lines "
        "elsewhere.",
        more="sources.md",
    )
    local_aggregation: CombiningMode = setting(
        "table.optimizer.agg-phase-strategy",
        kind=LOCAL_AGGREGATION,
        default="auto",
        doc="Whether rows of a batch are combined by key before they are sent to an aggregate: `auto` if that is "
        "faster, `on` wherever the result is the same, or `off`. Flink's words are `AUTO`, `TWO_PHASE` and "
        "`ONE_PHASE`.",
        more="aggregates.md#combined-before-they-are-sent",
    )
    slot_sharing: bool = setting(
        "slot.sharing",
        kind=SWITCH,
        default=True,
        doc="Whether the subtasks of a slot share one process. With `false` each has a process of its own in that "
        "slot.",
        more="placement.md#without-slot-sharing",
    )


_LIMITS = BufferLimits()
_OPTIONS = DataPlaneOptions()
_LIMIT_OF = {
    "channel_credit": "credit_bytes",
    "channel_queue": "queue_bytes_max",
    "frame_bytes_min": "frame_bytes_min",
    "frame_bytes_max": "frame_bytes_max",
    "frame_elements": "frame_elements_max",
    "buffer_timeout": "linger_ms",
    "credit_probe": "probe_ms",
    "window_min": "window_bytes_min",
    "in_flight": "in_flight_bytes_max",
    "turn_rows": "turn_rows_max",
    "merged_rows": "merged_rows_max",
}
"""The field of `BufferLimits` that each setting of `BufferSettings` sets."""
_OF_CHECKPOINTS = {
    "inline_bytes_max": "inline_threshold",
    "exactly_once": "mode",
    "local_copies": "local_copies (with local_directory)",
    "state_bytes_max": "max_state_size (with checkpoint_storage)",
    "paused_ms_max": "timeout (with interval)",
}
_LIMITS_OF_CHECKPOINTS = {"debloat_target_ms": "debloat_target"}
_BACKEND_OF_CHECKPOINTS = {
    "kind": "backend",
    "incremental": "incremental",
    "changelog": "changelog",
    "compression": "compression",
    "directory": "backend_directory",
    "memory_bytes": "backend_memory",
    "cache_bytes": "backend_cache",
    "database": "rocksdb_threads, rocksdb_write_buffer, rocksdb_block_size or rocksdb_open_files",
    "undo_bytes": "rewind_memory",
}
"""Fields of the backend options in `DataPlaneOptions` that programs set by `CheckpointConfig`, and the names of these
settings.
"""


class BufferSettings(Section):
    """Settings of the buffers between subtasks.

    They apply to each channel. In Python programs give them as `tg.DataPlaneOptions`.
    """

    channel_credit: int = setting(
        "taskmanager.network.memory.channel-credit",
        kind=size(1),
        default=_LIMITS.credit_bytes,
        doc="Bytes that may be in flight to a task on one channel.",
    )
    channel_queue: int = setting(
        "taskmanager.network.memory.channel-queue",
        kind=size(1),
        default=_LIMITS.queue_bytes_max,
        doc="Bytes that wait at the sender of one channel; a task with that many takes no more input.",
    )
    shm_bytes_per_channel: int = setting(
        "taskmanager.network.memory.shm-per-channel",
        kind=size(),
        default=_OPTIONS.shared_bytes,
        doc="The most bytes of shared memory for the rows of a channel between two tasks on one node. 0: rows go "
        "through Ray's calls and its object store.",
    )
    channel_socket: bool = setting(
        "taskmanager.network.channel-socket.enabled",
        kind=SWITCH,
        default=_OPTIONS.sockets,
        doc="Whether two tasks on one node, or a task and its coordinator, communicate over a socket. Off: by Ray's "
        "calls.",
    )
    frame_bytes_min: int = setting(
        "taskmanager.network.frame.min-size",
        kind=size(1),
        default=_LIMITS.frame_bytes_min,
        doc="Bytes of a frame, a message that carries rows, if latency matters more than throughput.",
    )
    frame_bytes_max: int = setting(
        "taskmanager.network.frame.max-size",
        kind=size(1),
        default=_LIMITS.frame_bytes_max,
        doc="Bytes of a frame if throughput matters more.",
    )
    frame_elements: int = setting(
        "taskmanager.network.frame.max-elements",
        kind=number(),
        default=_LIMITS.frame_elements_max,
        doc="The most batches, watermarks and barriers in one frame.",
    )
    buffer_timeout: int = setting(
        "execution.buffer-timeout",
        "execution.buffer-timeout.interval",
        kind=duration(),
        default=_LIMITS.linger_ms,
        doc="Milliseconds that rows wait for further ones before they are sent in a frame that is not full; 0: none.",
    )
    credit_probe: int = setting(
        "taskmanager.network.credit-probe-interval",
        kind=duration(INTERVAL_MS_MIN),
        default=_LIMITS.probe_ms,
        doc="Milliseconds that a sender waits for credit before it checks whether an answer was lost; at least 10.",
    )
    window_min: int = setting(
        "taskmanager.network.memory.buffer-debloat.min-window",
        kind=size(1),
        default=_LIMITS.window_bytes_min,
        doc="Bytes in flight on one channel that debloating leaves to the slowest task.",
    )
    in_flight: int = setting(
        "execution.checkpointing.unaligned.max-in-flight",
        kind=size(1),
        default=_LIMITS.in_flight_bytes_max,
        doc="Bytes that a task holds for one unaligned checkpoint before it declines it.",
    )
    turn_rows: int = setting(
        "task.turn-rows",
        kind=number(),
        default=_LIMITS.turn_rows_max,
        doc="The most rows that a task processes before it looks at other messages.",
    )
    merged_rows: int = setting(
        "task.merged-rows",
        kind=number(),
        default=_LIMITS.merged_rows_max,
        doc="Rows up to which small batches that wait for a task are merged for its operators, into at most 1 MiB; "
        "1: never.",
    )
    source_rows: int = setting(
        "task.source-batch-rows",
        kind=number(),
        default=_OPTIONS.source_rows_max,
        doc="The most rows that are requested from a source at a time.",
    )
    changelog_segment: int = setting(
        "state.changelog.segment-size",
        kind=size(1),
        default=SEGMENT_BYTES,
        doc="With `changelog`: bytes of changes, approximately, after which a segment is written.",
    )

    def check(self) -> None:
        """Raises SettingError for buffer sizes that contradict each other."""
        if self.frame_bytes_min > self.frame_bytes_max:
            raise self.contradiction("frame_bytes_min", "frame_bytes_max", "the minimum is larger; exchange them")

    def options(self, given: DataPlaneOptions | None) -> DataPlaneOptions:
        """Returns the options of a job's data plane: these settings, overridden by the fields of `given` that differ
        from their defaults.

        Raises ConfigurationError if `given` is not a `DataPlaneOptions`, or has a field that would be ignored.
        """
        given = _OPTIONS if given is None else given
        _check_given(given)
        limits = {
            field: getattr(self, name)
            for name, field in _LIMIT_OF.items()
            if getattr(given.limits, field) == getattr(_LIMITS, field)
        }
        options = replace(given, limits=replace(given.limits, **limits))
        if given.source_rows_max == _OPTIONS.source_rows_max:
            options = replace(options, source_rows_max=self.source_rows)
        if given.shared_bytes == _OPTIONS.shared_bytes:
            options = replace(options, shared_bytes=self.shm_bytes_per_channel)
        if given.sockets == _OPTIONS.sockets:
            options = replace(options, sockets=self.channel_socket)
        if given.backend.segment_bytes == SEGMENT_BYTES:
            options = replace(options, backend=replace(given.backend, segment_bytes=self.changelog_segment))
        return options


def _check_given(given: DataPlaneOptions) -> None:
    """Raises ConfigurationError if `DataPlaneOptions` sets a field that would be ignored, because `CheckpointConfig`
    sets it.
    """
    if not isinstance(given, DataPlaneOptions):
        raise ConfigurationError(f"options={given!r}: give a tg.DataPlaneOptions")
    for options, default, elsewhere in (
        (given, _OPTIONS, _OF_CHECKPOINTS),
        (given.limits, _LIMITS, _LIMITS_OF_CHECKPOINTS),
        (given.backend, _OPTIONS.backend, _BACKEND_OF_CHECKPOINTS),
    ):
        for field, name in elsewhere.items():
            if getattr(options, field) != getattr(default, field):
                raise ConfigurationError(
                    f"options: {type(options).__name__}({field}={getattr(options, field)!r}) has no effect, because "
                    f"{name} of tg.CheckpointConfig decides it for the job. Set that instead"
                )


assert set(_LIMIT_OF.values()) == {field.name for field in fields(BufferLimits)} - {"debloat_target_ms"}


Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class LogConfig(Section):
    """How the driver, the coordinator and the tasks log. If no setting is given, the driver's log is not set up."""

    log_level: Level | None = setting(
        "log.level",
        kind=LEVEL,
        default=None,
        doc="Level of all of tidegate's loggers. None: WARNING in the driver and in tasks, INFO in a coordinator on "
        "Ray, whose lines are then in Ray's log files only.",
        more="logging.md",
    )
    log_levels: dict[str, Level] = setting(
        "log.levels",
        kind=LEVELS,
        default={},
        doc="Levels of single loggers, by name: `log.levels.tidegate.actors.coordinator: DEBUG`.",
        is_open=True,
    )
    log_format: Literal["text", "json"] = setting(
        "log.format",
        kind=choice("text", "json"),
        default="text",
        doc="`json`: each line is an object with job, attempt, checkpoint, task and cause.",
        more="logging.md",
    )
    log_rows: bool = setting(
        "log.rows",
        kind=SWITCH,
        default=False,
        doc="Whether values of rows, keys and records may be in logs, the event log, the job page and REST. Off, they"
        " are `<withheld>` there, and only the error that the driver raises has them. Passwords and access keys "
        "are never shown.",
        more="logging.md#values-of-users",
    )

    @property
    def for_processes(self) -> LogSettings:
        """Returns the log settings that the coordinator and the workers of a job use."""
        return LogSettings(self.log_level, dict(self.log_levels), self.log_format == "json", self.log_rows)

    def set_up_driver(self) -> None:
        """Configures the log of this process, if any log setting was given.

        If the program has configured log handlers, text lines are sent to these handlers.
        """
        show_rows_in_logs(self.log_rows)
        if not self.given():
            return
        if self.log_format == "text" and logging.getLogger().hasHandlers():
            set_levels(self.for_processes)
            return
        log_to(sys.stderr, self.for_processes, "WARNING", {"process": "driver"})


class WebSettings(Section):
    """Settings of the job page and the REST server of an environment.

    Arguments of `serve_web` take precedence.
    """

    web: bool = setting(
        "rest.enabled",
        kind=SWITCH,
        default=False,
        doc="Whether jobs are shown from the first `execute` on. Needs the extra `tidegate[web]`.",
    )
    web_address: str = setting(
        "rest.address",
        "rest.bind-address",
        kind=HOST,
        default="127.0.0.1",
        doc="Name or address of the host to listen at. Readers need the token unless it is loopback.",
    )
    web_port: int = setting(
        "rest.port",
        kind=PORT,
        default=8081,
        doc="Port to listen at, or one of the next 16 if it is taken. 0: any free port.",
    )


class TopologySettings(Section):
    """Settings for where the jobs of an environment run.

    Arguments of the methods that create environments take precedence.
    """

    target: Literal["local", "ray", "raydp", "on_spark"] = setting(
        "execution.target",
        kind=choice("local", "ray", "raydp", "on_spark"),
        default="local",
        doc="The environment that `StreamEnvironment.from_config` makes: `local`, `ray`, `raydp` or `on_spark`.",
        more="topologies.md",
    )
    parallelism: int | None = setting(
        "parallelism.default",
        kind=number("number of subtasks").or_none(),
        default=None,
        doc="Parallelism of steps that do not set their own. None: 1, and with Spark the number of executors.",
    )
    max_parallelism: int | None = setting(
        "pipeline.max-parallelism",
        kind=number("number of key groups", at_most=MAX_PARALLELISM_LIMIT).or_none(),
        default=None,
        doc="Number of key groups: the most subtasks that a step may ever have. None: as in the checkpoint, or by "
        "size.",
    )
    address: str | None = setting(
        "ray.address",
        kind=NAME.or_none(),
        default=None,
        doc="`host:port` of a Ray cluster that runs. None: `raydp` starts one here; `ray` uses `RAY_ADDRESS`, or the "
        "one cluster of this user on this machine.",
    )
    slots: int | None = setting(
        "ray.slots",
        kind=number().or_none(),
        default=None,
        doc="With `ray`: task slots to reserve, a CPU each. None: no reservation.",
    )
    placement: Literal["spread", "pack", "strict_pack"] = setting(
        "ray.placement",
        kind=choice("spread", "pack", "strict_pack"),
        default="spread",
        doc="Whether slots are placed on many nodes, on few, or all on one.",
        more="placement.md",
    )
    include_dashboard: bool = setting(
        "ray.include-dashboard",
        kind=SWITCH,
        default=True,
        doc="Whether a Ray that is started has its dashboard.",
    )
    object_store_memory: int | None = setting(
        "ray.object-store-memory",
        kind=size(1).or_none(),
        default=None,
        doc="With `on_spark`: bytes of each node's object store. None: Ray's default.",
    )
    ray_options: dict[str, Any] = setting(
        "ray.options",
        kind=RAY_OPTIONS,
        default={},
        doc="Arguments of `ray.init`, with `raydp` and `on_spark`; with `ray` only its `runtime_env`.",
        is_open=True,
    )
    cluster_options: dict[str, Any] = setting(
        "ray.cluster-options",
        kind=MAPPING,
        default={},
        doc="Arguments of `ray.util.spark.setup_ray_cluster`, with `on_spark`.",
        is_open=True,
    )
    executors: int | None = setting(
        "spark.executor.instances",
        kind=number().or_none(),
        default=None,
        doc="Spark executors: `raydp` starts this many, 2 by default; `on_spark` uses this many, by default all.",
    )
    executor_cores: int = setting(
        "spark.executor.cores", kind=number(), default=1, doc="Cores of each executor that is started."
    )
    executor_memory: int = setting(
        "spark.executor.memory",
        kind=size(1),
        default=1024**3,
        doc="Bytes of the heap of each executor that is started.",
    )
    slots_per_executor: int | None = setting(
        "taskmanager.numberOfTaskSlots",
        kind=number().or_none(),
        default=None,
        doc="Task slots next to each executor. None: 2 with `raydp`; with `on_spark` all of its cores but one.",
    )
    app_name: str = setting("spark.app.name", kind=NAME, default="tidegate", doc="Name of the Spark application.")
    spark_configs: dict[str, str] = setting(
        "spark",
        kind=SPARK_CONFIGS,
        default={},
        doc="Settings of Spark itself: every other key that begins with `spark.`, as in `spark-defaults.conf`.",
        is_open=True,
    )

    @property
    def runtime_env(self) -> Mapping[str, Any]:
        """Returns the `runtime_env` in `ray_options`, empty if there is none."""
        found: Mapping[str, Any] | None = self.ray_options.get("runtime_env")
        return {} if found is None else found

    def of_spark(self) -> dict[str, str]:
        """Returns the settings of a new SparkSession: the `spark.*` settings, and the settings of executors that the
        user gave.
        """
        executors = {
            "spark.executor.instances": None if self.executors is None else str(self.executors),
            "spark.executor.cores": str(self.executor_cores) if "executor_cores" in self.model_fields_set else None,
            "spark.executor.memory": f"{self.executor_memory}b" if "executor_memory" in self.model_fields_set else None,
        }
        return {**self.spark_configs, **{key: value for key, value in executors.items() if value is not None}}
