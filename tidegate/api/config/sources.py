"""Where settings come from: a YAML file, a mapping, variables of the environment, `--set` of the command line.

Each is a layer: entries with the key, the value, and where it was said. Rules:

- Keys may be flat (`a.b: 1`), nested (`a: {b: 1}`) or both. A key that stands twice in one layer is refused.
- The variable of a key is the key in capitals, with `TIDEGATE_` in front, and `_` for dots and dashes. Its value is
  read as YAML reads it; an empty variable says nothing.
- A variable that begins with `TIDEGATE_` and belongs to no key is refused, like any unknown key. Those that Kubernetes
  makes of a service called "tidegate" are not: nobody has written them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tidegate.api.config.restrictions import FIXED, REFUSED
from tidegate.api.config.sections.restart_config import RESTART_KEYS
from tidegate.api.config.sections.setting_names import NAME_OF, VARIABLE_PREFIX, unknown_setting, variable_of
from tidegate.storage.errors import ConfigurationError
from tidegate.web.options import TOKEN_VARIABLE

FILE_VARIABLE = "TIDEGATE_CONFIG"
"""The variable that names a file whose settings count where nothing else says otherwise."""
_OTHER_VARIABLES = (FILE_VARIABLE, "TIDEGATE_TOPOLOGY", TOKEN_VARIABLE)
"""Variables that are no settings; the second one is that of the examples, the third is a secret."""
_OF_KUBERNETES = re.compile(r"TIDEGATE(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
_WHOLE = ("log.levels", "ray.options", "ray.cluster-options")
"""Keys whose values are mappings of another library: what is nested in them are no keys."""
KNOWN_KEYS = (*NAME_OF, *RESTART_KEYS)
"""Every key that can be given, besides those of `FIXED`."""
VARIABLES = {variable_of(key): key for key in (*KNOWN_KEYS, *FIXED, *(key for key in REFUSED if key[-1] not in ".-"))}
"""Variable to key."""


@dataclass(frozen=True, slots=True)
class Given:
    """One setting as somebody has said it. `origin` is empty for what a program says."""

    key: str
    value: object
    origin: str = ""


Layer = Sequence[Given]

_COMMAND_LINE: list[tuple[str | None, Layer]] = []
"""File and settings of the `tidegate run` that this process is, if it is one."""


@contextmanager
def of_command_line(path: str | None, settings: Layer) -> Iterator[None]:
    """Within this context every configuration of this process has this file below and these settings on top."""
    _COMMAND_LINE.append((path, settings))
    try:
        yield
    finally:
        _COMMAND_LINE.pop()


def layers(source: str | os.PathLike[str] | Mapping[str, object] | None, environ: Mapping[str, str]) -> list[Layer]:
    """All that is said, the weakest first: file of the command line, `source`, variables, settings of the command line.

    Raises ConfigurationError, which names file and line or variable.
    """
    path, on_top = _COMMAND_LINE[-1] if _COMMAND_LINE else (None, ())
    below = path or environ.get(FILE_VARIABLE) or None
    found: list[Layer] = [] if below is None else [of_file(below)]
    if isinstance(source, Mapping):
        found.append([*_of_mapping(source, "", "")])
    elif source is not None:
        found.append(of_file(source))
    return [*found, of_variables(environ), on_top]


def of_file(path: str | os.PathLike[str]) -> Layer:
    """Settings of a YAML file, with their lines. ConfigurationError for one that cannot be read or is no mapping."""
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
        raise ConfigurationError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not YAML: {error}") from error


def of_variables(environ: Mapping[str, str]) -> Layer:
    """Settings of the environment's variables. ConfigurationError for those that belong to no setting."""
    found: list[Given] = []
    for variable, text in environ.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable in _OTHER_VARIABLES or not text.strip():
            continue
        key = VARIABLES.get(variable)
        if key is None:
            if _OF_KUBERNETES.fullmatch(variable):
                continue
            raise ConfigurationError(f"the variable {unknown_setting(variable, VARIABLES)}")
        found += _of_text(key, text, f"variable {variable}")
    return found


def of_words(words: Sequence[str]) -> Layer:
    """Settings of `--set key=value` options."""
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
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{origin}: {text!r} cannot be read as YAML; put it between quotes") from error
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
            value = loader.construct_object(value_node, deep=True)
            yield Given(key, value, f"{path}:{key_node.start_mark.line + 1}")
