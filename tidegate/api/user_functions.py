"""`UserFunctions`: Python functions that queries of an environment may call by name."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pyarrow as pa

from tidegate.operators.operator_errors import is_failure
from tidegate.protocol.failure_reasons import error_text
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.row_schemas import arrow_type

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
