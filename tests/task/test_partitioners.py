"""Partitioners: every row goes where it must, once, in order, in batches that own their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reference import hash_columns_reference, owner_reference

from tidegate.actors.task import emitter
from tidegate.actors.task.emitter import (
    BroadcastPartitioner,
    ForwardPartitioner,
    HashPartitioner,
    Partitioner,
    RebalancePartitioner,
    make_partitioner,
)
from tidegate.protocol.edges import Partitioning, PartitioningKind
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import ConfigurationError


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """A batch with keys of two types, a row number and a nested column, perhaps sliced."""
    rows = draw(st.integers(0, 30))
    texts = draw(st.lists(st.none() | st.sampled_from(["a", "b", "ccc"]), min_size=rows, max_size=rows))
    ints = draw(st.lists(st.none() | st.integers(0, 5), min_size=rows, max_size=rows))
    batch = pa.record_batch(
        {
            "s": pa.array(texts, pa.string()),
            "i": pa.array(ints, pa.int32()),
            "row": pa.array(range(rows), pa.int64()),
            "list": pa.array([[n] * (n % 3) for n in range(rows)], pa.list_(pa.int64())),
        }
    )
    return batch.slice(draw(st.integers(0, rows)))


@settings(max_examples=80)
@given(batches(), st.sampled_from([("s",), ("i",), ("s", "i")]), st.integers(1, 5), st.sampled_from([5, 128]))
def test_hash_sends_each_row_to_the_owner_of_its_key(
    batch: pa.RecordBatch, keys: tuple[str, ...], parallelism: int, max_parallelism: int
) -> None:
    """Rows arrive at the subtask that owns their key group, in order, none twice and none lost."""
    parts = HashPartitioner(keys, max_parallelism, parallelism).split(batch)
    owners = [owner_reference(int(h), max_parallelism, parallelism) for h in hash_columns_reference(batch, keys)]
    expected: dict[int, list[Any]] = {}
    for owner, row in zip(owners, batch.to_pylist(), strict=True):
        expected.setdefault(owner, []).append(row)
    assert {target: part.to_pylist() for target, part in parts} == expected
    assert len({target for target, _ in parts}) == len(parts)
    for _, part in parts:
        part.validate(full=True)
        assert part.schema.equals(batch.schema)


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize(("key", "problem"), [("x", "'x' is not in the batch"), ("list", "cannot be a key")])
def test_a_column_that_cannot_be_a_key_is_refused(parallelism: int, rows: int, key: str, problem: str) -> None:
    """At every parallelism, with the batch that brings it, even an empty one, and with each that follows."""
    batch = pa.record_batch({"k": [1] * rows, "list": pa.array([[1]] * rows, pa.list_(pa.int64()))})
    partitioner = HashPartitioner(("k", key), 128, parallelism)
    partitioner.split(pa.record_batch({"k": [1], "list": [1], "x": [1]}))
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=problem):
            partitioner.split(batch)


def test_one_subtask_gets_every_row_without_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """It owns all keys."""
    hashed: list[int] = []
    monkeypatch.setattr(
        emitter, "hash_columns", lambda batch, columns: (hashed.append(1), hash_columns(batch, columns))[1]
    )
    batch = pa.record_batch({"k": pa.array(["a", "b", None, "a"]).dictionary_encode()})
    assert HashPartitioner(("k",), 128, 1).split(batch) == [(0, batch)]
    assert hashed == []
    HashPartitioner(("k",), 128, 2).split(batch)
    assert hashed == [1]


def test_rebalance_takes_turns() -> None:
    """Whole batches go round, from the start that was asked for; empty ones take no turn."""
    partitioner = RebalancePartitioner(3, start=2)
    one = pa.record_batch({"k": [1]})
    sent = [partitioner.split(batch) for batch in (one, one.slice(1), one, one, one)]
    assert [[target for target, _ in split] for split in sent] == [[2], [], [0], [1], [2]]


def test_broadcast_and_forward() -> None:
    """Broadcast reaches every subtask, forward the one of the same index."""
    batch = pa.record_batch({"k": [1, 2]})
    assert BroadcastPartitioner(3).split(batch) == [(0, batch), (1, batch), (2, batch)]
    assert ForwardPartitioner(4).split(batch) == [(4, batch)]


@pytest.mark.parametrize("kind", list(PartitioningKind))
def test_slices_are_compacted(kind: PartitioningKind) -> None:
    """A small slice of a large batch leaves its parent behind, whoever splits it; nothing comes of an empty one."""
    parent = pa.record_batch({"k": np.zeros(100_000, dtype=np.int64), "s": pa.array(["text"] * 100_000)})
    spec = Partitioning(kind, ("k",) if kind is PartitioningKind.HASH else ())
    partitioner = make_partitioner(spec, 1, 2, 128)
    parts = partitioner.split(parent.slice(50_000, 100))
    assert parts
    for _, part in parts:
        assert part.get_total_buffer_size() < 20_000
        assert part.equals(parent.slice(50_000, 100))
    assert partitioner.split(parent.slice(0, 0)) == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (Partitioning(PartitioningKind.FORWARD), ForwardPartitioner),
        (Partitioning(PartitioningKind.HASH, ("k",)), HashPartitioner),
        (Partitioning(PartitioningKind.REBALANCE), RebalancePartitioner),
        (Partitioning(PartitioningKind.BROADCAST), BroadcastPartitioner),
    ],
)
def test_specs_travel_and_become_partitioners(spec: Partitioning, expected: type[Partitioner]) -> None:
    """A spec survives the codec and makes the partitioner of its kind."""
    assert decode(encode(spec)) == spec
    assert isinstance(make_partitioner(spec, 0, 2, 128), expected)


def test_rebalancing_starts_apart() -> None:
    """Upstream subtasks do not all begin with the same downstream one."""
    spec = Partitioning(PartitioningKind.REBALANCE)
    batch = pa.record_batch({"k": [1]})
    starts = [make_partitioner(spec, subtask, 3, 128).split(batch)[0][0] for subtask in range(4)]
    assert starts == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (PartitioningKind.HASH, ()),
        (PartitioningKind.FORWARD, ("k",)),
        (PartitioningKind.HASH, ("k", "k")),
    ],
)
def test_contradictions_are_refused(kind: PartitioningKind, keys: tuple[str, ...]) -> None:
    """Hash needs keys, each once; the other kinds take none."""
    with pytest.raises(ConfigurationError):
        Partitioning(kind, keys)
