"""`lazy_names`: lets a package offer names that it imports when they are first used (PEP 562).

Without it `import tidegate.storage.ids` would load the whole house, because Python runs `tidegate/__init__.py` first. A
package calls it in a branch that type checkers do not read; they read ordinary imports instead, so that they know each
name, where it is defined, and that there is no other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(
    package: str, home_of: Mapping[str, str], submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package: names with the modules that define them, both below `package`.

    A module that is named from `tidegate.` on lies elsewhere: the package is a face for it as well.

    `submodules` answer as attributes of the package without having been imported.
    """

    def get(name: str) -> object:
        home = home_of.get(name)
        if home is not None:
            value = getattr(import_module(home if home.startswith("tidegate.") else f"{package}.{home}"), name)
        elif name in submodules:
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *submodules})

    return get, names
