"""One run of `chaos.py`: a job, the faults that strike it, how long rows stood still, and what its tables hold.

Rules:

- A fault waits for its event: all tasks run, every keyed subtask has taken in rows and a checkpoint has been completed
  since the fault before it. Then it waits for a part of a checkpoint's time that the seed decides, to strike anywhere
  in one. One that comes *on top* waits for nothing: it strikes while the job recovers.
- A fault that ends processes is over when the job has noticed (a restart, another coordinator), and goes on as before.
- Every wait has a limit. What has not happened by then is a hang.
- A link that is cut is healed after a while, whatever the job does meanwhile. What Ray has given up by then, or gives
  up until all goes on as before, is watched until its processes have ended, and replaced.
- A process that the job leaves behind is a problem like a wrong row. So is a word of one that was replaced in storage.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import polars as pl
import ray
from chaos_cluster import Nodes, end_of, start_driver
from chaos_fence import decided, written_by_the_replaced
from chaos_job import Plan, build, reference, rows_came_since, slots, stood_still_ms, submit
from chaos_links import Hosts
from common import ENDED

import tidegate as tg
from tidegate.actors.ray.health_endpoint import state_of
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.actors.runtimes.running_job import TaskProcessInfo

POLL_S = 0.1
S3_SILENT_S = 30.0
S3_REFUSES_S = 15.0
CUTS_S = (5, 30, 120)
MOVES_MAX = 20
"""A coordinator is lost so often, at most, until it is not on the head of Ray."""
GONE = ("", "Z", "X")
SHOWN_MAX = 5


class Hang(Exception):
    """Something has not happened within the limit."""


@dataclass(frozen=True)
class Fault:
    """One that was drawn. `part`: of a checkpoint's interval, to wait before it strikes."""

    kind: str
    part: float
    on_top: bool


@dataclass
class Struck:
    """A fault that has struck. `still_ms`: how long rows stood still; None where two faults share that."""

    fault: Fault
    victim: str
    at_ns: int
    still_ms: int | None = None


@dataclass
class Outcome:
    """What came of one run."""

    plan: Plan
    struck: list[Struck] = field(default_factory=list)
    lost: int = 0
    doubled: int = 0
    hangs: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Anything else that must not be, such as a job that has failed."""
    end: tg.JobProgress | None = None
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether anything is not as it must be."""
        return bool(self.lost or self.doubled or self.hangs or self.problems)

    def note(self, table: str, found: pl.DataFrame, expected: pl.DataFrame, say: Callable[[str], None]) -> None:
        """Count the rows that a table has too few and too many, and say which they are."""
        if found.columns == expected.columns and found.sort(found.columns).equals(expected.sort(expected.columns)):
            return
        here, there = Counter(found.iter_rows()), Counter(expected.iter_rows())
        lost, doubled = there - here, here - there
        self.lost += lost.total()
        self.doubled += doubled.total()
        for what, rows in (("lost", lost), ("too many", doubled)):
            say(f"  table {table}: {rows.total()} rows {what}: {list(rows.items())[:SHOWN_MAX]}")


