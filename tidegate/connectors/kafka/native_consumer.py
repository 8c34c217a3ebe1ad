"""`NativeConsumer`: a consumer over librdkafka that returns Arrow arrays without a Python object per record.

`librdkafka.py` lists when this is possible.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException
from numpy.typing import NDArray

from tidegate.connectors.kafka.librdkafka import (
    CONSUMER,
    MESSAGE,
    Log,
    error_of,
    log_callback,
    new_handle,
    raise_error,
    text_of,
)
from tidegate.connectors.kafka.records import Fetched, FetchReport, Records, headers_array
from tidegate.state.kernels import c_messages
from tidegate.state.kernels.c_messages import Addresses

_AT: Mapping[str, int] = {name: field[1] for name, field in (MESSAGE.fields or {}).items()}
"""Position in bytes of each field of a message."""
ARRAY_BYTES_MAX = 1 << 30
"""Maximum size in bytes of the values of one array, unless it has a single value. Arrow's offsets have 32 bits."""


class NativeConsumer:
    """Fetches records of assigned partitions. See `consumer.Consumer` for the methods."""

    def __init__(self, library: Any, settings: Mapping[str, object], parts: Collection[str], log: Log) -> None:
        """`library`: of `librdkafka.library_for`. `parts`: the parts of records to return, see `Records`.

        Raises KafkaException for settings that librdkafka refuses.
        """
        self._library = library
        self._parts = parts
        line = log_callback(log)
        handle = self._handle = new_handle(library, CONSUMER, settings, line, {})
        # Errors and log lines come with the records.
        library.poll_set_consumer(handle)
        queue = self._queue = library.queue_get_consumer(handle)
        self._destroy = ctypes.cast(library.rd_kafka_message_destroy, ctypes.c_void_p).value or 0
        self._timestamp = ctypes.cast(library.rd_kafka_message_timestamp, ctypes.c_void_p).value or 0
        self._headers = ctypes.cast(library.rd_kafka_message_headers, ctypes.c_void_p).value or 0
        # The callback lives as long as the handle. At the end of the process the system takes both away.
        self._end = weakref.finalize(self, _destroy, library, handle, queue, line)
        self._end.atexit = False

    def fetch(self, count: int) -> Fetched:
        """Returns up to `count` records that have arrived, without waiting. Raises KafkaException."""
        messages = np.empty(count, np.uint64)
        found = self._library.consume_batch_queue(self._queue, 0, messages.ctypes.data, count)
        if found < 0:
            raise KafkaException(error_of(self._library, self._library.last_error()))
        messages = messages[:found]
        try:
            errors = c_messages.integers(messages, _AT["err"] // 4)
            reports = [self._report(message) for message in messages[errors != 0].tolist()]
            return Fetched(found, reports, list(self._records(messages[errors == 0] if reports else messages)))
        finally:
            c_messages.results(self._destroy, messages, np.zeros(found, np.uint64))

    def _report(self, message: int) -> FetchReport:
        err, topic, partition, offset = (
            kind.from_address(message + _AT[name]).value
            for name, kind in (
                ("err", ctypes.c_int32),
                ("topic", ctypes.c_uint64),
                ("partition", ctypes.c_int32),
                ("offset", ctypes.c_int64),
            )
        )
        name = text_of(self._library.topic_name(topic)) if topic else ""
        error = KafkaError(err, text_of(self._library.message_errstr(message)))
        return FetchReport(error, name, partition, offset)

    def _records(self, messages: Addresses) -> Iterator[Records]:
        """Yields the records of consecutive messages of one partition."""
        if not len(messages):
            return
        topics = c_messages.words(messages, _AT["topic"] // 8)
        partitions = c_messages.integers(messages, _AT["partition"] // 4)
        offsets = c_messages.words(messages, _AT["offset"] // 8)
        ends = np.flatnonzero((topics[1:] != topics[:-1]) | (partitions[1:] != partitions[:-1])) + 1
        begins = [0, *ends.tolist()]
        for begin, end in zip(begins, [*begins[1:], len(messages)], strict=True):
            topic = text_of(self._library.topic_name(int(topics[begin])))
            for first, last in self._pieces(messages, begin, end):
                columns = {name: self._column(name, messages[first:last]) for name in self._parts}
                # A copy, so that a small part does not keep the offsets of all partitions.
                yield Records(topic, int(partitions[begin]), offsets[first:last].copy(), columns)

    def _pieces(self, messages: Addresses, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Splits a range of messages so that the values, and the keys, of each piece fit in one array."""
        sizes = sum(c_messages.words(messages[begin:end], _AT[name] // 8) for name in ("len", "key_len"))
        assert not isinstance(sizes, int)
        while begin < end:
            totals = np.cumsum(sizes[-(end - begin) :])
            count = max(1, int(np.searchsorted(totals, ARRAY_BYTES_MAX, side="right")))
            yield begin, min(begin + count, end)
            begin += count

    def _column(self, name: str, messages: Addresses) -> pa.Array:
        if name == "timestamp":
            return pa.array(c_messages.results(self._timestamp, messages, np.zeros(len(messages), np.uint64)))
        if name == "headers":
            return headers_array(self._headers_of(messages))
        place, size = ("payload", "len") if name == "value" else ("key", "key_len")
        return _binary(c_messages.words(messages, _AT[place] // 8), c_messages.words(messages, _AT[size] // 8))

    def _headers_of(self, messages: Addresses) -> Sequence[Sequence[tuple[str, bytes | None]]]:
        """Returns the headers of each message."""
        lists = np.zeros(len(messages), np.uint64)
        places = np.uint64(lists.ctypes.data) + np.arange(len(lists), dtype=np.uint64) * np.uint64(lists.itemsize)
        c_messages.results(self._headers, messages, places)
        found: list[Sequence[tuple[str, bytes | None]]] = [()] * len(messages)
        for number in np.flatnonzero(lists).tolist():
            found[number] = list(self._headers_in(int(lists[number])))
        return found

    def _headers_in(self, headers: int) -> Iterator[tuple[str, bytes | None]]:
        name, value, size = ctypes.c_char_p(), ctypes.c_void_p(), ctypes.c_size_t()
        places = ctypes.byref(name), ctypes.byref(value), ctypes.byref(size)
        for number in range(self._library.header_cnt(headers)):
            self._library.header_get_all(headers, number, *places)
            yield text_of(name.value), None if value.value is None else ctypes.string_at(value.value, size.value)

    def assign(self, topic: str, partition: int, offset: int) -> None:
        """Begins to fetch a partition from an offset on. Raises KafkaException."""
        self._change(self._library.incremental_assign, topic, partition, offset)

    def unassign(self, topic: str, partition: int) -> None:
        """Stops fetching a partition. No later `fetch` returns its records. Raises KafkaException."""
        self._change(self._library.incremental_unassign, topic, partition)

    def _change(self, function: Any, topic: str, partition: int, offset: int | None = None) -> None:
        library, name = self._library, topic.encode()
        places = library.topic_partition_list_new(1)
        try:
            library.topic_partition_list_add(places, name, partition)
            if offset is not None:
                library.topic_partition_list_set_offset(places, name, partition, offset)
            raise_error(library, function(self._handle, places))
        finally:
            library.topic_partition_list_destroy(places)

    def end_seen(self, topic: str, partition: int) -> int | None:
        """Returns the offset after a partition's last record, as the last answer of its broker reports it."""
        low, high = ctypes.c_int64(), ctypes.c_int64()
        code = self._library.get_watermark_offsets(
            self._handle, topic.encode(), partition, ctypes.byref(low), ctypes.byref(high)
        )
        # A negative offset is librdkafka's code for an unknown one.
        return None if code or high.value < 0 else high.value

    def bounds(self, topic: str, partition: int, timeout_s: float) -> tuple[int, int]:
        """Requests a partition's first offset, and the offset after its last record. Raises KafkaException."""
        low, high = ctypes.c_int64(), ctypes.c_int64()
        code = self._library.query_watermark_offsets(
            self._handle,
            topic.encode(),
            partition,
            ctypes.byref(low),
            ctypes.byref(high),
            round(timeout_s * 1_000),
        )
        if code:
            raise KafkaException(error_of(self._library, code))
        return low.value, high.value

    def close(self) -> None:
        """Stops fetching, and closes the connections."""
        if self._end.alive:
            self._library.consumer_close(self._handle)
            self._end()


def _destroy(library: Any, handle: int, queue: int, _log: object) -> None:
    library.queue_destroy(queue)
    library.destroy(handle)


def _binary(places: NDArray[np.int64], sizes: NDArray[np.int64]) -> pa.Array:
    """Copies byte strings, given by address and size, to an array. The address 0 becomes a null."""
    ends = np.zeros(len(places) + 1, np.int32)
    np.cumsum(sizes, out=ends[1:])
    missing = places == 0
    nulls = int(np.count_nonzero(missing))
    validity = pa.py_buffer(np.packbits(~missing, bitorder="little")) if nulls else None
    data = c_messages.contents(places.view(np.uint64), ends)
    return pa.Array.from_buffers(
        pa.binary(), len(places), [validity, pa.py_buffer(ends), pa.py_buffer(data)], null_count=nulls
    )
