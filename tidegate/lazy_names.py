"""`lazy_names`: lets a package offer names that it imports when they are first used (PEP 562).

Python runs `tidegate/__init__.py` before it imports `tidegate.storage.ids`. If that file had ordinary imports, the
smallest import would load the whole package. A package calls `lazy_names` in a branch that type checkers skip. In the
other branch they read ordinary imports, and so know each name and where it is defined.

An import makes many objects that stay. Python's garbage collector looks at all of them again and again meanwhile, which
takes a sixth of the time, and finds nothing. So it waits while a name is imported.
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
    """The `__getattr__` and `__dir__` of `package`.

    `home_of` maps each name to the module that defines it, relative to `package`; a module that begins with
    `tidegate.` lies outside of the package. `submodules` are attributes that are imported on first use, too.
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
    """A module; the garbage collector waits until it is loaded."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if collects:
            gc.enable()
