"""`StateNames`: the names of all states of one operator, keyed or not. In a checkpoint they are all that tells."""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.storage.errors import ConfigurationError, IncompatibleStateError
from tidegate.storage.state.timer_rows import TIMERS_STATE


class UndeclaredStateError(IncompatibleStateError):
    """A checkpoint has a state of a function that the function does not declare any more. `state`: its name.

    With consent such a state is dropped at submission (`restore/rehearsal.py`).
    """

    def __init__(self, text: str, state: str = "") -> None:
        super().__init__(text)
        self.state = state


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

    def not_bound(self, name: str, text: str) -> IncompatibleStateError:
        """Returns the error for a stored state that is not bound; `text` is its message.

        It is an UndeclaredStateError unless the name is taken: such a state is of another kind now, or tidegate's own.
        """
        return IncompatibleStateError(text) if name in self._taken else UndeclaredStateError(text, name)
