"""Compiles kernels with numba: into an image, or, where there can be none, with numba's own dispatcher.

`jit.py` imports this module when something must be compiled. An image contains a kernel and the kernels that it calls,
compiled for contiguous arrays of one dimension at any address (arrays in messages need not be aligned), and a C
function around it that takes array objects (`calling.py` has their layout).

Rules: nothing in an image needs Python or numba. Kernels allocate nothing and raise nothing; a kernel that does cannot
be loaded. Integers divided by zero give zero, floats infinity or NaN.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.core import compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import NumbaError
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype

from tidegate.state.kernels.machine_code import calling
from tidegate.state.kernels.machine_code.calling import ENTRY, CannotLoadError, address_of
from tidegate.state.kernels.machine_code.images import Image

_POINTER = ir.IntType(8).as_pointer()
_WORD, _HALF = ir.IntType(64), ir.IntType(32)


def part_of_images(function: Callable[..., Any], names: dict[str, Any]) -> Any:
    """Returns a function that other kernels may call in their stored machine code.

    `names` are the globals of the function, in the form that numba needs.
    """
    njit: Any = numba.njit
    return njit(nogil=True, _nrt=False, error_model="numpy")(_with_names(function, names))


def general(function: Callable[..., Any], names: dict[str, Any]) -> Any:
    """Returns a version of a kernel that numba compiles for any arguments, with numba's own cache. `names` as in
    `part_of_images`.
    """
    dispatcher: Any = numba.njit(cache=True, nogil=True)(_with_names(function, names))
    _load_without_compiler(dispatcher)
    _compile_alone(dispatcher)
    return dispatcher


def make_image(function: Callable[..., Any], names: dict[str, Any], kinds: Sequence[type | np.dtype[Any]]) -> Image:
    """Compiles a kernel for arguments of these kinds to stored machine code.

    Raises CannotLoadError if the code depends on more than an image can contain.
    """
    arguments = [_type_of(kind) for kind in kinds]
    flags: Any = compiler.Flags()
    flags.nrt = False
    flags.error_model = "numpy"
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    typing, target = cpu_target.typing_context, cpu_target.target_context
    with global_compiler_lock:
        typing.refresh()
        target.refresh()
        try:
            compiled = compiler.compile_extra(typing, target, _with_names(function, names), arguments, None, flags, {})
        except NumbaError as error:
            raise CannotLoadError(f"{function.__qualname__} does not compile as a kernel: {error}") from error
        result = "" if compiled.signature.return_type == numba.types.none else str(compiled.signature.return_type)
        if result not in ("", "bool", *calling.RESULTS):
            raise CannotLoadError(
                f"the kernel {function.__name__} returns {result}, which is not one of {list(calling.RESULTS)}; this "
                "is a bug in tidegate, please report it"
            )
        result = "boolean" if result == "bool" else result
        _add_entry(compiled, arguments, bool(result))
        compiled.library.finalize()
        code = _object_of(compiled.library)
    address_of(code)
    return Image(code, result)


def _with_names(function: Callable[..., Any], names: dict[str, Any]) -> Any:
    assert isinstance(function, FunctionType)
    assert function.__closure__ is None, f"{function.__name__} uses local variables of another function"
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    return copy


def _type_of(kind: type | np.dtype[Any]) -> Any:
    if isinstance(kind, type):
        return getattr(numba.types, calling.SCALARS[kind][0])
    return numba.types.Array(from_dtype(kind), 1, "C", aligned=False)


def _add_entry(compiled: Any, arguments: Sequence[Any], returns: bool) -> None:
    """Adds the C function that calls the compiled kernel. `calling.py` defines how it returns results."""
    context = compiled.target_context
    module = compiled.library.create_ir_module(ENTRY)
    types = [_POINTER if isinstance(kind, numba.types.Array) else context.get_data_type(kind) for kind in arguments]
    entry = ir.Function(module, ir.FunctionType(_HALF, [_POINTER, *types] if returns else types), ENTRY)
    builder = ir.IRBuilder(entry.append_basic_block())
    given = list(entry.args)
    place = given.pop(0) if returns else None
    values = [
        _array_of(context, builder, value, kind)
        if isinstance(kind, numba.types.Array)
        else context.data_model_manager[kind].from_data(builder, value)
        for value, kind in zip(given, arguments, strict=True)
    ]
    kernel = context.declare_function(module, compiled.fndesc)
    kinds = compiled.fndesc.argtypes
    _, result = context.call_conv.call_function(builder, kernel, compiled.fndesc.restype, kinds, values)
    if place is not None:
        if result.type == ir.IntType(1):
            result = builder.zext(result, ir.IntType(8))
        builder.store(result, builder.bitcast(place, result.type.as_pointer()))
    builder.ret(_HALF(calling.DONE))
    compiled.library.add_ir_module(module)


def _array_of(context: Any, builder: Any, given: Any, kind: Any) -> Any:
    """Emits code that makes numba's array from a Python array object, and leaves the function if the array is not
    contiguous.
    """

    def field(offset: int, of: Any) -> Any:
        return builder.load(builder.bitcast(builder.gep(given, [_WORD(offset)]), of.as_pointer()))

    def leave_unless(condition: Any) -> None:
        with builder.if_then(builder.not_(condition), likely=False):
            builder.ret(_HALF(calling.OTHER_ARRAYS))

    element = context.get_data_type(kind.dtype)
    size_bytes = context.get_abi_sizeof(element)
    leave_unless(builder.icmp_signed("==", field(calling.DIMENSIONS, _HALF), _HALF(1)))
    length = builder.load(field(calling.LENGTHS, _WORD.as_pointer()))
    stride = builder.load(field(calling.STRIDES, _WORD.as_pointer()))
    dense = builder.icmp_signed("==", stride, _WORD(size_bytes))
    leave_unless(builder.or_(dense, builder.icmp_signed("<=", length, _WORD(1))))
    array = context.make_array(kind)(context, builder)
    populate_array(array, field(calling.DATA, element.as_pointer()), [length], [_WORD(size_bytes)], size_bytes, None)
    return array._getvalue()


def _object_of(library: Any) -> bytes:
    """Returns the object file of a library that exports only the C function."""
    module = llvm.parse_assembly(library.get_llvm_str())
    for known in (*module.functions, *module.global_variables):
        if known.name != ENTRY and not known.is_declaration:
            known.linkage = llvm.Linkage.internal
    codegen = library.codegen
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=codegen._get_host_cpu_name(),
        features=codegen._get_host_cpu_features(),
        opt=3,
        reloc="pic",
        codemodel="small",
    )
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    found: bytes = machine.emit_object(module)
    return found


def _load_without_compiler(dispatcher: Any) -> None:
    """Makes a numba dispatcher load stored machine code, and load the compiler only if there is none."""
    cache = dispatcher._cache
    prepare_and_load = cache.load_overload

    def load(signature: object, target: object) -> object:
        rtsys.initialize(target)  # The memory that kernels make arrays in.
        kept = cache._load_overload(signature, target)
        return prepare_and_load(signature, target) if kept is None else kept

    cache.load_overload = load


def _compile_alone(dispatcher: Any) -> None:
    """Makes a numba dispatcher take a file lock while it looks for a function's machine code, or compiles and stores
    it.

    Without the lock, processes could read wrong code:

    numba writes its index before the data that it names, and renumbers data after a change of the source. A process
    that reads or writes at the same moment could get code for other types, or of the old source. A kernel also compiles
    and locks the kernels that it calls. Processes cannot deadlock, because calls are not circular. Neither can threads,
    because numba's own lock comes first and admits one of them.
    """
    compile_one, files = dispatcher.compile, dispatcher._cache._cache_file

    def compile_alone(signature: object) -> object:
        with global_compiler_lock:
            os.makedirs(files._cache_path, exist_ok=True)
            with open(f"{files._index_path}.lock", "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                return compile_one(signature)

    dispatcher.compile = compile_alone
