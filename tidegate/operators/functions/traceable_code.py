"""Decides, from the bytecode of a row function, whether the function may be traced with a symbolic row instead of being
called with each row.

Rules: the result must depend only on the one argument and on constants. The code may therefore have no loops, handle no
errors, and call only a few builtins and methods. Global names and closure variables must refer to numbers and strings.
Before each batch, the user of a trace checks by `outside_is_unchanged` that they still refer to the same objects.
"""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeAlias

Outside: TypeAlias = tuple[tuple[Callable[[], Any], Any], ...]
"""The global names and closure variables that a function reads: for each, a function that looks it up, and its value
during the trace.
"""

_ALLOWED_NAMES = """
    RESUME CACHE NOP EXTENDED_ARG LOAD_FAST STORE_FAST LOAD_CONST LOAD_GLOBAL LOAD_DEREF COPY_FREE_VARS
    BINARY_SUBSCR STORE_SUBSCR BINARY_OP COMPARE_OP CONTAINS_OP IS_OP UNARY_NEGATIVE UNARY_POSITIVE UNARY_NOT
    BUILD_MAP BUILD_TUPLE BUILD_CONST_KEY_MAP DICT_UPDATE DICT_MERGE RETURN_VALUE POP_TOP COPY SWAP PUSH_NULL
    PRECALL CALL KW_NAMES LOAD_METHOD JUMP_FORWARD POP_JUMP_FORWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE
    POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE JUMP_IF_TRUE_OR_POP JUMP_IF_FALSE_OR_POP
"""
_SINCE_3_12_NAMES = """
    RETURN_CONST LOAD_FAST_CHECK POP_JUMP_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE
"""
"""Bytecode instructions that are allowed since Python 3.12.

Before, jumps with these names could go backwards in a loop.
"""
_SINCE_3_13_NAMES = "TO_BOOL CALL_KW LOAD_FAST_LOAD_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST"
_ALLOWED = frozenset(
    [
        *_ALLOWED_NAMES.split(),
        *(_SINCE_3_12_NAMES.split() if sys.version_info >= (3, 12) else ()),
        *(_SINCE_3_13_NAMES.split() if sys.version_info >= (3, 13) else ()),
    ]
)
_LOOKS_FOR_NONE = frozenset(
    {
        "IS_OP",
        "POP_JUMP_FORWARD_IF_NONE",
        "POP_JUMP_FORWARD_IF_NOT_NONE",
        "POP_JUMP_IF_NONE",
        "POP_JUMP_IF_NOT_NONE",
    }
)
_BUILTINS = frozenset({"abs", "dict"})
_METHODS = frozenset({"get", "startswith", "endswith"})
_CONSTANTS = (bool, int, float, str)
_INSTRUCTIONS_MAX = 500


class UntraceableError(Exception):
    """Raised with the reason why a function cannot be traced and must be called with each row."""


def checked(function: object) -> tuple[Outside, bool]:
    """Returns the names that a function reads from its surroundings (globals and closure), and whether the function
    compares with None.

    Raises UntraceableError if the code of the function breaks a rule.
    """
    if type(function) is not FunctionType:
        raise UntraceableError(f"the function is a {type(function).__name__} and not a plain function")
    code = function.__code__
    if code.co_argcount != 1 or code.co_kwonlyargcount or code.co_flags & (0x04 | 0x08 | 0x20 | 0x80 | 0x200):
        raise UntraceableError("the function takes other arguments than the row, or is a generator")
    if code.co_exceptiontable:
        raise UntraceableError("the function handles errors in a try statement")
    outside: dict[str, tuple[Callable[[], Any], Any]] = {}
    asks_for_none = False
    for instruction in _instructions(code):
        name = "LOAD_METHOD" if _loads_method(instruction) else instruction.opname
        if name not in _ALLOWED:
            raise UntraceableError(f"the code of the function has the instruction {name}")
        if name == "LOAD_METHOD" and instruction.argval not in _METHODS:
            raise UntraceableError(f"the function calls {instruction.argval}()")
        if name in ("LOAD_GLOBAL", "LOAD_DEREF"):
            outside[instruction.argval] = _found(function, name, instruction.argval)
        asks_for_none |= name in _LOOKS_FOR_NONE
    return tuple(outside.values()), asks_for_none


def outside_is_unchanged(outside: Outside) -> bool:
    """Returns whether the global names and closure variables that a function reads still refer to the same objects as
    during the trace.
    """
    return all(look() is found for look, found in outside)


def _instructions(code: CodeType) -> list[dis.Instruction]:
    found = list(dis.get_instructions(code))
    if len(found) > _INSTRUCTIONS_MAX:
        raise UntraceableError(f"the function has {len(found)} instructions, more than {_INSTRUCTIONS_MAX}")
    return found


def _loads_method(instruction: dis.Instruction) -> bool:
    """Returns whether a bytecode instruction looks up a method: LOAD_METHOD or, since Python 3.12, LOAD_ATTR with its
    lowest bit set.
    """
    is_marked = sys.version_info >= (3, 12) and instruction.opname == "LOAD_ATTR" and (instruction.arg or 0) & 1
    return bool(is_marked) or instruction.opname == "LOAD_METHOD"


def _found(function: FunctionType, operation: str, name: str) -> tuple[Callable[[], Any], Any]:
    if operation == "LOAD_DEREF":
        cell = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)).get(name)
        if cell is None:
            raise UntraceableError(f"the function shares the variable {name!r} with functions inside it")
        found = _cell_value(cell)
        look: Callable[[], Any] = lambda: _cell_value(cell)  # noqa: E731
    else:
        known = function.__globals__
        look = lambda: known.get(name, getattr(builtins, name, None))  # noqa: E731
        found = look()
        if name in _BUILTINS and found is getattr(builtins, name):
            return look, found
    if type(found) not in _CONSTANTS:
        raise UntraceableError(f"the function uses {name!r}, an object of type {type(found).__name__}")
    return look, found


def _cell_value(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
