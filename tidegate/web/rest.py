"""The REST API: Flink's paths, with answers from the model (`Reading`), and the requests that change a job
(`Changing`).

Rules:

- Each answer is created once for each view of the jobs, for any number of clients.
- The gate has already checked the token of a request that changes a job.
- A request for a change is answered immediately, with its id. A path with that id returns the result.
- Errors have Flink's form: `{"errors": ["..."]}`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.actors.runtimes.running_job import Answer, SnapshotRequest
from tidegate.protocol.failures import log_failure
from tidegate.storage.checkpoints.layout import parse_pointer
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.errors import ConfigurationError, TidegateError
from tidegate.storage.files.file_system_store import check_savepoint_target
from tidegate.web import model
from tidegate.web.jobs import NotReachedError, SeenJob, View
from tidegate.web.model import NotKnown, job_state
from tidegate.web.security import FAULT, BodyTooLargeError, error_body
from tidegate.web.watch import KEPT_MAX, OPEN_MAX, JobWatch

log = logging.getLogger(__name__)

TEXT_CHARACTERS_MAX = 300
"""How many characters of a client's text an error repeats at most."""

TARGET_CHARACTERS_MAX = 2_000

ANSWERS_MAX = 500
"""How many answers are kept for the current view at most."""

DIGITS_MAX = 18
_OfView = Callable[[View], Any]
_OfJob = Callable[[SeenJob, Request], Any]

_OF_VIEW: dict[str, _OfView] = {
    "/overview": model.overview,
    "/jobs": model.job_ids,
    "/jobs/overview": model.jobs_overview,
    "/taskmanagers": model.task_managers,
}

_OF_JOB: dict[str, _OfJob] = {
    "/jobs/{job}": lambda job, _: model.job_details(job),
    "/jobs/{job}/status": lambda job, _: model.job_status(job),
    "/jobs/{job}/accumulators": lambda job, _: model.job_accumulators(job),
    "/jobs/{job}/plan": lambda job, _: model.plan(job),
    "/jobs/{job}/config": lambda job, _: model.job_config(job),
    "/jobs/{job}/jobmanager/config": lambda job, _: model.configuration(job),
    "/jobs/{job}/exceptions": lambda job, request: _exceptions(job, request),
    "/jobs/{job}/metrics": lambda job, request: model.job_metrics(job, _named(request)),
    "/jobs/{job}/timeline": lambda job, _: model.timeline(job),
    "/jobs/{job}/recoveries": lambda job, _: model.recoveries(job),
    "/jobs/{job}/checkpoints": lambda job, _: model.checkpoints(job),
    "/jobs/{job}/checkpoints/config": lambda job, _: model.checkpoint_config(job),
    "/jobs/{job}/checkpoints/details/latest": lambda job, request: _newest(job, request),
    "/jobs/{job}/checkpoints/details/{checkpoint}": lambda job, r: model.checkpoint_details(job, _checkpoint(r)),
    "/jobs/{job}/checkpoints/details/{checkpoint}/subtasks/{vertex}": (
        lambda job, r: model.checkpoint_subtasks(job, _checkpoint(r), _vertex(r))
    ),
    "/jobs/{job}/vertices/{vertex}": lambda job, r: model.vertex_details(job, _vertex(r)),
    "/jobs/{job}/vertices/{vertex}/accumulators": lambda job, r: model.vertex_accumulators(job, _vertex(r)),
    "/jobs/{job}/vertices/{vertex}/subtasktimes": lambda job, r: model.subtask_times(job, _vertex(r)),
    "/jobs/{job}/vertices/{vertex}/taskmanagers": lambda job, r: model.vertex_task_managers(job, _vertex(r)),
    "/jobs/{job}/vertices/{vertex}/backpressure": lambda job, r: model.backpressure(job, _vertex(r)),
    "/jobs/{job}/vertices/{vertex}/watermarks": lambda job, r: model.watermarks(job, _vertex(r)),
    "/jobs/{job}/vertices/{vertex}/metrics": lambda job, r: model.vertex_metrics(job, _vertex(r), _named(r)),
}


