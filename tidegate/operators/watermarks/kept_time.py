"""`KeptTime`: holds that a function hands on the event time of each row that it gets.

Watermarks are made of the times that `assign_timestamps` has read. A function behind it that makes times earlier makes
rows late that were in time, and they would be dropped. Flink keeps the timestamp of a record apart from its columns.
Here it is a column, so a function may not change it where steps behind it go by it. Rules:

- It is checked only where a step behind the function uses event time, and no `assign_timestamps` stands between.
- It is for functions that make rows of one row each: `map` and `flat_map`. The rows of others are their own.
- Times count in milliseconds, so another unit or type of the same time is no change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.operators.watermarks.watermark_generator import event_times_ms
from tidegate.storage.errors import ConfigurationError

Row = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class KeptTime:
    """The column of event time that a function is to hand on. `used`: whether steps behind it go by that column.

    A program sets `used` when it adds such a step, so the same object is in the function's operator.
    """

    column: str
    used: bool = False

    def check(self, before: pa.RecordBatch, after: pa.RecordBatch) -> None:
        """Raise ConfigurationError if the rows of `after`, one for each row of `before`, have other times."""
        if not self.used or after.schema.get_field_index(self.column) < 0:
            return
        if before.column(self.column).equals(after.column(self.column)):
            return  # most functions: quicker than to make milliseconds of both
        old, new = event_times_ms(before, self.column), event_times_ms(after, self.column)
        if old.equals(new):
            return
        differ = np.fromiter((a != b for a, b in zip(old.to_pylist(), new.to_pylist(), strict=True)), bool, len(old))
        row = int(np.flatnonzero(differ)[0])
        raise self._changed(before.column(self.column)[row], after.column(self.column)[row])

    def results(self, fn: Callable[[dict[str, Any]], Iterable[Row]]) -> Callable[[dict[str, Any]], Iterable[Row]]:
        """A function that makes any number of rows of one, with a check of each."""
        return self._checked(fn) if self.used else fn

    def _checked(self, fn: Callable[[dict[str, Any]], Iterable[Row]]) -> Callable[[dict[str, Any]], Iterator[Row]]:
        column = self.column

        def checked(row: dict[str, Any]) -> Iterator[Row]:
            time = row.get(column)
            for result in fn(row):
                if column in result and type(result[column]) is type(time) and not _same(time, result[column]):
                    raise self._changed(time, result[column])
                yield result

        return checked

    def _changed(self, before: object, after: object) -> ConfigurationError:
        return ConfigurationError(
            f"the function has changed the column of event time, {self.column!r}, from {before} to {after}; watermarks "
            "are of the former times, so steps behind it would take the row for late. Give the new time another name, "
            "or call assign_timestamps behind the function"
        )


def _same(time: object, other: object) -> bool:
    """Whether two values of one type are one moment. Python takes the two of an hour that comes twice for equal."""
    return time == other and getattr(time, "fold", 0) == getattr(other, "fold", 0)
