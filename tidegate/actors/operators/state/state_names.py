"""`StateNames`: the names of all states of one operator, keyed or not. In a checkpoint they are all that tells."""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state.timer_rows import TIMERS_STATE


class StateNames:
    """The names that are taken."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._taken)

    def take(self, name: str) -> None:
        """Take a name. ConfigurationError if another state has it, or tidegate itself."""
        if name in self._taken or name == TIMERS_STATE:
            raise ConfigurationError(f"two states are named {name!r} ({TIMERS_STATE!r} is tidegate's own)")
        self._taken.add(name)
