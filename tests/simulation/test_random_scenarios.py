"""Random scenarios: what is drawn, what is exercised, and that a violation is shown by a short run."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from broken import BROKEN, Break, seeds_until_caught
from drawn_pairs import Pair, all_pairs, pairs_of
from pipelines import pipeline
from random_jobs.draw import CONTRADICTIONS, Scenario, draw
from random_jobs.ledger_topologies import COMMITS_IN_TASKS
from random_jobs.scenarios import simulate_random, simulate_scenario

from tidegate.cli.seed_runs import quiet
from tidegate.testing import Faults, SimulationReport
from tidegate.testing.oracle.coverage import EFFECTS

SEEDS = (*range(20), 23, 33, 46, 50, 57, 103, 120, 178, 317, 517, 545)
"""A small set of seeds that shows every effect."""
SEEDS_FOR_ALL_PAIRS = 2_000
_INDUCED_STOP = Scenario(
    seed=5648,
    values={
        "topology": "induced", "mode": "exactly-once", "alignment": "unaligned", "max_concurrent": 1,
        "interval_ms": 250, "min_pause_ms": 100, "timeout_ms": 10000, "retained": 3, "tolerable": 3,
        "retention": "retain_on_cancellation", "buffers": "tiny", "turn_rows": 1000, "width": "one",
        "faults": "network", "ask": "savepoint", "ending": "terminate", "then": "same", "hooks": "none",
    },
    rows=51, widths=(1, 1, 1, 1), then_widths=(1, 1, 1, 1), ask_at_ms=1107, end_at_ms=345, aligned_timeout_ms=200,
)  # fmt: skip
_STOP_AFTER_PARTLY_FINISHED = Scenario(
    seed=4830,
    values={
        "topology": "ordered", "mode": "exactly-once", "alignment": "unaligned", "max_concurrent": 1,
        "interval_ms": 250, "min_pause_ms": 0, "timeout_ms": 10000, "retained": 3, "tolerable": 3,
        "retention": "retain_on_cancellation", "buffers": "tiny", "turn_rows": 1000, "width": "one",
        "faults": "tasks", "ask": "nothing", "ending": "suspend", "then": "rescaled", "hooks": "none",
        "state": "whole", "log": "long",
    },
    rows=39, widths=(1, 1, 1, 1), then_widths=(1, 2, 2, 3), ask_at_ms=462, end_at_ms=278, aligned_timeout_ms=200,
)  # fmt: skip
BROKEN_RULE = "gaps are ignored"
"""A break of which reports of violations are tested."""
SHOWN_AFTER_MANY_FAULTS = 31
"""A seed that shows this break after more than one fault. When the code changes, others are tried."""
SEEDS_ELSEWHERE = (2, 5, 11)
ELSEWHERE_HASH_SEED = "20131225"
"""Hash seed of the other process, in which sets have another order."""
_TRACES = """
import hashlib, logging, sys
from random_jobs.scenarios import simulate_random
logging.getLogger("tidegate").setLevel(logging.CRITICAL)
for seed in sys.argv[1:]:
    print(hashlib.sha256("\\n".join(simulate_random(int(seed)).trace).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def reports() -> list[SimulationReport]:
    """One report for each of the seeds."""
    with quiet():
        return [simulate_random(seed) for seed in SEEDS]


def test_no_random_scenario_violates_an_invariant(reports: list[SimulationReport]) -> None:
    """Whatever is drawn: two jobs, one after the other, write just the rows that plain Python computes."""
    violated = [f"{report}\n{report.sequence()}" for report in reports if not report.ok]
    assert not violated, violated[0]


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(19_136, id="a coordinator that was cut off completes a checkpoint after the end of the job"),
        pytest.param(449, id="a source induces a checkpoint of which a coordinator died before it could tell"),
        pytest.param(40_057, id="a region fails twice while a stop is under way"),
        pytest.param(342, id="the answer to a stop that has cut the data short is lost with its coordinator"),
        pytest.param(2_001_129, id="a task hears of a complete checkpoint after it has heard of the next one"),
        pytest.param(3_002_476, id="a coordinator that was replaced deploys what its successor knows to be due"),
        pytest.param(9_610_376, id="a task that has not heard so takes part in a checkpoint lost with its coordinator"),
        pytest.param(
            9_715_030, id="the last frame of a channel is lost, and savepoints expire before a checkpoint does"
        ),
        pytest.param(
            9_721_415, id="rows and the watermarks behind them stand before a barrier, for longer than it may take"
        ),
        pytest.param(
            9_831_303, id="rows of sessions come with an increment, and go after its restore, when slots were ordered"
        ),
        pytest.param(9_130, id="all rows stand before a barrier, for longer than a checkpoint may take"),
        pytest.param(5_059, id="a finished subtask of a source is restored, and its splits are in no later checkpoint"),
        pytest.param(392, id="storage decides about a savepoint when its job begins to end"),
        pytest.param(5_603, id="a job is cancelled in an outage, and a copied savepoint fails when that is over"),
        pytest.param(4_225, id="the same of another savepoint"),
        pytest.param(5_081, id="a finished subtask of a source is restarted alone, and its splits are read again"),
        pytest.param(666, id="a copy that a lost coordinator has completed is deleted by the one that is to stop"),
        pytest.param(1_518, id="the same of a job that was not restarted"),
    ],
)
def test_seeds_that_once_violated_an_invariant(seed: int) -> None:
    """Each seed once showed a violation, and no longer does."""
    report = simulate_random(seed, shrink=False)
    assert report.ok, report


