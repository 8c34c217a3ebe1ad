"""The machine instructions that NumPy lacks, as numba intrinsics.

Kernels use the names that `jit.py` and `paged.py` define; `compiling.py` substitutes these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tidegate.state.kernels.machine_code.page_size import PAGE_BITS, PAGE_ROWS


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


load64 = _define_load(64)
load32 = _define_load(32)


@_intrinsic
def store64(typingctx: Any, data: Any, position: Any, word: Any) -> Any:
    """Stores 8 bytes at any position of an array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0])
        pointer = builder.gep(array.data, [args[1]])
        stored = builder.store(args[2], builder.bitcast(pointer, ir.IntType(64).as_pointer()))
        stored.align = 1
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), codegen


def _emit_prefetch(builder: Any, pointer: Any) -> None:
    """Emits an instruction that prefetches the cache line at a pointer, for writing."""
    address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    i32 = ir.IntType(32)
    function_type = ir.FunctionType(ir.VoidType(), [address.type, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
    for_writing, keep, data_cache = i32(1), i32(3), i32(1)
    builder.call(function, [address, for_writing, keep, data_cache])


@_intrinsic
def prefetch(typingctx: Any, data: Any, position: Any) -> Any:
    """Prefetches the cache line at a position of an array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0])
        _emit_prefetch(builder, builder.gep(array.data, [args[1]]))
        return context.get_dummy_value()

    return types.void(data, types.int64), codegen


def _pointer(context: Any, builder: Any, signature: Any, args: Any, value_type: Any) -> Any:
    """Returns a pointer to the value of a slot. The first two of `args` are the pages and the slot."""
    array = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0])
    i64 = ir.IntType(64)
    page = builder.load(builder.gep(array.data, [builder.lshr(args[1], i64(PAGE_BITS))]))
    values = builder.inttoptr(page, context.get_data_type(value_type).as_pointer())
    return builder.gep(values, [builder.and_(args[1], i64(PAGE_ROWS - 1))])


@_intrinsic
def load_value(typingctx: Any, pages: Any, slot: Any, like: Any) -> Any:
    """Loads the value of a slot from pages. `like` determines the type."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature, args, signature.return_type)
        return builder.load(pointer)

    return (like(pages, types.int64, like), codegen) if pages.dtype == types.uintp else None


@_intrinsic
def load_at(typingctx: Any, page: Any, position: Any, like: Any) -> Any:
    """Loads the value at a position of a page. `like` determines the type."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = builder.inttoptr(args[0], context.get_data_type(signature.return_type).as_pointer())
        return builder.load(builder.gep(values, [args[1]]))

    return like(types.uintp, types.int64, like), codegen


@_intrinsic
def store_value(typingctx: Any, pages: Any, slot: Any, value: Any) -> Any:
    """Stores the value of a slot in pages."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature, args, signature.args[2])
        builder.store(args[2], pointer)
        return context.get_dummy_value()

    return (types.void(pages, types.int64, value), codegen) if pages.dtype == types.uintp else None


@_intrinsic
def store_at(typingctx: Any, page: Any, position: Any, value: Any) -> Any:
    """Stores the value at a position of a page."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = builder.inttoptr(args[0], context.get_data_type(signature.args[2]).as_pointer())
        builder.store(args[2], builder.gep(values, [args[1]]))
        return context.get_dummy_value()

    return types.void(types.uintp, types.int64, value), codegen


@_intrinsic
def prefetch_value(typingctx: Any, pages: Any, slot: Any, like: Any) -> Any:
    """Prefetches the cache line with the value of a slot. `like` determines the type."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature, args, signature.args[2])
        _emit_prefetch(builder, pointer)
        return context.get_dummy_value()

    return (types.void(pages, types.int64, like), codegen) if pages.dtype == types.uintp else None


@_intrinsic
def call(typingctx: Any, function: Any, first: Any, second: Any) -> Any:
    """Calls a C function with two pointers. `function` is its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.IntType(64), [pointer, pointer])
        target = builder.inttoptr(args[0], kind.as_pointer())
        return builder.call(target, [builder.inttoptr(each, pointer) for each in args[1:]])

    return types.int64(types.int64, types.uintp, types.uintp), codegen
