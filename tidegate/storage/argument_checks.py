"""Checks arguments: the fields of option classes as they are built (`DataPlaneOptions(source_rows_max=0): give a whole
number …`), and the functions and objects that a program gives to its steps.

Each check raises ConfigurationError with the place, the value that was given, and the allowed values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence

from tidegate.storage.errors import ConfigurationError

INT64_MAX = 2**63 - 1


def invalid_field(options: object, field: str, allowed: str) -> ConfigurationError:
    """Returns the error for an option field with a wrong value. `allowed` describes the allowed values."""
    return ConfigurationError(f"{type(options).__name__}({field}={getattr(options, field)!r}): give {allowed}")


def check_whole(options: object, *fields: str, least: int, most: int = INT64_MAX, none: bool = False) -> None:
    """Raises ConfigurationError unless each named field of an options object is an int from `least` to `most`. `none`
    also allows None.
    """
    for field in fields:
        value = getattr(options, field)
        if value is None and none:
            continue
        # True is an int to Python.
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            end = "up" if most == INT64_MAX and not (isinstance(value, int) and value > most) else f"to {most:,}"

            raise invalid_field(options, field, f"a whole number from {least:,} {end}{', or None' if none else ''}")


def check_switch(options: object, *fields: str) -> None:
    """Raises ConfigurationError unless each named field of an options object is True or False."""
    for field in fields:
        if not isinstance(getattr(options, field), bool):
            raise invalid_field(options, field, "True or False")


def check_choice(options: object, field: str, choices: Sequence[str | None]) -> None:
    """Raises ConfigurationError unless the value of the field is one of `choices`."""
    value = getattr(options, field)
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise invalid_field(options, field, " or ".join(map(repr, choices)))


def check_folder(options: object, field: str) -> None:
    """Raises ConfigurationError unless the field is a folder path (a non-empty str) or None."""
    value = getattr(options, field)
    if value is not None and (not isinstance(value, str) or not value):
        raise invalid_field(options, field, "the path of a folder as a str, or None")


def check_kind(options: object, field: str, kind: type) -> None:
    """Raises ConfigurationError unless the field is an instance of `kind`."""
    if not isinstance(getattr(options, field), kind):
        raise invalid_field(options, field, f"a {kind.__name__}")


def check_call(fn: Callable[..., object], step: str, *arguments: str) -> None:
    """Raises ConfigurationError if a function cannot be called with this many arguments, by their position.

    `arguments`: their names, for the error.
    """
    try:
        # A decorator may change the parameters, so the signature of the decorated function does not count.
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # Some functions written in C have no signature.
    try:
        signature.bind(*arguments)
    except TypeError as error:
        hint = f"; {fn.__name__} is a class: pass an object of it, {fn.__name__}(...)" if isinstance(fn, type) else ""
        raise ConfigurationError(
            f"{step}: fn is called as fn({', '.join(arguments)}), and cannot be: it is fn{signature} ({error}){hint}"
        ) from None


def check_runs_at_once(fn: object, step: str, *, may_yield: bool = False) -> None:
    """Raises ConfigurationError for an async function, because a call would run nothing, and return an object that is
    treated as true.

    The same is true of a generator function. `may_yield` allows generator functions for steps that iterate over the
    result.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    called = fn if inspect.isroutine(fn) or isinstance(fn, type) else getattr(type(fn), "__call__", fn)  # noqa: B004
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise ConfigurationError(
            f"{step} is an async function, which nothing would await. Give a plain function; map_async calls services"
        )
    if not may_yield and inspect.isgeneratorfunction(called):
        raise ConfigurationError(
            f"{step} is a generator function, whose items nothing would read. Return one result instead of yield; "
            "flat_map makes several rows of one"
        )


def check_methods_run_at_once(given: object, *contracts: type, may_yield: Collection[str] = ()) -> None:
    """Raises ConfigurationError if a method that the contracts name is async, or yields and may not.

    - `contracts`: the base classes or protocols with the methods that tidegate calls.
    - `may_yield`: the names of methods that may be generators.
    """
    for contract in contracts:
        for name, declared in vars(contract).items():
            if name.startswith("_") or not inspect.isroutine(declared):
                continue
            method = getattr(given, name, None)
            if method is not None:
                check_runs_at_once(method, f"{type(given).__name__}.{name}", may_yield=name in may_yield)
