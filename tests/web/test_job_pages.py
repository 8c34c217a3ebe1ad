"""The pages as HTML: every template in every state, escaped, bounded, and whole."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import page_answers as answers
import pytest
from page_html import Element, Read

from tidegate.web.page.pages import checkpoint_page, job_page, jobs_page, problem_page

STATES = (
    "INITIALIZING",
    "CREATED",
    "RUNNING",
    "FAILING",
    "FAILED",
    "CANCELLING",
    "CANCELED",
    "FINISHED",
    "RESTARTING",
    "SUSPENDED",
    "RECONCILING",
)
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&lt;{{ 7 * 7 }}\u202e\x00"


def full_job() -> str:
    """A job to which everything has happened that a page shows."""
    history = [
        answers.checkpoint(20, "IN_PROGRESS"),
        answers.savepoint(19),
        answers.checkpoint(18, "FAILED", "declined by keyed (2/4): disk is full"),
        *(answers.checkpoint(n) for n in range(17, 0, -1)),
    ]
    restored = {"id": 17, "restore_timestamp": answers.NOW_MS - 5_000, "is_savepoint": False, "external_path": "x"}
    return job_page(
        answers.job(
            of_checkpoints=answers.checkpoints(*history, restored=restored),
            recoveries=[answers.recovery(2, over=False), answers.recovery()],
            failures=[answers.failure()],
            decisions=[answers.decision(), answers.decision("Checkpoint 18 failed", trouble=True)],
            tasks=[answers.task(), answers.task(1, "main/standby#0"), answers.task(2, None)],
            last_hour=[answers.sample(0), answers.sample(11, 1_500.0, None, None), answers.sample(22, None, 9_000)],
        )
    )


def full_checkpoint() -> str:
    """A checkpoint that waits for one subtask."""
    given, subtasks = answers.with_tasks(
        answers.checkpoint(17, "IN_PROGRESS"),
        orders=[answers.subtask(0), answers.subtask(1)],
        rates=[answers.subtask(0)],
        keyed=[answers.subtask(0, alignment=40), answers.pending(1)],
    )
    return checkpoint_page(answers.details(), given, subtasks | {"rates": None})


PAGES = {
    "jobs": lambda: jobs_page(answers.overview(*STATES)),
    "no job": lambda: jobs_page(answers.overview()),
    "job": full_job,
    "new job": lambda: job_page(answers.job(vertex_rates={})),
    "checkpoint": full_checkpoint,
    "problem": lambda: problem_page("Unknown job", "There is no job x here", "../"),
}


@pytest.fixture(params=PAGES, scope="module")
def page(request: pytest.FixtureRequest) -> Read:
    """Each page."""
    return Read(PAGES[request.param]())


def words(element: Element) -> str:
    """Its text on one line."""
    return " ".join(element.text.split())


def facts(page: Read) -> dict[str, str]:
    """What the lists of a page say, by their terms."""
    return dict(zip(map(words, page.all("dt")), map(words, page.all("dd")), strict=True))


def test_a_page_is_whole(page: Read) -> None:
    """Each element is closed, has an id of its own, and what is named by its id is there."""
    assert page.unbalanced == []
    ids = [e.attributes["id"] for e in page.elements if "id" in e.attributes]
    assert [name for name, number in Counter(ids).items() if number > 1] == []
    named = [e.attributes["aria-labelledby"] for e in page.elements if "aria-labelledby" in e.attributes]
    named += [e.attributes["href"][1:] for e in page.all("a") if e.attributes["href"].startswith("#")]
    named += re.findall(r"url\(#(\w+)\)", page.page)
    assert set(named) - set(ids) == set()


def test_a_page_obeys_its_own_policy(page: Read) -> None:
    """No style, script or handler stands in it, and nothing of it comes from elsewhere."""
    for element in page.elements:
        assert element.tag != "style"
        assert [name for name in element.attributes if name == "style" or name.startswith("on")] == []
        for name in ("src", "href", "action", "hx-get"):
            assert not re.match(r"\w+:|/", element.attributes.get(name, "")), element
    assert [e.text.strip() for e in page.all("script")] == ["", ""]


def test_a_page_can_be_used_without_seeing_it(page: Read) -> None:
    """One heading of the first order, no order left out, pictures and scrolled regions have names, tables heads."""
    orders = [int(e.tag[1]) for e in page.elements if re.fullmatch(r"h\d", e.tag)]
    assert orders[0] == 1
    assert orders.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(orders))
    pictures = [e for e in page.all("svg") if e.attributes.get("aria-hidden") != "true" and "x" not in e.attributes]
    assert [e for e in pictures if not (e.attributes.get("role") and e.attributes.get("aria-label"))] == []
    assert [
        e for e in page.elements if e.attributes.get("role") in {"img", "region"} and not e.attributes["aria-label"]
    ] == []
    assert [e for e in page.all("th") if e.attributes.get("scope") not in {"row", "col"}] == []
    assert [e for e in page.all("div", of="scroll") if e.attributes.get("tabindex") != "0"] == []


def test_a_slot_sharing_group_stands_beside_its_vertex() -> None:
    """In the table, and in the picture where the pointer rests; the default one nowhere."""
    details = answers.details()
    details["vertices"][2]["slotSharingGroupId"] = "<scoring>"
    shown = Read(job_page(answers.job(details)))
    heads = [words(e) for e in shown.all("th") if e.attributes.get("scope") == "row"]
    assert heads[:3] == ["source: orders", "source: rates", "sum by key slot sharing group <scoring>"]
    told = [words(e) for e in shown.all("title") if "slot sharing" in e.text]
    assert set(told) == {"sum by key: busy, slot sharing group <scoring>"}


@pytest.mark.parametrize("state", STATES)
def test_a_state_is_told_by_a_word_and_a_mark(state: str) -> None:
    """Not by a colour alone."""
    shown = Read(job_page(answers.job(answers.details(state)))).all("span", of="state")[0]
    assert re.fullmatch(rf"\S+ {state}", words(shown))


def test_the_head_says_how_the_job_is() -> None:
    """State, uptime, attempt, restarts, last checkpoint."""
    found = facts(Read(full_job()))
    assert found["Uptime"] == "42.0 s"
    assert (found["Attempt"], found["Restarts"]) == ("1", "1")
    assert found["Last checkpoint"] == "#19 40.9 s ago, 103 ms, 1.2 MB"
    assert found["Tasks"] == "7 running"


@pytest.mark.parametrize(
    ("state", "ours", "note"),
    [
        ("FAILED", {"reason": "ValueError: a row"}, "ValueError: a row"),
        ("RESTARTING", {"failure-cause": "keyed (2/4): lost"}, "Restarting: keyed (2/4): lost"),
        ("CREATED", {"waits-for": "2 more CPUs"}, "Waiting: 2 more CPUs"),
        ("RUNNING", {"stale-ms": 5_000}, "Its coordinator does not answer: what stands here is 5.0 s old."),
    ],
)
def test_the_head_says_what_is_wrong(state: str, ours: dict[str, object], note: str) -> None:
    """One line, before everything else."""
    page = Read(job_page(answers.job(answers.details(state, **ours))))
    assert words(page.one("p", of="note")) == note


@pytest.mark.parametrize("ours", [{"stale-ms": 4_999}, {"failure-cause": "of the attempt before"}, {}])
def test_a_job_that_is_well_has_no_note(ours: dict[str, object]) -> None:
    """Nor one whose coordinator was a little slow, or that runs again."""
    assert Read(job_page(answers.job(answers.details(**ours)))).all("p", of="note") == []


def test_the_graph_is_drawn_twice_and_told_once() -> None:
    """For wide and for narrow screens, of which one is shown, and as a table."""
    page = Read(full_job())
    assert [len(page.all("svg", of=kind)) for kind in ("wide", "narrow")] == [1, 1]
    assert len(page.all("a", of="box")) == 6
    box = page.all("a", of="pressed-high")[0]
    assert words(box) == (
        "source: orders: back-pressured: high source: orders back-pressured: high out 3.0/s busy 10%, pressed 80% ×2"  # noqa: RUF001
    )
    row = page.one("tr", id="vertex-2")
    assert words(row) == ("sum by key busy 4 running 12.3k 3.0 95 % 0 % 5 % 91,234 512 0 B 2026-11-23 18:39:56")


def test_each_task_is_shown_with_its_process() -> None:
    """Also where the name of the actor does not name the task, and where there is none."""
    rows = [words(row) for row in Read(full_job()).all("tr") if "sum by key (" in row.text]
    assert rows == [
        "sum by key (1/4) running 2 main/sum by key (1/4)#0 4711 a1b2c3d4e5f6…",
        "sum by key (2/4) running 2 main/standby#0 4711 a1b2c3d4e5f6…",
        "sum by key (3/4) scheduled 2 – – –",  # noqa: RUF001
    ]
    assert Read(job_page(answers.job())).all("details", id="tasks") == []
    many = job_page(answers.job(tasks=[answers.task(n) for n in range(1_000)]))
    assert "800 more are not shown" in many


def test_checkpoints_have_an_overview_a_strip_a_history_and_a_summary() -> None:
    """As Flink's page has, and the strip."""
    page = Read(full_job())
    found = facts(page)
    assert [found[name] for name in ("Triggered", "In progress", "Completed", "Failed", "Restored")] == [
        "20",
        "1",
        "18",
        "1",
        "1",
    ]
    assert found["Latest failed"].startswith("#18")
    assert "disk is full" in found["Latest failed"]
    assert "savepoint-main-0-19" in found["Latest savepoint"]
    assert found["Latest restore"] == "#17 5.0 s ago"
    strip = page.one("svg", of="strip")
    assert strip.attributes["aria-label"] == (
        "The last 20 checkpoints: 1 failed, the longest took 104 ms. The table below lists them."
    )
    assert strip.text.count("✕") == 1
    assert words(page.one("details", id="checkpoint-summary")).count("p99.9") == 1


