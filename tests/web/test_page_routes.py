"""The pages of a server: their addresses, their answers, and what their headers forbid."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urljoin

import pytest
from asgi_client import Client, Reply
from fixture_jobs import failed_job, restarting_job, running_job, view_of
from page_html import Read
from starlette.applications import Starlette

from tidegate.web.jobs import NotReachedError, SeenJob, View
from tidegate.web.page.pages import page_routes

JOB = "main-1a2b3c4d"


class Fixed:
    """Knows what it was given."""

    def __init__(self, view: View | None) -> None:
        self._view = view

    async def view(self) -> View:
        """That, if there was something."""
        if self._view is None:
            raise NotReachedError("the jobs have not answered yet; ask again")
        return self._view

    async def job(self, job_id: str) -> SeenJob | None:
        """One of that."""
        return (await self.view()).job(job_id)


def get(path: str, view: View | None = None, **headers: str) -> Reply:
    """Ask for a page of a server that knows two jobs, or what it is given."""
    return ask(Fixed(view or view_of(running_job(), failed_job())), "GET", path, headers)


def ask(views: Fixed, method: str, path: str, headers: Mapping[str, str] | None = None) -> Reply:
    """Ask a server with these views."""
    return Client(Starlette(routes=page_routes(views))).ask(method, path, headers=headers)


def text(reply: Reply) -> str:
    """What the page says."""
    return reply.body.decode()


PAGES = ["/ui/", f"/ui/jobs/{JOB}", f"/ui/jobs/{JOB}/checkpoints/20", f"/ui/jobs/{JOB}/checkpoints/21"]


@pytest.mark.parametrize("path", PAGES)
def test_pages_of_a_real_read_model_are_whole(path: str) -> None:
    """What the model says is what the templates expect."""
    answer = get(path)
    assert answer.status == 200
    assert Read(text(answer)).unbalanced == []
    assert text(get(path, hx_request="true")) in text(answer)


def test_every_job_has_a_page() -> None:
    """Running, restarting, failed."""
    for job in (running_job(), restarting_job(), failed_job()):
        answer = get(f"/ui/jobs/{job.job_id}", view_of(job))
        assert (answer.status, job.snapshot.status.value.upper() in text(answer)) == (200, True)


def test_every_checkpoint_of_the_history_has_a_page() -> None:
    """Links of the list lead somewhere, the oldest included, of which subtasks are forgotten."""
    links = {
        e.attributes["href"]
        for e in Read(text(get(f"/ui/jobs/{JOB}"))).all("a")
        if "checkpoints/" in e.attributes["href"]
    }
    assert len(links) == 21
    assert {get(urljoin("/ui/jobs/x", link)).status for link in links} == {200}
    assert "no longer kept" in text(get(f"/ui/jobs/{JOB}/checkpoints/1"))


@pytest.mark.parametrize("path", [*PAGES, "/", "/ui/static/page.js", "/ui/jobs/unknown", "/ui/static/nothing"])
def test_nothing_comes_from_elsewhere(path: str) -> None:
    """Each answer says so, an error too."""
    headers = get(path).headers
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    if path in PAGES:
        assert (headers["cache-control"], headers["vary"]) == ("no-store", "HX-Request")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/ui/jobs/<b>x", "There is no job &lt;b&gt;x here"),
        ("/ui/jobs/unknown/checkpoints/1", "There is no job unknown here"),
        (f"/ui/jobs/{JOB}/checkpoints/999", "Checkpoint 999 is not known"),
        (f"/ui/jobs/{JOB}/checkpoints/x", "Give the number of a checkpoint"),
        (f"/ui/jobs/{JOB}/checkpoints/{'9' * 5_000}", "Give the number of a checkpoint"),
        ("/ui/static/routes.py", "There is no file routes.py"),
        ("/ui/static/VENDORED.md", "There is no file VENDORED.md"),
    ],
)
def test_what_is_not_there_is_said_in_words(path: str, said: str) -> None:
    """A page with a way back, and no trace of the server."""
    answer = get(path)
    assert answer.status == 404
    assert said in text(answer)


def test_a_server_that_knows_nothing_yet_says_so() -> None:
    """The coordinators have not answered."""
    answer = ask(Fixed(None), "GET", "/ui/")
    assert (answer.status, "the jobs have not answered yet" in text(answer)) == (503, True)


def test_pages_only_read() -> None:
    """Another method is refused."""
    assert {ask(Fixed(view_of(running_job())), "POST", path).status for path in PAGES} == {405}


@pytest.mark.parametrize("path", ["/", "/ui"])
def test_the_root_leads_to_the_jobs(path: str) -> None:
    """By a relative way, which works behind a proxy."""
    answer = get(path)
    assert (answer.status, answer.headers["location"]) == (307, "ui/")


@pytest.mark.parametrize("name", ["page.css", "page.js", "htmx.min.js", "htmx.LICENSE.txt", "icon.svg"])
def test_static_files_are_served(name: str) -> None:
    """Those that pages name, and the licence."""
    answer = get(f"/ui/static/{name}")
    assert (answer.status, len(answer.body) > 100) == (200, True)
