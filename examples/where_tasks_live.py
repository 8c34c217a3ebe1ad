"""Shows where the tasks of a job live: its actors, and the processes that they are in.

    .venv/bin/python examples/where_tasks_live.py
    TIDEGATE_TOPOLOGY=local-cluster .venv/bin/python examples/where_tasks_live.py    # see topology.py

A small job runs. The script prints the actors that Ray's dashboard would show, and for each the processes that its own
descends from: with RayDP a node of Ray, with Ray on Spark a node of Ray in an executor of Spark.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from ray.util.state import list_actors
from rich.console import Console
from rich.tree import Tree
from topology import VARIABLE, environment

import tidegate as tg

WORDS = (
    (r"CoarseGrainedExecutorBackend.*--executor-id (\S+)", "executor {} of Spark"),
    (r"deploy\.worker\.Worker", "worker of Spark"),
    (r"SparkSubmit", "driver of Spark"),
    (r"pyspark\.daemon", "Python worker of Spark"),
    (r"start_ray_node.*--head", "Ray's head, started beside Spark's driver"),
    (r"start_ray_node", "Ray's node, started by a task of Spark"),
    (r"raylet/raylet .*--node_id=(\w{6})|raylet/raylet ", "raylet {}"),
    (r"ray::(\S+)", "actor {}"),
    (r"RayDPExecutor|DefaultWorker|raydp", "Java process of RayDP"),
)
"""What a command line is, in words; what is not in the list is left out."""


def main() -> None:
    """Run a job for a moment, and look at it."""
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder, environment(options=tg.DataPlaneOptions()) as env:
        (
            env.from_rate(1_000, splits=2, uid="rows")
            .key_by("value")
            .aggregate(n=tg.count(), uid="counts")
            .to_table(f"{folder}/table", mode="upsert", keys=["value"], uid="table")
        )
        job = env.execute("shown", checkpoints=tg.CheckpointConfig(interval="1s", storage=f"{folder}/checkpoints"))
        while job.progress().completed_checkpoints == 0:
            threading.Event().wait(0.1)
        console.print(Tree(f"[bold]{VARIABLE}[/bold]: {env.spark.sparkContext.master}"))
        roots: dict[tuple[int, str], Tree] = {}
        trees: list[Tree] = []
        alive = list_actors(filters=[("state", "=", "ALIVE")])
        actors = {actor.pid: actor.name or actor.class_name for actor in alive if actor.pid}
        for pid, name in sorted(actors.items(), key=lambda each: each[1]):
            above: Tree | None = None
            for key in reversed(list(lineage(pid))):
                if key not in roots:
                    label = f"{key[1]} (process {key[0]})"
                    roots[key] = Tree(label) if above is None else above.add(label)
                    if above is None:
                        trees.append(roots[key])
                above = roots[key]
            assert above is not None, "a process descends from something"
            above.label = f"[bold]{name}[/bold] (process {pid})"
        for tree in trees:
            console.print(tree)
        job.cancel()
        job.wait("1min")


def lineage(pid: int) -> Iterator[tuple[int, str]]:
    """A process and those that it descends from, as far as they are of Ray or Spark: id, and what it is."""
    last = ""
    while pid > 1:
        folder = Path(f"/proc/{pid}")
        line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        named = (found for found in (_in_words(line, *each) for each in WORDS) if found)
        words = next(named, None)
        if words is not None and words != last:
            yield pid, words
            last = words
        pid = int((folder / "stat").read_text().rpartition(")")[2].split()[1])


def _in_words(line: str, pattern: str, words: str) -> str | None:
    found = re.search(pattern, line)
    return None if found is None else words.format(*(group or "" for group in found.groups())).strip()


if __name__ == "__main__":
    main()
