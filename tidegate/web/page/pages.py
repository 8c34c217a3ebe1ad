"""The job pages: their routes (`page_routes`), and each page as HTML, rendered from the results of the model.

Rules:

- Pages only read. URLs inside of pages are relative, so they work behind a proxy that adds a prefix.
- The answer to a request of htmx is only the part of a page that changes, without its frame (`part`).
- Every value is escaped. A missing value is an error, not an empty text.

URLs: `/ui/`, `/ui/jobs/<id>`, `/ui/jobs/<id>/checkpoints/<n>`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from tidegate.web import model
from tidegate.web.jobs import NotReachedError, SeenJob, View
from tidegate.web.page import texts
from tidegate.web.page.checkpoints import COLUMN_NAMES, PHASES, breakdown_of, checkpoint_of, checkpoints_of
from tidegate.web.page.graph import draw_graph
from tidegate.web.page.jobs import (
    TASKS_MAX,
    charts_of,
    decisions_of,
    failures_of,
    header_of,
    job_lines,
    part_names,
    recoveries_of,
    settings_of,
    task_lines,
)

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Headers of every response: all content is from this server, and pages have no inline scripts or styles."""

_STATIC = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "htmx.min.js": "text/javascript",
    "htmx.LICENSE.txt": "text/plain",
    "icon.svg": "image/svg+xml",
}
"""The static files that are served, with their media types."""

NUMBER_DIGITS_MAX = 18

Answer = Mapping[str, Any]
"""The result of a function of the model."""


@dataclass(frozen=True, slots=True)
class JobAnswers:
    """The results of the model's functions about one job, for its page."""

    details: Answer
    rates: Mapping[str, Answer]
    tasks: Sequence[Answer]
    checkpoints: Answer
    recoveries: Answer
    exceptions: Answer
    timeline: Answer
    last_hour: Sequence[Answer]
    configuration: Sequence[Answer]


class Views(Protocol):
    """The source of the state of jobs for the pages, such as a `JobWatch`."""

    async def view(self) -> View:
        """Returns the current state of all jobs. Raises NotReachedError."""
        ...

    async def job(self, job_id: str) -> SeenJob | None:
        """Returns the job with this id, or None if there is none. Raises NotReachedError."""
        ...


def page_routes(views: Views) -> list[BaseRoute]:
    """Returns the routes of the pages."""
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
    """Returns a handler that answers a NotReachedError with an error page and status 503."""

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
            raise model.NotKnown("Give the number of a checkpoint, such as 17.")
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
    text = f"There is no job {request.path_params['jid']} here. It may have ended a while ago, or run on another Ray."
    return _html(problem_page("Unknown job", text, base), status=404)


def _html(text: str, status: int = 200) -> Response:
    return HTMLResponse(text, status, headers={**HEADERS, "cache-control": "no-store", "vary": "HX-Request"})


def jobs_page(overview: Answer, part: bool = False) -> str:
    """Returns the list of jobs as HTML, from the result of `jobs_overview`. `part`: without the frame."""
    lines = job_lines(overview)
    return render(
        "jobs_live.html" if part else "jobs.html", base="", jobs=lines, more=len(overview["jobs"]) - len(lines)
    )


def job_page(job: JobAnswers, part: bool = False) -> str:
    """Returns the page of one job as HTML. `part`: without the frame."""
    header = header_of(job.details)
    recoveries = recoveries_of(job.recoveries)
    return render(
        "job_live.html" if part else "job.html",
        base="../",
        here=f"./{texts.quoted(header.jid)}",
        links=f"./{texts.quoted(header.jid)}",
        now_ms=job.details["now"],
        header=header,
        graph=draw_graph(job.details, job.rates),
        tasks=task_lines(job.tasks),
        more_tasks=max(0, len(job.tasks) - TASKS_MAX),
        charts=charts_of(job.last_hour),
        checkpoints=checkpoints_of(job.checkpoints),
        column_names=COLUMN_NAMES,
        recoveries=recoveries,
        recovery_parts=part_names(recoveries),
        failures=failures_of(job.exceptions),
        decisions=decisions_of(job.timeline),
        settings=settings_of(job.configuration),
    )


def checkpoint_page(
    details: Answer, checkpoint: Answer, subtasks: Mapping[str, Answer | None], part: bool = False
) -> str:
    """Returns the page of one checkpoint as HTML. `subtasks`: by vertex, None if they are no longer stored."""
    names = {vertex["id"]: vertex["name"] for vertex in details["vertices"]}
    return render(
        "checkpoint_live.html" if part else "checkpoint.html",
        base="../../../",
        here=f"./{checkpoint['id']}",
        jid=details["jid"],
        name=texts.name(details["name"]),
        checkpoint=checkpoint_of(checkpoint),
        breakdown=breakdown_of(checkpoint, subtasks, names),
        phases=PHASES,
    )


def problem_page(title: str, text: str, base: str) -> str:
    """Returns an error page as HTML. `base`: relative path from the URL of the page to the list of jobs."""
    return render("problem.html", base=base, title=texts.name(title), text=texts.line(text))


def render(template: str, **values: object) -> str:
    """Renders a template with these values, and returns the text."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tidegate.web.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "size": lambda value: _unbroken(texts.size(value)),
        "span": lambda value: _unbroken(texts.span(value)),
        "count": texts.count,
        "rate": texts.rate,
        "percent": lambda value: _unbroken(texts.percent(value)),
        "clock": texts.clock,
        "moment": texts.moment,
        "machine_moment": texts.machine_moment,
        "ago": texts.ago,
        "bounded_line": texts.line,
        "quoted": texts.quoted,
    }
    environment.tests["known"] = texts.is_moment
    environment.globals["unknown"] = texts.UNKNOWN
    return environment


def _unbroken(text: str) -> str:
    """Replaces spaces, so that a number stays on one line with its unit."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")
