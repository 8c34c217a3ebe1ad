"""`load_config` reads the configuration from all sources of settings, and records where each setting was given.

Each source is a layer: entries with a key, a value, and the place where the value was given. Rules:

- Precedence, the highest first: an argument of a Python call, `--set` of `tidegate run`, an environment variable, the
  file of `config=`, the file of `tidegate run --config` or `TIDEGATE_CONFIG`, the default. It applies to each setting
  separately.
- Keys may be flat (`a.b: 1`), nested (`a: {b: 1}`) or both. A key that is unknown, or given twice in one layer, is an
  error, which names the file and line, or the variable.
- The variable of a key is the key in capitals, with `TIDEGATE_` in front, and `_` for dots and dashes. Its value is
  read as YAML. An empty variable is ignored. A variable that begins with `TIDEGATE_` and belongs to no key is an error,
  except for variables that Kubernetes sets for a service with the name "tidegate".
- The key of the type chooses the restart strategy. Settings of other strategies are ignored if they come from a layer
  with a lower precedence than the type, and are an error otherwise.
- The kinds of settings (`setting_kinds.py`) and `restart_config.py` interpret the values.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import yaml

from tidegate.actors.drivers.job_context import Standbys
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.config.restart_config import KIND_OF, RESTART_KEYS, kind_of, restart_from
from tidegate.api.config.restrictions import FIXED, REFUSED, refusal_of
from tidegate.api.config.sections import BufferSettings, JobSettings, LogConfig, TopologySettings, WebSettings
from tidegate.api.config.setting import Section, SettingError, unknown_setting
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.errors import ConfigurationError
from tidegate.web.options import TOKEN_VARIABLE

SECTIONS: Mapping[str, type[Section]] = {
    "checkpoints": CheckpointConfig,
    "job": JobSettings,
    "buffers": BufferSettings,
    "log": LogConfig,
    "web": WebSettings,
    "topology": TopologySettings,
}
"""The class of each section of settings, by the section's field in `Config`."""
NAME_OF: Mapping[str, str] = {
    key: name for kind in SECTIONS.values() for name, each in kind.settings().items() for key in each.keys
}
"""Maps each key of a file to the Python name of the setting."""
OPEN = tuple(
    key for kind in SECTIONS.values() for each in kind.settings().values() if each.is_open for key in each.keys
)
"""Keys with a mapping as their value, such as `ray.options`. Another library defines and checks the entries of the
mapping.
"""
KNOWN_KEYS = (*NAME_OF, *RESTART_KEYS)
"""Every key that a file may contain, except the keys of `FIXED`."""
VARIABLE_PREFIX = "TIDEGATE_"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
"""Tags of numbers in YAML."""


def variable_of(key: str) -> str:
    """Returns the environment variable that sets a key, such as `TIDEGATE_STATE_CHECKPOINTS_DIR`."""
    return VARIABLE_PREFIX + key.upper().replace(".", "_").replace("-", "_")


