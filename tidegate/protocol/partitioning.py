"""`Partitioning`: how an edge of the job graph distributes rows over the downstream subtasks."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tidegate.storage.codec import wire
from tidegate.storage.errors import ConfigurationError


@wire
class PartitioningKind(enum.Enum):
    """Who gets a row: the same subtask, the owner of its key, each subtask in turn, or all subtasks."""

    FORWARD = "forward"
    HASH = "hash"
    REBALANCE = "rebalance"
    BROADCAST = "broadcast"


@wire
@dataclass(frozen=True, slots=True)
class Partitioning:
    """The kind, and the key columns, which HASH must have and no other kind may. Else ConfigurationError."""

    kind: PartitioningKind
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind is PartitioningKind.HASH) != bool(self.keys):
            raise ConfigurationError(
                f"{self.kind.value} partitioning with keys {list(self.keys)}: hash partitioning needs at "
                f"least one key column, the other kinds take none"
            )
        if len(set(self.keys)) != len(self.keys):
            raise ConfigurationError(f"a key column is named twice: {list(self.keys)}")
