"""What one can read: each path, and the function of the model that answers it.

An answer is made once for each view of the jobs, however many clients ask for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.web import model
from tidegate.web.rest.answers import RefusedError, as_json, bad_request, json_answer, quoted
from tidegate.web.seen_job import SeenJob, View
from tidegate.web.watch import JobWatch

ANSWERS_MAX = 500
"""Answers that are kept for the present view."""
DIGITS_MAX = 18

_OfView = Callable[[View], Any]
_OfJob = Callable[[SeenJob, Request], Any]


async def job_of(watch: JobWatch, job_id: str) -> SeenJob:
    """The job of this id. RefusedError (404) if there is none."""
    job = await watch.job(job_id)
    if job is None:
        raise RefusedError(404, f"Job {quoted(job_id)} not found: it does not run on this Ray, and has not lately")
    return job


def _named(request: Request) -> list[str] | None:
    """The metrics that a client chooses with `get`; None: it chooses none."""
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
        raise bad_request(f"status is {quoted(status)!r}: it is COMPLETED or FAILED")
    return model.checkpoint_details(job, model.newest_checkpoint(job, status))


def _exceptions(job: SeenJob, request: Request) -> Any:
    limit = request.query_params.get("maxExceptions")
    return model.exceptions(job) if limit is None else model.exceptions(job, _number(limit, "maxExceptions"))


def _vertex(request: Request) -> str:
    return str(request.path_params["vertex"])


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
    "/jobs/{job}/exceptions": _exceptions,
    "/jobs/{job}/metrics": lambda job, request: model.job_metrics(job, _named(request)),
    "/jobs/{job}/timeline": lambda job, _: model.timeline(job),
    "/jobs/{job}/recoveries": lambda job, _: model.recoveries(job),
    "/jobs/{job}/checkpoints": lambda job, _: model.checkpoints(job),
    "/jobs/{job}/checkpoints/config": lambda job, _: model.checkpoint_config(job),
    "/jobs/{job}/checkpoints/details/latest": _newest,
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
    """The routes of one server for reading."""

    def __init__(self, watch: JobWatch) -> None:
        self._watch = watch
        self._view: View | None = None
        self._answers: dict[str, bytes] = {}

    def routes(self, prefix: str) -> list[Route]:
        """All of them."""
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
            self._view, self._answers = view, {}
        key = f"{request.url.path}?{request.url.query}"
        body = self._answers.get(key)
        if body is None:
            body = as_json(answer(view))
            if len(self._answers) < ANSWERS_MAX:
                self._answers[key] = body
        return Response(body, media_type="application/json")
