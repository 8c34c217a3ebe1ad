"""Checks of a program before it runs: captured objects, retractions that need exactly-once mode, and likely mistakes.

A function of the user may capture objects that cannot be sent to another process, such as locks, connections and
sessions of Spark. If tasks run in other processes, such a program is refused before any task starts. If the tasks run
in this process, the program works, and a warning is logged.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import logging
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import cloudpickle
import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.connectors.memory_source import MemorySource
from tidegate.connectors.source import never_ends
from tidegate.operators.functions.batch_functions import Peek
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.operator import Operator
from tidegate.operators.watermarks.watermark_generator import (
    WatermarkGenerator,
    look_like_seconds,
    seconds_advice,
)
from tidegate.storage.errors import ConfigurationError

log = logging.getLogger(__name__)

_DEPTH_MAX = 20
_ADVICE = (
    "make it in open() of a tg.ProcessFunction or tg.BatchFunction, which runs in the task, or within the function "
    "itself"
)
_ADVICE_OF_CALLS = (
    "make it in the task, by a function with @functools.cache that the first call of map_async calls. A slow function "
    "needs no pool of its own: await asyncio.to_thread(fn, row)"
)


def check_captures(nodes: Sequence[StreamNode], refuse: bool) -> None:
    """Raises ConfigurationError for a step whose function cannot be sent to its tasks.

    If `refuse` is False, a warning is logged instead.
    """
    for node in nodes:
        if node.factory is None or _travels(node.factory):
            continue
        path, value = _culprit(node.factory, (), 0)
        captured = f"captures {'.'.join(path)}, a {_kind(value)}" if path else f"is a {_kind(value)}"
        text = (
            f"step {node.name!r} (uid {node.uid!r}) cannot be sent to its tasks:\n"
            f"its function {captured}, which belongs to this process alone;\n"
            f"{_ADVICE if node.calls is None else _ADVICE_OF_CALLS}"
        )
        if refuse:
            raise ConfigurationError(text)
        log.warning("on a cluster %s", text)


class _Nowhere:
    def write(self, data: object) -> int:
        return 0


def _travels(value: object) -> bool:
    try:
        cloudpickle.Pickler(_Nowhere()).dump(value)
    except Exception:  # noqa: BLE001 - pickling runs code of the value, which may raise anything
        return False
    return True


def _culprit(value: Any, path: tuple[str, ...], depth: int) -> tuple[tuple[str, ...], Any]:
    """Finds the innermost part of a function that cannot be sent to a task.

    Returns the path of names to this part, and the part.
    """
    if depth < _DEPTH_MAX:
        for name, part in _parts(value):
            if not _travels(part):
                return _culprit(part, (*path, name) if name else path, depth + 1)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the objects that a value refers to, each as (name, object): captured variables, attributes and items.

    Objects inside functions and classes of tidegate have an empty name.
    """
    if isinstance(value, functools.partial):
        yield from (("", part) for part in (value.func, *value.args, *value.keywords.values()))
    elif inspect.ismethod(value):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, types.FunctionType):
        variables = inspect.getclosurevars(value)
        yield from _named(value, {**variables.nonlocals, **variables.globals}.items())
        yield from (("", part) for part in value.__defaults__ or ())
    elif isinstance(value, Mapping):
        yield from ((str(name), part) for name, part in value.items())
    elif isinstance(value, list | tuple | set):
        yield from (("", part) for part in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _named(type(value), [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)])
    elif isinstance(getattr(value, "__dict__", None), dict):
        yield from _named(type(value), vars(value).items())


