"""The protocol under seeded faults, and the proof that the oracle would see it break."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from broken import BROKEN, FAST, seeds_until_caught
from pipelines import HARSH, PIPELINES, ROWS, harsh_run, pipeline

import tidegate as tg
from tidegate.testing import Faults, SimulatedPipeline, simulate
from tidegate.testing.runtime import run

SEEDS_A_PIPELINE = 6
SEEDS_UNTIL_CAUGHT = range(4, 29)
STEPS_OF_A_BREAK_MAX = 6_000
"""Eight rows take fewer steps. A break that makes a job hang would take as many steps as a simulation allows."""


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("seed", range(SEEDS_A_PIPELINE))
def test_no_seed_violates_an_invariant(name: str, seed: int) -> None:
    """Crashes, delays, duplicates, losses and failing storage change neither the rows nor the protocol."""
    report = harsh_run(name, seed)
    assert report.ok, f"{report}\n" + "\n".join(report.trace[-60:])


def test_faults_happen() -> None:
    """These runs do contain crashes, restarts and checkpoints."""
    reports = [harsh_run("keyed", seed) for seed in range(3)]
    assert sum(report.crashes for report in reports) > 0
    assert sum(report.coordinator_crashes for report in reports) > 0
    assert all(report.checkpoints >= 2 for report in reports)
    assert all(report.restarts > 0 for report in reports)


def test_one_seed_gives_one_run() -> None:
    """A seed replays: the same events at the same virtual times."""
    first, second = (pipeline("keyed").run(41, HARSH) for _ in range(2))
    assert first.trace == second.trace
    assert first.trace != harsh_run("keyed", 0).trace


@pytest.mark.parametrize("rule", FAST)
def test_the_oracle_sees_a_broken_rule(rule: str) -> None:
    """Each rule of the protocol, broken on purpose, shows as a violation within a few seeds."""
    seeds = seeds_until_caught(rule, SEEDS_UNTIL_CAUGHT)
    for seed in seeds:
        report = BROKEN[rule].simulate(seed)
        if not report.ok:
            assert report.violation is not None
            assert f"seed {seed}: VIOLATED" in str(report)
            return
    pytest.fail(f"none of {len(seeds)} seeds shows the break: {rule}")


@pytest.mark.parametrize("rule", sorted(BROKEN.keys() - set(FAST)))
def test_a_break_fits_the_code(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each patched function is still called as it was. An error of the break itself would prove nothing."""
    monkeypatch.setattr(run, "STEPS_MAX", STEPS_OF_A_BREAK_MAX)
    broken = replace(BROKEN[rule], fixed={**BROKEN[rule].fixed, "rows": 8})
    try:
        broken.simulate(0)
    except (TypeError, AttributeError, NameError, ImportError) as misfit:
        raise AssertionError(f"{rule} does not fit the code any more") from misfit
    except Exception:  # noqa: BLE001 (breaks raise what they like)
        return  # A machine has noticed, before the oracle could.


def test_every_invariant_has_a_break() -> None:
    """The breaks, of which the benchmark `mutations.py` tries all, go through every invariant, and are many."""
    assert set(range(1, 11)) == {broken.invariant for broken in BROKEN.values()}
    assert len(BROKEN) >= 60
    assert set(FAST) <= set(BROKEN)


def firsts(env: tg.StreamEnvironment) -> None:
    """Keeps the first of two sources' rows of each key, and counts behind it: which one comes first is chance."""
    schema = pa.schema([("k", pa.int64()), ("from", pa.string())])
    left, right = (pa.table({"k": range(12), "from": [name] * 12}, schema=schema) for name in ("left", "right"))
    both = env.from_batches(left).union(env.from_batches(right))
    first = both.key_by("k").deduplicate(uid="race")
    first.key_by("from").aggregate(n=tg.count(), emit="final", uid="counts").to_table("sim://out")


def test_output_that_depends_on_the_order_of_rows_is_no_violation() -> None:
    """The output differs without any fault. The report names the rows and the step that makes them."""
    race = SimulatedPipeline(firsts)
    found = next(report for seed in range(6) if not (report := race.run(seed, HARSH)).ok)
    assert found.violation is None
    assert found.order_dependence is not None
    assert found.order_dependence.startswith("sim://out differs between two runs without any fault: ")
    assert "(uid 'race')" in found.order_dependence
    assert "(uid 'counts')" not in found.order_dependence
    assert "'left'" in found.order_dependence
    assert "YOUR OUTPUT DEPENDS ON THE ORDER OF ROWS" in str(found)
    assert "VIOLATED" not in str(found)


def test_output_that_depends_on_something_outside_is_no_violation() -> None:
    """A function that remembers what it has seen gives other rows in each run, without any fault."""
    calls = [0]

    def numbered(row: dict[str, object]) -> dict[str, object]:
        calls[0] += 1
        return {"k": calls[0]}

    def build(env: tg.StreamEnvironment) -> None:
        env.from_batches(ROWS.slice(0, 20)).map(numbered, schema=pa.schema([("k", pa.int64())])).collect()

    report = simulate(build, seed=0, faults=Faults())
    assert not report.ok
    assert report.violation is None
    assert "on something outside of the pipeline" in str(report.order_dependence)


def test_rows_that_only_faults_change_are_a_violation() -> None:
    """Here by a function that remembers rows beyond its attempt: each schedule without faults writes the same rows."""
    seen: set[object] = set()

    def remembers(row: dict[str, object]) -> dict[str, object]:
        again = row["k"] in seen
        seen.add(row["k"])
        return {"k": row["k"], "again": again}

    def build(env: tg.StreamEnvironment) -> None:
        seen.clear()
        rows = env.from_batches(pa.table({"k": range(40)}))
        rows.map(remembers, schema=pa.schema([("k", pa.int64()), ("again", pa.bool_())])).collect()

    remembering = SimulatedPipeline(build)
    found = next(report for seed in range(20) if not (report := remembering.run(seed, HARSH)).ok)
    assert found.order_dependence is None
    assert "invariant 6" in str(found.violation)


def test_a_range_of_delays_is_read() -> None:
    """`from..to`, with the unit on both ends or on the last."""
    assert Faults(delay="0..2s").delay_ms == (0, 2_000)
    assert Faults(delay="5ms..1s").delay_ms == (5, 1_000)


def test_building_does_not_execute() -> None:
    """`simulate` runs the pipeline. A `build` that executes it itself gets an error that explains this."""

    def build(env: tg.StreamEnvironment) -> None:
        env.from_batches(ROWS).collect()
        env.execute("mine", checkpoints=tg.CheckpointConfig(storage="sim://x"))

    with pytest.raises(tg.ConfigurationError, match="does not execute"):
        simulate(build, seed=0)
