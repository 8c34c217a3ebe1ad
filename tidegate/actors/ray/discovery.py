"""Finds the worker processes of a lost coordinator, both with subtasks and spare.

Rules:

- Processes are found by their names, and report their subtasks: a spare process keeps its name when it gets subtasks.
- A process also has to report the id of the job, because another job with the same name may just be ending.
- If only a connection broke, the request is repeated, as often as by a running coordinator (`lost_nodes.py`).
- A process that has not answered when all running tasks are found is either starting or useless. It is evicted and
  replaced.
- If two processes have subtasks of one worker, the process with the newer attempt is used. An evicted process is not.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from tidegate.actors.graph.slot_plan import WorkerId
from tidegate.actors.ray.actor_calls import find_actor
from tidegate.actors.ray.exit_probe import memory_death
from tidegate.actors.ray.lost_nodes import ASK_AGAIN_MS, FAILURES_MAX
from tidegate.actors.ray.task_deployment import Handle, ProcessStatus
from tidegate.actors.ray.worker_pool import FoundProcess
from tidegate.protocol.identity import TaskId
from tidegate.storage.clock import now_ms
from tidegate.storage.ids import AttemptNumber, JobId

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 15.0
"""Seconds to wait for the answers of processes.

With 5 s, a slow answer on a busy machine failed a job that allows no restart. Ray detects a lost node no faster than 15
s, so this hardly delays a takeover after the loss of a node.
"""
NEVER = AttemptNumber(-1)
LATELY_MS = 600_000
"""Age, in ms, up to which the death of a process may explain the loss of the coordinator."""
_NUMBERED = re.compile(r"#\d+$")


def find_processes(
    prefix: str, namespace: str, job_id: JobId, running: Collection[TaskId], timeout_s: float = ANSWER_TIMEOUT_S
) -> tuple[list[FoundProcess], dict[str, Handle]]:
    """Returns the living processes of a job, and the handles of processes that do not answer, by name.

    Blocks for at most `timeout_s` seconds. `running`: tasks that run according to the log. The search ends when all of
    these are found.
    """
    handles: dict[str, Handle] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        ours = actor["namespace"] == namespace and name.startswith(f"{prefix}/") and _NUMBERED.search(name)
        if ours and (handle := find_actor(name, namespace)) is not None:  # None: it has ended meanwhile
            handles[name] = handle
    missing, found = set(running), []
    asked = {handle.held.remote(): name for name, handle in handles.items()}
    broken: Counter[str] = Counter()
    again: list[str] = []
    deadline = time.monotonic() + timeout_s
    while (asked or again) and (missing or not running) and (left_s := deadline - time.monotonic()) > 0:
        answered = _first_of(list(asked), min(left_s, ASK_AGAIN_MS / 1000) if again else left_s)
        if not answered:
            asked |= {handles[name].held.remote(): name for name in again}
            again.clear()
        for reference in answered:
            name = asked.pop(reference)
            try:
                held: ProcessStatus = ray.get(reference)
            except RayError as error:
                broken[name] += 1
                if isinstance(error, ActorUnavailableError) and broken[name] < FAILURES_MAX:
                    again.append(name)
                else:
                    log.info("%s has ended: %s", name, error)
                continue
            if held.job_id == job_id:
                found.append(FoundProcess(name, handles[name], held))
                missing -= held.tasks.keys()
    silent = (*asked.values(), *again)
    return sorted(found, key=lambda one: one.name), {name: handles[name] for name in silent}


def memory_death_of_tasks(prefix: str) -> str | None:
    """Returns why Ray's memory monitor recently killed a process of this job, or None if it killed none.

    If it killed several, the newest death counts. The monitor mostly kills the coordinator along with the tasks, so the
    reason is only in Ray's records. `prefix` is the beginning of the actor names of the job.
    """
    try:
        actors: Any = ray._private.state.actors(actor_state_name="DEAD")
    except (RayError, ConnectionError, RuntimeError) as error:
        log.info("Ray does not report how the processes of the job have ended: %s", error)
        return None
    since_ms = now_ms() - LATELY_MS
    own = [actor for actor in actors.values() if actor["Name"].startswith(f"{prefix}/") and actor["EndTime"] > since_ms]
    for actor in sorted(own, key=lambda actor: -actor["EndTime"]):
        if (memory := memory_death(str(actor["DeathCause"].oom_context.error_message))) is not None:
            return memory
    return None


def _first_of(references: list[Any], wait_s: float) -> list[Any]:
    """Waits for the first answer to the calls in a list, and returns it in a list. Returns an empty list after
    `wait_s`.
    """
    if references:
        return list(ray.wait(references, num_returns=1, timeout=wait_s)[0])
    threading.Event().wait(wait_s)
    return []


def by_worker(
    found: Sequence[FoundProcess], workers: Mapping[TaskId, WorkerId], given_up: Collection[str] = ()
) -> tuple[dict[WorkerId, FoundProcess], list[FoundProcess], list[FoundProcess]]:
    """Divides found processes into three: the process of each worker, the spare processes, and the useless processes.

    A process is useless if it was evicted, if another process has a newer attempt of its worker, or if it was started
    for a worker and has no subtasks, because it would keep its reserved resources. `given_up`: actor ids of evicted
    processes.
    """
    kept: dict[WorkerId, FoundProcess] = {}
    useless = [one for one in found if one.held.info.actor_id in given_up]
    useful = [one for one in found if one.held.info.actor_id not in given_up]
    useless += [one for one in useful if not one.held.tasks and not one.held.spare]
    for one in sorted(useful, key=lambda one: max(one.held.tasks.values(), default=NEVER)):
        if one.held.tasks:
            worker = workers[next(iter(one.held.tasks))]
            if worker in kept:
                useless.append(kept[worker])
            kept[worker] = one
    return kept, [one for one in useful if not one.held.tasks and one.held.spare], useless
