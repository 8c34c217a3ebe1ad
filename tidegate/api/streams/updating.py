"""`Updating`: marks a stream of updates, in which a row replaces the earlier rows with its keys.

An aggregate with `emit="update"` makes one. There are no retractions, as Flink's changelog streams have them. So only
two things are right behind it: an upsert by the same keys, which keeps the newest row of each, and `collect` (or
`for_each_checkpoint`), which shows all rows. Any other operator would count replaced rows as well. So an operator
refuses such a stream, unless it is known to pass on the keys and every row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate.api.streams.stream_columns import name_after
from tidegate.storage.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Updating:
    """A stream of updates: the newest row of each key counts. `made_by` names the operator that emits them."""

    keys: tuple[str, ...]
    made_by: str

    def refuse(
        self, operator: str, reason: str = "it would take old versions for rows of their own"
    ) -> ConfigurationError:
        """The error for an operator that cannot follow."""
        which = f"the one before it with the same {list(self.keys)}" if self.keys else "the one before it"
        advice = (
            f', or write the updates with to_table(..., mode="upsert", keys={list(self.keys)})' if self.keys else ""
        )
        return ConfigurationError(
            f"{operator} cannot follow {self.made_by}, which emits updates: a row takes the place of {which}, and "
            f'{reason}. Use emit="final" in {self.made_by}{advice}'
        )

    def parallelism(self, operator: str, asked: int | None) -> int | None:
        """How many subtasks an operator behind may have, where so many were asked for.

        Without keys it is one, so that updates stay in order. ConfigurationError if more were asked for.
        """
        if self.keys:
            return asked
        if asked not in (None, 1):
            raise self.refuse(operator, f"in {asked} subtasks they would overtake each other")
        return 1

    def renamed(self, operator: str, passed: Mapping[str, str]) -> Updating:
        """The updates after a step that copies these columns. ConfigurationError if a key is not among them."""
        names = []
        for key in self.keys:
            name = name_after(key, passed)
            if name is None:
                raise self.refuse(operator, f"it does not pass on the key {key!r} as it is")
            names.append(name)
        return Updating(tuple(names), self.made_by)

    def check_upsert(self, operator: str, keys: Sequence[str]) -> None:
        """Raise ConfigurationError unless a table with these keys keeps exactly the newest row of each key."""
        if set(keys) != set(self.keys):
            how = f"an upsert by {list(keys)}" if keys else 'a table in mode "append"'
            raise self.refuse(operator, f"{how} would keep old versions, or lose rows")
