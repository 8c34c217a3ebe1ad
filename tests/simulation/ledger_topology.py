"""A pipeline whose rows go to a sink that commits in its tasks. It runs in the scenarios of random jobs.

It is not among the drawn pipelines, because it needs values of its own: rows are written once only if every job
continues from the newest checkpoint. The rules are in `random_jobs/topologies.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

from random_jobs.draw import FAULT_MIXES, Scenario, draw
from random_jobs.pieces import Data, Topology, source_of
from random_jobs.topologies import TOPOLOGIES

import tidegate as tg
from tidegate.testing.runtime.run import Rows, counted
from tidegate.testing.world.ledger import BUCKETS, LedgerSink

NAME = "ledger"
COMMITS_IN_TASKS = {"committed_in_task", "commit_repeated"}
"""The effects that only jobs with such a sink show."""
_GOING_BACK = ("damage", "lost entries")
"""Faults after which a job may continue from an older checkpoint, and write later rows again."""
MIXES = tuple(name for name in FAULT_MIXES if name not in _GOING_BACK)
_VALUES: Mapping[str, Any] = {"topology": NAME, "mode": "exactly-once", "retention": "retain_on_cancellation"}


def ledger(env: tg.StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Rows to a ledger, from subtasks whose number changes between the two jobs."""
    rows = source_of(env, inputs[0], 0, width[0])
    ledgers = cast(Any, env)  # the environment of the simulator
    sink = LedgerSink(ledgers.ledger("ledger"))
    rows.to_sink(sink, keys="k", flush_bytes=100, uid="ledger", parallelism=min(width[2], BUCKETS))


def expect_ledger(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """The rows of the input."""
    return {"ledger": counted(list(inputs[0]))}


@contextmanager
def known() -> Iterator[None]:
    """Adds the pipeline to the ones that a scenario may name, in a `with` block."""
    with patch.dict(TOPOLOGIES, {NAME: Topology(ledger, expect_ledger)}):  # type: ignore[arg-type]
        yield


def scenario_of(seed: int, **fixed: Any) -> Scenario:
    """Returns the scenario of a seed with this pipeline. All other values are drawn, unless they are fixed."""
    drawn = draw(seed)
    faults = drawn.values["faults"] if drawn.values["faults"] in MIXES else MIXES[seed % len(MIXES)]
    return replace(drawn, values={**drawn.values, **_VALUES, "faults": faults, **fixed})
