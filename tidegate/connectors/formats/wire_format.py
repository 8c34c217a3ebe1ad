"""Confluent's wire format: a payload is the byte 0, the id of its schema in four bytes, and the data.

Rules:

- `WireDecoder` decodes each payload with the schema of its id. Payloads with the same schema are decoded together.
- A payload out of the wire format is bad, and so is one with an id that the registry does not have, or with a schema
  that cannot be read as the schema of the program.
- Up to CACHED_MAX compiled schemas are cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.formats.format import DecodedRecords, PayloadDecoder
from tidegate.connectors.formats.payload_block import Block
from tidegate.connectors.formats.registry import (
    CACHED_MAX,
    RegisteredSchema,
    RegistryClient,
    SchemaType,
    UnfitSchemaError,
    UnknownSchemaError,
)
from tidegate.state.kernels.distinct_integers import distinct_integers

HEADER_BYTES = 5


BlockReader: TypeAlias = Callable[[Block], DecodedRecords]
"""A function that decodes payloads of one schema, given without their wire format header."""


class WireDecoder(PayloadDecoder):
    """Decodes payloads in the wire format. `reader_of` returns the reader for a schema, or raises UnfitSchemaError."""

    def __init__(
        self,
        columns: pa.Schema,
        kind: SchemaType,
        client: RegistryClient,
        reader_of: Callable[[RegisteredSchema], BlockReader],
    ) -> None:
        self._columns = columns
        self._kind = kind
        self._client = client
        self._reader_of = reader_of
        self._readers: OrderedDict[int, BlockReader | str] = OrderedDict()

    def decode(self, payloads: pa.Array) -> DecodedRecords:
        """Decodes payloads to rows. Raises RegistryError if the registry does not answer."""
        block = Block.of(payloads)
        bad: dict[int, str] = {}
        ids = schema_ids(block, bad)
        parts: list[pa.RecordBatch] = []
        places: list[NDArray[np.int64]] = []
        for schema_id in distinct_integers(ids[ids >= 0]).tolist():
            numbers = np.flatnonzero(ids == schema_id)
            read = self._reader(schema_id)
            if isinstance(read, str):
                bad |= dict.fromkeys(numbers.tolist(), read)
                continue
            found = read(Block(block.data, block.starts[numbers] + HEADER_BYTES, block.ends[numbers]))
            bad |= {int(numbers[number]): reason for number, reason in found.bad.items()}
            parts.append(found.batch)
            places.append(np.delete(numbers, list(found.bad)))
        if len(parts) == 1:
            return DecodedRecords(parts[0], bad)
        table = pa.Table.from_batches(parts, self._columns).combine_chunks()
        if not table.num_rows:
            return DecodedRecords(empty_rows(self._columns), bad)
        order = np.argsort(np.concatenate(places), kind="stable")
        return DecodedRecords(table.to_batches()[0].take(pa.array(order)), bad)

    def _reader(self, schema_id: int) -> BlockReader | str:
        """Returns the reader for the schema with an id, or a text why payloads with this id are bad."""
        known = self._readers.get(schema_id)
        if known is not None:
            self._readers.move_to_end(schema_id)
            return known
        try:
            registered = self._client.by_id(schema_id)
        except UnknownSchemaError:
            return f"the schema registry has no schema with the id {schema_id}"
        found: BlockReader | str
        try:
            if registered.kind != self._kind:
                raise UnfitSchemaError(
                    f"it is of type {registered.kind}, not {self._kind}; give the format of this type"
                )
            found = self._reader_of(registered)
        except UnfitSchemaError as error:
            found = f"the schema with the id {schema_id} cannot be read as the schema of the program: {error}"
        self._readers[schema_id] = found
        while len(self._readers) > CACHED_MAX:
            self._readers.popitem(last=False)
        return found


def schema_ids(block: Block, bad: dict[int, str]) -> NDArray[np.int64]:
    """Returns the schema id of each payload; -1 for a payload that is not in the wire format, whose reason is added
    to `bad`.
    """
    ids = np.full(len(block.starts), -1, dtype=np.int64)
    long = block.ends - block.starts >= HEADER_BYTES
    starts = block.starts[long]
    magic = block.data[starts] == 0
    found = np.zeros(len(starts), dtype=np.int64)
    for number in range(1, HEADER_BYTES):
        found = found << 8 | block.data[starts + number]
    ids[np.flatnonzero(long)[magic]] = found[magic]
    for number in np.flatnonzero(ids < 0).tolist():
        size = int(block.ends[number] - block.starts[number])
        bad[number] = (
            f"it has {size} bytes, too few for the wire format of a schema registry"
            if size < HEADER_BYTES
            else f"it begins with the byte 0x{int(block.data[block.starts[number]]):02x} and not with 0, so it is not "
            "in the wire format of a schema registry"
        )
    return ids


def header_of(schema_id: int) -> bytes:
    """Returns the wire format header of payloads with this schema id."""
    return b"\0" + schema_id.to_bytes(4, "big")


def with_header(header: bytes, payloads: pa.Array) -> pa.Array:
    """Prepends a header to each payload. A null stays null."""
    return pc.binary_join_element_wise(pa.scalar(header, pa.binary()), payloads, pa.scalar(b"", pa.binary()))


def empty_rows(columns: pa.Schema) -> pa.RecordBatch:
    """Returns a batch with these columns and no rows."""
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in columns], schema=columns)
