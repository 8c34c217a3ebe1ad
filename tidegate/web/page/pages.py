"""The pages as HTML, each a function of what the model says (`tidegate.web.model`): no server, no clock.

`part`: only what changes, without the frame, for a page that is shown already. Links are relative to the page's own
address: `/ui/`, `/ui/jobs/<id>`, `/ui/jobs/<id>/checkpoints/<n>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.web.page import texts
from tidegate.web.page.breakdown import PHASES, breakdown_of
from tidegate.web.page.charts import charts_of
from tidegate.web.page.checkpoints import COLUMN_NAMES, checkpoint_of, checkpoints_of
from tidegate.web.page.graph import draw_graph
from tidegate.web.page.jobs import (
    TASKS_MAX,
    decisions_of,
    failures_of,
    header_of,
    job_lines,
    settings_of,
    task_lines,
)
from tidegate.web.page.recoveries import part_names, recoveries_of
from tidegate.web.page.render import render

Answer = Mapping[str, Any]
"""What a function of the model returns."""


@dataclass(frozen=True, slots=True)
class JobAnswers:
    """What the model says of one job."""

    details: Answer
    rates: Mapping[str, Answer]
    tasks: Sequence[Answer]
    checkpoints: Answer
    recoveries: Answer
    exceptions: Answer
    timeline: Answer
    last_hour: Sequence[Answer]
    configuration: Sequence[Answer]


def jobs_page(overview: Answer, part: bool = False) -> str:
    """The list of jobs, of `jobs_overview`."""
    lines = job_lines(overview)
    return render(
        "jobs_live.html" if part else "jobs.html", base="", jobs=lines, more=len(overview["jobs"]) - len(lines)
    )


def job_page(job: JobAnswers, part: bool = False) -> str:
    """One job."""
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
    """One checkpoint of a job by subtask. `subtasks`: by vertex, None where they are forgotten."""
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
    """What went wrong, in words. `base`: the way from the page's address to the list of jobs."""
    return render("problem.html", base=base, title=texts.name(title), text=texts.line(text))
