"""`load_config`: the configuration that follows from all that was said, and who has said each part of it.

Rules:

- What is said nearer to the run counts more: an argument of a Python call, then `--set` of `tidegate run`, then a
  variable of the environment, then the file of `config=`, then that of `tidegate run --config` or `TIDEGATE_CONFIG`,
  then the default. It is so for each setting by itself.
- A restart strategy is chosen by its type. Settings of other strategies are dropped if they were said further away than
  the type, and refused if not.
- A key that is unknown, or given twice in one place, is refused. The error names the file and line, or the variable.
- What a value means is decided elsewhere, in the sections and in `restart_config.py`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tidegate.actors.drivers.process_settings import Standbys
from tidegate.api.config.restrictions import FIXED, refusal_of
from tidegate.api.config.sections.buffer_settings import BufferSettings
from tidegate.api.config.sections.checkpoint_config import CheckpointConfig
from tidegate.api.config.sections.job_settings import JobSettings
from tidegate.api.config.sections.log_config import LogConfig
from tidegate.api.config.sections.restart_config import KIND_OF, RESTART_KEYS, kind_of, restart_from
from tidegate.api.config.sections.section import Section, SettingError
from tidegate.api.config.sections.setting_names import NAME_OF, OPEN, unknown_setting
from tidegate.api.config.sections.topology_settings import TopologySettings
from tidegate.api.config.sections.web_settings import WebSettings
from tidegate.api.config.sources import KNOWN_KEYS, Given, Layer, layers
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.errors import ConfigurationError

_Made = TypeVar("_Made")
_MISSPELT = 0.93
"""A key that is so much like a known one is that one, misspelt, and no other one of Flink's."""


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. `origins` has, by the name of a setting or the key of a restart strategy, where it was said."""

    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    restart: RestartStrategy | None = None
    """None: the default for these checkpoints."""
    job: JobSettings = field(default_factory=JobSettings)
    buffers: BufferSettings = field(default_factory=BufferSettings)
    web: WebSettings = field(default_factory=WebSettings)
    topology: TopologySettings = field(default_factory=TopologySettings)
    log: LogConfig = field(default_factory=LogConfig)
    origins: Mapping[str, Given] = field(default_factory=dict, compare=False)

    def checkpoints_of(self, given: CheckpointConfig | None, standbys: Standbys | None = None) -> CheckpointConfig:
        """The settings of one job's checkpoints: these, the environment's `standbys=`, and what the job was given."""
        settings = self.checkpoints.given()
        if standbys is not None:
            settings["standbys"] = standbys
        if given is not None:
            settings |= given.given()
        return explained(self.origins, lambda: CheckpointConfig.model_validate(settings))


def load_config(
    source: str | os.PathLike[str] | Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Settings from a local YAML file or a mapping, and from the variables of the environment, which count more.

    Keys are Flink's, flat (`a.b: 1`) or nested (`a: {b: 1}`). What is not mentioned has its default. `environ` is that
    of this process unless it is given. Raises ConfigurationError, naming file and line or the variable, for a file that
    cannot be read or is no mapping, for unknown keys (with the nearest known one), keys that tidegate has not (with the
    reason), doubled keys, wrong values and settings that contradict each other.
    """
    return resolve(layers(source, os.environ if environ is None else environ))


def resolve(said: Sequence[Layer]) -> Config:
    """The configuration that follows from these layers, of which the last counts most."""
    settings: dict[str, Given] = {}
    restart: dict[str, Given] = {}
    for layer in said:
        settings = _with_layer(settings, _by_name(layer))
        restart = _with_restart(restart, layer)
    origins = settings | restart

    def section(kind: type[_SectionT]) -> _SectionT:
        values = {name: settings[name].value for name in kind.model_fields if name in settings}
        return explained(origins, lambda: kind.model_validate(values))

    return Config(
        section(CheckpointConfig),
        explained(origins, lambda: restart_from({key: given.value for key, given in restart.items()})),
        section(JobSettings),
        section(BufferSettings),
        section(WebSettings),
        section(TopologySettings),
        section(LogConfig),
        origins,
    )