VARIABLES = {variable_of(key): key for key in (*KNOWN_KEYS, *FIXED, *(key for key in REFUSED if key[-1] not in ".-"))}
"""Maps the name of each environment variable to the key of its setting."""
_Made = TypeVar("_Made")
_MISSPELT = 0.93
"""Similarity (from 0 to 1, by `difflib`) from which an unknown key is reported as a misspelling of a known key, and not
as an unsupported key of Flink.
"""
FILE_VARIABLE = "TIDEGATE_CONFIG"
"""The environment variable that names a file with settings of the lowest precedence."""
_OTHER_VARIABLES = (FILE_VARIABLE, "TIDEGATE_TOPOLOGY", TOKEN_VARIABLE)
"""Environment variables that begin with `TIDEGATE_` and are not settings.

`TIDEGATE_TOPOLOGY` belongs to the examples, and `TOKEN_VARIABLE` is a secret.
"""
_OF_KUBERNETES = re.compile(r"TIDEGATE(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
_WHOLE = tuple(key for key in OPEN if key != "spark")
"""Keys with a mapping as their value, of which all keys below belong to another library.

(Below `spark` there are also settings of tidegate.)
"""


@dataclass(frozen=True, slots=True)
class Given:
    """One setting of a layer: its key, its value, and where the user gave it (`origin`), which is empty for settings
    from Python.
    """

    key: str
    value: object
    origin: str = ""


Layer = Sequence[Given]


@dataclass(frozen=True, slots=True)
class Config:
    """The values of all settings.

    `origins` has the place where each value was given (file and line, or variable), by the name of a setting or the key
    of a restart strategy.
    """

    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    restart: RestartStrategy | None = None
    """The restart strategy that the user chose, or None for the default: exponential-delay with periodic checkpoints,
    otherwise no restart.
    """
    job: JobSettings = field(default_factory=JobSettings)
    buffers: BufferSettings = field(default_factory=BufferSettings)
    web: WebSettings = field(default_factory=WebSettings)
    topology: TopologySettings = field(default_factory=TopologySettings)
    log: LogConfig = field(default_factory=LogConfig)
    origins: Mapping[str, Given] = field(default_factory=dict, compare=False)

    def checkpoints_of(self, given: CheckpointConfig | None, standbys: Standbys | None = None) -> CheckpointConfig:
        """Returns the checkpoint settings of one job.

        `standbys=` of the environment takes precedence over these settings, and the settings given for the job
        (`given`) over both.
        """
        settings = self.checkpoints.given()
        if standbys is not None:
            settings["standbys"] = standbys
        if given is not None:
            settings |= given.given()
        return explained(self.origins, lambda: CheckpointConfig.model_validate(settings))


def load_config(
    source: str | os.PathLike[str] | Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Returns the settings of a YAML file or a mapping, and of environment variables, which take precedence.

    - `source`: the path of a local file, or a mapping. Keys are Flink's, flat (`a.b: 1`) or nested (`a: {b: 1}`).
      Settings that are not mentioned have their defaults.
    - `environ`: the environment variables, by default the variables of this process.

    Raises ConfigurationError, with file and line or the variable, for a file that cannot be read, unknown keys (with
    the nearest known key), keys of Flink that tidegate does not support (with the reason), keys that are given twice,
    wrong values, and settings that contradict each other.
    """
    return resolve(layers(source, os.environ if environ is None else environ))


def resolve(layers: Sequence[Layer]) -> Config:
    """Returns the configuration that results from these layers. Later layers take precedence over earlier ones."""
    settings: dict[str, Given] = {}
    restart: dict[str, Given] = {}
    for layer in layers:
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
    """Returns the result of `make()`.

    If it raises a SettingError, adds to the error where its settings were given (file and line, or variable).
    """
    try:
        return make()
    except SettingError as error:
        places = [origins[name].origin for name in error.settings if name in origins and origins[name].origin]
        if not places:
            raise
        raise ConfigurationError(f"{', '.join(dict.fromkeys(places))}: {error}") from error


def _by_name(layer: Layer) -> dict[str, Given]:
    """Returns the settings of one layer by name. Keys of restart strategies are omitted.

    Raises ConfigurationError for an unknown key or one that is given twice.
    """
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
    """Returns the name of the setting that a key sets, and the part of the key below an open key, such as
    `ray.options`.

    The part is empty for the whole mapping of an open key, and None for other settings. Raises ConfigurationError for
    an unknown key.
    """
    key = given.key
    name = NAME_OF.get(key)
    if name is not None:
        return name, "" if key in OPEN else None
    for start in OPEN:
        if key.startswith(f"{start}."):
            return NAME_OF[start], key.removeprefix(f"{start}.")
    reason = refusal_of(key)
    if reason is not None and not difflib.get_close_matches(key, KNOWN_KEYS, 1, _MISSPELT):
        raise _at(given, f"{key} is a setting of Flink that tidegate lacks: {reason}")
    raise _at(given, str(unknown_setting(key, KNOWN_KEYS)))


def _check_fixed(given: Given) -> None:
    only, reason = FIXED[given.key]
    if not isinstance(given.value, bool):
        raise _at(given, f"{given.key}: {given.value!r} is neither true nor false; write true or false")
    if given.value is not only:
        raise _at(given, f"{given.key} can only be {str(only).lower()}: {reason}; remove it")


def _with_layer(before: Mapping[str, Given], layer: Mapping[str, Given]) -> dict[str, Given]:
    merged = dict(before)
    for name, given in layer.items():
        old = merged.get(name)
        if old is not None and isinstance(old.value, Mapping) and isinstance(given.value, Mapping):
            given = Given(given.key, {**old.value, **given.value}, given.origin)
        merged[name] = given
    return merged


def _with_restart(before: Mapping[str, Given], layer: Layer) -> dict[str, Given]:
    """Returns the settings of the restart strategy after adding one more layer, which takes precedence over the earlier
    layers (`before`).
    """
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


# --- layers --------------------------------------------------------------------------------------------------------

_COMMAND_LINE: list[tuple[str | None, Layer]] = []
"""The configuration file and the `--set` options of `tidegate run`, while this command runs in this process."""


@contextmanager
def of_command_line(path: str | None, settings: Layer) -> Iterator[None]:
    """Returns a context manager for a run of the command line.

    In its block every configuration uses the file `path` as its lowest layer and `settings` as its highest layer.
    """
    _COMMAND_LINE.append((path, settings))
    try:
        yield
    finally:
        _COMMAND_LINE.pop()


def layers(source: str | os.PathLike[str] | Mapping[str, object] | None, environ: Mapping[str, str]) -> list[Layer]:
    """Returns all layers, the lowest precedence first: file of the command line or of TIDEGATE_CONFIG, `source`,
    environment variables, `--set` options.

    Raises ConfigurationError, which names the file and line or the variable, for a source that cannot be read.
    """
    path, on_top = _COMMAND_LINE[-1] if _COMMAND_LINE else (None, ())
    below = path or environ.get(FILE_VARIABLE) or None
    found: list[Layer] = [] if below is None else [of_file(below)]
    if isinstance(source, Mapping):
        found.append([*_of_mapping(source, "", "")])
    elif isinstance(source, str | os.PathLike):
        found.append(of_file(source))
    elif source is not None:
        raise ConfigurationError(f"config={source!r}: give the path of a YAML file, or a mapping of settings")
    return [*found, of_variables(environ), on_top]


def of_file(path: str | os.PathLike[str]) -> Layer:
    """Returns the settings of a YAML file, with their line numbers.

    Raises ConfigurationError if it cannot be read or is not a YAML mapping.
    """
    try:
        with Path(path).open("rb") as file:
            loader = yaml.SafeLoader(file)
            root = loader.get_single_node()
            if root is None:
                return []
            if not isinstance(root, yaml.MappingNode):
                kind = type(loader.construct_document(root)).__name__
                raise ConfigurationError(f"{path}: holds a {kind}; write `key: value` lines")
            return [*_of_node(loader, root, os.fspath(path), "")]
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the configuration {path}: {error.strerror}; correct the path, or its permissions"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not YAML: {error}; correct this line") from error


def of_variables(environ: Mapping[str, str]) -> Layer:
    """Returns the settings of environment variables. Raises ConfigurationError for variables that belong to no
    setting."""
    found: list[Given] = []
    for variable, text in environ.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable in _OTHER_VARIABLES or not text.strip():
            continue
        key = VARIABLES.get(variable)
        if key is None:
            if _OF_KUBERNETES.fullmatch(variable):
                continue
            raise unknown_setting(variable, VARIABLES, "environment variable")
        found += _of_text(key, text, f"variable {variable}")
    return found


def of_words(words: Sequence[str]) -> Layer:
    """Returns the settings of `--set` options as a layer. `words` are the texts `key=value`."""
    found: list[Given] = []
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key.strip():
            raise ConfigurationError(f"--set {word!r}: write key=value")
        found += _of_text(key.strip(), text, f"--set {key.strip()}")
    return found


def _of_text(key: str, text: str, origin: str) -> Iterator[Given]:
    try:
        value: object = yaml.safe_load(text)
        if isinstance(value, int | float) and ":" in text:
            value = text.strip()  # YAML 1.1 reads 10:00 as 600
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigurationError(
            f"{origin}: {text!r} cannot be read as YAML ({problem}); put the value in quotes, and both in quotes of "
            "the shell: 'key=\"value\"'"
        ) from error
    return _of_mapping({key: value}, "", origin)


def _of_mapping(content: Mapping[str, object], prefix: str, origin: str) -> Iterator[Given]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in _WHOLE:
            yield from _of_mapping(value, f"{key}.", origin)
        else:
            yield Given(key, value, origin)


def _of_node(loader: yaml.SafeLoader, node: yaml.MappingNode, path: str, prefix: str) -> Iterator[Given]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        name = str(key_node.value)
        if name in seen:
            raise ConfigurationError(
                f"{path}:{key_node.start_mark.line + 1}: {prefix}{name} is given twice; give it once"
            )
        seen.add(name)
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        if isinstance(value_node, yaml.MappingNode) and key not in _WHOLE:
            yield from _of_node(loader, value_node, path, f"{key}.")
        else:
            if ":" in str(value_node.value) and value_node.tag in _NUMBERS:
                value_node.tag = "tag:yaml.org,2002:str"  # YAML 1.1 reads 10:00 as 600
            value = loader.construct_object(value_node, deep=True)
            yield Given(key, value, f"{path}:{key_node.start_mark.line + 1}")
