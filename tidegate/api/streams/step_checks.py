"""Checks the methods of a process function when a step is added: their names, their parameters, and how they use the
context.

Users of Flink and Bytewax write `process_element`, `process(key, context, elements)`, `ctx.timestamp()` and
`ctx.get_state(...)`. Such code would fail at the first row. These checks find the mistake earlier, from the names of
the methods, their signatures, and the attributes of the context that their bytecode reads.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import FunctionType
from typing import TypeVar

from tidegate.operators.functions.process_functions import BaseProcessFunction, ProcessFunction
from tidegate.operators.windows.process_windows import ProcessWindowFunction
from tidegate.storage.argument_checks import check_call, check_runs_at_once
from tidegate.storage.errors import ConfigurationError

_OTHER_METHODS: Mapping[str, str] = {
    "process_element": "process",
    "process_element1": "process1",
    "process_element2": "process2",
    "process_broadcast_element": "process_broadcast",
    "processElement": "process",
    "onTimer": "on_timer",
    "on_item": "process",
    "on_batch": "process_batch",
    "on_notify": "on_timer",
    "on_eof": "finish",
}
"""Maps method names of other engines to the corresponding names in tidegate."""
_OTHER_ATTRIBUTES: Mapping[str, str] = {
    "get_state": 'bind the state in open: self.count = context.state(tg.ValueState("count", int))',
    "get_list_state": 'bind the state in open: self.items = context.state(tg.ListState("items", int))',
    "get_map_state": 'bind the state in open: self.seen = context.state(tg.MapState("seen", str, int))',
    "get_broadcast_state": "bind the state in open: self.rules = context.broadcast_state(...)",
    "get_current_key": "context.current_key is a dict of the key columns",
    "output": "context.emit(tag, row) emits a row to a side output",
    "register_event_time_timer": "context.timer_service.register_event_time_timer(ms) does that",
    "register_processing_time_timer": "context.timer_service.register_processing_time_timer(ms) does that",
    "get_runtime_context": "the context itself has state and metrics",
}
"""Maps attributes of the contexts of other engines to what to write in tidegate."""
_VALUES = frozenset(
    {
        "timestamp",
        "current_watermark",
        "current_processing_time",
        "current_key",
        "timer_service",
        "time_domain",
        "window",
    }
)
"""Attributes of the context that are methods in other engines. Calling them is an error."""
_CALLS: Mapping[str, Sequence[str]] = {
    "open": ("context",),
    "process_batch": ("batch", "context"),
    "on_timer": ("timestamp", "context"),
    "on_timer_batch": ("keys", "context"),
    "finish": ("context",),
}
"""The methods that all kinds of process functions may have, with the parameters with which they are called."""

_OF_ROWS = ("process", "process1", "process2", "process_broadcast", "on_timer", "finish")
"""The methods that may yield rows. Others return a batch, or nothing."""


def check_methods(function: object) -> None:
    """Raises ConfigurationError if a process function lacks the method for its rows, or if a method has other
    parameters than the caller passes.

    Also raises it for a method that reads an attribute of the context that does not exist. Objects that are not process
    functions are not checked here.
    """
    kind = type(function)
    if isinstance(function, ProcessWindowFunction):
        base: type = ProcessWindowFunction
        inputs: Mapping[str, Sequence[str]] = {"process": ("rows", "context")}
    elif isinstance(function, BaseProcessFunction):
        base = next(each for each in kind.__mro__ if "INPUT_METHODS" in vars(each))
        inputs = dict.fromkeys(function.INPUT_METHODS, ("row", "context"))
    else:
        return
    if _defines(kind, "close", base):
        check_runs_at_once(function.close, f"{kind.__name__}.close")
    wanted = {**inputs, **_CALLS}
    for other, ours in _OTHER_METHODS.items():
        if ours in wanted and hasattr(kind, other) and not _defines(kind, ours, base):
            raise ConfigurationError(
                f"{kind.__name__} defines {other}; tidegate's process functions implement "
                f"{ours}({', '.join(wanted[ours])}); rename it"
            )
    for name, parameters in inputs.items():
        if not _defines(kind, name, base) and not (base is ProcessFunction and _defines(kind, "process_batch", base)):
            raise ConfigurationError(f"{kind.__name__} needs a method {name}(self, {', '.join(parameters)}); define it")
    for name, parameters in wanted.items():
        method = inspect.getattr_static(kind, name, None)
        if isinstance(method, FunctionType) and _defines(kind, name, base):
            check_runs_at_once(method, f"{kind.__name__}.{name}", may_yield=name in _OF_ROWS)
            _check_parameters(kind.__name__, method, parameters)
            _check_context(kind.__name__, method)


def _defines(kind: type, name: str, base: type) -> bool:
    """Returns whether a class overrides a method of the base class."""
    return getattr(kind, name, None) is not getattr(base, name, None)


def _check_parameters(of: str, method: FunctionType, parameters: Sequence[str]) -> None:
    signature = inspect.signature(method)
    try:
        signature.bind(None, *parameters)
    except TypeError:
        has = ", ".join(list(signature.parameters)[1:])
        raise ConfigurationError(
            f"{of}.{method.__name__}({has}): tidegate calls {method.__name__}({', '.join(parameters)}); change its "
            "parameters"
        ) from None


def _check_context(of: str, method: FunctionType) -> None:
    context = list(inspect.signature(method).parameters)[-1]
    for attribute, called in _attributes_read(method, context):
        where = f"{of}.{method.__name__}: {context}.{attribute}"
        if called and attribute in _VALUES:
            raise ConfigurationError(f"{where} is a value, not a method; remove ()")
        if attribute in _OTHER_ATTRIBUTES:
            raise ConfigurationError(f"{where}: there is no such method; {_OTHER_ATTRIBUTES[attribute]}")


def _attributes_read(method: FunctionType, variable: str) -> Iterator[tuple[str, bool]]:
    """Yields the attributes of a local variable that the code of a method reads, each with True if the code calls it
    directly.
    """
    instructions = list(dis.get_instructions(method))
    for before, after in pairwise(instructions):
        # Python 3.13 loads two variables in one instruction: the second of them is on top.
        loaded = before.argval[-1] if isinstance(before.argval, tuple) and before.argval else before.argval
        if "LOAD_FAST" in before.opname and loaded == variable:
            if after.opname == "LOAD_METHOD":  # Python 3.11
                yield str(after.argval), True
            elif after.opname == "LOAD_ATTR":  # from 3.12 on also for methods, which then push NULL
                yield str(after.argval), "NULL" in after.argrepr


S = TypeVar("S")


def check_function(fn: object, step: str, of: str, *arguments: str, may_yield: bool = False) -> None:
    """Raises ConfigurationError for an object that cannot be called.

    `of` describes the arguments of the call, and `step` names the step in the error.
    """
    check_callable(fn, step, of, *arguments)
    check_runs_at_once(fn, f"{step}: fn", may_yield=may_yield)


def check_callable(fn: object, step: str, of: str, *arguments: str) -> None:
    """Raises ConfigurationError for an object that cannot be called with these arguments.

    - `of`: describes the arguments, for the error.
    - `arguments`: the names of the arguments of a call, for the error. One, `row`, if none is given.
    """
    if not callable(fn):
        raise ConfigurationError(f"{step} takes a function of {of}, not {fn!r}")
    if isinstance(fn, type) and any("__call__" in vars(base) for base in fn.__mro__):
        raise ConfigurationError(f"{step}: {fn.__name__} is a class; pass an object of it, {fn.__name__}(...)")
    check_call(fn, step, *(arguments or ("row",)))


def check_stream(given: object, kind: type[S], step: str) -> S:
    """Returns `given`, the other stream of a step, if it is of the class `kind`.

    Raises ConfigurationError for another object, such as a keyed or a windowed stream.
    """
    if isinstance(given, kind):
        return given
    hint = "" if given is None else "; give the stream that a source or a step returned, before key_by and window"
    raise ConfigurationError(f"{step} takes another stream, not {type(given).__name__}{hint}")
