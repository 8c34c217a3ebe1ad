"""Settings of a job's checkpoints, under Python names and under the keys that Flink users know.

Rules: a value is checked where it is given, so that a job never starts with one that it cannot keep; nothing
is ignored silently, so an unknown or doubled setting, and one that another makes pointless, is refused; every
refusal is a ConfigurationError. A setting that Flink has under two keys is known under both.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state_file import INLINE_BYTES_MAX
from tidegate.storage.units import parse_duration_ms, parse_size_bytes

INTERVAL_MS_MIN = 10
"""Intervals below this switch periodic checkpoints off, and no timeout may be below it (both as in Flink)."""

# Settings that Flink 2 documents under another key, by their Python names; the older key holds as well, as there.
_NEWER_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "storage": "execution.checkpointing.dir",
        "savepoints": "execution.checkpointing.savepoint-dir",
        "unaligned": "execution.checkpointing.unaligned.enabled",
        "retained": "execution.checkpointing.num-retained",
        "inline_bytes": "execution.checkpointing.data-inline-threshold",
        "incremental": "execution.checkpointing.incremental",
        "checkpoint_storage": "execution.checkpointing.storage",
    }
)

_BACKENDS = {"columnar": "columnar", "hashmap": "columnar"}
_UNAVAILABLE_BACKENDS = ("rocksdb", "forst")


def setting_keys(name: str) -> tuple[str, ...]:
    """Every key of the setting that Python knows as `name`; the older one first."""
    newer = _NEWER_KEYS.get(name)
    alias = str(CheckpointConfig.model_fields[name].alias)
    return (alias,) if newer is None else (alias, newer)


def unknown_setting(name: str, known: Iterable[str]) -> ConfigurationError:
    """The refusal of a setting that is none of `known`: it names the nearest one."""

    def likeness(other: str) -> float:
        # People remember the last part of a key best, so it alone counts as much as the whole.
        parts = name.rpartition(".")[2].replace("_", "-"), other.rpartition(".")[2].replace("_", "-")
        return max(difflib.SequenceMatcher(None, name, other).ratio(), difflib.SequenceMatcher(None, *parts).ratio())

    return ConfigurationError(f"unknown setting {name!r}; the nearest known one is {max(known, key=likeness)!r}")


def _titled(name: str) -> str:
    """Name of a setting as people look for it: the Python name and the keys."""
    return f"{name} ({' or '.join(setting_keys(name))})"


def _label(info: ValidationInfo) -> str:
    return _titled(info.field_name or "")


def _duration(value: str | timedelta | int, info: ValidationInfo) -> int:
    return parse_duration_ms(value, setting=_label(info))


def _interval(value: str | timedelta | int | None, info: ValidationInfo) -> int | None:
    interval_ms = None if value is None else _duration(value, info)
    return None if interval_ms is None or interval_ms < INTERVAL_MS_MIN else interval_ms


def _timeout(value: str | timedelta | int, info: ValidationInfo) -> int:
    timeout_ms = _duration(value, info)
    if timeout_ms < INTERVAL_MS_MIN:
        raise ConfigurationError(f"{_label(info)}: {timeout_ms} ms is too short; give {INTERVAL_MS_MIN} ms or more")
    return timeout_ms


def _size(value: str | int, info: ValidationInfo) -> int:
    return parse_size_bytes(value, setting=_label(info))


def _whole(value: object, info: ValidationInfo, what: str, at_least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigurationError(f"{_label(info)}: {value!r} is no {what}; give a whole number from {at_least} up")
    return value


def _any_number(value: object, info: ValidationInfo) -> int:
    return _whole(value, info, "number of checkpoints", at_least=0)


def _at_least_one(value: object, info: ValidationInfo) -> int:
    return _whole(value, info, "number of checkpoints", at_least=1)


def _checkpoint_id(value: object, info: ValidationInfo) -> int | None:
    return None if value is None else _whole(value, info, "number of a checkpoint (the N of chk-N)", at_least=1)


def _place(value: object, info: ValidationInfo) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigurationError(
            f"{_label(info)}: {value!r} is no place to store at; give a folder or a URL such as s3://bucket/folder"
        )
    return str(os.fspath(value))


def _switch(value: object, info: ValidationInfo) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{_label(info)}: {value!r} is neither true nor false")
    return value


def _lowered(value: object) -> object:
    """Flink writes its choices in capitals, its users in either way."""
    return value.lower().replace("-", "_") if isinstance(value, str) else value


def _choice(value: object, info: ValidationInfo, choices: Iterable[str]) -> str:
    for choice in choices:
        if choice == _lowered(value):
            return choice
    raise ConfigurationError(f"{_label(info)}: {value!r} is none of {', '.join(map(repr, choices))}")


def _mode(value: object, info: ValidationInfo) -> str:
    return _choice(value, info, ("exactly_once", "at_least_once"))


def _retention(value: object, info: ValidationInfo) -> str:
    return _choice(value, info, ("retain_on_cancellation", "delete_on_cancellation", "no_externalized_checkpoints"))


def _backend(value: object, info: ValidationInfo) -> str:
    if _lowered(value) in _UNAVAILABLE_BACKENDS:
        raise ConfigurationError(
            f"{_label(info)}: {value!r} is not available yet; state lives in memory, in columns: leave the setting out "
            "or write 'columnar' (Flink's 'hashmap' means the same)"
        )
    return _BACKENDS[_choice(value, info, _BACKENDS)]


def _incremental(value: object, info: ValidationInfo) -> bool:
    if _switch(value, info):
        raise ConfigurationError(
            f"{_label(info)}: {value!r} is not available yet; every checkpoint holds the whole state: write false, or "
            "leave the setting out"
        )
    return False


def _checkpoint_storage(value: object, info: ValidationInfo) -> str:
    if _lowered(value) == "jobmanager":
        raise ConfigurationError(
            f"{_label(info)}: {value!r} is not available; checkpoints always rest in files: write 'filesystem', and "
            f"where in {_titled('storage')}"
        )
    return _choice(value, info, ("filesystem",))


class CheckpointConfig(BaseModel):
    """When checkpoints are taken and how, where they rest, and how many failures are put up with.

    Durations are strings (`"10s"`, `"5min"`), timedeltas, or milliseconds as int; kept as milliseconds.
    Sizes are strings (`"20kb"`) or bytes as int; kept as bytes. Choices may be in capitals, as Flink has them.
    Raises ConfigurationError for a wrong or unknown setting, and for two that contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    interval: Annotated[int | None, BeforeValidator(_interval)] = Field(
        default=None, alias="execution.checkpointing.interval"
    )
    """Milliseconds between two triggers. None, or below 10 ms (kept as None): no periodic checkpoints."""

    storage: Annotated[str | None, BeforeValidator(_place)] = Field(default=None, alias="state.checkpoints.dir")
    """Folder or URL (`s3://bucket/ckpt`) under which each job has its folder."""

    savepoints: Annotated[str | None, BeforeValidator(_place)] = Field(default=None, alias="state.savepoints.dir")
    """Folder or URL under which a savepoint gets its folder when none is named with the request."""

    mode: Annotated[Literal["exactly_once", "at_least_once"], BeforeValidator(_mode)] = Field(
        default="exactly_once", alias="execution.checkpointing.mode"
    )
    """With at_least_once no channel waits for another at a barrier: rows may count twice after a failure."""

    timeout: Annotated[int, BeforeValidator(_timeout)] = Field(default=600_000, alias="execution.checkpointing.timeout")
    """Milliseconds after which a checkpoint that is not complete is given up; at least 10."""

    min_pause: Annotated[int, BeforeValidator(_duration)] = Field(default=0, alias="execution.checkpointing.min-pause")
    """Milliseconds between the end of a checkpoint and the next trigger; may exceed the interval."""

    max_concurrent: Annotated[int, BeforeValidator(_at_least_one)] = Field(
        default=1, alias="execution.checkpointing.max-concurrent-checkpoints"
    )
    """Checkpoints that may be under way at the same time; at least 1."""

    unaligned: Annotated[bool, BeforeValidator(_switch)] = Field(
        default=False, alias="execution.checkpointing.unaligned"
    )
    """Whether barriers may overtake the data in flight, which then belongs to the checkpoint."""

    aligned_timeout: Annotated[int, BeforeValidator(_duration)] = Field(
        default=0, alias="execution.checkpointing.aligned-checkpoint-timeout"
    )
    """Milliseconds after which an aligned checkpoint goes on unaligned; 0: unaligned from the start."""

    tolerable_failed: Annotated[int, BeforeValidator(_any_number)] = Field(
        default=0, alias="execution.checkpointing.tolerable-failed-checkpoints"
    )
    """Checkpoints that may fail in a row before the job does."""

    retained: Annotated[int, BeforeValidator(_at_least_one)] = Field(default=1, alias="state.checkpoints.num-retained")
    """Completed checkpoints to keep; at least 1."""

    retention: Annotated[
        Literal["retain_on_cancellation", "delete_on_cancellation", "no_externalized_checkpoints"],
        BeforeValidator(_retention),
    ] = Field(default="retain_on_cancellation", alias="execution.checkpointing.externalized-checkpoint-retention")
    """What stays of a job that failed or was cancelled: all that is retained; the same unless cancelled; nothing."""

    inline_bytes: Annotated[int, BeforeValidator(_size)] = Field(
        default=INLINE_BYTES_MAX, alias="state.storage.fs.memory-threshold"
    )
    """State of a subtask up to this size goes into the checkpoint's metadata, not into a file of its own."""

    ignore_in_flight_of: Annotated[int | None, BeforeValidator(_checkpoint_id)] = Field(
        default=None, alias="execution.checkpointing.recover-without-channel-state.checkpoint-id"
    )
    """Number of a checkpoint whose data in flight is left out when it is restored: that data is lost."""

    history: Annotated[int, BeforeValidator(_any_number)] = Field(default=10, alias="web.checkpoints.history")
    """Checkpoints that the statistics keep in detail."""

    backend: Annotated[Literal["columnar"], BeforeValidator(_backend)] = Field(
        default="columnar", alias="state.backend.type"
    )
    """Where state lives while the job runs; `"hashmap"` is kept as `"columnar"`."""

    incremental: Annotated[Literal[False], BeforeValidator(_incremental)] = Field(
        default=False, alias="state.backend.incremental"
    )
    """Every checkpoint holds the whole state."""

    checkpoint_storage: Annotated[Literal["filesystem"], BeforeValidator(_checkpoint_storage)] = Field(
        default="filesystem", alias="state.checkpoint-storage"
    )
    """Checkpoints rest in files, under `storage`."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, Mapping):
            data = _by_name(data)
        try:
            config = handler(data)
        except ValidationError as error:
            raise ConfigurationError(f"not a checkpoint configuration: {error}") from error
        _check_together(config)
        return config


def _by_name(data: Mapping[object, object]) -> dict[str, object]:
    """The same settings under their Python names. ConfigurationError for unknown and doubled ones."""
    fields = CheckpointConfig.model_fields
    names = {name: name for name in fields} | {key: name for name in fields for key in setting_keys(name)}
    given: dict[str, str] = {}
    settings: dict[str, object] = {}
    for spelling, value in data.items():
        name = names.get(str(spelling))
        if name is None:
            raise unknown_setting(str(spelling), names)
        if name in given:
            raise ConfigurationError(f"{given[name]} and {spelling} are one setting; give it once")
        given[name] = str(spelling)
        settings[name] = value
    return settings


def _check_together(config: CheckpointConfig) -> None:
    """Refuse settings that contradict each other."""

    def refuse(one: str, other: str, why: str) -> ConfigurationError:
        pair = (f"{_titled(name)} is {getattr(config, name)!r}" for name in (one, other))
        return ConfigurationError(f"{' but '.join(pair)}: {why}")

    if config.unaligned and config.mode == "at_least_once":
        raise refuse("unaligned", "mode", "only exactly-once checkpoints can be unaligned; give up one of the two")
    if config.unaligned and config.max_concurrent > 1:
        raise refuse("unaligned", "max_concurrent", "unaligned checkpoints are taken one at a time; set it to 1")
    if config.max_concurrent > 1 and config.min_pause > 0:
        why = "with a pause between checkpoints there is one at a time; set max_concurrent to 1, or min_pause to 0"
        raise refuse("max_concurrent", "min_pause", why)
    if config.aligned_timeout > 0 and not config.unaligned:
        why = "an alignment that takes too long goes on unaligned; switch that on, or leave the timeout out"
        raise refuse("aligned_timeout", "unaligned", why)
    if config.aligned_timeout >= config.timeout:
        why = "a checkpoint would be given up before it could go on unaligned; make the first one shorter"
        raise refuse("aligned_timeout", "timeout", why)
