"""Loads the function that a command is to call: `MODULE:FUNC`, or `FILE.py:FUNC`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tidegate.storage.errors import ConfigurationError


def load_function(reference: str) -> Callable[..., Any]:
    """The function. ConfigurationError if there is no such module, file or function."""
    place, separator, name = reference.rpartition(":")
    if not separator or not place or not name:
        raise ConfigurationError(f"{reference!r}: write MODULE:FUNC or FILE.py:FUNC")
    module = _of_file(Path(place)) if place.endswith(".py") else _of_name(place, reference)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"{place} has no function {name!r}")
    found: Callable[..., Any] = function
    return found


def _of_file(path: Path) -> ModuleType:
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigurationError(f"{path} is not there, or no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _of_name(name: str, reference: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # The module is there, and imports one that is not.
        raise ConfigurationError(f"there is no module {name!r} (from {reference!r}): {error}") from error