_SectionT = TypeVar("_SectionT", bound=Section)


def explained(origins: Mapping[str, Given], make: Callable[[], _Made]) -> _Made:
    """What `make` makes. Its error says where the settings that it names were said."""
    try:
        return make()
    except SettingError as error:
        places = [origins[name].origin for name in error.settings if name in origins and origins[name].origin]
        if not places:
            raise
        raise ConfigurationError(f"{', '.join(dict.fromkeys(places))}: {error}") from error


def _by_name(layer: Layer) -> dict[str, Given]:
    """The settings of one layer, without those of restart strategies. Raises ConfigurationError."""
    found: dict[str, Given] = {}
    for given in layer:
        key, value = given.key, given.value
        if value is None and any(known.startswith(f"{key}.") for known in KNOWN_KEYS):
            continue  # A known section may be empty, for example when all its lines are comments.
        if key in RESTART_KEYS:
            continue
        if key in FIXED:
            _check_fixed(given)
            continue
        name, part = _setting_of(given)
        before = found.get(name)
        if part is not None:
            parts = value if part == "" and isinstance(value, Mapping) else {part: value} if part else value
            given = Given(key, parts, given.origin)
            if before is not None and isinstance(before.value, Mapping) and isinstance(parts, Mapping):
                twice = before.value.keys() & parts.keys()
                if twice:
                    raise _at(given, f"{key} is given twice, nested and flat; give it once")
                given = Given(key, {**before.value, **parts}, given.origin)
        elif before is not None and before.key == key:
            raise _at(given, f"{key} is given twice, nested and flat; give it once")
        elif before is not None:
            raise _at(given, f"{before.key} and {key} are one setting; give it once")
        found[name] = given
    return found


def _setting_of(given: Given) -> tuple[str, str | None]:
    """The setting of a key, and below an open key the part of it; an empty part is all of it."""
    key = given.key
    name = NAME_OF.get(key)
    if name is not None:
        return name, "" if key in OPEN else None
    for start in OPEN:
        if key.startswith(f"{start}."):
            return NAME_OF[start], key.removeprefix(f"{start}.")
    reason = refusal_of(key)
    if reason is not None and not difflib.get_close_matches(key, KNOWN_KEYS, 1, _MISSPELT):
        raise _at(given, f"{key} is a setting of Flink that tidegate has not: {reason}")
    raise _at(given, str(unknown_setting(key, KNOWN_KEYS)))


def _check_fixed(given: Given) -> None:
    only, reason = FIXED[given.key]
    if not isinstance(given.value, bool):
        raise _at(given, f"{given.key}: {given.value!r} is neither true nor false")
    if given.value is not only:
        raise _at(given, f"{given.key} can only be {str(only).lower()}: {reason}")


def _with_layer(before: Mapping[str, Given], layer: Mapping[str, Given]) -> dict[str, Given]:
    merged = dict(before)
    for name, given in layer.items():
        old = merged.get(name)
        if old is not None and isinstance(old.value, Mapping) and isinstance(given.value, Mapping):
            given = Given(given.key, {**old.value, **given.value}, given.origin)
        merged[name] = given
    return merged


def _with_restart(before: Mapping[str, Given], layer: Layer) -> dict[str, Given]:
    """The settings of restart strategies with those of one more layer, which counts more."""
    found: dict[str, Given] = {}
    for given in layer:
        if given.key not in RESTART_KEYS or (given.value is None and given.key == "restart-strategy"):
            continue
        if given.key in found:
            raise _at(given, f"{given.key} is given twice, nested and flat; give it once")
        found[given.key] = given
    kind = explained(found, lambda: kind_of({key: given.value for key, given in found.items()}))
    if kind is not None:
        before = {key: given for key, given in before.items() if KIND_OF.get(key) == kind}
    return {**before, **found}


def _at(given: Given, message: str) -> ConfigurationError:
    return ConfigurationError(f"{given.origin}: {message}" if given.origin else message)
