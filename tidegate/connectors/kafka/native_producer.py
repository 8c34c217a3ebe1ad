"""`NativeProducer`: a producer over librdkafka that sends whole Arrow batches.

A batch is one call, without the GIL, and only failed deliveries are reported. `librdkafka.py` lists when this is
possible.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, KafkaException
from numpy.typing import NDArray

from tidegate.connectors.kafka.librdkafka import (
    CLIENT_ERROR,
    DELIVERY,
    MESSAGE,
    PRODUCER,
    TEXT_BYTES,
    error_of,
    library_for,
    log_callback,
    new_handle,
    raise_error,
    text_of,
)
from tidegate.state.kernels.distinct_integers import distinct_integers

_F_COPY = 0x2
_ANY_PARTITION = -1
_PART = np.dtype(
    {"names": ["kind", "a", "b", "c"], "formats": ["i4", "u8", "u8", "i8"], "offsets": [0, 8, 16, 24], "itemsize": 72}
)
"""Memory layout of the C struct `rd_kafka_vu_t`, one part of a record."""
_TOPIC, _PARTITION, _VALUE, _KEY, _FLAGS, _TIMESTAMP, _HEADER = 2, 3, 4, 5, 7, 8, 9
"""Kinds of parts, `rd_kafka_vtype_t`."""
_FIXED_PARTS = 6
_EMPTY = ctypes.create_string_buffer(1)
"""Memory that the pointers of empty payloads refer to. A null payload has a null pointer."""


class Reports(Protocol):
    """Callbacks of a Kafka producer for failed deliveries, errors and log lines."""

    def failed(self, error: KafkaError, topic: str, partition: int) -> None:
        """Called for a record that was not delivered."""

    def client_error(self, error: KafkaError) -> None:
        """Called for an error of the client that does not belong to a record."""

    def log(self, level: int, facility: str, text: str) -> None:
        """Called for a line of the client's log. `level` is a level of Python's `logging`."""


def connect(settings: Mapping[str, object], reports: Reports) -> NativeProducer | None:
    """Creates a producer. Returns None if the settings need `confluent_kafka.Producer`, or librdkafka cannot be called.

    Raises KafkaException for settings that librdkafka refuses.
    """
    library = library_for(settings)
    if library is None:
        return None
    return NativeProducer(library, settings, reports)


class NativeProducer:
    """A producer with the methods of `confluent_kafka.Producer`, and with `send` for a batch of records."""

    def __init__(self, library: Any, settings: Mapping[str, object], reports: Reports) -> None:
        self._library = library
        self._reports = reports
        self._topics: dict[str, int] = {}
        log = log_callback(reports.log)
        callbacks = {
            "conf_set_dr_msg_cb": DELIVERY(self._on_delivery(library, reports)),
            "conf_set_error_cb": CLIENT_ERROR(
                lambda _handle, code, text, _opaque: reports.client_error(KafkaError(code, text_of(text)))
            ),
        }
        self._handle = new_handle(library, PRODUCER, settings, log, callbacks)
        # The callbacks live as long as the handle. At the end of the process the system takes both away.
        end = weakref.finalize(self, _destroy, library, self._handle, self._topics, (log, callbacks))
        end.atexit = False

    @staticmethod
    def _on_delivery(library: Any, reports: Reports) -> Any:
        # Not a method: the object would keep itself alive.
        def report(_handle: int, message: Any, _opaque: int) -> None:
            found = message.contents
            if found.err:
                reports.failed(error_of(library, found.err), text_of(library.topic_name(found.topic)), found.partition)

        return report

    def __len__(self) -> int:
        """Returns the number of records in the queue or in flight."""
        waiting: int = self._library.outq_len(self._handle)
        return waiting

    def poll(self, timeout: float) -> None:
        """Serves callbacks. Waits up to `timeout` seconds for the first one."""
        self._library.poll(self._handle, round(timeout * 1_000))

    def flush(self, timeout: float) -> int:
        """Waits until all records are delivered or have failed, for up to `timeout` seconds.

        Returns the number of remaining records.
        """
        self._library.flush(self._handle, round(timeout * 1_000))
        return len(self)

    def purge(self) -> None:
        """Drops all records in the queue and in flight. The next `poll` reports them as failed."""
        in_queue_and_in_flight = 0x3
        self._library.purge(self._handle, in_queue_and_in_flight)

    def init_transactions(self, timeout: float) -> None:
        """Fences earlier producers with the same transactional id. `timeout` is in seconds. Raises KafkaException."""
        raise_error(self._library, self._library.init_transactions(self._handle, round(timeout * 1_000)))

    def begin_transaction(self) -> None:
        """Begins a transaction. Raises KafkaException."""
        raise_error(self._library, self._library.begin_transaction(self._handle))

    def commit_transaction(self, timeout: float) -> None:
        """Delivers all records and commits. Raises KafkaException, also if a record was not delivered."""
        raise_error(self._library, self._library.commit_transaction(self._handle, round(timeout * 1_000)))

    def abort_transaction(self, timeout: float) -> None:
        """Aborts the transaction. Raises KafkaException."""
        raise_error(self._library, self._library.abort_transaction(self._handle, round(timeout * 1_000)))

    def send(self, records: pa.RecordBatch, topic: str | None) -> None:
        """Copies records into the client's queue, in their order. `topic` is for records without a column `topic`.

        Raises KafkaException, and BufferError if the queue is full. Some records may be in the queue then.
        """
        single = {"headers", "timestamp"} & set(records.schema.names)
        for name, part in _by_topic(records, topic):
            if single:
                self._send_each(part, self._topic(name))
            else:
                self._send_batch(part, self._topic(name))

    def _send_batch(self, records: pa.RecordBatch, topic: int) -> None:
        messages = np.zeros(records.num_rows, MESSAGE)
        messages["payload"], messages["len"] = _places(records.column("value"))
        if "key" in records.schema.names:
            messages["key"], messages["key_len"] = _places(records.column("key"))
        for partition, part in _by_partition(messages, _partitions(records)):
            sent = self._library.produce_batch(topic, partition, _F_COPY, part.ctypes.data, len(part))
            if sent < len(part):
                self._refuse(int(part["err"][np.flatnonzero(part["err"])[0]]))

    def _send_each(self, records: pa.RecordBatch, topic: int) -> None:
        """Sends records one by one, because librdkafka's batch call supports neither headers nor timestamps."""
        names = records.schema.names
        counts = np.zeros(records.num_rows, np.int64)
        if "headers" in names:
            counts = pc.fill_null(pc.list_value_length(records.column("headers")), 0).to_numpy().astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(counts + _FIXED_PARTS)])
        parts = np.zeros(int(starts[-1]), _PART)
        first = starts[:-1]
        for place, (kind, a, b) in enumerate(
            (
                (_TOPIC, topic, 0),
                (_FLAGS, _F_COPY, 0),
                (_VALUE, *_places(records.column("value"))),
                (_KEY, *(_places(records.column("key")) if "key" in names else (0, 0))),
                (_PARTITION, _partitions(records).astype(np.int64).view(np.uint64), 0),
                (_TIMESTAMP, _times(records).view(np.uint64), 0),
            )
        ):
            parts["kind"][first + place] = kind
            parts["a"][first + place] = a
            parts["b"][first + place] = b
        keep: object = None
        if counts.any():
            rows = np.repeat(first + _FIXED_PARTS, counts)
            within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            keys, values = pc.list_flatten(records.column("headers")).flatten()
            keep, key_places = _c_strings(keys)
            value_places, lengths = _places(values.cast(pa.binary()))
            parts["kind"][rows + within] = _HEADER
            parts["a"][rows + within] = key_places
            parts["b"][rows + within] = value_places
            parts["c"][rows + within] = lengths.astype(np.int64)
        produceva, handle, base, width = self._library.produceva, self._handle, parts.ctypes.data, _PART.itemsize
        for start, count in zip((base + first * width).tolist(), (counts + _FIXED_PARTS).tolist(), strict=True):
            if error := produceva(handle, start, count):
                code = self._library.error_code(error)
                self._library.error_destroy(error)
                self._refuse(code)
        del keep

    def _topic(self, name: str) -> int:
        if name not in self._topics:
            made = self._library.topic_new(self._handle, name.encode(), None)
            if not made:
                raise KafkaException(f"the client refuses topic {name!r}; give the name of a topic of Kafka")
            self._topics[name] = made
        return self._topics[name]

    def _refuse(self, code: int) -> None:
        if code == KafkaError._QUEUE_FULL:
            raise BufferError(text_of(self._library.err2str(code)))
        problem = ctypes.create_string_buffer(TEXT_BYTES)
        fatal = self._library.fatal_error(self._handle, problem, TEXT_BYTES)
        if fatal:
            raise KafkaException(KafkaError(fatal, text_of(problem.value), True))
        raise KafkaException(error_of(self._library, code))


