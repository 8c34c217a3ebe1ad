"""Settings of a job, in Python or in YAML under the keys that Flink users know.

Rules: a value is checked where it is given, so that a job never starts with one that it cannot keep; nothing
is ignored silently, so an unknown or doubled key is refused; every refusal is a ConfigurationError.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
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


def _label(info: ValidationInfo) -> str:
    """Name of a setting as people look for it: the Python name and the YAML key."""
    name = info.field_name or ""
    return f"{name} ({CheckpointConfig.model_fields[name].alias})"


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


def _count(value: object, info: ValidationInfo, at_least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigurationError(
            f"{_label(info)}: {value!r} is no number of checkpoints; give a whole number from {at_least} up"
        )
    return value


def _tolerable(value: object, info: ValidationInfo) -> int:
    return _count(value, info, at_least=0)


def _retained(value: object, info: ValidationInfo) -> int:
    return _count(value, info, at_least=1)


def _storage(value: object, info: ValidationInfo) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigurationError(
            f"{_label(info)}: {value!r} is no place for checkpoints; give a folder or a URL such as s3://bucket/ckpt"
        )
    return str(os.fspath(value))


def _mode(value: object, info: ValidationInfo) -> str:
    mode = value.lower().replace("-", "_") if isinstance(value, str) else value
    if mode != "exactly_once":
        raise ConfigurationError(f"{_label(info)}: {value!r} is not available; the one mode is 'exactly_once'")
    return "exactly_once"


class CheckpointConfig(BaseModel):
    """When checkpoints are taken, where they rest, and how many failures are put up with.

    Durations are strings (`"10s"`, `"5min"`), timedeltas, or milliseconds as int; kept as milliseconds.
    Sizes are strings (`"20kb"`) or bytes as int; kept as bytes.
    Raises ConfigurationError for a wrong or unknown setting.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    interval: Annotated[int | None, BeforeValidator(_interval)] = Field(
        default=None, alias="execution.checkpointing.interval"
    )
    """Milliseconds between two triggers. None, or below 10 ms (kept as None): no periodic checkpoints."""

    storage: Annotated[str | None, BeforeValidator(_storage)] = Field(default=None, alias="state.checkpoints.dir")
    """Folder or URL (`s3://bucket/ckpt`) under which each job has its folder."""

    mode: Annotated[Literal["exactly_once"], BeforeValidator(_mode)] = Field(
        default="exactly_once", alias="execution.checkpointing.mode"
    )

    timeout: Annotated[int, BeforeValidator(_timeout)] = Field(default=600_000, alias="execution.checkpointing.timeout")
    """Milliseconds after which a checkpoint that is not complete is given up; at least 10."""

    min_pause: Annotated[int, BeforeValidator(_duration)] = Field(default=0, alias="execution.checkpointing.min-pause")
    """Milliseconds between the end of a checkpoint and the next trigger; may exceed the interval."""

    tolerable_failed: Annotated[int, BeforeValidator(_tolerable)] = Field(
        default=0, alias="execution.checkpointing.tolerable-failed-checkpoints"
    )
    """Checkpoints that may fail in a row before the job does."""

    retained: Annotated[int, BeforeValidator(_retained)] = Field(default=1, alias="state.checkpoints.num-retained")
    """Completed checkpoints to keep; at least 1."""

    inline_bytes: Annotated[int, BeforeValidator(_size)] = Field(
        default=INLINE_BYTES_MAX, alias="state.storage.fs.memory-threshold"
    )
    """State of a subtask up to this size goes into the checkpoint's metadata, not into a file of its own."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, Mapping):
            keys = {name: str(field.alias) for name, field in cls.model_fields.items()}
            for name in data:
                if name not in keys and name not in keys.values():
                    raise _unknown_key(str(name), [*keys, *keys.values()])
                if keys.get(name) in data:
                    raise ConfigurationError(f"{name} and {keys[name]} are one setting; give it once")
        try:
            return handler(data)
        except ValidationError as error:
            raise ConfigurationError(f"not a checkpoint configuration: {error}") from error


@dataclass(frozen=True, slots=True)
class Config:
    """What a configuration file says."""

    checkpoints: CheckpointConfig


def load_config(source: str | os.PathLike[str] | Mapping[str, object]) -> Config:
    """Settings from a local YAML file or a mapping; Flink's keys, flat (`a.b: 1`) or nested (`a: {b: 1}`).

    What is not mentioned has its default. Raises ConfigurationError, naming the file, for a file that cannot
    be read or is no mapping, for unknown keys (with the nearest known one), doubled keys and wrong values.
    """
    if isinstance(source, Mapping):
        return _config(source)
    try:
        with Path(source).open("rb") as file:
            content = yaml.load(file, Loader=_StrictLoader)
        if content is None:
            return _config({})
        if not isinstance(content, Mapping):
            raise ConfigurationError(f"holds a {type(content).__name__}; write `key: value` lines")
        return _config(content)
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration {source}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{source}: not YAML: {error}") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from error


def _config(content: Mapping[str, object]) -> Config:
    known = [str(field.alias) for field in CheckpointConfig.model_fields.values()]
    flat: dict[str, object] = {}
    for key, value in _flatten(content, ""):
        if key in flat:
            raise ConfigurationError(f"{key} is given twice, nested and flat; give it once")
        if key in known:
            flat[key] = value
        elif value is not None or not any(name.startswith(f"{key}.") for name in known):
            # A known section with nothing in it, as when all its lines are comments, is no mistake.
            raise _unknown_key(key, known)
    return Config(checkpoints=CheckpointConfig.model_validate(flat))


def _flatten(content: Mapping[str, object], prefix: str) -> Iterable[tuple[str, object]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _unknown_key(key: str, known: Iterable[str]) -> ConfigurationError:
    def likeness(name: str) -> float:
        # People remember the last part of a key best, so it alone counts as much as the whole.
        parts = key.rpartition(".")[2].replace("_", "-"), name.rpartition(".")[2].replace("_", "-")
        return max(difflib.SequenceMatcher(None, key, name).ratio(), difflib.SequenceMatcher(None, *parts).ratio())

    return ConfigurationError(f"unknown setting {key!r}; the nearest known one is {max(known, key=likeness)!r}")


class _StrictLoader(yaml.SafeLoader):
    """YAML as `safe_load` reads it, except that a key that stands twice in one mapping is refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise ConfigurationError(f"line {key.start_mark.line + 1}: {name} is given twice; give it once")
            seen.add(name)
        return super().construct_mapping(node, deep)
