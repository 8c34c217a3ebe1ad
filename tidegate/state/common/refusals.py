"""Why stored rows cannot be loaded, in the words of every backend."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.schemas.columns_text import columns_text


def held_twice(state: str) -> CorruptionError:
    """A key came twice in layer 0 of a checkpoint."""
    return CorruptionError(f"state {state!r} holds a key twice: the key groups of the checkpoint's tables overlap")


def not_bound(state: str, bound: Iterable[str]) -> ConfigurationError:
    """The program has no such state."""
    return ConfigurationError(
        f"there is no state {state!r}; bound are {sorted(bound)}: bind it, or give the operator a new uid"
    )


def strange_columns(state: str, found: pa.Schema, expected: pa.Schema) -> CorruptionError:
    """Stored rows have other columns than the state."""
    return CorruptionError(
        f"stored rows of state {state!r} have columns {columns_text(found)}, but the program expects "
        f"{columns_text(expected)}; restore with the program that wrote them, or give the operator a new uid"
    )


def strange_rows(state: str, uid: str, found: pa.Schema, expected: pa.Schema) -> ConfigurationError:
    """A row table in a checkpoint has other value columns than in the program."""
    return ConfigurationError(
        f"state {state!r} of operator {uid!r} has rows with columns {columns_text(found)} in the checkpoint, and "
        f"{columns_text(expected)} in the program; give the operator its input columns back, or a new uid"
    )
