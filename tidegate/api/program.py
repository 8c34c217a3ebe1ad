"""`Program`: the operators, tables and hooks that a driver script has added since it last executed a job.

An environment has one for life, and clears it once a job was submitted. Streams know the program that they belong to,
and nothing of the environment.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import cloudpickle
import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.api.checkpoint_calls import CheckpointFunction
from tidegate.api.name_checks import check_name, check_uid
from tidegate.api.tables.output_tables import CollectedRows, OutputTable
from tidegate.connectors.source import MasterHook
from tidegate.operators.operator_errors import is_failure
from tidegate.protocol.failures import error_text
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import OperatorUid
from tidegate.storage.schemas.arrow_types import form_with_rows, holds_views, without_views
from tidegate.storage.schemas.column_names import check_not_reserved
from tidegate.storage.schemas.row_schemas import arrow_type

_NAME_IN_UID_CHARACTERS = 100


class Program:
    """Operators, tables, collected streams, views, functions of checkpoints and master hooks, as they were added."""

    def __init__(
        self, parallelism: int, open_store: OpenStore, preview: Callable[[Any, int, int], tuple[pa.Table, str]]
    ) -> None:
        """`preview` runs the steps before a stream for its first rows (`StreamEnvironment._preview`)."""
        self.preview = preview
        self.parallelism = parallelism
        """Parallelism of operators that name none."""
        self.max_parallelism: int | None = None
        """Number of key groups; None if the user has not said how many."""
        self.open_store = open_store
        self.given_up = False
        """Whether it could not be executed; then the next source begins another program."""
        self.clear()

    def clear(self) -> None:
        """Begin an empty program. Streams made so far belong to none."""
        self.nodes: list[StreamNode] = []
        self.tables: list[OutputTable] = []
        self.collected: list[CollectedRows] = []
        self.functions: list[CheckpointFunction] = []
        self.hooks: list[MasterHook] = []
        self.views = Views()
        self.given_up = False

    def up_to(self, streams: Sequence[StreamNode]) -> Program:
        """Another program, of these nodes and all nodes whose rows lead to them. This one stays as it is."""
        other = Program(self.parallelism, self.open_store, self.preview)
        other.max_parallelism = self.max_parallelism
        # A node comes behind those it reads. They are looked at twice: on the way to them, and on the way back.
        left = [(node.maker, False) for node in reversed(streams)]
        while left:
            node, complete = left.pop()
            if complete and node not in other.nodes:
                other.nodes.append(node)
            elif not complete and node not in other.nodes:
                left.append((node, True))
                left += [(upstream.maker, False) for upstream, _ in reversed(node.inputs)]
        return other

    def new_uid(self, name: str, uid: str | None) -> OperatorUid:
        """The uid given, or one made of the operator's name and its place in the program."""
        check_name("an operator's name", "name", name)
        if uid is None:
            uid = f"{name.replace('/', '-')[:_NAME_IN_UID_CHARACTERS]}-{len(self.nodes)}"
        check_uid(uid, name)
        return OperatorUid(uid)

    def add_node(self, node: StreamNode, own: Collection[str] = ()) -> None:
        """Add an operator. ConfigurationError if its input is of an earlier program, or its schema cannot be.

        `own` are the columns that tidegate itself adds in this step. They may pass through the steps behind.
        """
        known = {*own}.union(*(upstream.schema.names for upstream, _ in node.inputs if upstream.schema is not None))
        if not isinstance(node.parallelism, int) or isinstance(node.parallelism, bool) or node.parallelism < 1:
            raise ConfigurationError(
                f"operator {node.name!r}: parallelism={node.parallelism!r}: give a whole number of at least 1"
            )
        if node.schema is not None:
            check_plain(node.schema, f"operator {node.name!r}", known)
        for tag in node.side_outputs:
            check_plain(tag.schema, f"side output {tag.name!r} of operator {node.name!r}", known)
        if any(upstream.maker not in self.nodes for upstream, _ in node.inputs):
            raise ConfigurationError(
                f"operator {node.name!r} follows a stream of an earlier program: execute() begins a new one, so make "
                "its streams from their sources again"
            )
        self.nodes.append(node)

    def add_table(self, table: OutputTable) -> None:
        """Add a table that a stream writes to. ConfigurationError if another stream writes to it already."""
        if any(other.url == table.url for other in self.tables):
            raise ConfigurationError(f"two streams of one job write to {table.url}; join them with union first")
        self.tables.append(table)


def check_plain(schema: pa.Schema, where: str, own: Collection[str] = ()) -> None:
    """Raise ConfigurationError for what is no schema, for columns that are called as tidegate's own, and for views.

    So for columns of which Arrow cannot take single rows. Files and kernels lack all of these. `own` are columns that
    are tidegate's own.
    """
    if not isinstance(schema, pa.Schema):
        raise ConfigurationError(f"{where}: the schema must be a pyarrow Schema, not {type(schema).__name__}")
    check_not_reserved((name for name in schema.names if name not in own), where)
    if doubles := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise ConfigurationError(f"{where}: columns {doubles} are there twice; rename or drop one of each")
    for field in schema:
        if holds_views(field.type):
            instead = without_views(field.type)
            raise ConfigurationError(f"{where}: column {field.name!r} is {field.type}, a view; use {instead} instead")
        if (instead := form_with_rows(field.type)) is not None:
            raise ConfigurationError(
                f"{where}: column {field.name!r} is {field.type}, of which single rows cannot be taken; {instead}"
            )


