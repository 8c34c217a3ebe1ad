"""Keeps pandas out of a process in which nobody uses it.

Where pandas is installed, Arrow imports it for its first `pa.array`, only to ask whether the values are some of
pandas': 0.3 s and 23 MB of each task. `TaskProcess` calls this when it begins, before there are threads of ours.

Rules: Arrow finds out while pandas cannot be imported, and does not ask again. As soon as anybody imports pandas, Arrow
is told, and does all that it does with it. What differs until then: values in nanoseconds become pandas' objects in
Python only where it is there. So this is not for programs that have such columns (`JobGraph.has_nanoseconds`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pyarrow as pa

_PANDAS = "pandas"


def import_pandas_late() -> None:
    """Let Arrow do without pandas until somebody imports it. Does nothing where it is there already."""
    if _PANDAS in sys.modules:
        return
    absent = _Absent()
    sys.meta_path.insert(0, absent)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(absent)
    sys.meta_path.insert(0, _Watch())


class _Absent(MetaPathFinder):
    """Says that there is no pandas."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _PANDAS:
            raise ModuleNotFoundError(f"No module named {_PANDAS!r}", name=_PANDAS)
        return None


class _Watch(MetaPathFinder):
    """Waits for the first import of pandas, and makes it one that tells Arrow."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _PANDAS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(_PANDAS)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader)
        return spec


class _Telling(Loader):
    """A loader that tells Arrow when the module is there, and then leaves its place to the loader that it had."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        library: Any = pa.lib
        assert library._pandas_api.compat is not None  # Asked for this, Arrow imports pandas whatever it knew.