def test_a_checkpoint_is_shown_by_subtask() -> None:
    """Phases as a picture and as numbers; who has not acknowledged, and what is forgotten."""
    page = Read(full_checkpoint())
    assert [e.attributes["aria-label"] for e in page.all("svg", of="timeline")][2] == (
        "105 ms in all: start delay 12 ms, alignment 40 ms, sync 3 ms, async 41 ms"
    )
    keyed = [words(row) for row in page.all("tr")][-2:]
    assert keyed[0] == (
        "1 start delay 12 ms alignment 40 ms sync 3 ms async 41 ms 105 ms 12 ms 40 ms 3 ms 41 ms "
        "300.0 kB 6.0 MB 4.1 kB aligned"
    )
    assert keyed[1].startswith("2 … not acknowledged")
    assert "Its subtasks are no longer kept." in page.page
    assert page.one("div", id="live").attributes["data-over"] == "no"


def test_a_thousand_subtasks_make_no_long_page() -> None:
    """A page is bounded, however large the job."""
    given, subtasks = answers.with_tasks(answers.checkpoint(17), keyed=[answers.subtask(i) for i in range(1_000)])
    html = checkpoint_page(answers.details(), given, subtasks)
    assert "The 60 slowest of 1,000" in html
    assert len(html) < 150_000


