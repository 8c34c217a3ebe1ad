"""`Program` has the operators, tables and hooks that a driver script has added since it last executed a job.

An environment keeps one program and clears it after each submitted job. Streams refer to their program, and not to the
environment.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

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
from tidegate.storage.schemas.arrow_types import LEVELS_MAX, form_with_rows, holds_views, levels_of, without_views
from tidegate.storage.schemas.column_names import check_not_reserved
from tidegate.storage.schemas.row_schemas import arrow_type

_NAME_IN_UID_CHARACTERS = 100


class Program:
    """Operators, tables, collected streams, views, checkpoint functions and hooks, in the order they were added."""

    def __init__(
        self, parallelism: int, open_store: OpenStore, preview: Callable[[Any, int, int], tuple[pa.Table, str]]
    ) -> None:
        """Creates an empty program. `preview` is called by `Stream.show`: it runs the steps before a stream and returns
        its first rows.
        """
        self.preview = preview
        self.parallelism = parallelism
        """Parallelism of operators that do not set their own."""
        self.max_parallelism: int | None = None
        """Number of key groups, or None if the user has not set it."""
        self.open_store = open_store
        self.given_up = False
        """True if an `execute` of this program has failed. The next source then begins another program."""
        self.executed: str | None = None
        """Name of the job that ran the program before this one, or None."""
        self._in_call = False
        self.clear()

    def clear(self) -> None:
        """Starts an empty program. Streams of the previous program can no longer be used."""
        self.nodes: list[StreamNode] = []
        self.tables: list[OutputTable] = []
        self.collected: list[CollectedRows] = []
        self.functions: list[CheckpointFunction] = []
        self.hooks: list[MasterHook] = []
        self.views = Views()
        self.given_up = False

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Returns a context manager that restores the program if an error leaves its block.

        A method of a stream may add several steps, and be refused at a later one. Of nested blocks only the outermost
        one restores.
        """
        if self._in_call:
            yield
            return
        nodes, tables, collected = list(self.nodes), list(self.tables), list(self.collected)
        functions, hooks, views, given_up = list(self.functions), list(self.hooks), self.views, self.given_up
        self._in_call = True
        try:
            yield
        except BaseException:
            self.nodes = nodes
            self.tables = tables
            self.collected = collected
            self.functions = functions
            self.hooks = hooks
            self.views = views
            self.given_up = given_up
            raise
        finally:
            self._in_call = False

    def up_to(self, streams: Sequence[StreamNode]) -> Program:
        """Returns a new program with these nodes and all nodes upstream of them. This program is not changed."""
        other = Program(self.parallelism, self.open_store, self.preview)
        other.max_parallelism = self.max_parallelism
        # A node comes after its inputs, so each node is visited twice: before and after its inputs are added.
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
        """Returns `uid`, or a generated uid: the operator's name and its position in the program."""
        check_name("an operator's name", "name", name)
        if uid is None:
            uid = f"{name.replace('/', '-')[:_NAME_IN_UID_CHARACTERS]}-{len(self.nodes)}"
        check_uid(uid, name)
        return OperatorUid(uid)

    def add_node(self, node: StreamNode, own: Collection[str] = ()) -> None:
        """Adds an operator.

        `own` names the columns with reserved names that tidegate itself adds in this step. Later steps may copy them.

        Raises ConfigurationError if the input belongs to an earlier program, or if the schema is not valid.
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
        """Adds a table that a stream writes to. Raises ConfigurationError if another stream writes to it already."""
        if any(other.url == table.url for other in self.tables):
            raise ConfigurationError(f"two streams of one job write to {table.url}; join them with union first")
        self.tables.append(table)


_Made = TypeVar("_Made")
P = ParamSpec("P")
R = TypeVar("R")


def all_or_nothing(program_of: Callable[[Any], Program], *without: str) -> Callable[[type[_Made]], type[_Made]]:
    """Returns a decorator for classes whose public methods add steps: a refused call leaves no step in the program.

    `program_of` returns the program of an object. `without` names methods that only call a user's function, or run a
    job.
    """

    def decorate(kind: type[_Made]) -> type[_Made]:
        for name, member in list(vars(kind).items()):
            if inspect.isfunction(member) and not name.startswith("_") and name not in without:
                setattr(kind, name, whole_call(member, program_of))
        return kind

    return decorate


def whole_call(method: Callable[P, R], program_of: Callable[[Any], Program]) -> Callable[P, R]:
    """Returns a method that restores the program of its object if it raises an error."""

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with program_of(args[0]).all_or_nothing():
            return method(*args, **kwargs)

    return called


def check_plain(schema: pa.Schema, where: str, own: Collection[str] = ()) -> None:
    """Raises ConfigurationError, which begins with `where`, for a schema that rows of a stream cannot have.

    Not supported are objects that are not a pyarrow Schema, columns with reserved names, two columns with the same
    name, types that are nested too deeply, Arrow's view types, and types of which Arrow cannot take single rows. `own`
    are reserved columns that tidegate itself added.
    """
    if not isinstance(schema, pa.Schema):
        raise ConfigurationError(f"{where}: the schema must be a pyarrow Schema, not {type(schema).__name__}")
    check_not_reserved((name for name in schema.names if name not in own), where)
    if doubles := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise ConfigurationError(f"{where}: columns {doubles} occur twice; rename or drop one of each")
    for field in schema:
        if (levels := levels_of(field.type)) > LEVELS_MAX:
            raise ConfigurationError(
                f"{where}: column {field.name!r} is nested {levels:,} levels deep, and a column may have {LEVELS_MAX}; "
                "keep such values as text"
            )
        if holds_views(field.type):
            instead = without_views(field.type)
            raise ConfigurationError(f"{where}: column {field.name!r} is {field.type}, a view; use {instead} instead")
        if (instead := form_with_rows(field.type)) is not None:
            raise ConfigurationError(
                f"{where}: column {field.name!r} is {field.type}, and Arrow cannot take single rows of this type; "
                f"{instead}"
            )


_NAME = re.compile(r"[^\W\d]\w*")
Duration = str | timedelta | int


@dataclass(frozen=True, slots=True)
class LookupView:
    """A table registered as a view for lookup joins, how often it is read again (`refresh`), and how old its rows may
    be (`max_stale`).
    """

    table: Any
    refresh: Duration | None
    max_stale: Duration | None


View = Any
"""A view of a program: a `Stream`, or a `LookupView`."""


class Views:
    """The views of one program. Names are not case-sensitive."""

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
        """Registers a stream or a table. Raises ConfigurationError if the name is already used or not valid."""
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"create_temporary_view({name!r}): a name has only letters, digits and underscores, and does not begin "
                "with a digit; choose another name"
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
        """Returns the view with the name `name`, or None if there is none."""
        found = self._views.get(name.lower())
        return None if found is None else found[1]

    def listed(self) -> str:
        """Returns the names of all views as one text, for errors."""
        return ", ".join(sorted(name for name, _ in self._views.values())) or "none yet"


_NAME = re.compile(r"[^\W\d]\w*")
_PICKLED_BYTES_MAX = 1 << 20
_ARGUMENTS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A Python function registered for queries: its result type, and how many arguments it takes (`least` to `most`).

    `columns` is True if it takes whole columns.
    """

    name: str
    function: Callable[..., Any]
    returns: pa.DataType
    columns: bool
    least: int
    most: int


