"""`BufferSettings`: sizes of the data plane, which `tg.DataPlaneOptions` holds in Python."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated

from pydantic import BeforeValidator, Field

from tidegate.actors.drivers.job_context import DataPlaneOptions
from tidegate.actors.task.channels.output_gate import BufferLimits
from tidegate.api.config.sections import setting_values as of
from tidegate.api.config.sections.section import Section
from tidegate.api.config.sections.setting_names import KEYS
from tidegate.state.common.options import SEGMENT_BYTES
from tidegate.storage.errors import ConfigurationError

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
"""Setting to the field of `BufferLimits`."""

_OF_CHECKPOINTS = {
    "inline_bytes_max": "inline_bytes",
    "exactly_once": "mode",
    "local_copies": "local_copies (with local_directory)",
    "state_bytes_max": "state_size (with checkpoint_storage)",
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
    "undo_bytes": "undo_memory",
}
"""Fields that a job takes from the configuration of its checkpoints: the setting there."""


class BufferSettings(Section):
    """Sizes in bytes and times in ms, for each channel if nothing else is said."""

    channel_credit: Annotated[int, BeforeValidator(of.positive_size)] = Field(
        default=_LIMITS.credit_bytes, alias=KEYS["channel_credit"][0]
    )
    """Bytes that may be on their way to a task on one channel."""

    channel_queue: Annotated[int, BeforeValidator(of.positive_size)] = Field(
        default=_LIMITS.queue_bytes_max, alias=KEYS["channel_queue"][0]
    )
    """Bytes that wait at the sender of one channel; when they are reached, the task takes no more input."""

    channel_shared: Annotated[int, BeforeValidator(of.size)] = Field(
        default=_OPTIONS.shared_bytes, alias=KEYS["channel_shared"][0]
    )
    """Bytes of memory, at most, that two tasks on one node share for the rows of a channel; 0: rows go through Ray's
    calls and its object store."""

    channel_socket: Annotated[bool, BeforeValidator(of.switch)] = Field(
        default=_OPTIONS.sockets, alias=KEYS["channel_socket"][0]
    )
    """Whether two tasks on one node, or a task and its coordinator, speak over a socket between their processes; off:
    by Ray's calls."""

    frame_bytes_min: Annotated[int, BeforeValidator(of.positive_size)] = Field(
        default=_LIMITS.frame_bytes_min, alias=KEYS["frame_bytes_min"][0]
    )
    """Bytes of a frame, a message that carries rows, where latency matters more than throughput."""

    frame_bytes_max: Annotated[int, BeforeValidator(of.positive_size)] = Field(
        default=_LIMITS.frame_bytes_max, alias=KEYS["frame_bytes_max"][0]
    )
    """Bytes of a frame where throughput matters more."""

    frame_elements: Annotated[int, BeforeValidator(of.positive)] = Field(
        default=_LIMITS.frame_elements_max, alias=KEYS["frame_elements"][0]
    )
    """Batches, watermarks and barriers in one frame, at most."""

    buffer_timeout: Annotated[int, BeforeValidator(of.duration)] = Field(
        default=_LIMITS.linger_ms, alias=KEYS["buffer_timeout"][0]
    )
    """Milliseconds that rows wait for others before they are sent in a frame that is not full; 0: they do not."""

    credit_probe: Annotated[int, BeforeValidator(of.timeout)] = Field(
        default=_LIMITS.probe_ms, alias=KEYS["credit_probe"][0]
    )
    """Milliseconds that a sender waits for room before it asks whether an answer was lost; at least 10."""

    window_min: Annotated[int, BeforeValidator(of.positive_size)] = Field(
        default=_LIMITS.window_bytes_min, alias=KEYS["window_min"][0]
    )
    """Bytes on their way on one channel that debloating leaves to the slowest task."""

    in_flight: Annotated[int, BeforeValidator(of.positive_size)] = Field(
        default=_LIMITS.in_flight_bytes_max, alias=KEYS["in_flight"][0]
    )
    """Bytes that a task holds for one unaligned checkpoint before it declines it."""

    turn_rows: Annotated[int, BeforeValidator(of.positive)] = Field(
        default=_LIMITS.turn_rows_max, alias=KEYS["turn_rows"][0]
    )
    """Rows that a task processes at most before it looks at what else has come in."""

    merged_rows: Annotated[int, BeforeValidator(of.positive)] = Field(
        default=_LIMITS.merged_rows_max, alias=KEYS["merged_rows"][0]
    )
    """Rows up to which small batches that wait for a task are handed to its operators as one, of 1 MiB at most; 1: as
    they came."""

    source_rows: Annotated[int, BeforeValidator(of.positive)] = Field(
        default=_OPTIONS.source_rows_max, alias=KEYS["source_rows"][0]
    )
    """Rows that a source is asked for at a time, at most."""

    changelog_segment: Annotated[int, BeforeValidator(of.positive_size)] = Field(
        default=SEGMENT_BYTES, alias=KEYS["changelog_segment"][0]
    )
    """With `changelog`: after about so many bytes of changes a segment is written."""

    def check(self) -> None:
        """Refuse sizes that contradict each other."""
        if self.frame_bytes_min > self.frame_bytes_max:
            raise self.contradiction(
                "frame_bytes_min", "frame_bytes_max", "the smallest frame is larger; exchange them"
            )

    def options(self, given: DataPlaneOptions | None) -> DataPlaneOptions:
        """The options of a job's data plane. What `given` says other than by default counts more.

        Raises ConfigurationError for what is no `DataPlaneOptions`, and for a field that a job does not take from them.
        """
        given = _OPTIONS if given is None else given
        _check_given(given)
        limits = {
            field: getattr(self, name)
            for name, field in _LIMIT_OF.items()
            if getattr(given.limits, field) == getattr(_LIMITS, field)
        }
        segment_bytes = given.backend.segment_bytes
        return replace(
            given,
            limits=replace(given.limits, **limits),
            source_rows_max=self.source_rows
            if given.source_rows_max == _OPTIONS.source_rows_max
            else given.source_rows_max,
            shared_bytes=self.channel_shared if given.shared_bytes == _OPTIONS.shared_bytes else given.shared_bytes,
            sockets=self.channel_socket if given.sockets == _OPTIONS.sockets else given.sockets,
            backend=replace(
                given.backend, segment_bytes=self.changelog_segment if segment_bytes == SEGMENT_BYTES else segment_bytes
            ),
        )


def _check_given(given: DataPlaneOptions) -> None:
    """Refuse a field that would be ignored, because the configuration of checkpoints decides it."""
    if not isinstance(given, DataPlaneOptions):
        raise ConfigurationError(f"options={given!r}: give a tg.DataPlaneOptions")
    for options, default, elsewhere in (
        (given, _OPTIONS, _OF_CHECKPOINTS),
        (given.limits, _LIMITS, _LIMITS_OF_CHECKPOINTS),
        (given.backend, _OPTIONS.backend, _BACKEND_OF_CHECKPOINTS),
    ):
        for field, setting in elsewhere.items():
            if getattr(options, field) != getattr(default, field):
                raise ConfigurationError(
                    f"options: {type(options).__name__}({field}={getattr(options, field)!r}) has no effect, because "
                    f"{setting} of tg.CheckpointConfig decides it for the job. Set that instead"
                )


assert set(_LIMIT_OF.values()) == {field.name for field in fields(BufferLimits)} - {"debloat_target_ms"}