_NAME = re.compile(r"[^\W\d]\w*")
Duration = str | timedelta | int


@dataclass(frozen=True, slots=True)
class LookupView:
    """A table that is looked up, and how often it is read again."""

    table: Any
    refresh: Duration | None
    max_stale: Duration | None


View = Any
"""A `Stream`, or a `LookupView`."""


class Views:
    """The views of one program. Names are any case."""

    def __init__(self) -> None:
        self._views: dict[str, tuple[str, View]] = {}

    def add(
        self,
        name: str,
        view: object,
        is_stream: bool,
        refresh: Duration | None,
        max_stale: Duration | None,
        replace: bool,
    ) -> None:
        """Register a stream, or a table. ConfigurationError for a name that is taken, or no name."""
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"create_temporary_view({name!r}): a name is letters, digits and underscores, and begins with no digit"
            )
        if name.lower() in self._views and not replace:
            raise ConfigurationError(
                f"create_temporary_view({name!r}): there is such a view already; take another name, or replace=True"
            )
        if is_stream and (refresh is not None or max_stale is not None):
            raise ConfigurationError(
                f"create_temporary_view({name!r}): refresh= and max_stale= are for tables that are read again"
            )
        self._views[name.lower()] = (name, view if is_stream else LookupView(view, refresh, max_stale))

    def find(self, name: str) -> View | None:
        """What is registered under a name; None if nothing is."""
        found = self._views.get(name.lower())
        return None if found is None else found[1]

    def listed(self) -> str:
        """The names, for errors."""
        return ", ".join(sorted(name for name, _ in self._views.values())) or "none yet"


_NAME = re.compile(r"[^\W\d]\w*")
_PICKLED_BYTES_MAX = 1 << 20
_ARGUMENTS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function, the type of what it returns, whether it takes columns, and how many arguments it takes."""

    name: str
    function: Callable[..., Any]
    returns: pa.DataType
    columns: bool
    least: int
    most: int


class UserFunctions:
    """The functions of one environment. Names are any case."""

    def __init__(self) -> None:
        self._functions: dict[str, UserFunction] = {}

    def add(self, name: str, function: object, returns: Any, vectorized: bool, replace: bool) -> None:
        """Register a function. ConfigurationError for one that queries could not call."""
        what = f"create_temporary_function({name!r})"
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ConfigurationError(f"{what}: a name is letters, digits and underscores, and begins with no digit")
        if name.lower() in self._functions and not replace:
            raise ConfigurationError(f"{what}: there is such a function already; take another name, or replace=True")
        if not callable(function) or isinstance(function, type):
            raise ConfigurationError(f"{what}: a function is needed, not {function!r}")
        called = function if inspect.isroutine(function) else type(function).__call__
        if inspect.iscoroutinefunction(called) or inspect.isgeneratorfunction(called):
            raise ConfigurationError(
                f"{what}: a function returns one value for each row. To ask a service use map_async. To make several "
                "rows return a list, and UNNEST it"
            )
        least, most = _arguments(function, what)
        _check_pickles(function, what)
        made = _returned(called, returns, what)
        self._functions[name.lower()] = UserFunction(name.upper(), function, made, vectorized, least, most)

    def find(self, name: str) -> UserFunction | None:
        """The function of a name; None if there is none."""
        return self._functions.get(name.lower())


_CALLABLE: ContextVar[UserFunctions | None] = ContextVar("functions that the query being translated may call")


@contextmanager
def functions_of(functions: UserFunctions | None) -> Iterator[None]:
    """Expressions that are translated inside may call these functions."""
    token = _CALLABLE.set(functions)
    try:
        yield
    finally:
        _CALLABLE.reset(token)


def user_function(name: str) -> UserFunction | None:
    """The function of the user that a query may call by this name; None if there is none."""
    functions = _CALLABLE.get(None)
    return None if functions is None else functions.find(name)


def _arguments(function: Callable[..., Any], what: str) -> tuple[int, int]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # written in C, without a signature
        return 1, _ARGUMENTS_MAX
    by_place = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    if needed:
        raise ConfigurationError(f"{what}: SQL has no arguments by name, and {needed[0]!r} is one; give it a default")
    most = _ARGUMENTS_MAX if any(each.kind is each.VAR_POSITIONAL for each in parameters) else len(by_place)
    if not most:
        raise ConfigurationError(f"{what}: a function takes at least one argument, a value of the row")
    return max(1, sum(each.default is each.empty for each in by_place)), most


def _returned(called: Any, returns: Any, what: str) -> pa.DataType:
    if returns is None:
        try:
            returns = typing.get_type_hints(called).get("return")
        except (NameError, TypeError, AttributeError):
            returns = getattr(called, "__annotations__", {}).get("return")
    if returns is None or returns is type(None):
        raise ConfigurationError(
            f"{what}: say what it returns, by an annotation (def f(x: str) -> str) or by returns=str"
        )
    return arrow_type(returns, f"{what}, returns")


def _check_pickles(function: object, what: str) -> None:
    try:
        size = len(cloudpickle.dumps(function))
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ConfigurationError(
            f"{what}: the function cannot be pickled ({error_text(error)}), and goes to the tasks. Make what cannot be "
            "pickled inside the function"
        ) from error
    if size > _PICKLED_BYTES_MAX:
        raise ConfigurationError(
            f"{what}: the function carries {size:,} bytes, and at most {_PICKLED_BYTES_MAX:,} are allowed; let it load "
            "what is large from a file when it is first called, or use map_batches with a tg.BatchFunction"
        )
