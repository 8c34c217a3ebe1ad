"""The `kernel` decorator: compiles functions over arrays, stores their machine code on disk, and loads it.

Rules:

- A kernel is compiled once for each combination of argument types. Its machine code is stored next to its module, or in
  the user's cache (`machine_code/images.py`). A process that finds the code there does not load numba.
- A kernel releases the GIL, so that heartbeats and the asynchronous part of snapshots continue.
- A kernel only accesses arrays from its arguments, and checks nothing; the typed functions around it do. It allocates
  no arrays, raises nothing, and calls only other kernels and the instructions below.
- The processes of a job or of a test run start with an empty cache at the same time. One of them compiles a kernel, and
  the other processes load the stored code.
- If a kernel cannot have an image (it needs more than images allow), and for arrays that images do not support
  (strided, or with several dimensions), numba runs it, with its own cache.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.machine_code import images
from tidegate.state.kernels.machine_code.calling import ARRAYS_ARE_AS_EXPECTED, SCALARS, CannotLoadError, function_of

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
_Kinds = tuple[type | np.dtype[Any], ...]

_LOCK = threading.RLock()
_ARRAY = np.ndarray


def kernel(function: F) -> F:
    """Decorator for a function that is compiled to machine code. The static type of the function does not change."""
    return cast(F, Kernel(function))


class Kernel:
    """A compiled function, with the machine code that was loaded for each combination of argument types."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._loaded: dict[_Kinds, Callable[..., Any]] = {}
        self._for_numba: dict[str, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        kinds = tuple([each.dtype if type(each) is _ARRAY else type(each) for each in arguments])
        loaded = self._loaded.get(kinds)
        if loaded is None:
            with _LOCK:
                loaded = self._loaded[kinds] = self._loaded.get(kinds) or self._load(kinds)
        return loaded(*arguments)

    def _load(self, kinds: _Kinds) -> Callable[..., Any]:
        if ARRAYS_ARE_AS_EXPECTED and all(
            kind in SCALARS if isinstance(kind, type) else kind.isnative for kind in kinds
        ):
            try:
                return function_of(self._image(kinds), kinds, self._otherwise)
            except CannotLoadError as reason:
                log.debug("no image of kernel %s: %s", self._function.__qualname__, reason)
        return self._otherwise

    def _otherwise(self, *arguments: Any) -> Any:
        return self.general(*arguments)

    def _image(self, kinds: _Kinds) -> images.Image:
        """Loads the machine code for these argument types, or compiles and stores it. Only one process at a time
        compiles a kernel.
        """
        source = Path(self._function.__code__.co_filename)
        names = [kind.__name__ if isinstance(kind, type) else kind.str for kind in kinds]
        kernel_name = f"{source.stem}.{self._function.__qualname__}"
        name = images.file_name(kernel_name, self.program, names)
        places = [folder / name for folder in images.folders(source)]
        found = next((image for path in places if (image := images.kept(path)) is not None), None)
        if found is not None:
            return found
        for path in places:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = path.with_name(f".{kernel_name}.lock").open("ab")
            except OSError:
                continue
            with lock:
                with suppress(OSError):  # Where files cannot be locked, several processes may compile.
                    fcntl.flock(lock, fcntl.LOCK_EX)
                found = images.kept(path)
                if found is None:
                    found = self._compile(kinds)
                    images.keep(path, found)
                return found
        return self._compile(kinds)

    def _compile(self, kinds: _Kinds) -> images.Image:
        from tidegate.state.kernels.machine_code import compiling

        return compiling.make_image(self._function, self._names("part_of_images"), kinds)

    @functools.cached_property
    def program(self) -> bytes:
        """Returns the bytecode of the kernel and of kernels that it calls, with the globals that it uses.

        The source file is not used, because it may have changed since this process imported it.
        """
        parts = [*_parts_of(self._function.__code__), self._function.__defaults__]
        for name, value in sorted(self._globals().items()):
            parts += [name, value.program if isinstance(value, (Kernel, Instruction)) else _text_of(value)]
        return repr(parts).encode()

    def _globals(self) -> dict[str, Any]:
        known = self._function.__globals__
        return {name: known[name] for name in self._function.__code__.co_names if name in known}

    def _names(self, form: str) -> dict[str, Any]:
        """Returns the globals that the function uses, with kernels and instructions replaced by objects that numba
        understands.
        """
        return {
            name: value.for_numba(form) if isinstance(value, (Kernel, Instruction)) else value
            for name, value in self._globals().items()
        }

    def for_numba(self, form: str) -> Any:
        """Returns the object that represents this kernel when numba compiles a kernel that calls it.

        `form` names the function in `compiling.py` that creates the object.
        """
        with _LOCK:
            if form not in self._for_numba:
                from tidegate.state.kernels.machine_code import compiling

                self._for_numba[form] = getattr(compiling, form)(self._function, self._names(form))
            return self._for_numba[form]

    def general(self, *arguments: Any) -> Any:
        """Runs the kernel through numba, which accepts arguments of any types."""
        return self.for_numba("general")(*arguments)


def _parts_of(code: CodeType) -> list[Any]:
    constants = [_parts_of(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    return [code.co_code, constants, code.co_names, code.co_varnames, code.co_argcount]


def _text_of(value: object) -> str:
    return value.__name__ if isinstance(value, ModuleType) else repr(value)


class Instruction:
    """A machine instruction that kernels can call. `machine_code/intrinsics.py` defines it under its name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.program = name.encode()

    def for_numba(self, _form: str) -> Any:
        """Returns the object that represents this instruction when numba compiles a kernel."""
        from tidegate.state.kernels.machine_code import intrinsics

        return getattr(intrinsics, self._name)


Load = Callable[[NDArray[np.uint8], int | np.int64], np.uint64]

load64 = cast(Load, Instruction("load64"))
"""`load64(data, position)`: the 8 bytes from `position` on, little-endian, not necessarily aligned."""

load32 = cast(Load, Instruction("load32"))
"""`load32(data, position)`: the 4 bytes from `position` on, little-endian, widened to uint64."""

store64 = cast(Callable[[NDArray[np.uint8], int | np.int64, np.uint64], None], Instruction("store64"))
"""`store64(data, position, word)`: the inverse of `load64`."""

prefetch = cast(Callable[[NDArray[Any], int | np.int64], None], Instruction("prefetch"))
"""`prefetch(data, position)`: starts to load the cache line of `data[position]`, which will soon be written."""
