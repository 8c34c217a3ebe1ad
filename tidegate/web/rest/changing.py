"""What changes a job: checkpoints and savepoints by request, stop, and cancel. The gate has seen the token.

A request is answered with its id at once; a path with the id tells what has become of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.actors.runtimes.running_job import Answer, SnapshotRequest
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.web.model import job_state
from tidegate.web.rest.answers import RefusedError, bad_request, json_answer, quoted
from tidegate.web.rest.bodies import Wanted, checkpoint_wanted, savepoint_wanted, stop_wanted, trigger_id_of
from tidegate.web.rest.reading import job_of
from tidegate.web.seen_job import SeenJob
from tidegate.web.triggers import OPEN_MAX
from tidegate.web.watch import JobWatch

_Parse = Callable[[bytes], Wanted]


class Changing:
    """The routes of one server for what changes a job."""

    def __init__(self, watch: JobWatch) -> None:
        self._watch = watch

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
        ]

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


def _kind(wanted: Wanted, parse: _Parse) -> SnapshotKind:
    if parse is checkpoint_wanted:
        return SnapshotKind.CHECKPOINT
    if not wanted.ends:
        return SnapshotKind.SAVEPOINT
    return SnapshotKind.TERMINATE if wanted.drain else SnapshotKind.SUSPEND


def _savepoint_told(answer: Answer) -> dict[str, Any]:
    if answer.checkpoint_id is None:
        return {"failure-cause": _cause(answer)}
    return {"location": answer.path}


def _checkpoint_told(answer: Answer) -> dict[str, Any]:
    if answer.checkpoint_id is None:
        return {"failureCause": _cause(answer)}
    return {"checkpointId": answer.checkpoint_id}


def _cause(answer: Answer) -> dict[str, str]:
    reason = answer.error or "no reason was given"
    return {"class": "tidegate.CheckpointError", "stack-trace": reason}
