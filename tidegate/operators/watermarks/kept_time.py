"""`KeptTime` checks that a function passes on the event time of each row that it gets.

Watermarks follow the times that `assign_timestamps` has read. A later function that makes times earlier would make rows
late, and they would be dropped. Flink stores the timestamp of a record separately. Here it is a column, so a function
must not change it if later steps use it. Rules:

- It is checked only if a later step uses event time, and `assign_timestamps` is not called in between.
- It applies to functions that make rows of a single row: `map` and `flat_map`. Other functions may set their own times.
- Times are compared in milliseconds, so another unit or type of the same time is not a change.
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
            "follow the former times, so later steps would treat the row as late. Give the new time another name, or "
            "call assign_timestamps after the function"
        )


def _same(time: object, other: object) -> bool:
    """Whether two values of one type are one moment. Python takes the two of an hour that comes twice for equal."""
    return time == other and getattr(time, "fold", 0) == getattr(other, "fold", 0)