class UserFunctions:
    """The registered functions of one environment. Names are not case-sensitive."""

    def __init__(self) -> None:
        self._functions: dict[str, UserFunction] = {}

    def add(self, name: str, function: object, returns: Any, vectorized: bool, replace: bool) -> None:
        """Registers a function. Raises ConfigurationError if queries cannot call it, or if the name is already used."""
        what = f"create_temporary_function({name!r})"
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"{what}: a name has only letters, digits and underscores, and does not begin with a digit; choose "
                "another name"
            )
        if name.lower() in self._functions and not replace:
            raise ConfigurationError(f"{what}: there is such a function already; take another name, or replace=True")
        if not callable(function) or isinstance(function, type):
            raise ConfigurationError(
                f"{what}: {function!r} is not a function; give one that is called with values of a row"
            )
        called = function if inspect.isroutine(function) else type(function).__call__
        if inspect.iscoroutinefunction(called) or inspect.isgeneratorfunction(called):
            raise ConfigurationError(
                f"{what}: a function must return one value for each row. To call a service use map_async. To make "
                "several rows return a list, and UNNEST it"
            )
        least, most = _arguments(function, what)
        _check_pickles(function, what)
        made = _returned(called, returns, what)
        self._functions[name.lower()] = UserFunction(name.upper(), function, made, vectorized, least, most)

    def find(self, name: str) -> UserFunction | None:
        """Returns the function with the name `name`, or None if there is none."""
        return self._functions.get(name.lower())


_CALLABLE: ContextVar[UserFunctions | None] = ContextVar("functions that the query being translated may call")


@contextmanager
def functions_of(functions: UserFunctions | None) -> Iterator[None]:
    """Returns a context manager in which SQL expressions may call these functions when they are translated."""
    token = _CALLABLE.set(functions)
    try:
        yield
    finally:
        _CALLABLE.reset(token)


def user_function(name: str) -> UserFunction | None:
    """Returns the registered function with this name. None if there is none, or outside of `functions_of`."""
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
        raise ConfigurationError(
            f"{what}: SQL has no arguments by name; give the keyword argument {needed[0]!r} a default"
        )
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
            f"{what}: its return type is missing; give an annotation (def f(x: str) -> str), or returns=str"
        )
    return arrow_type(returns, f"{what}, returns")


def _check_pickles(function: object, what: str) -> None:
    try:
        size = len(cloudpickle.dumps(function))
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ConfigurationError(
            f"{what}: the function is sent to the tasks, and cannot be pickled ({error_text(error)}). Create objects "
            "that cannot be pickled inside the function"
        ) from error
    if size > _PICKLED_BYTES_MAX:
        raise ConfigurationError(
            f"{what}: the function has {size:,} bytes when pickled, and at most {_PICKLED_BYTES_MAX:,} are allowed; "
            "load large objects from a file in its first call, or use map_batches with a tg.BatchFunction"
        )
