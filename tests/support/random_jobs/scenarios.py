"""Runs a random scenario: the seed determines everything, one job runs to an end, and a second one continues from
there.

The second job is restored from the newest checkpoint or savepoint of the first, sometimes at another parallelism. The
tables must then hold the rows that plain Python computes from the input: exactly those rows, or (at-least-once) at
least those.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from random_jobs.draw import FAULT_MIXES, Scenario, draw
from random_jobs.pieces import Data, Topology
from random_jobs.sources import CutSource, FindingSource, TricklingSource, two_halves
from random_jobs.topologies import TOPOLOGIES, draw_inputs
from tidegate.actors.coordinator.checkpoint_requests import REQUESTS_MAX
from tidegate.actors.drivers.job_context import DataPlaneOptions
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.environment import StreamEnvironment
from tidegate.connectors.source import Source, is_unbounded
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.errors import TidegateError
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.output_tables import REPORT
from tidegate.testing.report import SimulationReport, report_of
from tidegate.testing.runtime.run import (
    STORAGE,
    Action,
    Build,
    JobRun,
    JobSetting,
    Protocol,
    Rows,
    Simulation,
    Slots,
    difference,
)
from tidegate.testing.runtime.simulated_job import TURN_MS_MAX
from tidegate.testing.simulated import shortest
from tidegate.testing.world.faults import Faults

SETTLE_MS_MAX = 240_000
"""A random scenario is over this long after the last fault: a few timeouts, and the slowest reading of its few rows."""
_SEGMENT_BYTES = 300
PARTS = 6
"""Splits are cut into this many parts, so that one answer of the coordinator has several of them."""
_ADOPTION_MS = {"adopt": 3_000, "restart": None}
_LOG_ENTRIES = {"long": None, "short": 8}
"""Number of log entries before a snapshot. Hardly any scenario writes the usual number."""
_SLOTS: Mapping[str, Slots] = {"shared": "shared", "halves": "halves", "apart": "apart"}
_UNDO_BYTES = {"keep": 1 << 20, "keep a little": 1_000, "read": 0}
_IN_ORDER = ("ordered", "late", "windows", "relations", "idle")
"""Pipelines that rely on the order of rows within the splits that they see."""
_ROW_BY_ROW = ("sim://rows", "sim://late", "sim://kept")
"""Tables with a row for each row of the input. Other tables have a row for each key."""
_TWO_TURNS_A_ROW = ("flushes", "late")
"""Pipelines with a timer for each row, or a watermark behind it. A slow task takes a turn for each."""
_BUFFERS = {"tiny": (300, 300), "small": (1_000, 1_500), "wide": (20_000, 20_000)}
_SURVIVING = {
    "fixed-delay": RestartStrategy.fixed_delay(10_000, "100ms"),
    "exponential-delay": RestartStrategy.exponential_delay("20ms", "400ms", 3.0, 0.3, "1s"),
    "failure-rate": RestartStrategy.failure_rate(10_000, "1s", "100ms"),
}
_FAILING = {
    "fixed-delay": RestartStrategy.none(),
    "exponential-delay": RestartStrategy.exponential_delay("20ms", "400ms", 3.0, 0.3, "1s", attempts=1),
    "failure-rate": RestartStrategy.failure_rate(1, "500ms", "50ms"),
}
"""Strategies of a job that may end by a failure."""
_ASKED = {"checkpoint": (SnapshotKind.CHECKPOINT, 2, 30), "savepoint": (SnapshotKind.SAVEPOINT, 2, 30)}
"""Kind of the request, number of requests, and ms between them."""
_ASKED_A_LOT = {
    "many savepoints": (SnapshotKind.SAVEPOINT, 20, 150),
    "a burst": (SnapshotKind.CHECKPOINT, REQUESTS_MAX + 50, 0),
}
_STOPS = {"suspend": SnapshotKind.SUSPEND, "terminate": SnapshotKind.TERMINATE}


def simulate_random(seed: int, *, protocol: Protocol | None = None, shrink: bool = True) -> SimulationReport:
    """Draws the scenario of a seed and runs it. The same seed gives the same run.

    With `shrink`, a report that is not ok is of the shortest run of the seed that was found to show the violation.
    """
    return simulate_scenario(draw(seed), protocol=protocol, shrink=shrink)


def random_run() -> Callable[[int], SimulationReport]:
    """Returns the function that runs a seed. Worker processes import it from here."""
    return simulate_random


def simulate_scenario(scenario: Scenario, *, protocol: Protocol | None = None, shrink: bool = True) -> SimulationReport:
    """Runs one scenario. A drawn scenario that is kept as a test stays the same when dimensions are added."""
    faults = faults_of(scenario)
    report = _run(scenario, faults, protocol)
    if report.ok or not shrink:
        return report
    found = shortest(report, faults, lambda tried: _run(scenario, tried, protocol))
    return _with_fewer_rows(scenario, found, protocol)


def faults_of(scenario: Scenario) -> Faults:
    """Returns the faults of a scenario."""
    return FAULT_MIXES[str(scenario.values["faults"])]


def setting_of(scenario: Scenario, build: Build) -> JobSetting:
    """Returns the setting of a job of a scenario that runs to its end, over any pipeline (see
    `benchmarks/nexmark/faults.py`).
    """
    return JobSetting(
        build,
        parallelism=1,
        checkpoints=_checkpoints(scenario),
        options=_options(scenario),
        settle_ms_max=_settle_ms_max(scenario),
        adoption_timeout_ms=_ADOPTION_MS[str(scenario.values.get("takeover", "restart"))],
        local_copies=_keeps_copies(scenario),
        local_aggregation="off" if scenario.values.get("combined", "never") == "never" else "on",
        log_entries=_LOG_ENTRIES[str(scenario.values.get("log", "long"))],
        slots=_SLOTS[str(scenario.values.get("slots", "shared"))],
    )


def _with_fewer_rows(scenario: Scenario, report: SimulationReport, protocol: Protocol | None) -> SimulationReport:
    """Halves the input as long as the violation stays."""
    best = report
    rows = scenario.rows // 2
    while rows:
        found = _run(replace(scenario, rows=rows), best.faults, protocol)
        best = replace(best, runs=best.runs + 1)
        if found.ok:
            break
        best = replace(found, runs=best.runs)
        rows //= 2
    return best


def _run(scenario: Scenario, faults: Faults, protocol: Protocol | None) -> SimulationReport:
    simulation = Simulation(scenario.seed, faults, protocol)
    topology = TOPOLOGIES[str(scenario.values["topology"])]
    inputs = draw_inputs(random.Random(f"rows {scenario.seed}"), scenario.rows)
    expected = _Expected(scenario, topology, inputs)

    def setting(
        widths: tuple[int, ...], actions: tuple[Action, ...], restore: str | None, fails: bool, combined: str
    ) -> JobSetting:
        def build(env: StreamEnvironment) -> None:
            topology.build(env, inputs, widths)

        strategies = _FAILING if fails else _SURVIVING
        return replace(
            setting_of(scenario, build),
            restart=strategies[str(scenario.values.get("restart", "fixed-delay"))],
            hooks=(_Hook(),) if scenario.values["hooks"] == "one" else (),
            actions=actions,
            restore=restore,
            sources=_changed_sources(scenario),
            local_aggregation="on" if scenario.values.get("combined", "never") in ("always", combined) else "off",
        )

    ending = scenario.values["ending"]
    first = simulation.run(setting(scenario.widths, _actions(scenario), None, ending == "fail", "at first"))
    runs = [first]
    violation = first.violation or _first_ended_well(scenario, first, expected)
    if violation is None:
        try:
            restore = _pointer(first) or "latest_or_fresh"
            second = simulation.run(setting(scenario.then_widths, (), restore, False, "then"))
        except TidegateError as error:
            if not (simulation.losses.tables and REPORT in str(error)):
                violation = f"invariant 7: the second job was refused: {error}"
        else:
            runs.append(second)
            violation = second.violation or _second_ended_well(scenario, first, second, expected)
    return report_of(scenario.seed, faults, simulation, runs, violation, str(scenario))


def _changed_sources(scenario: Scenario) -> Callable[[Source], Source] | None:
    """Returns a function that replaces sources, or None.

    Splits then have nothing to read now and then, are found while the job runs, or are cut into parts. The source that
    induces checkpoints is never replaced. Rows of a split that is found late may be late in event time, so such splits
    are not drawn for timers.
    """
    kind = scenario.values.get("sources")
    topology = scenario.values["topology"]
    if kind == "trickling" and topology != "induced":
        return TricklingSource
    if kind == "finding" and topology not in ("induced", "timers"):
        return FindingSource
    if topology == "induced":
        return None
    if kind in ("hybrid", "hybrid, finding") and topology not in (*_IN_ORDER, "timers"):
        return lambda source: source if is_unbounded(source) else two_halves(source, finding=kind != "hybrid")
    # Rows are in order within the splits that the pipeline sees.
    parts = PARTS if scenario.values.get("splits") == "many" and topology not in _IN_ORDER else 1
    cut = partial(CutSource, parts=parts, static_splits=scenario.values.get("splits") == "dealt out")
    return lambda source: source if is_unbounded(source) else cut(source)


def _keeps_copies(scenario: Scenario) -> bool:
    """Returns whether tasks keep copies on their nodes. State has to be in files then."""
    return scenario.values.get("copies") == "node"


def _checkpoints(scenario: Scenario) -> CheckpointConfig:
    values = scenario.values
    alignment = values["alignment"]
    return CheckpointConfig.model_validate(
        {
            "storage": STORAGE,
            "inline_threshold": 0 if _keeps_copies(scenario) else 600,
            "interval": values["interval_ms"],
            "mode": str(values["mode"]).replace("-", "_"),
            "timeout": _timeout_ms(scenario),
            "min_pause": values["min_pause_ms"],
            "max_concurrent": values["max_concurrent"],
            "unaligned": alignment != "aligned",
            "aligned_timeout": scenario.aligned_timeout_ms if alignment == "timeout" else 0,
            "tolerable_failed_checkpoints": values["tolerable"],
            "num_retained": values["retained"],
            "retention": values["retention"],
            "incremental": values.get("state") == "incremental",
            "changelog": values.get("state") == "changelog",
            "rewind_memory": _UNDO_BYTES[str(values.get("survivors", "keep"))],
        }
    )


def _settle_ms_max(scenario: Scenario) -> int:
    """Returns the time for the job to end.

    A lost frame may be noticed only when checkpoints expire, and savepoints that users request go before those. A
    savepoint that expires is not a failure of the job.
    """
    kind, times, _ = (_ASKED | _ASKED_A_LOT).get(str(scenario.values["ask"]), (SnapshotKind.CHECKPOINT, 0, 0))
    ahead = times if kind is SnapshotKind.SAVEPOINT else 0
    return SETTLE_MS_MAX + ahead * _timeout_ms(scenario)


def _timeout_ms(scenario: Scenario) -> int:
    timeout_ms = _number(scenario.values["timeout_ms"])
    return max(timeout_ms, _queued_ms(scenario)) if scenario.values["alignment"] == "aligned" else timeout_ms


def _queued_ms(scenario: Scenario) -> int:
    """Returns how long a barrier may wait in front of the slowest task, behind all rows of both of its inputs.

    Buffers have room for these rows. With less time, a checkpoint would fail after the first one of each attempt. Where
    no checkpoint may fail, the job would restart each time and never get beyond the rows before that first one.
    """
    turns_a_row = 2 if scenario.values["topology"] in _TWO_TURNS_A_ROW else 1
    turns = 2 * scenario.rows * turns_a_row // _number(scenario.values["turn_rows"])
    return turns * max(TURN_MS_MAX) // 2


@dataclass(frozen=True, slots=True)
class _Expected:
    """The rows that a scenario must write."""

    scenario: Scenario
    topology: Topology
    inputs: Sequence[Data]

    def rows(self, found: Rows | None) -> Rows:
        """Returns the rows that must be there at the end, given the found rows; before the end (None) the rows that
        there may be.
        """
        if self.topology.given is None:
            return self.topology.expect(self.inputs, self.scenario.widths)
        return self.topology.given(self.inputs, found)


class _Hook:
    """A master hook that stores the number of the checkpoint, and checks that it gets it back."""

    identifier = "numbers"

    def trigger(self, checkpoint_id: int, timestamp_ms: int) -> bytes | None:
        return str(checkpoint_id).encode()

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        if data is not None and data != str(checkpoint_id).encode():
            raise InvariantViolated(9, f"the hook of checkpoint {checkpoint_id} is restored with {data!r}")


def _options(scenario: Scenario) -> DataPlaneOptions:
    credit_bytes, queue_bytes = _BUFFERS[str(scenario.values["buffers"])]
    limits = BufferLimits(
        credit_bytes=credit_bytes,
        queue_bytes_max=queue_bytes,
        frame_bytes_min=100,
        frame_bytes_max=max(200, credit_bytes // 2),
        linger_ms=20,
        turn_rows_max=_number(scenario.values["turn_rows"]),
        window_bytes_min=credit_bytes // 8,
    )
    # Few rows change, so the changelog only rolls over and materializes with a tiny segment size.
    return DataPlaneOptions(limits=limits, source_rows_max=4, backend=StateBackendOptions(segment_bytes=_SEGMENT_BYTES))


def _actions(scenario: Scenario) -> tuple[Action, ...]:
    actions = []
    asked = str(scenario.values["ask"])
    ending = str(scenario.values["ending"])
    chosen = SavepointFormat(scenario.values.get("savepoints", "canonical"))
    if asked in (known := _ASKED | _ASKED_A_LOT):
        kind, times, pause_ms = known[asked]
        actions += [Action(scenario.ask_at_ms + pause_ms * i, kind, chosen) for i in range(times)]
    if ending == "cancel":
        actions.append(Action(scenario.end_at_ms, None))
    elif ending in _STOPS:
        actions.append(Action(scenario.end_at_ms, _STOPS[ending], chosen))
    return tuple(actions)


def _pointer(run: JobRun) -> str | None:
    """Returns the savepoint that a job was stopped with, or None."""
    stopped = [a.path for a in run.answers.values() if a.path is not None and run.status in ("suspended", "finished")]
    return stopped[-1] if stopped and run.status == "suspended" else None


def _first_ended_well(scenario: Scenario, run: JobRun, expected: _Expected) -> str | None:
    assert run.rows is not None
    ending = scenario.values["ending"]
    allowed = {"finished"} | {
        "cancel": {"cancelled"},
        "fail": {"failed"},
        "suspend": {"suspended"},
    }.get(str(ending), set())
    if run.reports_loss:
        allowed.add("failed")
    if run.status not in allowed:
        return f"invariant 7: the job {run.status}, though every fault was survivable: {run.reason}"
    whole = run.status == "finished" and not _drained(scenario, run)
    return _compare(scenario, expected.rows(run.rows if whole else None), run.rows, whole)


def _second_ended_well(scenario: Scenario, first: JobRun, run: JobRun, expected: _Expected) -> str | None:
    assert run.rows is not None
    assert first.rows is not None
    if run.reports_loss:
        return None
    if run.status != "finished":
        return f"invariant 7: the second job {run.status}, though every fault was survivable: {run.reason}"
    if _drained(scenario, first) and _goes_on_from_the_end(first, run):
        return difference(first.rows, run.rows)
    return _compare(scenario, expected.rows(run.rows), run.rows, whole=True)


def _drained(scenario: Scenario, run: JobRun) -> bool:
    """Returns whether the job was stopped with a drain. Its aggregates have then emitted partial results."""
    answered = any(answer.path is not None for answer in run.answers.values())
    # The answer may be lost with a coordinator that died, although its successor has ended the job as requested.
    lost = len(run.answers) < sum(action.kind is not None for action in _actions(scenario))
    return scenario.values["ending"] == "terminate" and (answered or (lost and run.cut_short))


def _goes_on_from_the_end(first: JobRun, run: JobRun) -> bool:
    """Returns whether a job was restored from the newest checkpoint of the first one, which may be damaged."""
    restore = run.job.spec.restore
    return restore is None or restore.checkpoint_id == first.job.watch.oracle.files.newest


def _compare(scenario: Scenario, expected: Rows, found: Rows, whole: bool) -> str | None:
    if not whole:
        tables = {*_ROW_BY_ROW}
        if scenario.values["mode"] == "exactly-once" and scenario.values["ending"] != "terminate":
            # Without a drain nothing is final before its end.
            tables |= expected.keys() - {"sim://running"}
        partial = {table: rows for table, rows in expected.items() if table in tables}
        return difference(partial, found, at_most=True, at_least=scenario.values["mode"] != "exactly-once")
    if scenario.values["mode"] == "exactly-once":
        return difference(expected, found)
    return _at_least(expected, found)


def _at_least(expected: Rows, found: Rows) -> str | None:
    """Compares at-least-once output: every input row counts at least once, and aggregates have the same keys and no
    lower counts.
    """
    for table, rows in expected.items():
        if table in _ROW_BY_ROW:
            lost = difference({table: rows}, found, at_least=True)
            if lost is not None:
                return lost
            continue
        wanted = _counts(rows)
        there = _counts(found[table])
        if wanted.keys() != there.keys():
            return f"invariant 6: {table} has keys {sorted(there)}, not {sorted(wanted)}"
        for key, count in wanted.items():
            if there[key] < count:
                return f"invariant 6: {table} counts {there[key]} rows of key {key}, and there were {count}"
    return None


def _counts(rows: dict[str, int]) -> dict[str, int]:
    """Returns the counts of the rows `(key, count, ...)` of an aggregate."""
    parts = [row.strip("()").split(", ") for row in rows]
    return {key: int(count) for key, count, *_ in parts}


def _number(value: Hashable) -> int:
    assert isinstance(value, int)
    return value
