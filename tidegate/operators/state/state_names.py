"""`StateNames`: the names of all states of one operator, keyed or not. In a checkpoint they are all that tells."""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.storage.errors import ConfigurationError, IncompatibleStateError
from tidegate.storage.schemas.reserved_names import RESERVED_PREFIX, is_reserved


class UndeclaredStateError(IncompatibleStateError):
    """A checkpoint has a state of a function that the function does not declare any more. `state`: its name.

    With consent such a state is dropped at submission (`restore/rehearsal.py`).
    """

    def __init__(self, text: str, state: str = "") -> None:
        super().__init__(text)
        self.state = state


class StateNames:
    """The names that are taken. States of users and those of tidegate have different namespaces (`own_name`)."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._taken)

    def take(self, name: str) -> None:
        """Take a name for a state of a user. ConfigurationError if another state has it, or if it is tidegate's own."""
        if is_reserved(name):
            raise ConfigurationError(
                f"state {name!r}: names that begin with {RESERVED_PREFIX!r} are tidegate's own; give the state another "
                "name"
            )
        if name in self._taken:
            raise ConfigurationError(f"two states are named {name!r}; give one of them another name")
        self._taken.add(name)

    def take_own(self, name: str) -> None:
        """Take a name of tidegate's namespace."""
        assert is_reserved(name) and name not in self._taken, f"the state {name!r}"
        self._taken.add(name)

    def not_bound(self, name: str, text: str) -> IncompatibleStateError:
        """Returns the error for a stored state that is not bound; `text` is its message.

        It is an UndeclaredStateError unless the name is taken: such a state is of another kind now, or tidegate's own.
        """
        return IncompatibleStateError(text) if name in self._taken else UndeclaredStateError(text, name)