def test_long_lists_and_texts_are_bounded() -> None:
    """More than anybody reads is left out."""
    long = "x" * 100_000
    html = job_page(
        answers.job(
            answers.details(name=long, vertex_name=long, reason=long),
            answers.checkpoints(*(answers.checkpoint(n, "FAILED", long) for n in range(1_000, 0, -1))),
            recoveries=[answers.recovery(n, cause=long) for n in range(1_000)],
            failures=[answers.failure(long, long) for _ in range(1_000)],
            decisions=[answers.decision(long) for _ in range(1_000)],
            settings=[{"key": f"{n}", "value": long} for n in range(1_000)],
            tasks=[answers.task(n, actor=long, vertex=long) for n in range(1_000)],
        )
    )
    assert len(html) < 600_000
    assert len(jobs_page(answers.overview(*["RUNNING"] * 5_000, name=long))) < 200_000


def test_nothing_that_somebody_wrote_is_html() -> None:
    """Names, causes, traces, settings, ids: wherever a text stands, it is only a text."""
    details = answers.details(name=HOSTILE, vertex_name=HOSTILE, reason=HOSTILE, root=HOSTILE)
    details["jid"] = HOSTILE
    details["vertices"][2]["id"] = details["plan"]["nodes"][2]["id"] = HOSTILE
    details["plan"]["nodes"][2]["inputs"][0]["ship_strategy"] = HOSTILE
    failed = answers.checkpoint(2, "FAILED", HOSTILE, checkpoint_type=HOSTILE)
    history = (failed, answers.savepoint(1) | {"external_path": HOSTILE})
    overview = answers.overview("RUNNING", HOSTILE, name=HOSTILE)
    overview["jobs"][0]["jid"] = HOSTILE
    tasks = answers.with_tasks(failed, **{HOSTILE: [answers.subtask(0)]})
    pages = [
        jobs_page(overview),
        job_page(
            answers.job(
                details,
                answers.checkpoints(*history),
                recoveries=[answers.recovery(cause=HOSTILE) | {"task": HOSTILE}],
                failures=[answers.failure(HOSTILE, HOSTILE) | {"taskName": HOSTILE, "endpoint": HOSTILE}],
                decisions=[answers.decision(HOSTILE)],
                settings=[{"key": HOSTILE, "value": HOSTILE}],
                tasks=[answers.task(actor=HOSTILE, vertex=HOSTILE) | {"status": HOSTILE, "node": HOSTILE}],
            )
        ),
        checkpoint_page(details, *tasks),
        problem_page(HOSTILE, HOSTILE, "../"),
    ]
    for html in pages:
        page = Read(html)
        assert page.unbalanced == []
        assert [e.attributes.get("src") for e in page.all("script")] == [
            s.attributes["src"] for s in page.all("script")
        ]
        assert page.all("img") == []
        assert "<script>alert" not in html
        assert "{{ 7" in html or "%7B%7B" in html
        assert not {"\u202e", "\x00"} & set(html)


def test_what_changes_comes_without_its_frame() -> None:
    """A request of htmx gets the same part that the page has, and asks for it again in the same way."""
    whole, part = job_page(answers.job()), job_page(answers.job(), part=True)
    assert part in whole
    live = Read(part).elements[0]
    assert live.attributes | {"class": ""} == {
        "id": "live",
        "hx-get": "./main-0",
        "hx-trigger": "refresh",
        "hx-swap": "outerMorph",
        "data-title": "RUNNING main - tidegate",
        "data-over": "no",
        "class": "",
    }
    assert jobs_page(answers.overview("RUNNING"), part=True) in jobs_page(answers.overview("RUNNING"))


@pytest.mark.parametrize(
    ("state", "over"), [("RUNNING", "no"), ("RESTARTING", "no"), ("FAILED", "yes"), ("FINISHED", "yes")]
)
def test_a_page_of_a_job_that_is_over_stands_still(state: str, over: str) -> None:
    """Nobody asks for what cannot change."""
    page = Read(job_page(answers.job(answers.details(state))))
    assert page.one("div", id="live").attributes["data-over"] == over
