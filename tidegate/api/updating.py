"""`Updating`: streams of updates, whose rows take the place of earlier ones with the same keys.

An aggregate with `emit="update"` makes them. As long as nothing says what a row replaces (a retraction), only two
things can be right behind it: an upsert by the very same keys, which keeps the newest row of each; and looking at all
versions, which `collect` does. Any other operator would take old versions for rows of their own. So every operator
refuses such a stream unless it is known to pass on the keys, and every version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate.api.stream_columns import name_after
from tidegate.storage.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Updating:
    """What a stream of updates is: of each key the newest row counts. `made_by` names the operator that makes it."""

    keys: tuple[str, ...]
    made_by: str

    def refuse(
        self, operator: str, reason: str = "it would take old versions for rows of their own"
    ) -> ConfigurationError:
        """The error for an operator that cannot follow."""
        return ConfigurationError(
            f"{operator} cannot follow {self.made_by}, which emits updates: a row takes the place of the one before it "
            f'with the same {list(self.keys)}, and {reason}. Use emit="final" in {self.made_by}, or write the updates '
            f'with to_table(..., mode="upsert", keys={list(self.keys)})'
        )

    def renamed(self, operator: str, passed: Mapping[str, str]) -> Updating:
        """The updates after a step that passes these columns. ConfigurationError if a key is not among them."""
        names = []
        for key in self.keys:
            name = name_after(key, passed)
            if name is None:
                raise self.refuse(operator, f"it does not pass on the key {key!r} as it is")
            names.append(name)
        return Updating(tuple(names), self.made_by)

    def check_upsert(self, operator: str, keys: Sequence[str]) -> None:
        """Raise ConfigurationError for a table that keeps other rows than the newest of each key."""
        if set(keys) != set(self.keys):
            how = f"an upsert by {list(keys)}" if keys else 'a table in mode "append"'
            raise self.refuse(operator, f"{how} would keep old versions, or lose rows")
