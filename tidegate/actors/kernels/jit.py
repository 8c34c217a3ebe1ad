"""How kernels are compiled, and the machine instructions that NumPy has no word for.

Rules: every kernel is cached beside its module (`cache=True`), so that a standby actor pays for loading and
not for compiling, and releases the GIL (`nogil=True`), so that heartbeats and the asynchronous part of
snapshots go on. A kernel only touches arrays that its caller hands in and checks nothing: the typed functions
around it do.

The processes of a job, and those of a test run, come to a fresh cache together. So one at a time looks for the machine
code of a kernel, or compiles and keeps it:

- The others need not compile it again.
- numba writes its index before the data that it names, and numbers data anew after a change of the source. Who reads
  or writes at the same moment could be given the code of other types, or of the old source.

What numba knows of Python and NumPy, so that it can compile, is loaded when something is compiled. To use machine code
that is there takes none of it, and it is nearly half of what numba costs a process.

numba keys its cache by the file that a kernel is in. After a change of an intrinsic here, delete the
`__pycache__` folders of this package: kernels elsewhere have the old one compiled in.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime.nrt import rtsys
from numba.extending import intrinsic
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Decorator: compile with the options that all kernels share, keeping the type of the Python function."""
    dispatcher: Any = numba.njit(cache=True, nogil=True)(function)
    _load_without_compiler(dispatcher)
    _compile_alone(dispatcher)
    return cast(F, dispatcher)


def _load_without_compiler(dispatcher: Any) -> None:
    """Look for a function's machine code first, and prepare to compile only where there is none."""
    cache = dispatcher._cache
    prepare_and_load = cache.load_overload

    def load(signature: object, target: object) -> object:
        rtsys.initialize(target)  # The memory that kernels make arrays in.
        kept = cache._load_overload(signature, target)
        return prepare_and_load(signature, target) if kept is None else kept

    cache.load_overload = load


def _compile_alone(dispatcher: Any) -> None:
    """Let one process at a time look for a function's machine code, or compile and keep it.

    A kernel compiles those that it calls, and locks them too. Processes cannot wait for each other in a circle: calls
    make none. Neither can threads of a process: numba's own lock comes first, and lets one of them in.
    """
    compile_one, files = dispatcher.compile, dispatcher._cache._cache_file

    def compile_alone(signature: object) -> object:
        with global_compiler_lock:
            os.makedirs(files._cache_path, exist_ok=True)
            with open(f"{files._index_path}.lock", "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                return compile_one(signature)

    dispatcher.compile = compile_alone


def _intrinsic(function: Callable[..., Any]) -> Any:
    return intrinsic(function)


def _define_load(bits: int) -> Any:
    @_intrinsic
    def load(typingctx: Any, data: Any, position: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0])
            pointer = builder.gep(array.data, [args[1]])
            word = builder.load(builder.bitcast(pointer, ir.IntType(bits).as_pointer()))
            word.align = 1
            return word if bits == 64 else builder.zext(word, ir.IntType(64))

        return types.uint64(data, types.int64), codegen

    return load


Load = Callable[[NDArray[np.uint8], int | np.int64], np.uint64]

load64: Load = _define_load(64)
"""`load64(data, position)`: the 8 bytes from `position` on, little-endian; they need not be aligned."""

load32: Load = _define_load(32)
"""`load32(data, position)`: the 4 bytes from `position` on, little-endian, widened to uint64."""


def emit_prefetch(builder: Any, pointer: Any) -> None:
    """Code that starts to load the cache line at a pointer, to be written."""
    address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    i32 = ir.IntType(32)
    function_type = ir.FunctionType(ir.VoidType(), [address.type, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
    for_writing, keep, data_cache = i32(1), i32(3), i32(1)
    builder.call(function, [address, for_writing, keep, data_cache])


@_intrinsic
def _prefetch(typingctx: Any, data: Any, position: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0])
        emit_prefetch(builder, builder.gep(array.data, [args[1]]))
        return context.get_dummy_value()

    return types.void(data, types.int64), codegen


prefetch: Callable[[NDArray[Any], int | np.int64], None] = _prefetch
"""`prefetch(data, position)`: start loading the cache line of `data[position]`, soon to be written."""
