"""The page of a job in a real browser: it follows its job, on a wide screen and on a phone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from urllib.parse import urlsplit

import pytest
import uvicorn
from debian_program import NotHadError
from fixture_jobs import JOB_ID, failed_job, restarting_job, running_job, view_of
from headless_chromium import chromium, find
from playwright.sync_api import Browser, Page, expect
from starlette.applications import Starlette
from waiting import until

from tidegate.actors.runtimes.job_snapshot import PlanEdge, PlanVertex, TaskNow
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import SubtaskIndex, VertexId
from tidegate.web.jobs import NotReachedError, SeenJob, View
from tidegate.web.page.pages import page_routes

EVENTS_MS = 60_000
"""How long a browser may take, on a machine that is busy with other things, for what it does at once."""

FLAWS = """
    svg => {
        const flaws = [];
        const frame = svg.getBoundingClientRect();
        if (frame.width !== svg.viewBox.baseVal.width) flaws.push('the picture is scaled');
        const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
        const texts = [...svg.querySelectorAll('text')].filter(text => text.textContent.trim());
        for (const text of texts) {
            const own = text.getBoundingClientRect();
            const box = text.closest('.box');
            const room = box ? box.querySelector('.frame').getBoundingClientRect() : frame;
            if (own.left < room.left || own.right > room.right || own.top < room.top || own.bottom > room.bottom)
                flaws.push(`cut off: ${text.textContent}`);
            if (parseFloat(getComputedStyle(text).fontSize) < 10) flaws.push(`small: ${text.textContent}`);
            for (const name of box && !text.matches('.name') ? box.querySelectorAll('.name') : [])
                if (!apart(own, name.getBoundingClientRect())) flaws.push(`covered: ${text.textContent}`);
        }
        return flaws;
    }
"""
"""Finds what of a picture cannot be read: texts that leave their box, are small, or lie on a name."""

COUNT = "window.asked = 0; const ask = window.fetch; window.fetch = (...what) => { asked += 1; return ask(...what); };"
"""Counts what a page asks for."""


class Changing:
    """Knows one job, which the test changes; None: nobody has told of it."""

    def __init__(self) -> None:
        self.known: SeenJob | None = running_job()

    async def view(self) -> View:
        """That job."""
        if self.known is None:
            raise NotReachedError("the coordinator does not answer")
        return view_of(self.known)

    async def job(self, job_id: str) -> SeenJob | None:
        """The same."""
        return (await self.view()).job(job_id)


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    try:
        find()
    except NotHadError as error:
        pytest.skip(f"there is no Chromium here: {error}")
    with chromium() as started:
        yield started


@contextmanager
def served(views: Changing) -> Iterator[str]:
    """The address of a server with the pages."""
    config = uvicorn.Config(Starlette(routes=page_routes(views)), port=0, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until("the server listens", lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(240)


@contextmanager
def opened(browser: Browser, address: str, width: int) -> Iterator[Page]:
    """The page of the job, whose clock the test sets; what the browser complains about fails the test."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme="dark")
    page = context.new_page()
    page.set_default_timeout(EVENTS_MS)
    complaints: list[str] = []
    elsewhere: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if "Content Security" in said.text else None)
    page.on("dialog", lambda dialog: (complaints.append("a dialog"), dialog.dismiss()))
    page.on("request", lambda request: elsewhere.append(request.url) if not request.url.startswith(address) else None)
    page.add_init_script(COUNT)
    page.clock.install()
    page.goto(f"{address}/ui/jobs/{JOB_ID}")
    yield page
    context.close()
    assert (complaints, elsewhere) == ([], [])


def hostile(job: SeenJob) -> SeenJob:
    """The same, with a name that would do something if it were not escaped."""
    name = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    vertices = tuple(replace(vertex, name=name) for vertex in job.about.vertices)
    return replace(job, about=replace(job.about, vertices=vertices))


def long_job(names: Sequence[str]) -> SeenJob:
    """A job whose graph is a chain of these vertices."""
    return job_of(names, list(pairwise(names)))


def broad_job(source: str, names: Sequence[str], sink: str) -> SeenJob:
    """A job whose source feeds all of these vertices, which feed one sink."""
    edges = [(source, name) for name in names] + [(name, sink) for name in names]
    return job_of([source, *names, sink], edges)


