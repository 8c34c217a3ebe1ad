"""Calls the machine code of an image from Python.

The code takes NumPy arrays as they are, and reads address and length out of the array object, in the layout that each
extension module compiled against NumPy relies on (`PyArrayObject_fields`). `ARRAYS_ARE_AS_EXPECTED` looks whether this
Python and this NumPy have it; where not, kernels are numba's alone.

Rules: calls release the GIL. The code looks whether arrays are what it was made for: one dimension, one value behind
the other. If not, it does nothing and returns `OTHER_ARRAYS`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tidegate.state.kernels.machine_code.images import Image
from tidegate.state.kernels.machine_code.loading import address_of

HEAD_BYTES = object.__basicsize__
DATA, DIMENSIONS, LENGTHS, STRIDES = (HEAD_BYTES + offset for offset in (0, 8, 16, 24))
"""Where in an array object its fields lie."""

DONE, OTHER_ARRAYS = 0, 1
"""What the code returns."""

SCALARS: dict[type, tuple[str, Any]] = {
    bool: ("boolean", ctypes.c_bool),
    int: ("int64", ctypes.c_int64),
    float: ("float64", ctypes.c_double),
    np.int32: ("int32", ctypes.c_int32),
    np.int64: ("int64", ctypes.c_int64),
    np.uint64: ("uint64", ctypes.c_uint64),
    np.float64: ("float64", ctypes.c_double),
}
"""What may be handed in beside arrays: its type of numba's, and of C."""

RESULTS: dict[str, Any] = {
    "boolean": ctypes.c_bool,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float64": ctypes.c_double,
}
"""What may be returned."""

Call = Callable[..., Any]


def function_of(image: Image, kinds: Sequence[type | np.dtype[Any]], otherwise: Call) -> Call:
    """The function of an image for arguments of some kinds: a dtype for an array, a type for a scalar.

    Arrays that it cannot take are handed to `otherwise`, with the rest. CannotLoadError.
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


def _with_python_numbers(call: Call, which: Sequence[int]) -> Call:
    """ctypes takes no scalars of NumPy's."""

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