@dataclass
class Run:
    """One job and its faults."""

    plan: Plan
    nodes: Nodes
    s3: Any
    """The process of the S3 server (`S3Process` of the tests)."""
    rng: random.Random
    interval_s: float
    limit_s: float
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.outcome = Outcome(self.plan)
        self._seen: dict[int, str] = {}
        """Processes of the job, by id: what they were."""
        self._driver: subprocess.Popen[str] | None = None
        self._slots: SlotPlacement | None = None

    def play(self, faults: list[Fault]) -> Outcome:
        """Start the job, let the faults strike, end the job, and compare."""
        began = time.monotonic()
        detached = any(fault.kind == "driver killed" for fault in faults)
        runtime: RayRuntime | None = None
        try:
            if detached:
                self._driver = start_driver(self.plan, self.nodes.address, self.limit_s)
                runtime = RayRuntime()
                _, self._job = runtime.attach(self.plan.name)
            else:
                self._slots = slots()
                runtime = RayRuntime(self._slots, standbys=self.plan.standbys)
                self._job = submit(self.plan, runtime, detached=False)
            self._runtime = runtime
            self._strike_all(faults)
            self.plan.gate.touch()
            self.outcome.end = self._job.wait(self.limit_s)
            if self.outcome.end is None:
                raise Hang(f"the job has not ended: {self._job.progress()}")
            self._compare(self.outcome.end)
        except Hang as hang:
            self.outcome.hangs.append(str(hang))
        except (tg.TidegateError, RuntimeError) as error:
            self.outcome.problems.append(f"{type(error).__name__}: {error}")
        finally:
            self._close(runtime, detached)
            self.outcome.seconds = time.monotonic() - began
        return self.outcome

    # --- faults ---------------------------------------------------------------------------------------------------

    def _strike_all(self, faults: list[Fault]) -> None:
        self._steady(0)
        open_faults: list[Struck] = []
        noticed = 0
        for number, fault in enumerate(faults):
            if not fault.on_top and number > 0:
                self._settle(open_faults, noticed)
                open_faults = []
            if not fault.on_top:
                noticed = _noticed(self._job.progress())
                time.sleep(fault.part * self.interval_s)
            open_faults.append(self._strike(fault))
        self._settle(open_faults, noticed)

    def _settle(self, faults: list[Struck], noticed: int) -> None:
        """Wait until the job is as if nothing had been, and note how long that took."""
        if any(one.fault.kind in _NOTICED for one in faults):
            self._until("anything that shows the fault", lambda p: _noticed(p) > noticed)
        self._steady(time.time_ns())
        (first, *more) = faults
        still_ms = stood_still_ms(self.plan, first.at_ns, time.time_ns())
        self._replace_lost()
        if not more:
            first.still_ms = still_ms
        kinds = " and ".join(f"{one.fault.kind} ({one.victim})" for one in faults)
        self.say(f"  {kinds}: rows stood still for {still_ms} ms")

    def _steady(self, since_ns: int) -> None:
        """All tasks run, rows came, and a checkpoint was completed since."""
        checkpoints = self._job.progress().completed_checkpoints
        self._until(
            "rows and a checkpoint",
            lambda p: (
                p.status == "running" and p.completed_checkpoints > checkpoints and rows_came_since(self.plan, since_ns)
            ),
        )

    def _strike(self, fault: Fault) -> Struck:
        strike = _STRIKES[fault.kind]
        struck = Struck(fault, "", time.time_ns())
        self.outcome.struck.append(struck)
        strike(self, struck)
        return struck

    def _task(self, struck: Struck, number: signal.Signals) -> None:
        self._until("a process of a task", lambda _: bool(self._processes()))
        victim = self.rng.choice(self._processes())
        struck.victim = f"{victim.task}, pid {victim.pid}"
        struck.at_ns = time.time_ns()
        end_of(victim.pid, number)

    def _coordinator(self, struck: Struck) -> None:
        info = self._job.coordinator()
        struck.victim = f"pid {info.pid}"
        struck.at_ns = time.time_ns()
        end_of(info.pid, signal.SIGKILL)

    def _drivers(self, struck: Struck) -> None:
        assert self._driver is not None
        struck.victim = f"pid {self._driver.pid}"
        struck.at_ns = time.time_ns()
        self._driver.kill()
        self._driver.wait()
        _, self._job = self._runtime.attach(self.plan.name)

    def _choose(self, of_coordinator: bool) -> tuple[str, str]:
        """A node, and what is on it: that of the coordinator unless that is the head, or one with tasks without it."""
        coordinator = self._job.coordinator().node_id
        self._until("a process of a task", lambda _: bool(self._processes()))
        busy = sorted({process.node_id for process in self._processes()} & self.nodes.ids)
        others = [node for node in busy if node != coordinator]
        here = of_coordinator and coordinator in self.nodes.ids
        node = coordinator if here else self.rng.choice(others or busy)
        on_it = [process for process in self._processes() if process.node_id == node]
        return node, f"node {node[:8]}, {len(on_it)} tasks{', the coordinator' if node == coordinator else ''}"

    def _node(self, struck: Struck, of_coordinator: bool = False, crowded: bool = False) -> None:
        node, struck.victim = self._choose(of_coordinator)
        taken = self.nodes.take_free_cpus() if crowded else None
        struck.at_ns = time.time_ns()
        self.nodes.kill(node)
        # Nodes share the disk of this machine: with one of them the local copies of all are lost.
        shutil.rmtree(self.plan.copies, ignore_errors=True)
        self.nodes.clear_up(node)
        if taken is not None:
            self._until("a word about the room that is missing", lambda p: p.waits_for is not None)
            ray.util.remove_placement_group(taken)
        self.nodes.start_one()

    def _link(self, struck: Struck, cut_s: float, of_coordinator: bool = False) -> None:
        assert isinstance(self.nodes, Hosts)
        if of_coordinator:
            self._move_coordinator(self.nodes)
        node, words = self._choose(of_coordinator)
        struck.victim = f"{self.nodes.name(node)}: {words}"
        struck.at_ns = time.time_ns()
        self.nodes.cut(node)
        time.sleep(cut_s)
        self.nodes.heal(node)
        self._replace_lost()

    def _move_coordinator(self, hosts: Hosts) -> None:
        """Ray starts it on the head as well, whose link cannot be cut: there it is lost, until it starts elsewhere."""
        for _ in range(MOVES_MAX):
            info = self._job.coordinator()
            if info.node_id in hosts.ids:
                return
            self._lose(info.pid)
        raise Hang(f"the coordinator was lost {MOVES_MAX} times and is still on the head of Ray")

    def _lose(self, coordinator: int) -> None:
        losses = self._job.progress().coordinator_losses
        end_of(coordinator, signal.SIGKILL)
        self._until("another coordinator", lambda p: p.coordinator_losses > losses)
        self._steady(time.time_ns())

    def _replace_lost(self) -> None:
        """Hosts that Ray has given up, once their processes have ended."""
        if isinstance(self.nodes, Hosts):
            for what, left in self.nodes.replace_lost():
                self.say(f"  {what}")
                if left:
                    self.outcome.problems.append(f"{what}: {left}")

    def _s3(self, struck: Struck, away_s: float) -> None:
        struck.at_ns = time.time_ns()
        self.s3.kill()
        time.sleep(away_s)
        self.s3.start()

    def _s3_silent(self, struck: Struck) -> None:
        struck.at_ns = time.time_ns()
        end_of(self.s3.running.pid, signal.SIGSTOP)
        time.sleep(S3_SILENT_S)
        end_of(self.s3.running.pid, signal.SIGCONT)

    def _processes(self) -> list[TaskProcessInfo]:
        found = list(self._job.tasks())
        self._seen |= {process.pid: f"{process.task}" for process in found}
        return found

    def _until(self, what: str, condition: Callable[[tg.JobProgress], bool]) -> None:
        deadline = time.monotonic() + self.limit_s
        while True:
            progress = self._job.progress()
            if progress.status in ENDED:
                raise tg.JobFailedError(f"the job {progress.status}: {progress.reason}")
            if condition(progress):
                return
            if time.monotonic() > deadline:
                raise Hang(f"{self.limit_s:g} s without {what}: {progress}")
            time.sleep(POLL_S)

    # --- the end --------------------------------------------------------------------------------------------------

    def _compare(self, end: tg.JobProgress) -> None:
        if end.status != "finished":
            self.outcome.problems.append(f"the job {end.status}: {end.reason}")
            return
        env = tg.StreamEnvironment.local()
        tables = build(env, self.plan)
        for name, expected in reference(self.plan).items():
            self.outcome.note(name, pl.DataFrame(tables[name].to_arrow()), expected, self.say)
        self.outcome.problems += written_by_the_replaced(self.plan)
        log = decided(self.plan)
        attempts, losses = len(log.attempts), end.coordinator_losses
        self.say(f"  by its log: {attempts} attempts, {len(log.checkpoints)} checkpoints, {losses} coordinators lost")
        for attempt, reason in log.failures.items():
            self.say(f"  attempt {attempt} failed: {reason}")
        self.outcome.problems += log.wrong
        if attempts > 1 and all(one.fault.kind in _LEAVES_TASKS for one in self.outcome.struck):
            self.outcome.problems.append(f"{attempts} attempts, and nothing but coordinators was lost")

    def _close(self, runtime: RayRuntime | None, detached: bool) -> None:
        if runtime is not None:
            try:
                if detached:
                    self._job.stop(self.limit_s)
                runtime.stop()
            except tg.TidegateError as error:
                self.outcome.problems.append(f"while it was stopped: {error}")
        if self._slots is not None:
            ray.util.remove_placement_group(self._slots.placement_group)
        if self._driver is not None:
            self._driver.kill()
            self._driver.wait()
        deadline = time.monotonic() + self.limit_s
        while left := self._left():
            if time.monotonic() > deadline:
                self.outcome.problems.append(f"processes are left behind: {left}")
                return
            time.sleep(POLL_S)

    def _left(self) -> dict[int, str]:
        """Processes of the job that are there, by id: those that were seen, and all actors on hosts."""
        seen = {pid: what for pid, what in self._seen.items() if state_of(pid) not in GONE}
        return seen | self.nodes.actors() if isinstance(self.nodes, Hosts) else seen


