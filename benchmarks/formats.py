"""Measures how fast formats of payloads decode and encode, beside JSON and beside a loop of fastavro.

    python benchmarks/formats.py [--rows 50000] [--rounds 5]

Prints microseconds a record, the best of the rounds, and the ratio to JSON. All formats have the same rows. Events of
Debezium have the row before and the row after, with a key; the registry of those in Avro is on loopback.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fastavro
import numpy as np
import pyarrow as pa
from google.protobuf import descriptor_pb2, timestamp_pb2

from tidegate.connectors.formats.avro import AvroFormat
from tidegate.connectors.formats.csv import CsvFormat
from tidegate.connectors.formats.debezium import DebeziumFormat
from tidegate.connectors.formats.format import Format, PayloadUse, RowChanges
from tidegate.connectors.formats.json import JsonFormat
from tidegate.connectors.formats.protobuf import ProtobufFormat

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from registry_server import registry_server

USE = PayloadUse("benchmark", ("bids",))
SCHEMA = {
    "type": "record",
    "name": "Bid",
    "fields": [
        {"name": "auction", "type": "long"},
        {"name": "bidder", "type": "long"},
        {"name": "price", "type": ["null", "double"]},
        {"name": "channel", "type": "string"},
        {"name": "url", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}


def rows(count: int) -> pa.RecordBatch:
    """Returns bids of about 100 bytes in Avro and 190 in JSON."""
    columns = AvroFormat(SCHEMA).for_reading(None, USE).schema
    numbers = range(count)
    return pa.record_batch(
        [
            pa.array(numbers, pa.int64()),
            pa.array([7 * number for number in numbers], pa.int64()),
            pa.array([number / 3 if number % 5 else None for number in numbers]),
            pa.array([f"ch{number % 100}" for number in numbers]),
            pa.array([f"https://www.example.com/item/{number}?x={'a' * 39}" for number in numbers]),
            pa.array([1_700_000_000_000 + number for number in numbers]).cast(columns.field("at").type),
        ],
        schema=columns,
    )


def descriptors() -> bytes:
    """Returns a message of Protobuf with the columns of `rows`."""
    kinds = descriptor_pb2.FieldDescriptorProto
    fields = [
        kinds(name="auction", number=1, type=kinds.TYPE_INT64, label=1),
        kinds(name="bidder", number=2, type=kinds.TYPE_INT64, label=1),
        kinds(name="price", number=3, type=kinds.TYPE_DOUBLE, label=1, oneof_index=0, proto3_optional=True),
        kinds(name="channel", number=4, type=kinds.TYPE_STRING, label=1),
        kinds(name="url", number=5, type=kinds.TYPE_STRING, label=1),
        kinds(name="at", number=6, type=kinds.TYPE_MESSAGE, label=1, type_name=".google.protobuf.Timestamp"),
    ]
    optional = [descriptor_pb2.OneofDescriptorProto(name="_price")]
    bid = descriptor_pb2.DescriptorProto(name="Bid", field=fields, oneof_decl=optional)
    imports = ["google/protobuf/timestamp.proto"]
    file = descriptor_pb2.FileDescriptorProto(
        name="bid.proto", package="bench", syntax="proto3", message_type=[bid], dependency=imports
    )
    known = descriptor_pb2.FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb)
    return bytes(descriptor_pb2.FileDescriptorSet(file=[known, file]).SerializeToString())


def best_us(rounds: int, count: int, run: Callable[[], object]) -> float:
    """Returns the best time of a run for each record, after one that loads code."""
    run()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times) / count * 1e6


def events_us(form: DebeziumFormat, batch: pa.RecordBatch, rounds: int) -> tuple[float, float]:
    """Returns the times of reading and of writing an event of each row."""
    keys = ("auction",)
    use = PayloadUse("benchmark", ("bids",), keys=keys)
    encoder = form.for_writing(batch.schema, use).encoder()
    of_keys = form.for_writing(
        batch.schema.empty_table().select(keys).schema, PayloadUse("benchmark", ("bids",), "key", keys)
    )
    rows = np.arange(batch.num_rows)
    changes = RowChanges(rows, rows)
    values = encoder.encode_changes(batch, changes, None, "bids").payloads
    texts = of_keys.encoder().encode(batch.select(keys), "bids").payloads
    decoder = form.for_reading(batch.schema, use).decoder()
    found = decoder.decode_records(values, texts)
    assert not found.bad
    assert found.batch.select(batch.schema.names).equals(batch)
    return (
        best_us(rounds, batch.num_rows, lambda: decoder.decode_records(values, texts)),
        best_us(rounds, batch.num_rows, lambda: encoder.encode_changes(batch, changes, None, "bids")),
    )


def main() -> None:
    """Runs all measurements and prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    batch = rows(options.rows)
    formats: dict[str, Format] = {
        "json": JsonFormat(),
        "avro": AvroFormat(SCHEMA),
        "protobuf": ProtobufFormat("bench.Bid", descriptors()),
        "csv": CsvFormat(),
    }
    results: dict[str, tuple[float, float]] = {}
    for name, form in formats.items():
        encoder = form.for_writing(batch.schema, USE).encoder()
        decoder = form.for_reading(batch.schema, USE).decoder()
        payloads = encoder.encode(batch).payloads
        assert decoder.decode(payloads).batch.equals(batch)
        results[name] = (
            best_us(options.rounds, options.rows, lambda decoder=decoder, payloads=payloads: decoder.decode(payloads)),  # type: ignore[misc]
            best_us(options.rounds, options.rows, lambda encoder=encoder: encoder.encode(batch)),  # type: ignore[misc]
        )
    parsed = fastavro.parse_schema(SCHEMA)
    payloads = formats["avro"].for_writing(batch.schema, USE).encoder().encode(batch).payloads.to_pylist()

    def loop() -> pa.RecordBatch:
        found = [fastavro.schemaless_reader(io.BytesIO(payload), parsed, None) for payload in payloads]
        return pa.RecordBatch.from_pylist(found, batch.schema)

    def write_loop() -> None:
        for row in batch.to_pylist():
            fastavro.schemaless_writer(io.BytesIO(), parsed, row)

    read_us = best_us(options.rounds, options.rows, loop)
    results["fastavro, a dictionary a row"] = read_us, best_us(options.rounds, options.rows, write_loop)
    results["debezium in json"] = events_us(DebeziumFormat(), batch, options.rounds)
    with registry_server() as registry:
        results["debezium in avro"] = events_us(DebeziumFormat(registry=registry.url), batch, options.rounds)
    base = results["json"]
    print(f"{'format':30} {'decode us':>10} {'of json':>8} {'encode us':>10} {'of json':>8}")
    for name, (decode, encode) in results.items():
        print(f"{name:30} {decode:10.2f} {decode / base[0]:8.2f} {encode:10.2f} {encode / base[1]:8.2f}")


if __name__ == "__main__":
    main()