def _named(owner: Any, parts: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    ours = str(getattr(owner, "__module__", "")).partition(".")[0] == "tidegate"
    return (("" if ours else name, part) for name, part in parts)


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_changes_come_once(nodes: Iterable[StreamNode], config: CheckpointConfig) -> None:
    """Raises ConfigurationError if a step retracts rows of a stream with changes, and the checkpoint mode is
    at-least-once.
    """
    if config.mode == "exactly_once":
        return
    for node in nodes:
        if node.retracts is not None:
            raise ConfigurationError(
                f"{node.name!r} (uid {node.uid!r}) retracts rows of {node.retracts}, which emits changes, but "
                f"{CheckpointConfig.title('mode')} is {config.mode!r}: after a failure a row could be retracted "
                "twice, or never. Use "
                'CheckpointConfig(mode="exactly_once"), the default, or no changes: emit="update" or "final"'
            )


_REGISTERS = "register_event_time_timer"


def doubts(nodes: Sequence[StreamNode], periodic_checkpoints: bool) -> list[str]:
    """Returns a warning, as a sentence, for each part of a program that is probably a mistake.

    - `nodes`: the steps of the program, in the order in which they were made.
    - `periodic_checkpoints`: whether the job takes periodic checkpoints.
    """
    made = {id(node): _operator(node) for node in nodes}
    read = {id(upstream.maker) for node in nodes for upstream, _ in node.inputs}
    found: list[str] = []
    for node in nodes:
        which = f"{node.name!r} (uid {node.uid!r})"
        operator = made[id(node)]
        if (
            id(node) not in read
            and node.table is None
            and node.sink is None
            and node.committing is None
            and not isinstance(operator, Peek)
        ):
            found.append(
                f"{which} leads nowhere: its rows are computed, but no step, table or collect() reads them. Write "
                "them, or remove the step"
            )
        endless = _endless_source(node)
        if node.table is not None and endless is not None and not periodic_checkpoints:
            found.append(
                f"{which} writes rows of {endless.name!r} (uid {endless.uid!r}), which has no end, and the job takes "
                "no periodic checkpoints: rows become visible with a checkpoint, so they never would. Give "
                'checkpoints=tg.CheckpointConfig(interval="10s")'
            )
        if isinstance(operator, WatermarkGenerator):
            found += [f"{which}: {advice}" for advice in _of_seconds(operator, node)]
        if isinstance(operator, ProcessOperator) and operator.has_keyed_state:
            found += [f"{which} {doubt}" for doubt in _of_timers(operator, node, made)]
    return found


def endless_source(nodes: Sequence[StreamNode]) -> str | None:
    """Returns the name and the uid of a source that never ends, as text, or None if all sources end."""
    for node in nodes:
        if node.source is not None and never_ends(node.source):
            return f"{node.name!r} (uid {node.uid!r})"
    return None


def _of_timers(operator: ProcessOperator, node: StreamNode, made: dict[int, Operator | None]) -> Iterator[str]:
    """Yields a warning if a step sets event-time timers and one of its inputs has no event time.

    Such an input has no watermarks, so the timers fire only when the input ends, or never.
    """
    if (name := _that_registers(operator.function)) is None:
        return
    upstream = [each for each, _ in node.inputs]
    untimed = [each for each in upstream if not _has_watermarks(each, made)]
    if not untimed:
        return
    endless = any(_endless_source(each) is not None for each in untimed)
    of_it = "the input" if len(upstream) == 1 else "that input"
    end = f"never, because {of_it} has no end" if endless else f"only when {of_it} ends"
    names = " and ".join(f"{each.name!r} (uid {each.uid!r})" for each in untimed)
    inputs = "its input" if len(upstream) == 1 else f"its input {names}"
    verb = "has" if len(untimed) == 1 else "have"
    yield (
        f"sets event-time timers in {name}, and {inputs} {verb} no event time: they fire {end}. Name the column of "
        "event time with timestamp= at the source, or with assign_timestamps"
    )


def _operator(node: StreamNode) -> Operator | None:
    return None if node.factory is None else node.factory()


def _of_seconds(operator: WatermarkGenerator, node: StreamNode) -> Iterator[str]:
    """Yields a warning if the event times of an in-memory source are in seconds instead of ms.

    Event times of other sources are checked when the job reads them.
    """
    for upstream, _ in node.inputs:
        if isinstance(upstream.source, MemorySource):
            times = upstream.source.column(operator.column)
            if times is not None and pa.types.is_int64(times.type) and look_like_seconds(times):
                yield seconds_advice(operator.column, times)


def _before(node: StreamNode) -> Iterator[StreamNode]:
    """Yields a node, and then all nodes upstream of this node."""
    seen: set[int] = set()
    left = [node]
    while left:
        each = left.pop().maker
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [upstream for upstream, _ in each.inputs]


def _endless_source(node: StreamNode) -> StreamNode | None:
    return next((each for each in _before(node) if each.source is not None and never_ends(each.source)), None)


def _has_watermarks(node: StreamNode, made: dict[int, Operator | None]) -> bool:
    """Returns whether a node or one of the nodes upstream of it generates watermarks."""
    found = (made.get(id(each)) for each in _before(node))
    return any(operator is not None and operator.generates_watermarks for operator in found)


def _that_registers(function: object) -> str | None:
    """Returns the class and method of a function that registers event-time timers, such as "MyFunction.process", or
    None if no method of the user's classes does.
    """
    for cls in type(function).__mro__:
        if cls.__module__.startswith("tidegate."):
            continue
        for name, method in vars(cls).items():
            code = getattr(method, "__code__", None)
            if isinstance(code, CodeType) and _names(code):
                return f"{type(function).__name__}.{name}"
    return None


def _names(code: CodeType) -> bool:
    """Returns whether the code, or a function defined in it, calls the method that registers event-time timers."""
    if any(each.argval == _REGISTERS for each in dis.get_instructions(code)):
        return True
    return any(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType))
