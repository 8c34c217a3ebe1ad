"""`page_routes`: the pages of a server, of what a server knows of jobs (`JobWatch`). They only read.

Addresses inside of pages are relative, so they work behind a proxy that puts something in front of them. A request of
htmx gets the part of a page that changes, without its frame.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Protocol

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from tidegate.web import model
from tidegate.web.jobs import NotReachedError
from tidegate.web.page.pages import Answer, JobAnswers, checkpoint_page, job_page, jobs_page, problem_page
from tidegate.web.seen_job import SeenJob, View

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Of every answer: nothing comes from elsewhere, and no script or style stands in a page itself."""

_STATIC = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "htmx.min.js": "text/javascript",
    "htmx.LICENSE.txt": "text/plain",
    "icon.svg": "image/svg+xml",
}
"""What is served, by its name: nothing else in the folder, and no path."""


NUMBER_DIGITS_MAX = 18


class Views(Protocol):
    """Who knows the jobs."""

    async def view(self) -> View:
        """All jobs as of about now. Raises NotReachedError."""
        ...

    async def job(self, job_id: str) -> SeenJob | None:
        """The job of this id, or None if there is none. Raises NotReachedError."""
        ...


def page_routes(views: Views) -> list[BaseRoute]:
    """The routes of the pages."""
    folder = files("tidegate.web.page") / "static"
    contents = {name: (folder / name).read_bytes() for name in _STATIC}

    async def root(request: Request) -> Response:
        return RedirectResponse("ui/", status_code=307, headers=HEADERS)

    async def jobs(request: Request) -> Response:
        return _html(jobs_page(model.jobs_overview(await views.view()), _is_part(request)))

    async def job(request: Request) -> Response:
        found = await views.job(request.path_params["jid"])
        return _unknown_job(request, "../") if found is None else _html(job_page(_answers(found), _is_part(request)))

    async def checkpoint(request: Request) -> Response:
        found = await views.job(request.path_params["jid"])
        return _unknown_job(request, "../../../") if found is None else _checkpoint(request, found)

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in contents:
            return _html(problem_page("Not found", f"There is no file {name}", "../"), status=404)
        headers = {**HEADERS, "cache-control": "no-cache"}
        return Response(contents[name], media_type=_STATIC[name], headers=headers)

    return [
        Route("/", root),
        Route("/ui", root),
        Route("/ui/", _reached(jobs, "./")),
        Route("/ui/jobs/{jid}", _reached(job, "../")),
        Route("/ui/jobs/{jid}/checkpoints/{number}", _reached(checkpoint, "../../../")),
        Route("/ui/static/{name}", static),
    ]


def _reached(handler: Callable[[Request], Awaitable[Response]], base: str) -> Callable[[Request], Awaitable[Response]]:
    """The handler, and a page that says so while nobody has told of the jobs."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except NotReachedError as error:
            return _html(problem_page("Not reached", str(error), base), status=503)

    return handle


def _answers(job: SeenJob) -> JobAnswers:
    return JobAnswers(
        details=model.job_details(job),
        rates=model.vertex_rates(job),
        tasks=model.task_processes(job),
        checkpoints=model.checkpoints(job),
        recoveries=model.recoveries(job),
        exceptions=model.exceptions(job),
        timeline=model.timeline(job),
        last_hour=model.last_hour(job),
        configuration=model.configuration(job),
    )


def _checkpoint(request: Request, job: SeenJob) -> Response:
    given = request.path_params["number"]
    try:
        if not given.isdecimal() or len(given) > NUMBER_DIGITS_MAX:
            raise model.NotKnown("A checkpoint has a number, such as 17.")
        number = int(given)
        checkpoint = model.checkpoint_details(job, number)
    except model.NotKnown as error:
        return _html(problem_page(f"Checkpoint {given} is not known", str(error), "../../../"), status=404)
    subtasks: dict[str, Answer | None] = {}
    for vertex in checkpoint["tasks"]:
        try:
            subtasks[vertex] = model.checkpoint_subtasks(job, number, vertex)
        except model.NotKnown:
            subtasks[vertex] = None
    return _html(checkpoint_page(model.job_details(job), checkpoint, subtasks, _is_part(request)))


def _is_part(request: Request) -> bool:
    return request.headers.get("hx-request") == "true"


def _unknown_job(request: Request, base: str) -> Response:
    text = f"There is no job {request.path_params['jid']} here. It may have ended a while ago, or runs on another Ray."
    return _html(problem_page("Unknown job", text, base), status=404)


def _html(text: str, status: int = 200) -> Response:
    return HTMLResponse(text, status, headers={**HEADERS, "cache-control": "no-store", "vary": "HX-Request"})
