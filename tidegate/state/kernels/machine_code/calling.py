"""Loads the machine code of an image into this process, and calls it from Python.

LLVM's linker loads it. `llvmlite.binding` is LLVM without numba, and importing it costs a small part of importing the
compiler. The code takes NumPy arrays as they are, and reads address and length from the array object, in the layout
that each extension module compiled against NumPy relies on (`PyArrayObject_fields`). `ARRAYS_ARE_AS_EXPECTED` checks
that this Python and this NumPy use it; if not, numba runs all kernels. Rules:

- An object refers to nothing outside itself, neither library functions nor numba's. Other objects cannot be loaded.
- Loaded code stays for the lifetime of the process, because functions point into it.
- Calls release the GIL. The code checks that arrays have one dimension and are contiguous. If not, it does nothing and
  returns `OTHER_ARRAYS`.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from tidegate.state.kernels.machine_code.images import Image

ENTRY = "tidegate_kernel"
"""Name of the function that each object defines."""

_numbers = itertools.count()
_loaded: list[Any] = []

HEAD_BYTES = object.__basicsize__
DATA, DIMENSIONS, LENGTHS, STRIDES = (HEAD_BYTES + offset for offset in (0, 8, 16, 24))
"""Positions of the fields in an array object."""

DONE, OTHER_ARRAYS = 0, 1
"""Results of the code."""

SCALARS: dict[type, tuple[str, Any]] = {
    bool: ("boolean", ctypes.c_bool),
    int: ("int64", ctypes.c_int64),
    float: ("float64", ctypes.c_double),
    np.int32: ("int32", ctypes.c_int32),
    np.int64: ("int64", ctypes.c_int64),
    np.uint64: ("uint64", ctypes.c_uint64),
    np.float64: ("float64", ctypes.c_double),
}
"""Scalar types that may be passed: the numba type and the C type of each."""

RESULTS: dict[str, Any] = {
    "boolean": ctypes.c_bool,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float64": ctypes.c_double,
}
"""Result types: the C type of each numba type."""

Call = Callable[..., Any]


class CannotLoadError(Exception):
    """Raised if a kernel cannot be run from stored machine code, so that numba is needed."""


def function_of(image: Image, kinds: Sequence[type | np.dtype[Any]], otherwise: Call) -> Call:
    """Returns the function in an image (stored machine code) for arguments of these kinds.

    A kind is a dtype for an array, or a type for a scalar. Calls with arrays that the function cannot handle are passed
    to `otherwise`. Raises CannotLoadError.
    """
    types = [SCALARS[kind][1] if isinstance(kind, type) else ctypes.py_object for kind in kinds]
    address = address_of(image.code)
    converted = [number for number, kind in enumerate(kinds) if isinstance(kind, type) and issubclass(kind, np.generic)]
    if not image.result:
        function = ctypes.CFUNCTYPE(ctypes.c_int32, *types)(address)

        def call(*arguments: Any) -> Any:
            return otherwise(*arguments) if function(*arguments) else None
    else:
        result_type = RESULTS[image.result]
        function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *types)(address)

        def call(*arguments: Any) -> Any:
            result = result_type()
            return otherwise(*arguments) if function(ctypes.byref(result), *arguments) else result.value

    return _with_python_numbers(call, converted) if converted else call


def address_of(code: bytes) -> int:
    """Loads an object file of machine code into this process, and returns the address of its function. Raises
    CannotLoadError. Not thread-safe.
    """
    built = llvm.JITLibraryBuilder().add_object_img(code).export_symbol(ENTRY)
    try:
        library = built.link(_linker(), f"kernel {next(_numbers)}")
    except RuntimeError as error:
        raise CannotLoadError(str(error)) from error
    _loaded.append(library)
    address: int = library[ENTRY]
    return address


@cache
def _linker() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler(use_jit_link=True, suppress_errors=True)


def _with_python_numbers(call: Call, which: Sequence[int]) -> Call:
    """Wraps a function that ctypes calls: converts the scalar arguments `which` to Python numbers, because ctypes does
    not accept NumPy scalars.
    """

    def with_numbers(*arguments: Any) -> Any:
        taken = list(arguments)
        for number in which:
            taken[number] = taken[number].item()
        return call(*taken)

    return with_numbers


def _arrays_are_as_expected() -> bool:
    array = np.arange(6, dtype=np.int32)[::2]
    words = ctypes.c_int64.from_address
    start = id(array)
    return (
        words(start + DATA).value == array.ctypes.data
        and ctypes.c_int32.from_address(start + DIMENSIONS).value == 1
        and words(words(start + LENGTHS).value).value == len(array)
        and words(words(start + STRIDES).value).value == array.strides[0]
    )


ARRAYS_ARE_AS_EXPECTED = _arrays_are_as_expected()
