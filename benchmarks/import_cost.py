"""What it takes to begin: `import tidegate`, and from there to the first result of a local program, beside others.

    .venv/bin/python benchmarks/import_cost.py [--rounds 5] [--flink /path/to/a/python/with/apache-flink]

Each line is a fresh process that runs the smallest program with a sum by key: three rows in, two rows out. Times are of
that process, from its first statement on; starting Python itself is not in them. One round is not counted: it compiles
tidegate's modules and kernels if no run before it has, and brings files into memory. Then all take turns, and medians
are shown. *Processor* is what the process itself has used until its first result, which says more than its clock where
a machine does something else as well; the work of a JVM beside it is not in there.
Exit code 1 if importing takes more than 150 ms, or the first result more than a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from common import describe_machine
from rich.console import Console
from rich.table import Table

from tidegate.spark_bridge import ensure_java

IMPORT_MS, FIRST_RESULT_MS = 150, 1_000
"""What it may take."""

TIMED = """
import json, sys, time
begin, begin_cpu = time.perf_counter(), time.process_time()
{imports}
imported = time.perf_counter()
{program}
result, result_cpu = time.perf_counter(), time.process_time()
assert sorted(rows) == [("a", 4), ("b", 2)], rows
taken = [imported - begin, result - begin, result_cpu - begin_cpu]
print("TIMED", json.dumps([1000 * seconds for seconds in taken]), file=sys.stderr)
"""

TIDEGATE = """
import pyarrow as pa
with tg.StreamEnvironment.local() as env:
    stream = env.from_batches(pa.table({"k": ["a", "b", "a"], "x": [1, 2, 3]}))
    sums = stream.key_by("k").aggregate(x=tg.sum("x"), emit="final").collect()
    env.execute("first").wait()
    rows = [tuple(row.values()) for row in sums.to_arrow().to_pylist()]
"""

PYSPARK = """
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
made = spark.createDataFrame([("a", 1), ("b", 2), ("a", 3)], ["k", "x"])
rows = [tuple(row) for row in made.groupBy("k").sum("x").collect()]
"""

PYFLINK = """
env = StreamExecutionEnvironment.get_execution_environment()
env.set_runtime_mode(RuntimeExecutionMode.BATCH)
made = env.from_collection([("a", 1), ("b", 2), ("a", 3)], type_info=Types.TUPLE([Types.STRING(), Types.LONG()]))
sums = made.key_by(lambda row: row[0]).reduce(lambda a, b: (a[0], a[1] + b[1]))
rows = [tuple(row) for row in sums.execute_and_collect()]
"""


@dataclass
class Case:
    """A program, the Python that runs it, and what was measured.

    Of each run: ms to the end of the imports, ms to the result, and ms of processor time.
    """

    name: str
    python: str
    imports: str
    program: str
    runs: list[tuple[float, float, float]] = field(default_factory=list)

    def run(self, folder: Path) -> tuple[float, float, float]:
        """Once, in a process of its own."""
        code = TIMED.format(imports=self.imports, program=self.program)
        # Installed packages are compiled; where this variable is set, each process would compile our modules anew.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        command = [self.python, "-c", code]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{self.name} failed:\n{done.stderr[-2_000:]}")
        # The JVM says something on this stream, also after the program has ended.
        (line,) = (line for line in done.stderr.splitlines() if line.startswith("TIMED "))
        imported, result, processor = json.loads(line.removeprefix("TIMED "))
        return imported, result, processor


def cases(flink: str | None) -> list[Case]:
    """tidegate, PySpark, and PyFlink where it is installed."""
    found = [
        Case("tidegate", sys.executable, "import tidegate as tg", TIDEGATE),
        Case(
            "tidegate, with all that the program names",
            sys.executable,
            "import tidegate as tg\ntg.StreamEnvironment, tg.sum",
            TIDEGATE,
        ),
        Case("PySpark", sys.executable, "from pyspark.sql import SparkSession", PYSPARK),
    ]
    if flink is not None:
        names = "RuntimeExecutionMode, StreamExecutionEnvironment"
        imports = f"from pyflink.common import Types\nfrom pyflink.datastream import {names}"
        found.append(Case("PyFlink", flink, imports, PYFLINK))
    return found


def main() -> int:
    """Measure, and compare with what it may take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each program is run (default 5)")
    parser.add_argument(
        "--flink", metavar="PYTHON", help="a Python with apache-flink (default: this one, if it has it)"
    )
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    ensure_java()
    flink = arguments.flink or (sys.executable if find_spec("pyflink") is not None else None)
    if flink is None:
        console.print("PyFlink is left out: this Python does not have it, and --flink names no other")
    measured = cases(flink)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPARK_LOCAL_DIRS"] = folder
        for number in range(arguments.rounds + 1):
            for case in measured:
                run = case.run(Path(folder))
                case.runs += [run] if number else []
    table = Table("", "imports, ms", "first result, ms", "processor, ms", "first results, ms")
    for case in measured:
        medians = (statistics.median(part) for part in zip(*case.runs, strict=True))
        each = " ".join(f"{result:.0f}" for _, result, _ in case.runs)
        table.add_row(case.name, *(f"{median:.0f}" for median in medians), each)
    console.print(table)
    imported, result, _ = (statistics.median(part) for part in zip(*measured[0].runs, strict=True))
    return 0 if imported <= IMPORT_MS and result <= FIRST_RESULT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
