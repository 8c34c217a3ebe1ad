"""The permanent table: runs the benchmarks that end in figures, keeps these as a file, and makes a page of them.

    make bench-all [ARGS="--only kernels.py,row_functions.py"]
    python benchmarks/bench_all.py --page

Each benchmark runs in a process of its own and writes its figures by `--json`. All of them go to
`benchmarks/results/<date>.json`, with the kind of the machine, and `docs/performance.md` is made of the newest file.
Figures that are more than 15 % worse than in the newest earlier file of a machine of the same kind are named, at the
end and on the page. `--page` makes the page anew, without a run. `keyed_throughput.py` starts Ray and Spark, and takes
minutes; leave it out with `--only`.

Rules: a floor and a peer are figures of the same run, so that ratios to them hold on a busy machine. A file is never
changed; it says which benchmarks it has, and a comparison takes the newest earlier file that has the figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nexmark.published import AIM, FELDERA, FLINK
from performance_page import Results, Suite, page, regressions

SPARK = "Spark"
PUBLISHED = {"Flink, published": FLINK, "Feldera, published": FELDERA, "aim": AIM}
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"


@dataclass(frozen=True)
class Script:
    """A benchmark: how it is run, and how its figures are read. `yardsticks`: what the others are compared with."""

    name: str
    arguments: tuple[str, ...]
    title: str
    unit: str
    higher_is_better: bool
    yardsticks: tuple[str, ...]
    read: Callable[[Any], Mapping[str, float]] = dict
    compared: str = ""
    """Figures whose name begins so are compared with the yardsticks."""


def _of_nexmark(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median run of each query, in events a second of a core, with Spark's and what others have published."""
    rates: dict[str, list[float]] = {}
    for run in runs:
        rates.setdefault(f"{run['query']}, {run['runtime']}", []).append(run["per_core"])
    medians = {name: sorted(of)[len(of) // 2] for name, of in rates.items()}
    ours = {name: rate for name, rate in medians.items() if not name.endswith(f", {SPARK}")}
    yardsticks: dict[str, float] = {}
    for name in ours:
        query = name.partition(",")[0]
        if (spark := medians.get(f"{query}, {SPARK}")) is not None:
            yardsticks[f"{name}, {SPARK}"] = spark
        for peer, published in PUBLISHED.items():
            if query in published:
                yardsticks[f"{name}, {peer}"] = published[query] * 1_000.0
    return ours | yardsticks


SCRIPTS = (
    Script(
        "kernels.py",
        ("--seconds", "20"),
        "Kernels and the keyed path: one thread, 1,000,000 int64 keys",
        "ns of CPU a row",
        False,
        ("floor: arrays instead of an index", "polars group_by of the batch, no state"),
        compared="KeyedAggregate",
    ),
    Script(
        "row_functions.py",
        ("--rows", "200000"),
        "Functions of users: local jobs of one subtask",
        "rows a second of CPU",
        True,
        ("floor: a loop over dicts",),
    ),
    Script(
        "nexmark_throughput.py",
        ("--events", "2000000", "--runtimes", "local", "--rounds", "3", "--spark"),
        "Nexmark: local runtime, a checkpoint a second, compared with Spark's Structured Streaming",
        "events a second and core",
        True,
        (SPARK, *PUBLISHED),
        _of_nexmark,
    ),
    Script(
        "keyed_rows.py",
        ("--rounds", "3"),
        "Counts and sums by key, and words: local runtime, a checkpoint a second",
        "rows a second",
        True,
        ("floor", "polars", "arrays"),
    ),
    Script(
        "narrow_rows.py",
        ("--runtimes", "ray", "--rows", "800000000", "--rounds", "3", "--programs", "q1,q2,W3"),
        "Narrow rows on Ray with two cores, a checkpoint a second",
        "rows a second",
        True,
        (),
    ),
    Script(
        "keyed_throughput.py",
        (),
        "Keyed count and sum on Ray, a checkpoint a second and none, compared with Spark's batch",
        "rows a second, end to end",
        True,
        ("Spark batch",),
    ),
)


def _machine() -> dict[str, str]:
    """The kind of the machine, by which files are compared, and what else the page says of it."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    return {"kind": f"{model}, {os.cpu_count()} cores, {memory} GiB", "python": platform.python_version()}


def _run(script: Script) -> Suite | None:
    """Run a benchmark. None, and a line that says so, if it fails."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "figures.json"
        command = [sys.executable, str(ROOT / "benchmarks" / script.name), *script.arguments, "--json", str(found)]
        ended = subprocess.run(command, cwd=ROOT, check=False)
        if ended.returncode or not found.exists():
            print(f"{script.name} has failed, with exit code {ended.returncode}: it has no figures in this file")
            return None
        figures = dict(script.read(json.loads(found.read_text())))
    return Suite(
        script.name,
        script.title,
        " ".join(("python", f"benchmarks/{script.name}", *script.arguments)),
        script.unit,
        script.higher_is_better,
        figures,
        tuple(each for each in script.yardsticks if any(f", {name}".endswith(f", {each}") for name in figures)),
        script.compared,
        round(load, 1),
    )


def stored() -> list[Results]:
    """All files, oldest first."""
    return [Results.of(path.stem, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]


def main() -> int:
    """Run, keep, and make the page. Exit code 1 if a benchmark has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [script.name for script in SCRIPTS]
    parser.add_argument("--only", default=",".join(names), help=f"scripts with commas between (default: {names})")
    parser.add_argument("--page", action="store_true", help="make the page anew, and run nothing")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"there is no {', '.join(sorted(unknown))} among {', '.join(names)}")
    suites: list[Suite | None] = []
    if not options.page:
        suites = [_run(script) for script in SCRIPTS if script.name in chosen]
        done = [suite for suite in suites if suite is not None]
        if not done:
            return 1
        RESULTS.mkdir(exist_ok=True)
        name = time.strftime("%Y-%m-%d-%H%M%S")
        content = {"machine": _machine(), "suites": [asdict(suite) for suite in done]}
        (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    results = stored()
    if not results:
        parser.error("there are no results yet: run it without --page")
    PAGE.write_text(page(results))
    for line in regressions(results[-1], results[:-1]):
        print(line)
    return 1 if None in suites else 0


if __name__ == "__main__":
    sys.exit(main())
