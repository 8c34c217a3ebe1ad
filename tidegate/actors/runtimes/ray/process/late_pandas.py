"""Keeps pandas out of a process in which nobody uses it.

Where pandas is installed, Arrow imports it for its first `pa.array`, only to ask whether the values are some of
pandas': 0.3 s and 23 MB of each task. `WorkerProcess` calls this when it begins, before there are threads of ours.

Rules: Arrow finds out while pandas cannot be imported, and does not ask again. Parts of it then never know the single
values of pandas (`NA`, `Timedelta`), whatever comes later. So this is only for programs that are all ours
(`is_all_ours`): no functions, sources or sinks of the user's, and no columns in nanoseconds, whose values become
pandas' objects in Python only where it is there (`JobGraph.has_nanoseconds`).

Should a library import pandas there all the same, Arrow is told, as well as it can be. A look for pandas
(`importlib.util.find_spec`, which `import polars` does) is not an import: the finder stays until the module has run.
An import that fails leaves it too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import local
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import pyarrow as pa

_PANDAS = "pandas"
_OURS = (sys.stdlib_module_names | {"tidegate", "pyarrow", "numpy", "cloudpickle"}) - {"__main__"}
"""Top packages whose code imports pandas, if at all, only to give values to somebody else."""


def is_all_ours(graph: object) -> bool:
    """Whether nothing in a graph is code, or an object of a class, of the user or of another library."""
    try:
        _Search(_Nowhere(), protocol=5, buffer_callback=lambda buffer: None).dump(graph)
    except Exception:  # noqa: BLE001  # Found, or an object that does not travel twice: then nobody knows.
        return False
    return True


def import_pandas_late() -> None:
    """Let Arrow do without pandas until somebody imports it. Does nothing where it is there, or waited for, already."""
    if _PANDAS in sys.modules or any(isinstance(finder, _Watch) for finder in sys.meta_path):
        return
    absent = _Absent()
    sys.meta_path.insert(0, absent)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(absent)
    sys.meta_path.insert(0, _Watch())


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)


class _Foreign(Exception):
    """Something is not ours."""


class _Search(cloudpickle.Pickler):  # type: ignore[misc]
    """Goes through all that travels with an object, and raises at the first thing that is not ours."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType):
            module = obj.__globals__.get("__name__", "")  # Where it was written, whatever a decorator has made it say.
        elif isinstance(obj, ModuleType):
            module = obj.__name__
        else:
            of = obj if hasattr(obj, "__qualname__") else type(obj)  # Classes and functions, of C too, have one.
            module = getattr(of, "__module__", None)
        if module is not None and module.partition(".")[0] not in _OURS:
            raise _Foreign(module)
        return super().reducer_override(obj)


class _Absent(MetaPathFinder):
    """Says that there is no pandas."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _PANDAS:
            raise ModuleNotFoundError(f"No module named {_PANDAS!r}", name=_PANDAS)
        return None


class _Watch(MetaPathFinder):
    """Waits for the first import of pandas that succeeds, and makes each one that is tried tell Arrow."""

    def __init__(self) -> None:
        self._asking = local()
        """Set in a thread that asks the other finders: one of them may ask them all again, and so this one."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _PANDAS or hasattr(self._asking, "now"):
            return None
        self._asking.now = True
        try:
            spec = self._ask_the_others(name, path, target)
        finally:
            del self._asking.now
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self)
        return spec

    def _ask_the_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                return spec
        return None

    def leave(self) -> None:
        """Pandas is there and Arrow knows. A list of finders that somebody has replaced may be without this one."""
        with suppress(ValueError):
            sys.meta_path.remove(self)


class _Telling(Loader):
    """A loader that tells Arrow when the module is there, and then leaves its place to the loader that it had."""

    def __init__(self, loader: Loader, watch: _Watch) -> None:
        self._loader = loader
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        """Who looks for pandas without importing it may ask its loader for the source, files and so on."""
        if name in {"_loader", "_watch"}:  # A copy that is not filled yet.
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _tell_arrow()
        self._watch.leave()


def _tell_arrow() -> None:
    """Make Arrow import pandas whatever it knew. One that is too old for Arrow is still there for the program."""
    library: Any = pa.lib
    with suppress(ImportError):
        library._pandas_api.pd  # noqa: B018  # Asked for this, Arrow imports pandas.
