"""Hypothesis strategies for what the storage room stores: Arrow data, wire values, state tables."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Collection, Iterator
from decimal import Decimal
from functools import cache
from itertools import accumulate
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
from hypothesis import reject
from hypothesis import strategies as st

from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.codec import wire_types
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.snapshot import StateChunk, StateTable

_int64 = st.integers(-(2**63), 2**63 - 1)
_text = st.text(max_size=8)

_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: _int64,
    str: _text,
    bytes: st.binary(max_size=4),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
    None: st.none(),
    Any: st.none() | _int64 | _text | st.tuples(_text, _int64),
    object: st.none() | _int64 | _text,
    pa.RecordBatch: st.just(pa.record_batch({"x": [1, None], "s": ["a", "b"]}).slice(1)),
    pa.Schema: st.just(pa.schema([("x", pa.int64())])),
}

# A type and the Python values that it can hold.
_COLUMNS: tuple[tuple[pa.DataType, st.SearchStrategy[object]], ...] = (
    (pa.int64(), _int64),
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), _text),
    (pa.large_string(), _text),
    (pa.binary(), st.binary(max_size=8)),
    (pa.timestamp("us", "UTC"), _int64),
    (pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.decimal128(20, 3), st.integers(-(10**15), 10**15).map(lambda n: Decimal(n).scaleb(-3))),
    (pa.list_(pa.int32()), st.lists(st.integers(-5, 5), max_size=3)),
    (pa.struct([("a", pa.int64()), ("b", pa.string())]), st.fixed_dictionaries({"a": _int64, "b": _text})),
    (pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["x", "y", "z"])),
)


@st.composite
def record_batches(draw: st.DrawFn, rows: int | None = None, columns_min: int = 0) -> pa.RecordBatch:
    """Batches of random schemas with nulls; often a slice of a larger one, as batches on a channel are."""
    count = draw(st.integers(0, 12)) if rows is None else rows
    before, after = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    columns = draw(st.lists(st.sampled_from(_COLUMNS), min_size=columns_min, max_size=4))
    total = before + count + after
    arrays = [
        pa.array(draw(st.lists(st.none() | values, min_size=total, max_size=total)), type_) for type_, values in columns
    ]
    schema = pa.schema([(f"c{i}", type_) for i, (type_, _) in enumerate(columns)])
    return pa.record_batch(arrays, schema=schema).slice(before, count if columns else 0)


@dataclasses.dataclass(frozen=True)
class FrozenChunks:
    """A `FrozenState` of given chunks."""

    state: str
    kind: StateKind
    given: tuple[StateChunk, ...]
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        """As they were given."""
        return iter(self.given)


MAX_PARALLELISM = 8


@st.composite
def _keyed_chunks(draw: st.DrawFn) -> StateChunk:
    first = draw(st.integers(0, MAX_PARALLELISM - 1))
    sizes = draw(st.lists(st.sampled_from([0, 0, 1, 3]), min_size=1, max_size=MAX_PARALLELISM - first))
    sums = tuple(accumulate(sizes, initial=0))
    return StateChunk(draw(record_batches(rows=sums[-1], columns_min=1)), first, sums)


@st.composite
def frozen_states(draw: st.DrawFn, kinds: Collection[StateKind] = tuple(StateKind)) -> FrozenChunks:
    """States of a few chunks, each of a schema of its own; keyed ones with random, often empty key groups."""
    kind = draw(st.sampled_from(tuple(kinds)))
    chunks = _keyed_chunks() if kind is StateKind.KEYED else record_batches(columns_min=1).map(StateChunk)
    name, removed = draw(st.text(min_size=1, max_size=5)), draw(st.booleans())
    return FrozenChunks(name, kind, tuple(draw(st.lists(chunks, max_size=3))), removed)


def operator_states(max_size: int = 4) -> st.SearchStrategy[list[tuple[OperatorUid, FrozenChunks]]]:
    """States of a few operators, several of one operator among them, some of them without rows."""
    uids = st.sampled_from(["counts", "Größe/ü", ""]).map(OperatorUid)
    return st.lists(st.tuples(uids, frozen_states()), min_size=1, max_size=max_size)


def plain_values() -> st.SearchStrategy[object]:
    """Values that msgpack knows, nested; sequences are tuples, as they decode."""
    atoms = st.none() | st.booleans() | _int64 | st.floats(allow_nan=False) | _text | st.binary(max_size=8)
    keys = _text | st.integers(-9, 9) | st.tuples(st.integers(-9, 9), _text)
    return st.recursive(
        atoms,
        lambda inner: (
            st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=3)
            | st.frozensets(st.integers(), max_size=0)
            | st.frozensets(st.integers(-99, 99), max_size=3)
        ),
        max_leaves=8,
    )


@cache
def instances(hint: Any, inside: tuple[type, ...] = ()) -> st.SearchStrategy[Any]:
    """Instances of a wire type, or values of the type of one of its fields; small, so that nesting stays quick.

    `inside`: the types around it. One that has parts of its own type has them one deep, and these have none.
    """
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if hasattr(hint, "__supertype__"):
        return instances(hint.__supertype__, inside)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([instances(argument, inside) for argument in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        if inside.count(arguments[0]) > 1:
            return st.just(())
        return st.lists(instances(arguments[0], inside), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(instances(argument, inside) for argument in arguments))
    if origin is dict:
        return st.dictionaries(*(instances(argument, inside) for argument in arguments), max_size=2)
    if origin is frozenset:
        return st.frozensets(instances(arguments[0], inside), max_size=2)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        within = (*inside, hint)
        fields = {f.name: instances(hints[f.name], within) for f in dataclasses.fields(hint)}
        return st.builds(_made, st.just(hint), **fields)
    # `dataclass(slots=True)` makes a second class; only the one that is registered counts.
    registered = wire_types().values()
    subclasses = [cls for cls in hint.__subclasses__() if cls in registered] if isinstance(hint, type) else []
    assert subclasses, f"no strategy for {hint!r}: teach `instances` about it"
    return st.one_of([instances(subclass, inside) for subclass in subclasses])


def _made(cls: type, **fields: Any) -> Any:
    """An instance, or another try where a type refuses fields that contradict each other."""
    try:
        return cls(**fields)
    except (ConfigurationError, AssertionError):
        reject()


def same_tables(left: StateTable, right: StateTable) -> bool:
    """Whether two tables are equal, schemas included."""
    return (
        (left.state, left.kind, left.removed) == (right.state, right.kind, right.removed)
        and left.rows.schema.equals(right.rows.schema)
        and left.rows.equals(right.rows)
    )