def job_of(vertex_names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> SeenJob:
    """A job with these vertices and edges."""
    job = running_job()
    names = [VertexId(name) for name in vertex_names]
    vertices = tuple(PlanVertex(name, str(name), 16, (str(name),)) for name in names)
    edges = tuple(PlanEdge(VertexId(one), VertexId(other), "REBALANCE") for one, other in pairs)
    tasks = tuple(TaskNow(TaskId(name, SubtaskIndex(0)), "RUNNING", 1, 4_000, "node-a") for name in names)
    about = replace(job.about, vertices=vertices, edges=edges)
    return replace(job, about=about, snapshot=replace(job.snapshot, about=about, tasks=tasks, vertices=()))


def hide(page: Page, hidden: bool) -> None:
    """The tab goes behind another one, or comes back."""
    page.evaluate(
        "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        hidden,
    )


@pytest.mark.slow
def test_the_page_follows_its_job(browser: Browser) -> None:
    """It shows what changes, keeps what is open, rests while it is hidden, and says when it is not answered."""
    expect.set_options(timeout=EVENTS_MS)
    views = Changing()
    with served(views) as address:
        with opened(browser, address, 1_280) as page:
            _follow(page, views)
        views.known = hostile(running_job())
        with opened(browser, address, 360) as page:
            _on_a_phone(page)


@pytest.mark.slow
def test_a_wide_graph_scrolls_by_itself(browser: Browser) -> None:
    """Of twenty steps the last one can be reached, by wheel and by keyboard, while the page stays where it is."""
    expect.set_options(timeout=EVENTS_MS)
    views = Changing()
    views.known = long_job([f"step-{place}" for place in range(20)])
    with served(views) as address, opened(browser, address, 1_280) as page:
        graph, last = page.locator(".scroll[aria-label=Graph]"), page.locator("svg.graph.wide .box").last
        assert page.locator("svg.graph.wide").bounding_box()["width"] > 4_000  # type: ignore[index]
        expect(last).not_to_be_in_viewport()
        graph.evaluate("region => { region.scrollLeft = region.scrollWidth; }")
        expect(last).to_be_in_viewport(ratio=1)
        graph.evaluate("region => { region.scrollLeft = 0; }")
        expect(last).not_to_be_in_viewport()
        last.focus()
        expect(last).to_be_in_viewport(ratio=1)
        assert page.evaluate("[document.scrollingElement.scrollWidth, scrollX]") == [1_280, 0]


@pytest.mark.slow
def test_graphs_are_whole_and_readable_at_every_width(browser: Browser) -> None:
    """A long and a broad graph scroll in their card: the page does not, and each box can be reached with its name."""
    expect.set_options(timeout=EVENTS_MS)
    views = Changing()
    chain = [f"enrich orders with customers {place}" for place in range(14)]
    windows = [f"window sum by customer {place}" for place in range(8)]
    # On a phone the chain goes down. Eight boxes beside each other do not fit, so they go down instead of the ranks.
    cases = [(long_job(chain), chain, (170, 2_200)), (broad_job("orders", windows, "totals"), windows, (700, 1_100))]
    with served(views) as address:
        for job, names, phone_size in cases:
            views.known = job
            for width in (1_400, 1_000, 400):
                with opened(browser, address, width) as page:
                    graph = page.locator("svg.graph >> visible=true")
                    expect(graph).to_have_count(1)
                    assert graph.evaluate(FLAWS) == []
                    shown = [" ".join(box.locator(".name").all_text_contents()) for box in graph.locator(".box").all()]
                    assert set(names) <= set(shown)
                    for box in graph.locator(".box").all():
                        box.evaluate("box => box.scrollIntoView({block: 'center', inline: 'center'})")
                        expect(box).to_be_in_viewport(ratio=1)
                    assert page.evaluate("[document.scrollingElement.scrollWidth, scrollX]") == [width, 0]
                    size = graph.bounding_box()
                    assert size is not None
                    assert width > 400 or (size["width"] < phone_size[0] and size["height"] < phone_size[1])


def _follow(page: Page, views: Changing) -> None:
    state = page.locator(".head .state")
    connection = page.locator("#connection")
    expect(state).to_have_text("● RUNNING")
    expect(connection).to_have_text("live")
    expect(page.locator("svg.graph.wide")).to_be_visible()
    expect(page.locator("svg.graph.narrow")).to_be_hidden()

    # A part that somebody has opened stays open while the job changes around it.
    page.locator("#settings > summary").click()
    page.locator(".strip a").last.focus()
    views.known = restarting_job()
    page.clock.fast_forward(2_500)
    expect(state).to_have_text("↻ RESTARTING")
    expect(page).to_have_title("RESTARTING main - tidegate")
    assert page.locator("#settings").get_attribute("open") is not None

    # Without an answer the page says so, and asks less and less often.
    views.known = None
    page.clock.fast_forward(2_500)
    expect(connection).to_have_text("answer 503, asking again in 4 s")
    page.clock.fast_forward(4_500)
    expect(connection).to_have_text("answer 503, asking again in 8 s")
    expect(state).to_have_text("↻ RESTARTING")

    # A page that nobody sees asks for nothing, and at once when it is seen again.
    hide(page, True)
    before = page.evaluate("asked")
    views.known = running_job()
    page.clock.fast_forward(600_000)
    assert page.evaluate("asked") == before
    hide(page, False)
    assert page.evaluate("asked") == before + 1
    expect(state).to_have_text("● RUNNING")
    expect(connection).to_have_text("live")

    # The breakdown of a checkpoint is a link away, also by keyboard.
    page.locator(".history tbody a").nth(1).focus()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Checkpoint 20")
    expect(page.locator("svg.timeline").first).to_be_visible()
    assert urlsplit(page.url).path == f"/ui/jobs/{JOB_ID}/checkpoints/20"
    page.go_back()

    # What is over does not change, so nobody asks.
    views.known = replace(failed_job(), snapshot=replace(failed_job().snapshot, card=running_job().snapshot.card))
    page.clock.fast_forward(60_000)
    expect(state).to_have_text("✕ FAILED")
    expect(connection).to_have_text("over")
    before = page.evaluate("asked")
    page.clock.fast_forward(600_000)
    assert page.evaluate("asked") == before


def _on_a_phone(page: Page) -> None:
    expect(page.locator("svg.graph.narrow")).to_be_visible()
    expect(page.locator("svg.graph.wide")).to_be_hidden()
    expect(page.locator("tbody th").first).to_contain_text("<script>alert(1)</script>")
    assert page.evaluate("document.scrollingElement.scrollWidth") == 360
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
