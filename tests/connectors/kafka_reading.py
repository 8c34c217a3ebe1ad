"""What tests of the Kafka source share: records, and reading a split as a task does."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
from waiting import until

from tidegate.connectors.kafka.source import KafkaSource
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit

QUICK = (("fetch.wait.max.ms", 10), ("fetch.queue.backoff.ms", 10), ("fetch.error.backoff.ms", 10))
"""Settings of a client that does not wait for more."""
SCHEMA = pa.schema([("x", pa.int64()), ("s", pa.string())])


def objects(*xs: int) -> list[bytes]:
    """Records that are JSON objects."""
    return [json.dumps({"x": x, "s": f"s{x}", "more": [x]}).encode() for x in xs]


def partitions_of(found: KafkaSource) -> list[SourceSplit]:
    """The splits of a source that have records."""
    return [split for split in found.splits() if split.rows]


class Reading:
    """One split, read as a task does."""

    def __init__(self, reader: SourceReader, split: SourceSplit) -> None:
        self.reader, self.split, self.offset = reader, split, 0
        self.rows: list[dict[str, object]] = []
        self.letters: list[dict[str, object]] = []
        self.at_end = False

    def once(self, rows_max: int = 1_000) -> ReadResult:
        """One read."""
        result = self.reader.read(self.split, self.offset, rows_max)
        self.split = self.split if result.payload is None else replace(self.split, payload=result.payload)
        self.offset, self.at_end = result.next_offset, result.at_end
        self.rows += [] if result.batch is None else result.batch.to_pylist()
        self.letters += [] if result.bad is None else result.bad.to_pylist()
        return result

    def until(self, rows: int, rows_max: int = 1_000) -> list[object]:
        """Read until there are so many rows; their first column."""

        def there() -> bool:
            self.once(rows_max)
            return len(self.rows) >= rows

        until(f"{rows} rows", there, lambda: self.rows)
        return [next(iter(row.values())) for row in self.rows]
