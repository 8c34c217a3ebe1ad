"""The codec gives back what it was given, and never something else for bytes that it does not know."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import pkgutil
from typing import Any

import msgpack
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_strategies import instances, plain_values, record_batches

import tidegate.actors
import tidegate.recovery
import tidegate.storage
from tidegate.storage.checkpoints.metadata import SectionRef, StateHandle, StateKind
from tidegate.storage.codec import decode, encode, wire, wire_types
from tidegate.storage.errors import CodecError


def _all_wire_types() -> list[type]:
    """Every type that any module of the house registers, found by importing them."""
    for package in (tidegate.storage, tidegate.recovery, tidegate.actors):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    ours = [cls for cls in wire_types().values() if cls.__module__.startswith("tidegate.")]
    return sorted(ours, key=lambda cls: cls.__name__)


@given(value=plain_values())
@settings(max_examples=60)
def test_plain_values_come_back(value: object) -> None:
    """Any nesting of msgpack's types, tuples and frozensets decodes to an equal value."""
    assert decode(encode(value)) == value


@pytest.mark.parametrize("cls", _all_wire_types(), ids=lambda cls: cls.__name__)
@given(data=st.data())
@settings(max_examples=5)
def test_every_wire_type_comes_back(cls: type, data: st.DataObject) -> None:
    """Each registered type decodes to an equal instance of itself, alone and nested."""
    value = data.draw(instances(cls))

    for found in (decode(encode(value)), decode(encode({"nested": (value,)}))["nested"][0]):
        assert type(found) is cls
        assert found == value


@given(batch=record_batches())
@settings(max_examples=60)
def test_batches_come_back(batch: pa.RecordBatch) -> None:
    """A batch of any schema, also one that is a slice, decodes to equal rows and schema."""
    found = decode(encode(batch))

    assert found.schema.equals(batch.schema)
    assert found.equals(batch)


def test_a_slice_leaves_its_parent_behind() -> None:
    """Encoding a slice costs the bytes of its rows, not of the batch that it was cut from."""
    parent = pa.record_batch({"x": pa.array(range(100_000), pa.int64())})

    assert len(encode(parent.slice(50_000, 10))) < 1_000


def test_schemas_come_back() -> None:
    """A schema decodes with its metadata."""
    schema = pa.schema([pa.field("x", pa.int64(), nullable=False)], metadata={"k": "v"})

    assert decode(encode(schema)).equals(schema, check_metadata=True)


def test_defaults_fill_fields_that_old_bytes_lack() -> None:
    """A field with a default that was added later does not make old bytes unreadable."""
    section = SectionRef("u", "s", StateKind.LIST, 0, 0, 0)
    name_and_fields = {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}
    del name_and_fields["removed"]

    old = msgpack.packb(msgpack.ExtType(1, encode(["SectionRef", name_and_fields])))

    assert decode(old) == section


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (msgpack.packb(msgpack.ExtType(1, encode(["FromTheFuture", {}]))), "FromTheFuture"),
        (msgpack.packb(msgpack.ExtType(1, encode(["DataFile", {"colour": 1}]))), "colour"),
        (msgpack.packb(msgpack.ExtType(1, encode(["DataFile", {}]))), "required"),
        (msgpack.packb(msgpack.ExtType(4, encode(["StateKind", "odd"]))), "odd"),
        (msgpack.packb(msgpack.ExtType(99, b"")), "99"),
        (msgpack.packb(msgpack.ExtType(2, b"")), "cannot decode"),
        (msgpack.packb(msgpack.ExtType(2, pa.schema([]).serialize().to_pybytes())), "cannot decode"),
        (msgpack.packb(msgpack.ExtType(5, b"\0" * 8)), "cannot decode"),
        (b"", "cannot decode 0 bytes"),
    ],
)
def test_unknown_bytes_are_an_error_that_names_them(data: bytes, named: str) -> None:
    """What a newer version wrote, or what is torn, is a CodecError, never silence or something else."""
    with pytest.raises(CodecError, match=named):
        decode(data)


@given(data=st.data())
@settings(max_examples=60)
def test_damaged_bytes_raise_nothing_but_codec_errors(data: st.DataObject) -> None:
    """Cutting or changing bytes gives a CodecError or some value, no error that callers do not expect."""
    handle = StateHandle("p", None, 3, "c", (SectionRef("u", "s", StateKind.KEYED, 0, 3, 1),))
    batch = pa.record_batch({"x": [1, None], "s": ["a", "b"]})
    encoded = bytearray(encode((handle, batch, frozenset((1, 2)))))
    position = data.draw(st.integers(0, len(encoded) - 1))
    if data.draw(st.booleans()):
        del encoded[position:]
    else:
        encoded[position] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(encoded))
    except CodecError:
        return


class _Unregistered(enum.Enum):
    X = 1


@pytest.mark.parametrize("value", [object(), _Unregistered.X, {1, 2}, 2**64, [1, object()], frozenset((1, "a"))])
def test_refuses_what_is_no_wire_value(value: Any) -> None:
    """A value that could not come back is refused when it is encoded."""
    with pytest.raises(CodecError, match="cannot encode"):
        encode(value)


def test_a_refused_value_leaves_nothing_behind() -> None:
    """What was written of a value before it was refused is not part of the next one, however deep it lay."""
    handle = StateHandle("p", None, 3, "c", (SectionRef("u", "s", StateKind.KEYED, 0, 3, 1),))
    encoded = encode((1, handle))
    with pytest.raises(CodecError, match="cannot encode"):
        encode((1, handle, StateHandle("q", None, 3, "c", (object(),))))
    assert encoded == encode((1, handle))
    assert (1, handle) == decode(encoded)


def test_refuses_two_types_of_one_name() -> None:
    """A second class of a registered name would make bytes ambiguous."""
    with pytest.raises(CodecError, match="two wire types are called 'DataFile'"):
        wire(dataclasses.make_dataclass("DataFile", ["x"], frozen=True))
