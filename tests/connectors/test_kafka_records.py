"""Records of a partition of Kafka: what is taken out of messages stays in order, with its offsets."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.connectors.formats.json import JsonRead
from tidegate.connectors.formats.raw import RawRead
from tidegate.connectors.kafka.records import RecordBuffer, RecordFormat, RecordReader, Records
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
    return Records.of_messages("t", 3, NAMES, messages)  # type: ignore[arg-type]


def contents(records: Records) -> list[tuple[object, ...]]:
    """Offset, value, key, time and headers of each record."""
    parts = {name: records.columns[name].to_pylist() for name in NAMES}
    parts["headers"] = [[(each["key"], each["value"]) for each in pairs] for pairs in parts["headers"]]
    return list(zip(records.offsets.tolist(), *parts.values(), strict=True))


def size_bytes(messages: list[Sent]) -> int:
    """Bytes of values, keys and headers, and 40 for each record and 20 for each header besides."""
    headers = [pair for each in messages for pair in each.headers() or ()]
    return sum(40 + len(each) + len(each.key()) for each in messages) + sum(20 + len(k) + len(v) for k, v in headers)


def test_records_without_their_keys_and_headers_are_smaller() -> None:
    """A part that is not needed has no size."""
    sent = [Sent(1, b"abc")]
    sizes = [Records.of_messages("t", 0, NAMES[:count], sent).size_bytes for count in (1, 2, 3, 4)]  # type: ignore[arg-type]
    assert sizes == [43, 45, 45, 67]


_STEPS = st.lists(
    st.lists(st.integers(1, 3), min_size=1, max_size=4) | st.integers(1, 5),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(_STEPS, st.integers(0, 3))
def test_records_are_taken_in_order(steps: list[list[int] | int], start: int) -> None:
    """However they are added and taken, with gaps between offsets and without, and with tombstones."""
    buffer, waiting, offset = RecordBuffer(), list[Sent](), start
    for step in steps:
        if isinstance(step, list):
            messages = []
            for gap in step:
                messages.append(Sent(offset, None if offset % 5 == 0 else b"v%d" % offset))
                offset += gap
            added = Records.of_messages("t", 0, NAMES, messages)  # type: ignore[arg-type]
            assert buffer.add(added) == size_bytes(messages)
            waiting += messages
        else:
            taken = buffer.take(step)
            expected, waiting = waiting[:step], waiting[step:]
            assert (taken is None) == (not expected)
            if taken is not None:
                assert (taken.topic, taken.partition) == ("t", 0)
                assert contents(taken) == [
                    (e.number, e.data, e.key(), 1_000 + e.number, e.headers() or []) for e in expected
                ]
                assert taken.size_bytes == size_bytes(expected)
        assert (len(buffer), buffer.size_bytes) == (len(waiting), size_bytes(waiting))


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