def _destroy(library: Any, handle: int, topics: Mapping[str, int], _callbacks: object) -> None:
    for topic in topics.values():
        library.topic_destroy(topic)
    library.destroy(handle)


def _by_topic(records: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Splits records by topic. Yields the topic and its records, in their order."""
    if "topic" not in records.schema.names:
        assert topic is not None, "records have a topic each, or all the same"
        yield topic, records
        return
    encoded = records.column("topic").dictionary_encode()
    codes = encoded.indices.to_numpy()
    names = encoded.dictionary.to_pylist()
    for code, name in enumerate(names):
        yield name, records if len(names) == 1 else records.take(pa.array(np.flatnonzero(codes == code)))


def _by_partition(messages: NDArray[np.void], partitions: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.void]]]:
    """Splits messages by partition. Yields the partition and its messages, in their order.

    One call of librdkafka sends to one partition. If a batch had several, an unknown topic would be added to the
    transaction with "any partition", which the brokers refuse.
    """
    found = distinct_integers(partitions)
    if len(found) == 1:
        yield int(found[0]), messages
    elif found[0] != _ANY_PARTITION:
        for partition in found.tolist():
            yield partition, messages[partitions == partition]
    else:
        # The partitioner may choose the partition of another record of the batch: their order has to stay.
        bounds = np.flatnonzero(np.diff(partitions)) + 1
        for part in np.split(np.arange(len(messages)), bounds):
            yield int(partitions[part[0]]), messages[part]


def _places(column: pa.Array) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns the address and the length in bytes of each value. A null has the address 0."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4).astype(np.uint64)
    begin = np.uint64(data.address if data is not None and data.size else ctypes.addressof(_EMPTY))
    places = bounds[:-1] + begin
    lengths = np.diff(bounds)
    if column.null_count:
        there = column.is_valid().to_numpy(zero_copy_only=False)
        places = np.where(there, places, np.uint64(0))
        lengths = np.where(there, lengths, np.uint64(0))
    return places, lengths


def _partitions(records: pa.RecordBatch) -> NDArray[np.int32]:
    if "partition" not in records.schema.names:
        return np.full(records.num_rows, _ANY_PARTITION, np.int32)
    filled: NDArray[np.int32] = pc.fill_null(records.column("partition"), _ANY_PARTITION).to_numpy()
    return filled


def _times(records: pa.RecordBatch) -> NDArray[np.int64]:
    """Returns the timestamp of each record in ms since 1970. 0 means the time of sending."""
    if "timestamp" not in records.schema.names:
        return np.zeros(records.num_rows, np.int64)
    filled: NDArray[np.int64] = pc.fill_null(records.column("timestamp"), 0).to_numpy()
    return np.ascontiguousarray(filled)


def _c_strings(names: pa.Array) -> tuple[object, NDArray[np.uint64]]:
    """Stores the distinct names as C strings in memory. Returns the object that owns this memory, and the address of
    each entry's name.
    """
    encoded = names.dictionary_encode()
    texts = [str(name).encode() for name in encoded.dictionary.to_pylist()]
    memory = ctypes.create_string_buffer(b"\0".join(texts) + b"\0")
    lengths = np.array([len(text) + 1 for text in texts], np.uint64)
    begins = np.cumsum(lengths) - lengths + np.uint64(ctypes.addressof(memory))
    return memory, begins[encoded.indices.to_numpy()]
