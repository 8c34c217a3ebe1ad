"""`lazy_names`: lets a package offer names that it imports when they are first used (PEP 562).

Python runs `tidegate/__init__.py` before it imports `tidegate.storage.ids`. If that file had ordinary imports, the
smallest import would load the whole package. A package therefore calls `lazy_names` in a branch that type checkers
skip. Type checkers read ordinary imports in the other branch, and find each name and its definition there.

Python's garbage collector is disabled during such an import. An import makes many objects that stay, and the collector
would scan them again and again, which takes a sixth of the time and frees nothing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType


def lazy_names(
    package: str, home_of: Mapping[str, str], submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns the functions `__getattr__` and `__dir__` of `package`.

    `home_of` maps each name to the module that defines it. The module is relative to `package`, unless it begins with
    `tidegate.`. `submodules` are attributes that are imported on first use, too.
    """

    def get(name: str) -> object:
        home = home_of.get(name)
        if home is not None:
            value = getattr(_imported(home if home.startswith("tidegate.") else f"{package}.{home}"), name)
        elif name in submodules:
            value = _imported(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *submodules})

    return get, names


def _imported(module: str) -> ModuleType:
    """Returns a module, imported while the garbage collector is disabled."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if collects:
            gc.enable()
