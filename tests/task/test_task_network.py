"""Linked machines under any interleaving: cuts fit together, and a restored job gives what an undisturbed one gives."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest
from batches import ONE_ROW_BYTES
from hypothesis import given, settings
from hypothesis import strategies as st
from link import BY_X, UNALIGNED, Summing, node, timed
from network import Collecting, Network, Parts

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.graph.stream_graph import translate
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.protocol.edges import Partitioning, PartitioningKind
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import ALIGNED_BARRIER, BarrierOptions
from tidegate.storage.ids import SubtaskIndex, VertexId

ROWS = 36
LIVES = 3
SINK = TaskId(VertexId("down"), SubtaskIndex(0))
OPTIONS = (ALIGNED_BARRIER, UNALIGNED, timed(0), timed(5), timed(60))
EDGES = {kind.value: Partitioning(kind, ("x",) if kind is PartitioningKind.HASH else ()) for kind in PartitioningKind}


def job(found: list[int], sources: int, workers: int, edge: str) -> JobGraph:
    """`source` -> `work`, which sums -> `down`, which keeps all rows, and leaves them in `found` at its end."""
    source = node("source", parallelism=sources, rows=range(1, ROWS + 1))
    work = node("work", (source, EDGES[edge]), parallelism=workers, factory=Summing)
    return translate([source, work, node("down", (work, BY_X), factory=lambda: Collecting(found))])


def check_cut(graph: JobGraph, cut: Parts) -> None:
    """Invariant 3: on every channel, what the sender has put is what the receiver has taken or the cut holds."""
    for edge in graph.edges:
        for channel in graph.channels(edge):
            sender, receiver = cut[graph.sender(channel)], cut[graph.receiver(channel)]
            held = sum(
                batch.num_rows
                for part in cut.values()
                for in_flight in part.in_flight
                if in_flight.channel == channel
                for batch in in_flight.elements[in_flight.recovered :]
                if isinstance(batch, pa.RecordBatch)
            )
            assert sender.put[channel] == receiver.taken[channel] + held, channel


def end_of(network: Network, random: Random) -> None:
    """Let the job come to its end, with as many checkpoints as that needs."""
    for _ in range(8):
        network.settle()
        assert network.under_way == [], "a checkpoint neither completes nor fails"
        if network.finished:
            return
        network.trigger(random.choice(OPTIONS))
    raise AssertionError("the job does not end")


def live(
    graph: JobGraph,
    limits: BufferLimits,
    random: Random,
    found: list[int],
    cut: Parts | None,
    options: list[BarrierOptions],
) -> Network:
    """One attempt, for some time, with checkpoints and aborts."""
    network = Network(graph, limits, random, found, cut)
    for _ in range(random.randint(20, 500)):
        chance = random.random()
        if chance < 0.06:
            network.trigger(random.choice(options))
        elif chance < 0.065:
            network.abort_one()
        network.step()
    return network


@given(
    seed=st.integers(0, 2**32 - 1),
    sources=st.integers(1, 2),
    workers=st.integers(1, 2),
    edge=st.sampled_from(["hash", "rebalance", "broadcast"]),
    credit_rows=st.sampled_from([1, 2, 4, 1_000]),
    queue_rows=st.sampled_from([1, 4, 1_000]),
    turn_rows=st.sampled_from([1, 2, 1_000]),
    merged_rows=st.sampled_from([1, 3, 1_000]),
    target_ms=st.sampled_from([0, 10, 200]),
    options=st.lists(st.sampled_from(OPTIONS), min_size=1, max_size=3, unique=True),
)
@settings(max_examples=25)
def test_a_job_that_is_restored_again_and_again_loses_and_repeats_nothing(
    seed: int,
    sources: int,
    workers: int,
    edge: str,
    credit_rows: int,
    queue_rows: int,
    turn_rows: int,
    merged_rows: int,
    target_ms: int,
    options: list[BarrierOptions],
) -> None:
    """Attempts that end in the middle, each going on from the newest cut: all cuts fit, and the output is exact.

    Whatever was written for a checkpoint is acknowledged or discarded, once.
    """
    limits = BufferLimits(
        credit_bytes=credit_rows * ONE_ROW_BYTES,
        queue_bytes_max=queue_rows * ONE_ROW_BYTES,
        frame_bytes_min=1,
        turn_rows_max=turn_rows,
        merged_rows_max=merged_rows,
        debloat_target_ms=target_ms,
        window_bytes_min=1,
    )
    random = Random(seed)
    workers = 1 if edge == "broadcast" else workers
    cut: Parts | None = None
    for life in range(LIVES):
        found = [] if cut is None else list(cut[SINK].output)
        graph = job(found, sources, workers, edge)
        network = live(graph, limits, random, found, cut, options)
        if life == LIVES - 1:
            end_of(network, random)
            assert network.left_behind == []
            assert list(range(1, ROWS + 1)) == sorted(x for x in found if x > 0)
            assert -sum(range(1, ROWS + 1)) == sum(x for x in found if x <= 0)
        for completed in network.completed:
            check_cut(graph, completed)
        cut = network.completed[-1] if network.completed else cut


@pytest.mark.parametrize("what", ["with in-flight", "recovered again", "partly finished"])
def test_the_interleavings_reach_what_they_are_for(what: str) -> None:
    """Some seed has cuts with elements in flight, some stores recovered ones again, some has finished tasks."""
    limits = BufferLimits(credit_bytes=2 * ONE_ROW_BYTES, queue_bytes_max=4 * ONE_ROW_BYTES, frame_bytes_min=1)
    for seed in range(40):
        random = Random(seed)
        cut: Parts | None = None
        for _ in range(LIVES):
            found: list[int] = [] if cut is None else list(cut[SINK].output)
            network = live(job(found, 2, 2, "hash"), limits, random, found, cut, [UNALIGNED, timed(5)])
            if network.statistics[what]:
                return
            cut = network.completed[-1] if network.completed else cut
    raise AssertionError(f"no cut {what}")
