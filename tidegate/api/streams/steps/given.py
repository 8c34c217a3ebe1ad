"""Checks what a program gives to a step, so that a slip is told where it is, and what is to be done."""

from __future__ import annotations

from typing import TypeVar

from tidegate.storage.errors import ConfigurationError

S = TypeVar("S")


def check_function(fn: object, step: str, of: str) -> None:
    """Raise ConfigurationError for what cannot be called. `of`: what a function is called with."""
    if not callable(fn):
        raise ConfigurationError(f"{step} takes a function of {of}, not {fn!r}")


def check_stream(given: object, kind: type[S], step: str) -> S:
    """The other stream of a step. ConfigurationError for what is none, such as a keyed or a windowed one."""
    if isinstance(given, kind):
        return given
    hint = "" if given is None else "; a stream is what a source or a step makes, before key_by and window"
    raise ConfigurationError(f"{step} takes another stream, not {type(given).__name__}{hint}")
