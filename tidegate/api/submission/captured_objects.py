"""Finds what functions of the user capture that cannot travel to a task: locks, connections, sessions of Spark.

Where tasks run in other processes such a program is refused before anything starts. Where they run in this one it
works, and a warning says that it will not elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from tidegate.actors.graph.stream_graph import StreamNode
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
    """Raises ConfigurationError for a step whose functions cannot be sent to a task; only warns if not `refuse`."""
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
    except Exception:  # noqa: BLE001 - any: code of the value itself refuses, each library in its own way
        return False
    return True


def _culprit(value: Any, path: tuple[str, ...], depth: int) -> tuple[tuple[str, ...], Any]:
    """The innermost part that cannot travel, and the names that lead to it from the function of the user."""
    if depth < _DEPTH_MAX:
        for name, part in _parts(value):
            if not _travels(part):
                return _culprit(part, (*path, name) if name else path, depth + 1)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value is made of. Parts of tidegate's own functions and objects have no name."""
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