@pytest.mark.parametrize(
    ("seed", "chosen"),
    [
        pytest.param(
            70_138,
            {"faults": "coordinator", "state": "changelog", "interval_ms": 60},
            id="checkpoints are given up by a coordinator that dies before it could tell",
        ),
    ],
)
def test_seeds_that_once_violated_an_invariant_with_some_values_chosen(seed: int, chosen: dict[str, str | int]) -> None:
    """Each seed once showed a violation with these values, and no longer does."""
    report = Break(5, fixed=chosen).simulate(seed)
    assert report.ok, report


def test_a_violation_can_be_sent_to_another_process() -> None:
    """With its whole history: a run of many seeds has several processes."""
    broken = BROKEN[BROKEN_RULE]
    seeds = seeds_until_caught(BROKEN_RULE, range(100))
    report = next(report for seed in seeds if not (report := broken.simulate(seed)).ok)
    sent = pickle.loads(pickle.dumps(report.portable()))
    assert sent.trace == report.trace
    assert sent.sequence() == report.sequence()


def test_a_stop_right_after_a_source_was_restored_partly_finished_knows_all_splits() -> None:
    """No task has finished again when the savepoint is taken, and the next job is not refused."""
    report = simulate_scenario(_STOP_AFTER_PARTLY_FINISHED, shrink=False)
    assert report.ok, report


def test_an_induced_source_is_drained_before_the_savepoint() -> None:
    """A stop with a drain: what the aggregate wrote stays, and the source is not read on after a restore."""
    report = simulate_scenario(_INDUCED_STOP, shrink=False)
    assert report.ok, report


def test_the_seeds_exercise_every_effect(reports: list[SimulationReport]) -> None:
    """Each effect that is counted is seen to happen, in a few dozen seeds already.

    Sinks that commit in their tasks have scenarios and a test of their own (`test_committing_sinks_under_faults.py`).
    """
    counts: Counter[str] = Counter()
    for report in reports:
        counts.update(report.coverage)
    assert not [effect for effect in EFFECTS.keys() - COMMITS_IN_TASKS if not counts[effect]]


def test_the_page_explains_every_effect() -> None:
    """Each name that `tidegate simulate` prints is on the page, with the same words."""
    page = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page.partition("| effect |")[2], re.MULTILINE))
    assert rows == EFFECTS


@cache
def drawn_pairs() -> frozenset[Pair]:
    """The pairs of values that some hundred seeds draw together."""
    return pairs_of(draw(seed) for seed in range(SEEDS_FOR_ALL_PAIRS))


def test_the_draw_covers_every_pair() -> None:
    """Any two values of different dimensions that may go together are drawn together within some hundred seeds."""
    assert not sorted(map(str, all_pairs() - drawn_pairs()))


def test_what_contradicts_is_never_drawn() -> None:
    """A scenario is one that a submission accepts."""
    assert not drawn_pairs() & set(CONTRADICTIONS)


def test_a_seed_is_a_scenario(reports: list[SimulationReport]) -> None:
    """A seed gives the same run each time, and another seed gives another run."""
    assert simulate_random(3).trace == reports[SEEDS.index(3)].trace
    assert str(draw(3)) != str(draw(4))


def test_a_seed_is_a_scenario_in_every_process(reports: list[SimulationReport]) -> None:
    """A seed replays elsewhere: nothing in a run follows the order of a set, or anything else that a process draws."""
    elsewhere = subprocess.run(
        [sys.executable, "-c", _TRACES, *map(str, SEEDS_ELSEWHERE)],
        env={**os.environ, "PYTHONHASHSEED": ELSEWHERE_HASH_SEED, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    here = [hashlib.sha256("\n".join(reports[seed].trace).encode()).hexdigest() for seed in SEEDS_ELSEWHERE]
    assert elsewhere.stdout.split() == here
    assert len(SEEDS_ELSEWHERE) == len(set(here))


def test_every_lost_message_is_in_the_trace() -> None:
    """The trace has every message that a drop lost: frames, grants of credit, acknowledgements and messages of the
    coordinator.
    """
    lost = 0
    for seed in range(3):
        report = pipeline("keyed").run(seed, Faults(drop=0.02, duration="2s"))
        told = [line for line in report.trace if re.search(r" is lost( \(from event \d+\))?$", line)]
        assert report.faults_happened == len(told)
        lost += sum("grant of" in line for line in told)
    assert lost > 0


def test_a_violation_is_shown_by_a_shorter_run() -> None:
    """The report needs no more faults than the first violating run, still violates, and describes how."""
    broken = BROKEN[BROKEN_RULE]
    seed, first = next(
        (seed, report)
        for seed in (SHOWN_AFTER_MANY_FAULTS, *range(100))
        if not (report := broken.simulate(seed)).ok and report.faults_happened > 1
    )
    shortest = broken.simulate(seed, shrink=True)
    assert not shortest.ok
    assert shortest.faults_happened < first.faults_happened
    assert shortest.runs > 1
    assert broken.simulate(seed, shrink=True).trace == shortest.trace


def test_the_drawing_has_a_lane_for_everyone_and_is_bounded(reports: list[SimulationReport]) -> None:
    """Coordinator and tasks have lanes, messages have arrows, and no more lines are drawn than were asked for."""
    drawing = reports[0].sequence(lines_max=20).splitlines()
    assert "coordina~" in drawing[0]
    assert any("o---" in line and ">" in line for line in drawing)
    assert len(drawing) <= 20 + 3
