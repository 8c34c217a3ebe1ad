"""`Views`: what a query may name in FROM: streams of a program, and tables that are looked up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tidegate.storage.errors import ConfigurationError

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
