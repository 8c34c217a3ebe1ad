"""Records of a partition of Kafka: what is taken out of messages stays in order, with its offsets."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.connectors.formats.json import JsonRead
from tidegate.connectors.formats.raw import RawRead
from tidegate.connectors.kafka.records import RecordFormat, RecordReader, Records
from tidegate.storage.errors import ConfigurationError

SCHEMA = pa.schema([("x", pa.int64())])
NAMES = ("value", "key", "timestamp", "headers")


@dataclass(frozen=True)
class Sent:
    """A message as the client has it, with values that follow from its offset."""

    number: int
    data: bytes | None = b"{}"

    def __len__(self) -> int:
        return len(self.data or b"")

    def offset(self) -> int:
        """Its offset."""
        return self.number

    def value(self) -> bytes | None:
        """Its value."""
        return self.data

    def key(self) -> bytes:
        """A key."""
        return b"k%d" % self.number

    def timestamp(self) -> tuple[int, int]:
        """The kind of the time, and the time."""
        return 1, 1_000 + self.number

    def headers(self) -> list[tuple[str, bytes]] | None:
        """Headers, for every second one."""
        return [("h", b"%d" % self.number)] if self.number % 2 else None


def records_of(*messages: Sent) -> Records:
    """Records of one partition."""
    records = Records("t", 3, NAMES)
    records.add(messages)  # type: ignore[arg-type]
    return records


def contents(records: Records) -> list[tuple[object, ...]]:
    """Offset, value, key, time and headers of each record."""
    return list(zip(records.offsets, *(records.columns[name] for name in NAMES), strict=True))


def size_bytes(messages: list[Sent]) -> int:
    """Bytes of values, keys and headers; a header has 200 besides."""
    headers = [pair for each in messages for pair in each.headers() or ()]
    return sum(len(each) + len(each.key()) for each in messages) + sum(200 + len(k) + len(v) for k, v in headers)


def test_records_without_their_keys_and_headers_are_smaller() -> None:
    """What is not held does not count."""
    sent = Sent(1, b"abc")
    assert [Records("t", 0, NAMES[:count]).add([sent]) for count in (1, 2, 3, 4)] == [3, 5, 5, 207]  # type: ignore[list-item]


_STEPS = st.lists(
    st.lists(st.integers(1, 3), min_size=1, max_size=4) | st.integers(0, 5),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(_STEPS, st.integers(0, 3))
def test_records_are_taken_in_order(steps: list[list[int] | int], start: int) -> None:
    """However they are added and taken, with gaps between offsets and without, and with tombstones."""
    records, waiting, offset = Records("t", 0, NAMES), list[Sent](), start
    for step in steps:
        if isinstance(step, list):
            messages = []
            for gap in step:
                messages.append(Sent(offset, None if offset % 5 == 0 else b"v%d" % offset))
                offset += gap
            assert records.add(messages) == size_bytes(messages)  # type: ignore[arg-type]
            waiting += messages
        else:
            taken = records.take(step)
            assert (taken.topic, taken.partition) == ("t", 0)
            expected, waiting = waiting[:step], waiting[step:]
            assert contents(taken) == [(e.number, e.data, e.key(), 1_000 + e.number, e.headers()) for e in expected]
            assert taken.size_bytes == size_bytes(expected)
        assert (len(records), list(records.offsets)) == (len(waiting), [each.number for each in waiting])


def test_a_bad_record_behind_a_gap_is_named_by_its_offset() -> None:
    """And the records beside it keep their own."""
    records = records_of(Sent(4), Sent(7, b"{"), Sent(8, None), Sent(20, b'{"x":1}'))
    form = RecordFormat(
        JsonRead(SCHEMA),
        RawRead("key", text=True, part="key"),
        metadata=("offset", "timestamp", "headers", "tombstone"),
    )
    with pytest.raises(ConfigurationError, match="the record at offset 7 of partition 3 of 't' cannot be read"):
        RecordReader(form, "fail").rows(records)
    batch, letters = RecordReader(form, "side").rows(records)
    assert batch is not None
    assert batch.select(["x", "kafka_key", "kafka_offset", "kafka_tombstone"]).to_pylist() == [
        {"x": None, "kafka_key": "k4", "kafka_offset": 4, "kafka_tombstone": False},
        {"x": None, "kafka_key": "k8", "kafka_offset": 8, "kafka_tombstone": True},
        {"x": 1, "kafka_key": "k20", "kafka_offset": 20, "kafka_tombstone": False},
    ]
    assert letters is not None
    assert letters.select(["raw", "topic", "partition", "offset"]).to_pylist() == [
        {"raw": b"{", "topic": "t", "partition": 3, "offset": 7}
    ]