_STRIKES: dict[str, Callable[[Run, Struck], None]] = {
    "task killed": lambda run, struck: run._task(struck, signal.SIGKILL),
    "task stopped": lambda run, struck: run._task(struck, signal.SIGSTOP),
    "coordinator killed": Run._coordinator,
    "driver killed": Run._drivers,
    "node lost": lambda run, struck: run._node(struck),
    "node lost, no room": lambda run, struck: run._node(struck, crowded=True),
    "node of the coordinator lost": lambda run, struck: run._node(struck, of_coordinator=True),
    "S3 restarted": lambda run, struck: run._s3(struck, 0.0),
    "S3 refuses for 15 s": lambda run, struck: run._s3(struck, S3_REFUSES_S),
    "S3 silent for 30 s": Run._s3_silent,
}
_CUTS: dict[str, Callable[[Run, Struck], None]] = {
    f"link{whose} cut for {cut_s} s": partial(Run._link, cut_s=cut_s, of_coordinator=bool(whose))
    for whose in ("", " of the coordinator")
    for cut_s in CUTS_S
}
LINK_KINDS = tuple(_CUTS)
"""These need hosts."""
_STRIKES |= _CUTS
KINDS = tuple(_STRIKES)
_LEAVES_TASKS = ("coordinator killed", "driver killed")
_NOTICED = tuple(kind for kind in KINDS if kind.startswith(("task", "coordinator", "node")))


def _noticed(progress: tg.JobProgress) -> int:
    return progress.restarts + progress.coordinator_losses
