"""What is probably not meant in a program, although it can run: `StreamEnvironment.execute` logs each as a warning.

What cannot work is refused elsewhere, where the program says it.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Sequence
from types import CodeType

import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
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

_REGISTERS = "register_event_time_timer"


def doubts(nodes: Sequence[StreamNode], periodic_checkpoints: bool) -> list[str]:
    """A sentence for each thing in a program that is probably not meant.

    `nodes` are its operators, in the order in which they were made. `periodic_checkpoints`: whether the job takes
    checkpoints by itself.
    """
    made = {id(node): _operator(node) for node in nodes}
    read = {id(upstream.maker) for node in nodes for upstream, _ in node.inputs}
    found: list[str] = []
    for node in nodes:
        which = f"{node.name!r} (uid {node.uid!r})"
        operator = made[id(node)]
        if id(node) not in read and node.table is None and node.sink is None and not isinstance(operator, Peek):
            found.append(
                f"{which} leads nowhere: its rows are computed, and no step, table or collect() takes them. Write "
                "them, or leave the step out"
            )
        endless = _endless_source(node)
        if node.table is not None and endless is not None and not periodic_checkpoints:
            found.append(
                f"{which} writes rows of {endless.name!r} (uid {endless.uid!r}), which has no end, and the job takes "
                "no checkpoints by itself: written rows become visible with a checkpoint, so none ever would. Give "
                'checkpoints=tg.CheckpointConfig(interval="10s")'
            )
        if isinstance(operator, WatermarkGenerator):
            found += [f"{which}: {said}" for said in _of_seconds(operator, node)]
        if isinstance(operator, ProcessOperator) and operator.has_keyed_state:
            found += [f"{which} {said}" for said in _of_timers(operator, node, made)]
    return found


def endless_source(nodes: Sequence[StreamNode]) -> str | None:
    """Returns the name and uid of a source among these nodes that never ends, for people. None if all end."""
    for node in nodes:
        if node.source is not None and never_ends(node.source):
            return f"{node.name!r} (uid {node.uid!r})"
    return None


def _of_timers(operator: ProcessOperator, node: StreamNode, made: dict[int, Operator | None]) -> Iterator[str]:
    """What is wrong with event-time timers behind an input without event time, which holds event time back."""
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
    """What is wrong with event times in memory that look like seconds. Others are seen when the job reads them."""
    for upstream, _ in node.inputs:
        if isinstance(upstream.source, MemorySource):
            times = upstream.source.column(operator.column)
            if times is not None and pa.types.is_int64(times.type) and look_like_seconds(times):
                yield seconds_advice(operator.column, times)


def _before(node: StreamNode) -> Iterator[StreamNode]:
    """The nodes that a node takes rows of, directly or not, and the node itself."""
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
    """Whether there is event time before a node."""
    found = (made.get(id(each)) for each in _before(node))
    return any(operator is not None and operator.generates_watermarks for operator in found)


def _that_registers(function: object) -> str | None:
    """The method of a function that sets timers of event time; None if its own code sets none."""
    for cls in type(function).__mro__:
        if cls.__module__.startswith("tidegate."):
            continue
        for name, method in vars(cls).items():
            code = getattr(method, "__code__", None)
            if isinstance(code, CodeType) and _names(code):
                return f"{type(function).__name__}.{name}"
    return None


def _names(code: CodeType) -> bool:
    """Whether code, or a function within it, names the method that sets timers."""
    if any(each.argval == _REGISTERS for each in dis.get_instructions(code)):
        return True
    return any(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType))
