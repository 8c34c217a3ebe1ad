"""Every setting as people read it: its keys, its variable, what is written for it, its default. And values as text.

`settings_page.py` makes the page of it, and `tidegate config check` prints by it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from tidegate.api.config.config_file import Config
from tidegate.api.config.sections import setting_values as of
from tidegate.api.config.sections.buffer_settings import BufferSettings
from tidegate.api.config.sections.checkpoint_config import CheckpointConfig
from tidegate.api.config.sections.job_settings import JobSettings
from tidegate.api.config.sections.log_config import LogConfig
from tidegate.api.config.sections.restart_config import RESTART_KEYS, TYPE_KEYS, keys_of
from tidegate.api.config.sections.section import Section
from tidegate.api.config.sections.setting_names import setting_keys
from tidegate.api.config.sections.topology_settings import TopologySettings
from tidegate.api.config.sections.web_settings import WebSettings
from tidegate.recovery.restart_strategy import default_strategy

SECTIONS: Mapping[str, tuple[type[Section], str]] = {
    "checkpoints": (CheckpointConfig, "`tg.CheckpointConfig(...)`, for `execute(checkpoints=)`"),
    "job": (JobSettings, "`execute(...)`"),
    "buffers": (BufferSettings, "`tg.DataPlaneOptions`, for `options=` of an environment"),
    "log": (LogConfig, "`log_level=` of an environment"),
    "web": (WebSettings, "`env.serve_web(...)`"),
    "topology": (TopologySettings, "`StreamEnvironment.local`, `.ray`, `.raydp` and `.on_spark`"),
}
"""Name of a section in `Config`, its class, and where Python gives its settings."""

_DURATIONS: tuple[Callable[..., object], ...] = (
    of.duration,
    of.interval,
    of.timeout,
    of.lease,
    of.heartbeat,
    of.call_timeout,
    of.debloat_target,
)
_SIZES: tuple[Callable[..., object], ...] = (of.size, of.state_size, of.positive_size, of.optional_size)
_NUMBERS: tuple[Callable[..., object], ...] = (
    of.any_number,
    of.at_least_one,
    of.checkpoint_id,
    of.positive,
    of.optional_positive,
    of.parallelism,
    of.port,
    of.max_parallelism,
)
_WORDS: Mapping[Callable[..., object], str] = {
    of.switch: "`true` or `false`",
    of.place: "folder or URL",
    of.restore: "path, `latest` or `latest_or_fresh`",
    of.name: "text",
    of.host: "text",
    of.level: "`DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL`",
    of.levels: "mapping",
    of.options: "mapping",
    of.spark_configs: "mapping",
    of.standbys: "number, `auto` or `warm`",
    of.compression: "`none`, `lz4`, `zstd` or `true`",
    of.backend: "`columnar` (also `hashmap`) or `rocksdb`",
    **dict.fromkeys(_DURATIONS, "duration"),
    **dict.fromkeys(_SIZES, "size"),
    **dict.fromkeys(_NUMBERS, "number"),
}
_MS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000))
_BYTES = (("gb", 2**30), ("mb", 2**20), ("kb", 2**10))


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. `kind` is what is written for it, `default` that value as it is written."""

    section: str
    name: str
    keys: tuple[str, ...]
    kind: str
    default: str


def rows() -> Iterator[Row]:
    """Every setting, in the order of the sections."""
    for section, (kind, _) in SECTIONS.items():
        defaults = kind()
        for name, field in kind.model_fields.items():
            written = value_text(kind, name, getattr(defaults, name))
            yield Row(section, name, setting_keys(name), _kind_of(field), written)


def effective(config: Config) -> Iterator[tuple[str, str, str]]:
    """The key of each setting, its value as YAML has it, and where that was said."""
    for section, (kind, _) in SECTIONS.items():
        settings = getattr(config, section)
        for name in kind.model_fields:
            origin = config.origins[name].origin if name in config.origins else "default"
            yield setting_keys(name)[-1], value_text(kind, name, getattr(settings, name)), origin
    strategy = config.restart
    if strategy is None:
        strategy = default_strategy(periodic_checkpoints=config.checkpoints.interval is not None)
    for key, value in keys_of(strategy).items():
        given = [config.origins[each] for each in _same(key) if each in config.origins]
        yield key, restart_text(key, value), given[0].origin if given else "default"


def value_text(kind: type[Section], name: str, value: object) -> str:
    """A value that is kept, as it is written in YAML."""
    read = _read_by(kind.model_fields[name])
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and read in _DURATIONS:
        return _in_units(value, _MS, "ms")
    if isinstance(value, int) and read in _SIZES:
        return _in_units(value, _BYTES, "b")
    return json.dumps(value, default=str) if isinstance(value, Mapping | str) and not _is_plain(value) else str(value)


def restart_text(key: str, value: object) -> str:
    """A value of a restart strategy, as it is written in YAML."""
    if value is None:
        return "null"
    is_ms = isinstance(value, int) and key.endswith(("delay", "backoff", "interval", "threshold"))
    is_ms = is_ms and not key.endswith("per-interval") and "attempts" not in key
    return _in_units(int(str(value)), _MS, "ms") if is_ms else str(value)


def _same(key: str) -> tuple[str, ...]:
    return TYPE_KEYS if key in TYPE_KEYS else (key,) if key in RESTART_KEYS else ()


def _in_units(value: int, units: tuple[tuple[str, int], ...], smallest: str) -> str:
    for unit, amount in units:
        if value and value % amount == 0:
            return f"{value // amount}{unit}"
    return f"{value}{smallest}"


def _is_plain(value: object) -> bool:
    # Words of a choice, and paths without anything that means something to YAML.
    return isinstance(value, str) and value.replace("_", "a").replace("-", "a").isalnum() and value not in ("off", "on")


def _kind_of(field: FieldInfo) -> str:
    word = _WORDS.get(_read_by(field))
    if word is not None:
        return word
    choices = [f"`{choice}`" for choice in get_args(field.annotation)]
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


def _read_by(field: FieldInfo) -> Callable[..., object]:
    return next(each.func for each in field.metadata if isinstance(each, BeforeValidator))