class Reading:
    """The routes of one server that only read: each path with the function of the model for its answer."""

    def __init__(self, watch: JobWatch) -> None:
        self._watch = watch
        self._view: View | None = None
        self._answers: dict[str, bytes] = {}

    def routes(self, prefix: str) -> list[Route]:
        return [
            Route(f"{prefix}/config", self._config, methods=["GET"]),
            Route(f"{prefix}/taskmanagers/{{process}}", self._process, methods=["GET"]),
            *(Route(prefix + path, self._of_view(answer), methods=["GET"]) for path, answer in _OF_VIEW.items()),
            *(Route(prefix + path, self._of_job(answer), methods=["GET"]) for path, answer in _OF_JOB.items()),
        ]

    async def _config(self, request: Request) -> Response:
        offset_s = time.localtime().tm_gmtoff
        zone = time.strftime("%Z")
        return json_answer(model.dashboard_config(round(self._watch.refresh_s * 1_000), zone, offset_s * 1_000))

    async def _process(self, request: Request) -> Response:
        name = str(request.path_params["process"])
        return await self._answer(request, lambda view: model.task_manager(view, name))

    def _of_view(self, answer: _OfView) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return await self._answer(request, answer)

        return endpoint

    def _of_job(self, answer: _OfJob) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            job = await job_of(self._watch, request.path_params["job"])
            return await self._answer(request, lambda view: answer(view.jobs.get(job.job_id, job), request))

        return endpoint

    async def _answer(self, request: Request, answer: _OfView) -> Response:
        view = await self._watch.view()
        if view is not self._view:
            self._view = view
            self._answers = {}
        key = f"{request.url.path}?{request.url.query}"
        body = self._answers.get(key)
        if body is None:
            body = as_json(answer(view))
            if len(self._answers) < ANSWERS_MAX:
                self._answers[key] = body
        return Response(body, media_type="application/json")


async def job_of(watch: JobWatch, job_id: str) -> SeenJob:
    """Returns the job with this id. Raises RefusedError (404) if it is unknown."""
    job = await watch.job(job_id)
    if job is None:
        raise RefusedError(
            404,
            f"Job {quoted(job_id)} not found: it does not run here, and did not run recently; /jobs lists the known "
            "ones",
        )
    return job


def _named(request: Request) -> list[str] | None:
    """Returns the names of metrics that a client has chosen with `get`, or None if it has not."""
    given = request.query_params.get("get")
    return None if given is None else [name for name in given.split(",") if name][:ANSWERS_MAX]


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX):
        raise bad_request(f"{what} is {quoted(text)!r}: give a whole number")
    return int(text)


def _checkpoint(request: Request) -> int:
    return _number(request.path_params["checkpoint"], "the number of the checkpoint")


def _newest(job: SeenJob, request: Request) -> Any:
    status = request.query_params.get("status")
    if status not in (None, "COMPLETED", "FAILED"):
        raise bad_request(f"status is {quoted(status)!r}: give COMPLETED or FAILED")
    return model.checkpoint_details(job, model.newest_checkpoint(job, status))


def _exceptions(job: SeenJob, request: Request) -> Any:
    limit = request.query_params.get("maxExceptions")
    return model.exceptions(job) if limit is None else model.exceptions(job, _number(limit, "maxExceptions"))


def _vertex(request: Request) -> str:
    return str(request.path_params["vertex"])


@dataclass(frozen=True, slots=True)
class Wanted:
    """A validated request of a client. `ends`: whether the job ends with the savepoint."""

    trigger_id: str
    target: str | None = None
    savepoint_format: SavepointFormat = SavepointFormat.CANONICAL
    ends: bool = False
    drain: bool = False


_Parse = Callable[[bytes], Wanted]


