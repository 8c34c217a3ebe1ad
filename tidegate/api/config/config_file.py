"""Reads settings from a YAML file or a mapping, under Flink's keys.

Rules:

- Keys may be flat (`a.b: 1`), nested (`a: {b: 1}`) or both.
- A key that is unknown, or given twice, is refused. The error names the file.
- What a value means is decided elsewhere, in `checkpoint_config.py` and `restart_config.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tidegate.api.config.checkpoint_config import CheckpointConfig, setting_keys, unknown_setting
from tidegate.api.config.restart_config import RESTART_KEYS, restart_from
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Config:
    """What a configuration file says."""

    checkpoints: CheckpointConfig
    restart: RestartStrategy | None = None
    """None: the default for these checkpoints."""


def load_config(source: str | os.PathLike[str] | Mapping[str, object]) -> Config:
    """Settings from a local YAML file or a mapping; Flink's keys, flat (`a.b: 1`) or nested (`a: {b: 1}`).

    What is not mentioned has its default. Raises ConfigurationError, naming the file, for a file that cannot
    be read or is no mapping, for unknown keys (with the nearest known one), doubled keys, wrong values and
    settings that contradict each other.
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
    known = [*(key for name in CheckpointConfig.model_fields for key in setting_keys(name)), *RESTART_KEYS]
    flat: dict[str, object] = {}
    for key, value in _flatten(content, ""):
        if key in flat:
            raise ConfigurationError(f"{key} is given twice, nested and flat; give it once")
        if value is None and any(name.startswith(f"{key}.") for name in known):
            continue  # A known section may be empty, for example when all its lines are comments.
        if key not in known:
            raise unknown_setting(key, known)
        flat[key] = value
    restart = restart_from({key: flat.pop(key) for key in RESTART_KEYS if key in flat})
    return Config(CheckpointConfig.model_validate(flat), restart)


def _flatten(content: Mapping[str, object], prefix: str) -> Iterable[tuple[str, object]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
