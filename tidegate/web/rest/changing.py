"""What changes a job: checkpoints and savepoints by request, stop, and cancel; and the deletion of savepoints.

The gate has seen the token. A request is answered with its id at once; a path with the id tells what has become of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.actors.runtimes.running_job import Answer, SnapshotRequest
from tidegate.protocol.failure_reasons import log_failure
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import TidegateError
from tidegate.web.model import job_state
from tidegate.web.rest.answers import RefusedError, bad_request, json_answer, quoted
from tidegate.web.rest.bodies import (
    Wanted,
    checkpoint_wanted,
    disposal_wanted,
    savepoint_wanted,
    stop_wanted,
    trigger_id_of,
)
from tidegate.web.rest.reading import job_of
from tidegate.web.security.gate import FAULT
from tidegate.web.seen_job import SeenJob
from tidegate.web.triggers import KEPT_MAX, OPEN_MAX
from tidegate.web.watch import JobWatch

log = logging.getLogger(__name__)

_Parse = Callable[[bytes], Wanted]


class Changing:
    """The routes of one server for what changes a job."""

    def __init__(self, watch: JobWatch) -> None:
        self._watch = watch
        self._disposals: dict[str, _Disposal] = {}

    def routes(self, prefix: str) -> list[Route]:
        """All of them."""
        job = f"{prefix}/jobs/{{job}}"
        return [
            Route(f"{job}/savepoints", self._asked(savepoint_wanted), methods=["POST"]),
            Route(f"{job}/stop", self._asked(stop_wanted), methods=["POST"]),
            Route(f"{job}/checkpoints", self._asked(checkpoint_wanted), methods=["POST"]),
            Route(f"{job}/savepoints/{{trigger}}", self._told(_savepoint_told), methods=["GET"]),
            Route(f"{job}/checkpoints/{{trigger}}", self._told(_checkpoint_told), methods=["GET"]),
            Route(job, self._cancel, methods=["PATCH"]),
            Route(f"{prefix}/savepoint-disposal", self._dispose, methods=["POST"]),
            Route(f"{prefix}/savepoint-disposal/{{trigger}}", self._disposed, methods=["GET"]),
        ]

    async def _dispose(self, request: Request) -> Response:
        trigger_id, path = disposal_wanted(await request.body())
        before = self._disposals.get(trigger_id)
        if before is None:
            if sum(not each.deletion.done() for each in self._disposals.values()) >= OPEN_MAX:
                raise RefusedError(429, f"{OPEN_MAX} savepoints are being deleted already", {"Retry-After": "5"})
            self._disposals[trigger_id] = _Disposal(path, asyncio.create_task(self._delete(path)))
            over = [name for name, each in self._disposals.items() if each.deletion.done()]
            for name in over[: max(0, len(self._disposals) - KEPT_MAX)]:
                del self._disposals[name]
        elif before.path != path:
            raise RefusedError(409, f"triggerId {trigger_id} stands for another request already")
        return json_answer({"request-id": trigger_id}, 202)

    async def _delete(self, path: str) -> str | None:
        """Deletes a savepoint, and returns why it could not be deleted."""
        try:
            await self._watch.delete_savepoint(path)
        except TidegateError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 (a fault of ours, which the client is told of as such)
            log_failure(log, f"savepoint {path} could not be deleted", error)
            return FAULT
        return None

    async def _disposed(self, request: Request) -> Response:
        trigger_id = trigger_id_of(request.path_params["trigger"])
        disposal = self._disposals.get(trigger_id)
        if disposal is None:
            raise RefusedError(404, f"there is no request {trigger_id}, or none any more")
        if not disposal.deletion.done():
            return json_answer({"status": {"id": "IN_PROGRESS"}})
        failure = disposal.deletion.result()
        operation = {} if failure is None else {"failure-cause": _cause(failure)}
        return json_answer({"status": {"id": "COMPLETED"}, "operation": operation})

    def _asked(self, parse: _Parse) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            job = await job_of(self._watch, request.path_params["job"])
            wanted = parse(await request.body())
            kind = _kind(wanted, parse)
            before = self._watch.triggers.get(wanted.trigger_id)
            if before is None:
                await self._ask(job, wanted, kind)
            elif (before.job_id, before.kind) != (job.job_id, kind):
                raise RefusedError(409, f"triggerId {wanted.trigger_id} stands for another request already")
            return json_answer({"request-id": wanted.trigger_id}, 202)

        return endpoint

    async def _ask(self, job: SeenJob, wanted: Wanted, kind: SnapshotKind) -> None:
        self._check_running(job)
        if len(self._watch.triggers.open_of(job.job_id)) >= OPEN_MAX:
            raise RefusedError(429, f"job {job.job_id} has {OPEN_MAX} open requests already", {"Retry-After": "5"})
        target = (wanted.target or job.snapshot.card.savepoints) if kind.is_savepoint else None
        if kind.is_savepoint and target is None:
            raise bad_request(
                "where is the savepoint to be written? Give target-directory (targetDirectory to stop), or set "
                "state.savepoints.dir"
            )
        await self._watch.request(job.job_id, wanted.trigger_id, SnapshotRequest(kind, target, wanted.savepoint_format))

    def _told(self, tell: Callable[[Answer], dict[str, Any]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            trigger_id = trigger_id_of(request.path_params["trigger"])
            trigger = self._watch.triggers.get(trigger_id)
            if trigger is None or trigger.job_id != request.path_params["job"]:
                raise RefusedError(404, f"there is no request {trigger_id}, or none any more")
            await self._watch.view()
            trigger = self._watch.triggers.get(trigger_id) or trigger
            if trigger.answer is None:
                return json_answer({"status": {"id": "IN_PROGRESS"}})
            return json_answer({"status": {"id": "COMPLETED"}, "operation": tell(trigger.answer)})

        return endpoint

    async def _cancel(self, request: Request) -> Response:
        job = await job_of(self._watch, request.path_params["job"])
        mode = request.query_params.get("mode", "cancel")
        if mode != "cancel":
            raise bad_request(
                f"mode is {quoted(mode)!r}: it is cancel. To stop with a savepoint: POST /jobs/{job.job_id}/stop"
            )
        self._check_running(job)
        await self._watch.cancel(job.job_id)
        return json_answer({}, 202)

    def _check_running(self, job: SeenJob) -> None:
        if job.over:
            raise RefusedError(409, f"job {job.job_id} is {job_state(job)}: nothing can be asked of it any more")


@dataclass(frozen=True, slots=True)
class _Disposal:
    """The deletion of a savepoint. Its task returns the reason of a failure, or None."""

    path: str
    deletion: asyncio.Task[str | None]


def _kind(wanted: Wanted, parse: _Parse) -> SnapshotKind:
    if parse is checkpoint_wanted:
        return SnapshotKind.CHECKPOINT
    if not wanted.ends:
        return SnapshotKind.SAVEPOINT
    return SnapshotKind.TERMINATE if wanted.drain else SnapshotKind.SUSPEND


def _savepoint_told(answer: Answer) -> dict[str, Any]:
    if answer.checkpoint_id is None:
        return {"failure-cause": _cause(answer.error)}
    return {"location": answer.path}


def _checkpoint_told(answer: Answer) -> dict[str, Any]:
    if answer.checkpoint_id is None:
        return {"failureCause": _cause(answer.error)}
    return {"checkpointId": answer.checkpoint_id}


def _cause(reason: str | None) -> dict[str, str]:
    return {"class": "tidegate.CheckpointError", "stack-trace": reason or "no reason was given"}
