"""Pipelines whose rows go to a sink that commits in its tasks. They run in the scenarios of random jobs.

One of them reads a replication slot, which deletes the rows that completed checkpoints cover. They are not among the
drawn pipelines, because they need values of their own: rows are written once only if every job continues from the
newest checkpoint. The rules are in `random_jobs/topologies.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import tidegate as tg
from random_jobs.draw import FAULT_MIXES, Scenario, draw
from random_jobs.pieces import SPLITS, Data, Topology, rows_of, source_of
from random_jobs.scenarios import simulate_scenario
from random_jobs.topologies import TOPOLOGIES
from tidegate.api.streams.stream import Stream
from tidegate.testing import SimulationReport
from tidegate.testing.runtime.run import Rows, counted
from tidegate.testing.world.ledger import BUCKETS, LedgerSink
from tidegate.testing.world.replication_slot import ReplicationSlotSource

NAME = "ledger"
SLOT = "slot"
"""The pipeline from a replication slot to a ledger."""
COMMITS_IN_TASKS = {"committed_in_task", "commit_repeated", "committed_together"}
"""The effects that only jobs with such a sink show."""
_GOING_BACK = ("damage", "lost entries")
"""Faults after which a job may continue from an older checkpoint, and write later rows again."""
MIXES = tuple(name for name in FAULT_MIXES if name not in _GOING_BACK)
_VALUES: Mapping[str, Any] = {"topology": NAME, "mode": "exactly-once", "retention": "retain_on_cancellation"}


def ledger(env: tg.StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Rows to a ledger, from subtasks whose number changes between the two jobs."""
    _to_ledger(env, source_of(env, inputs[0], 0, width[0]), width)


def slot(env: tg.StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Rows of a replication slot to a ledger."""
    outside = cast(Any, env).replication_slot("slot", rows_of(inputs[0]), SPLITS)
    rows = env.from_source(ReplicationSlotSource(outside), uid="source0", name="source0", parallelism=width[0])
    _to_ledger(env, rows, width)


def _to_ledger(env: tg.StreamEnvironment, rows: Stream, width: Sequence[int]) -> None:
    ledgers = cast(Any, env)  # the environment of the simulator
    sink = LedgerSink(ledgers.ledger("ledger"))
    rows.to_sink(sink, keys="k", flush_bytes=100, uid="ledger", parallelism=min(width[2], BUCKETS))


def expect_ledger(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """The rows of the input."""
    return {"ledger": counted(list(inputs[0]))}


@contextmanager
def known() -> Iterator[None]:
    """Adds the pipelines to the ones that a scenario may name, in a `with` block."""
    added = {NAME: Topology(ledger, expect_ledger), SLOT: Topology(slot, expect_ledger)}
    with patch.dict(TOPOLOGIES, added):
        yield


def scenario_of(seed: int, **fixed: Any) -> Scenario:
    """Returns the scenario of a seed with the ledger. All other values are drawn, unless they are fixed."""
    drawn = draw(seed)
    faults = drawn.values["faults"] if drawn.values["faults"] in MIXES else MIXES[seed % len(MIXES)]
    return replace(drawn, values={**drawn.values, **_VALUES, "faults": faults, **fixed})


def slot_scenario_of(seed: int, **fixed: Any) -> Scenario:
    """Returns the scenario of a seed that reads a replication slot. Its source is not replaced by another one."""
    return scenario_of(seed, topology=SLOT, sources="at once", **fixed)


def ledger_run() -> Callable[[int], SimulationReport]:
    """Returns the function that runs a seed with the ledger. Worker processes import it from here."""
    return partial(_simulated, scenario_of)


def slot_run() -> Callable[[int], SimulationReport]:
    """Returns the function that runs a seed from a replication slot to the ledger."""
    return partial(_simulated, slot_scenario_of)


def _simulated(scenario: Callable[[int], Scenario], seed: int) -> SimulationReport:
    with known():
        return simulate_scenario(scenario(seed))
