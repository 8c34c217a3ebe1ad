"""Commands, metrics and alerts that pages name exist: operators type what they read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tidegate.actors.runtimes import metric_registry as registry
from tidegate.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
COMMAND = re.compile(r"(?:^|[`(\s/])tidegate (?P<words>[a-z][^`#\n]*)")
METRIC = re.compile(r"(?<!\w)(?:ray_)?tidegate_(?:job|task)_\w+")
OPTION = re.compile(r"--[a-z][a-z-]*")
FENCE = re.compile(r"^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(tidegate [a-z][^`\n]*)`")
CLI: Any = typer.main.get_command(app)


def commands(page: str) -> Iterator[str]:
    """What a page has of commands: in blocks that are no programs, at the begin of a line, and in backticks."""
    for fence in FENCE.finditer(page):
        if fence["language"] in ("", "sh", "console"):
            for line in fence["text"].splitlines():
                if (found := re.search(r"(?:^\s*(?:\$ )?|\$\(|/bin/)(tidegate [a-z].*)", line)) is not None:
                    yield re.split(r"\s{2,}|\s#|\|\||\)", found[1])[0]
    yield from INLINE.findall(FENCE.sub("", page))


def problem(command: str) -> str | None:
    """What is wrong with a command: there is none of the name, or it has no such option."""
    # What follows `--` belongs to the program that is run.
    words, known, at = command.partition(" -- ")[0].split()[1:], {"--help"}, CLI
    while True:
        known |= {option for parameter in at.params for option in (*parameter.opts, *parameter.secondary_opts)}
        named = getattr(at, "commands", None)
        if named is None:
            break
        # The arguments of a group come before the name of its command.
        words = words[sum(parameter.param_type_name == "argument" for parameter in at.params) :]
        if not words or not words[0].islower():
            break
        name, words = words[0].split("|")[0], words[1:]
        if name not in named:
            return f"{command}: there is no {name!r}"
        at = named[name]
    unknown = [option for option in OPTION.findall(" ".join(words)) if option not in known]
    return f"{command}: there is no {unknown[0]}" if unknown else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_pages_exist(page: Path) -> None:
    """Each command is one of `tidegate`, with options that it has."""
    assert [found for command in commands(page.read_text(encoding="utf-8")) if (found := problem(command))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_of_pages_exist(page: Path) -> None:
    """Each name is one of the registry, as tasks write it or as Prometheus sees it."""
    metrics = [value for value in vars(registry).values() if isinstance(value, registry.Metric)]
    # The page of metrics gives a histogram its name without the ends that Prometheus sees.
    known = {name for metric in metrics for name in (metric.name, f"ray_{metric.name}", *metric.exported)}
    assert sorted(set(METRIC.findall(page.read_text(encoding="utf-8"))) - known) == []


def test_each_alert_has_something_to_do() -> None:
    """Whoever is woken by an alert finds its name in the page of operators, in a table, and beside it what to do."""
    rules = yaml.safe_load((ROOT / "configs" / "alerts.yaml").read_text(encoding="utf-8"))
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    lines = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| `Tidegate")]
    assert [alert for alert in alerts if not any(f"`{alert}`" in row.split("|")[1] for row in rows)] == []
    assert all(len(row.split("|")) == 5 and all(cell.strip() for cell in row.split("|")[1:4]) for row in rows)


def test_what_is_not_there_is_found() -> None:
    """The rules bite, and placeholders are free."""
    assert problem("tidegate job NAME stop --drain") is None
    assert problem("tidegate checkpoints list|show PATH") is None
    assert problem("tidegate run x.py:main --config FILE -- --day 1") is None
    assert problem("tidegate job NAME restart") == "tidegate job NAME restart: there is no 'restart'"
    assert problem("tidegate events PATH --restart") == "tidegate events PATH --restart: there is no --restart"
    assert problem("tidegate attach NAME") == "tidegate attach NAME: there is no 'attach'"
    page = "```sh\npath=$(tidegate jobs --json)  # tidegate x\n```\n`tidegate job NAME status` and tidegate itself\n"
    assert list(commands(page)) == ["tidegate jobs --json", "tidegate job NAME status"]
    assert METRIC.findall("`ray_tidegate_job_x` tidegate_task_y my_tidegate_job_z") == [
        "ray_tidegate_job_x",
        "tidegate_task_y",
    ]