class Changing:
    """The routes of one server that change a job: checkpoint, savepoint, stop, cancel, and deletion of savepoints."""

    def __init__(self, watch: JobWatch) -> None:
        self._watch = watch
        self._disposals: dict[str, _Disposal] = {}

    def routes(self, prefix: str) -> list[Route]:
        job = f"{prefix}/jobs/{{job}}"
        return [
            Route(f"{job}/savepoints", self._trigger_endpoint(savepoint_wanted), methods=["POST"]),
            Route(f"{job}/stop", self._trigger_endpoint(stop_wanted), methods=["POST"]),
            Route(f"{job}/checkpoints", self._trigger_endpoint(checkpoint_wanted), methods=["POST"]),
            Route(f"{job}/savepoints/{{trigger}}", self._result_endpoint(_savepoint_result), methods=["GET"]),
            Route(f"{job}/checkpoints/{{trigger}}", self._result_endpoint(_checkpoint_result), methods=["GET"]),
            Route(job, self._cancel, methods=["PATCH"]),
            Route(f"{prefix}/savepoint-disposal", self._dispose, methods=["POST"]),
            Route(f"{prefix}/savepoint-disposal/{{trigger}}", self._disposed, methods=["GET"]),
        ]

    async def _dispose(self, request: Request) -> Response:
        trigger_id, path = disposal_wanted(await request.body())
        before = self._disposals.get(trigger_id)
        if before is None:
            if sum(not each.deletion.done() for each in self._disposals.values()) >= OPEN_MAX:
                raise RefusedError(
                    429, f"{OPEN_MAX} savepoints are being deleted already; try again later", {"Retry-After": "5"}
                )
            self._disposals[trigger_id] = _Disposal(path, asyncio.create_task(self._delete(path)))
            over = [name for name, each in self._disposals.items() if each.deletion.done()]
            for name in over[: max(0, len(self._disposals) - KEPT_MAX)]:
                del self._disposals[name]
        elif before.path != path:
            raise RefusedError(409, f"triggerId {trigger_id} belongs to another request already; use a new one")
        return json_answer({"request-id": trigger_id}, 202)

    async def _delete(self, path: str) -> str | None:
        """Deletes a savepoint. Returns the reason if that was impossible, or None on success."""
        try:
            await self._watch.delete_savepoint(path)
        except TidegateError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 (reported to the client as a fault of the server)
            log_failure(log, f"savepoint {path} could not be deleted", error)
            return FAULT
        return None

    async def _disposed(self, request: Request) -> Response:
        trigger_id = trigger_id_of(request.path_params["trigger"])
        disposal = self._disposals.get(trigger_id)
        if disposal is None:
            raise RefusedError(404, f"request {trigger_id} is unknown, or no longer kept. Trigger it again")
        if not disposal.deletion.done():
            return json_answer({"status": {"id": "IN_PROGRESS"}})
        failure = disposal.deletion.result()
        operation = {} if failure is None else {"failure-cause": _cause(failure)}
        return json_answer({"status": {"id": "COMPLETED"}, "operation": operation})

    def _trigger_endpoint(self, parse: _Parse) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            job = await job_of(self._watch, request.path_params["job"])
            wanted = parse(await request.body())
            kind = _kind(wanted, parse)
            before = self._watch.triggers.get(wanted.trigger_id)
            if before is None:
                await self._ask(job, wanted, kind)
            elif (before.job_id, before.kind) != (job.job_id, kind):
                raise RefusedError(
                    409, f"triggerId {wanted.trigger_id} belongs to another request already; use a new one"
                )
            return json_answer({"request-id": wanted.trigger_id}, 202)

        return endpoint

    async def _ask(self, job: SeenJob, wanted: Wanted, kind: SnapshotKind) -> None:
        self._check_running(job)
        if len(self._watch.triggers.open_of(job.job_id)) >= OPEN_MAX:
            raise RefusedError(
                429, f"job {job.job_id} has {OPEN_MAX} open requests already; try again later", {"Retry-After": "5"}
            )
        target = (wanted.target or job.snapshot.card.savepoints) if kind.is_savepoint else None
        if kind.is_savepoint and target is None:
            raise bad_request(
                "the savepoint has no target: give target-directory (targetDirectory to stop), or set "
                "state.savepoints.dir"
            )
        await self._watch.request(job.job_id, wanted.trigger_id, SnapshotRequest(kind, target, wanted.savepoint_format))

    def _result_endpoint(self, describe: Callable[[Answer], dict[str, Any]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            trigger_id = trigger_id_of(request.path_params["trigger"])
            trigger = self._watch.triggers.get(trigger_id)
            if trigger is None or trigger.job_id != request.path_params["job"]:
                raise RefusedError(404, f"request {trigger_id} is unknown, or no longer kept. Trigger it again")
            await self._watch.view()
            trigger = self._watch.triggers.get(trigger_id) or trigger
            if trigger.answer is None:
                return json_answer({"status": {"id": "IN_PROGRESS"}})
            return json_answer({"status": {"id": "COMPLETED"}, "operation": describe(trigger.answer)})

        return endpoint

    async def _cancel(self, request: Request) -> Response:
        job = await job_of(self._watch, request.path_params["job"])
        mode = request.query_params.get("mode", "cancel")
        if mode != "cancel":
            raise bad_request(
                f"mode is {quoted(mode)!r}: give cancel. To stop with a savepoint: POST /jobs/{job.job_id}/stop"
            )
        self._check_running(job)
        await self._watch.cancel(job.job_id)
        return json_answer({}, 202)

    def _check_running(self, job: SeenJob) -> None:
        if job.over:
            raise RefusedError(
                409, f"job {job.job_id} is {job_state(job)}: it takes no more requests; start it again first"
            )


@dataclass(frozen=True, slots=True)
class _Disposal:
    """A deletion of a savepoint that a client has requested. The result of `task` is the reason of a failure, or
    None.
    """

    path: str
    deletion: asyncio.Task[str | None]


def _kind(wanted: Wanted, parse: _Parse) -> SnapshotKind:
    if parse is checkpoint_wanted:
        return SnapshotKind.CHECKPOINT
    if not wanted.ends:
        return SnapshotKind.SAVEPOINT
    return SnapshotKind.TERMINATE if wanted.drain else SnapshotKind.SUSPEND


def _savepoint_result(answer: Answer) -> dict[str, Any]:
    if answer.checkpoint_id is None:
        return {"failure-cause": _cause(answer.error)}
    return {"location": answer.path}


def _checkpoint_result(answer: Answer) -> dict[str, Any]:
    if answer.checkpoint_id is None:
        return {"failureCause": _cause(answer.error)}
    return {"checkpointId": answer.checkpoint_id}


def _cause(reason: str | None) -> dict[str, str]:
    return {"class": "tidegate.CheckpointError", "stack-trace": reason or "no reason was reported"}


_TRIGGER = re.compile(r"[0-9a-f]{32}")
_SAVEPOINT = {"target-directory": str, "cancel-job": bool, "formatType": str, "triggerId": str}
_STOP = {"targetDirectory": str, "drain": bool, "formatType": str, "triggerId": str}
_DISPOSAL = {"savepoint-path": str, "triggerId": str}
_CHECKPOINT = {"checkpointType": str, "triggerId": str}
_CHECKPOINT_TYPES = ("CONFIGURED", "FULL", "INCREMENTAL")


def savepoint_wanted(body: bytes) -> Wanted:
    """Parses the body of `POST /jobs/<id>/savepoints`. Raises RefusedError."""
    fields = _object(body, _SAVEPOINT)
    target = _target(fields.get("target-directory"), "target-directory")
    return Wanted(_trigger(fields), target, _format(fields), ends=fields.get("cancel-job", False))


def stop_wanted(body: bytes) -> Wanted:
    """Parses the body of `POST /jobs/<id>/stop`. Raises RefusedError."""
    fields = _object(body, _STOP)
    target = _target(fields.get("targetDirectory"), "targetDirectory")
    return Wanted(_trigger(fields), target, _format(fields), ends=True, drain=fields.get("drain", False))


def checkpoint_wanted(body: bytes) -> Wanted:
    """Parses the body of `POST /jobs/<id>/checkpoints`. Raises RefusedError."""
    fields = _object(body, _CHECKPOINT)
    kind = fields.get("checkpointType", "CONFIGURED")
    if kind not in _CHECKPOINT_TYPES:
        raise bad_request(f"checkpointType is {quoted(kind)!r}: give one of {', '.join(_CHECKPOINT_TYPES)}")
    if kind != "CONFIGURED":
        raise bad_request(
            f"checkpointType {kind} is not supported: the job's settings decide. Give CONFIGURED, or omit it"
        )
    return Wanted(_trigger(fields))


def disposal_wanted(body: bytes) -> tuple[str, str]:
    """Parses the body of `POST /savepoint-disposal`. Returns the trigger id and the path. Raises RefusedError."""
    fields = _object(body, _DISPOSAL)
    path = _target(fields.get("savepoint-path"), "savepoint-path")
    if path is None:
        raise bad_request("savepoint-path is missing: give the path of the savepoint to delete")
    if not parse_pointer(path).savepoint:  # Raises ConfigurationError: status 400.
        raise bad_request(
            f"savepoint-path is {quoted(path)!r}, a checkpoint: a job deletes its own checkpoints. "
            "After its end use `tidegate checkpoints delete`"
        )
    return _trigger(fields), path


def trigger_id_of(text: str) -> str:
    """Returns a trigger id from a URL path. Raises RefusedError if its form is wrong."""
    if not _TRIGGER.fullmatch(text):
        raise bad_request(f"{quoted(text)!r} is not a triggerId: give 32 hexadecimal digits in lower case")
    return text


def _object(body: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    """Parses a body as a JSON object that has only these fields.

    An empty body is an empty object; fields with null are dropped.
    """
    if not body.strip():
        return {}
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(
            f"the body is not JSON: {quoted(str(error))}; send an object with {_names(fields)}"
        ) from error
    if not isinstance(parsed, dict):
        raise bad_request(f"the body is a {type(parsed).__name__}: give an object with {_names(fields)}")
    for name, value in parsed.items():
        if name not in fields:
            raise bad_request(f"unknown field {quoted(name)!r}: give only {_names(fields)}")
        if value is not None and type(value) is not fields[name]:
            what = "true or false" if fields[name] is bool else "a text"
            raise bad_request(f"{name} is a {type(value).__name__}: give {what}")
    return {name: value for name, value in parsed.items() if value is not None}


def _names(fields: Mapping[str, type]) -> str:
    return ", ".join(fields)


def _trigger(fields: Mapping[str, Any]) -> str:
    return trigger_id_of(fields["triggerId"]) if "triggerId" in fields else uuid.uuid4().hex


def _format(fields: Mapping[str, Any]) -> SavepointFormat:
    given = fields.get("formatType", "CANONICAL")
    try:
        return SavepointFormat[given]
    except KeyError:
        raise bad_request(f"formatType is {quoted(given)!r}: give CANONICAL or NATIVE") from None


def _target(given: str | None, name: str) -> str | None:
    if given is None:
        return None
    if not given or not given.isprintable() or len(given) > TARGET_CHARACTERS_MAX:
        most = f"with {TARGET_CHARACTERS_MAX} characters at most"
        raise bad_request(f"{name} is {quoted(given)!r}: give a folder or a URL, {most}")
    if not given.startswith("/") and "://" not in given:
        raise bad_request(f"{name} is {quoted(given)!r}: give a whole path, or a URL such as s3://bucket/folder")
    check_savepoint_target(given, f"{name}: the savepoint")  # Raises ConfigurationError: status 400.
    return given


class RefusedError(Exception):
    """Raised if a request is refused. The text is the reason."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = headers


def error_answer(request: Request, error: Exception) -> Response:
    """Returns the response for an error that a handler raised."""
    status = 500
    headers = None
    reason = str(error) if isinstance(error, ERRORS) else FAULT
    match error:
        case RefusedError():
            status = error.status
            headers = error.headers
        case BodyTooLargeError():
            status = 413
            headers = {"Connection": "close"}
        case NotKnown():
            status = 404
        case ConfigurationError():
            status = 400
        case NotReachedError():
            status = 503
            headers = {"Retry-After": "2"}
        case HTTPException():
            status = error.status_code
            headers = error.headers
            reason = f"{request.method} {quoted(request.url.path)}: {error.detail}"
    return Response(error_body(reason), status, headers, media_type="application/json")


def bad_request(reason: str) -> RefusedError:
    """Returns the error for an invalid request (400)."""
    return RefusedError(400, reason)


def json_answer(content: object, status: int = 200) -> Response:
    """Returns a response with the content as JSON."""
    return Response(as_json(content), status, media_type="application/json")


def as_json(content: object) -> bytes:
    """Returns the content as JSON bytes. Raises ValueError for NaN and infinity."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def quoted(text: str) -> str:
    """Returns the text of a client for an error message: cut off, and without control characters."""
    cut = text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}…"
    return "".join(character if character.isprintable() else "?" for character in cut)


ERRORS = (RefusedError, BodyTooLargeError, NotKnown, ConfigurationError, NotReachedError, HTTPException)
"""Errors whose text is sent to clients. Any other error is a fault of the server, which the gate logs."""
