"""Makes docs/operator-transcript.md: a job on Ray, run as an operator runs it, with every command and what it printed.

    .venv/bin/python scripts/operator_transcript.py [--out docs/operator-transcript.md]

It starts a Ray of its own on this machine, in folders of its own, and ends it again. Rules:

- `STEPS` has all commands. They run one after the other in one shell, so variables stay; a command that fails ends the
  script, and the page stays as it was.
- What a command printed comes into the page as it is, but for folders and the host of this machine, which get names
  that mean the same anywhere.
- Where the next command needs something that takes time, the script waits for it, and the page says so.
- At the end the table is compared with polars' result. A page is only made of a run in which they are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PAGE = ROOT / "docs" / "operator-transcript.md"
JOB = "live-flights"
WAIT_S, LOOK_S = 600.0, 0.5
LINES_MAX = 40

Status = Mapping[str, Any]
Condition = Callable[[Status], bool]


@dataclass(frozen=True)
class Step:
    """What the page says, the commands that follow, and what is waited for before the first one, in words."""

    title: str
    text: str
    commands: Sequence[str]
    when: str = ""


_seen_checkpoints = 0
"""How many the job had completed when it was looked at last."""

CONDITIONS: Mapping[str, Condition] = {
    "its spare process was ready": lambda status: status["standbys_ready"] >= 1,
    "it had completed three checkpoints": lambda status: status["completed_checkpoints"] >= 3,
    "the job ran again, and had completed a checkpoint since": lambda status: (
        status["attempt"] >= 1 and status["status"] == "running" and status["checkpoint.count"] > _seen_checkpoints
    ),
    "the restored job had completed a checkpoint": lambda status: status["completed_checkpoints"] >= 1,
}
CONFIG = """\
execution:
  target: ray
  detached: true                # the job outlives the command that starts it
  savepoint.path: latest        # the first time it starts afresh
  checkpointing.interval: 2s
parallelism.default: 2
pipeline.name: live-flights
state:
  checkpoints: {dir: $DATA/checkpoints, num-retained: 3}
  savepoints.dir: $DATA/savepoints
"""

RUN = "tidegate run examples/live_flights.py:delays --config $DATA/job.yaml"

LIST_PROCESSES = (
    "python -c \"import tidegate as tg; job = tg.StreamEnvironment.ray().attach('live-flights'); "
    "print(*[(str(p.task), p.pid) for p in job.processes()], sep='\\n')\" | tee $DATA/processes"
)

STEPS = (
    Step(
        "Start",
        "A Ray that stays was started by `ray start --head`. `RAY_ADDRESS` and `RAY_AUTH_TOKEN` say where it is, and\n"
        "let us in. The settings of the job are in a file. The program is the main job without an end: delays of real\n"
        "flights, per carrier and origin (`examples/live_flights.py`).",
        (
            "cat $DATA/job.yaml",
            "tidegate config check $DATA/job.yaml --changed",
            f"{RUN} -- $DATA/delays",
        ),
    ),
    Step(
        "Watch",
        "The command has returned, because the job is detached.",
        ("tidegate jobs", f"tidegate job {JOB} status"),
        "it had completed three checkpoints",
    ),
    Step(
        "Take a savepoint",
        "The job goes on meanwhile. Every byte of a savepoint can be verified.",
        (
            f"BEFORE=$(tidegate job {JOB} savepoint); echo $BEFORE",
            "tidegate checkpoints verify $BEFORE",
            "tidegate checkpoints inspect $BEFORE",
        ),
    ),
    Step(
        "Kill a task",
        "Any driver can ask which process runs which task. One of those with keyed state is killed.",
        (
            LIST_PROCESSES,
            "VICTIM=$(grep per-carrier $DATA/processes | head -1 | grep -o '[0-9]*)$' | tr -d ')')",
            "kill -9 $VICTIM",
        ),
        "its spare process was ready",
    ),
    Step(
        "See the recovery, and its parts",
        "Nobody had to do anything. The times in the lines are what the recovery is made of: until the failure was\n"
        "known, until tasks were deployed, until all of them had their state.",
        (
            f"tidegate events $DATA/checkpoints --job {JOB} --restarts",
            f"tidegate job {JOB} status | grep -E '^(status|attempt|restarts|last_failure|standbys)'",
        ),
        "the job ran again, and had completed a checkpoint since",
    ),
    Step(
        "Stop with a savepoint",
        "From the shell, as before an upgrade.",
        (
            f"tidegate job {JOB} stop | tee $DATA/stopped",
            "SAVEPOINT=$(grep -o '[^ ]*$' $DATA/stopped)",
            f"tidegate events $DATA/checkpoints --job {JOB} | tail -4",
            "tidegate checkpoints verify $SAVEPOINT",
        ),
    ),
    Step(
        "Restore from it",
        "`--set` counts more than the file. The new job has another id, and goes on where the old one had stopped.",
        (f"{RUN} --set execution.savepoint.path=$SAVEPOINT -- $DATA/delays",),
    ),
    Step(
        "Was every flight counted once?",
        "The job is stopped, and its table compared with what polars computes of the same flights: through a process\n"
        "that was killed, a stop and a restore.",
        (
            "tidegate jobs",
            f"tidegate job {JOB} stop",
            "python examples/live_flights.py --check $DATA/delays",
        ),
        "the restored job had completed a checkpoint",
    ),
)


class Shell:
    """One bash, in which commands run one after the other."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "--norc", "-o", "pipefail"],
            cwd=ROOT,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )

    def run(self, command: str) -> str:
        """What a command prints. SystemExit with it if the command fails."""
        mark = f"--{secrets.token_hex(8)}--"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\necho {mark}$?\n")
        self._process.stdin.flush()
        lines = []
        for line in self._process.stdout:
            before, found, code = line.partition(mark)
            lines += [before] if before else []
            if found:
                if int(code):
                    sys.exit(f"`{command}` ended with exit code {int(code)}:\n{''.join(lines)}")
                return "".join(lines)
        sys.exit(f"the shell has ended in `{command}`:\n{''.join(lines)}")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def ray_head(folder: Path, environ: Mapping[str, str], port: int) -> Iterator[None]:
    """A Ray of our own. `--block` keeps its processes below one that is ours, with which they end."""
    command = [str(BIN / "ray"), "start", "--head", f"--port={port}", "--num-cpus=4", "--block"]
    command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={folder / 'ray'}"]
    with (folder / "ray.log").open("wb") as log:
        head = subprocess.Popen(command, env=dict(environ), stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + WAIT_S
        while not _listens(port):
            if head.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"Ray did not start:\n{(folder / 'ray.log').read_text()}")
            time.sleep(LOOK_S)
        yield
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def await_status(condition: Condition, environ: Mapping[str, str], what: str) -> None:
    """Wait until the status of the job is as a condition says."""
    global _seen_checkpoints
    deadline = time.monotonic() + WAIT_S
    command = [str(BIN / "tidegate"), "job", JOB, "status", "--json"]
    seen = "nothing"
    while time.monotonic() < deadline:
        answer = subprocess.run(command, env=dict(environ), capture_output=True, text=True, check=False)
        seen = answer.stdout or answer.stderr
        if answer.returncode == 0:
            status: Status = json.loads(answer.stdout)
            if condition(status):
                _seen_checkpoints = status["checkpoint.count"]
                return
        time.sleep(LOOK_S)
    sys.exit(f"waited {WAIT_S:g} s in vain until {what}: {seen}")


def neutral(text: str, folder: Path) -> str:
    """A text without what is this machine's own."""
    text = text.replace(str(folder), "/data").replace(str(ROOT), "/app").replace(socket.gethostname(), "head")
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def cut(text: str) -> str:
    """At most `LINES_MAX` lines; what is left out is said."""
    lines = text.splitlines()
    left = len(lines) - LINES_MAX
    return "\n".join(lines if left <= 0 else [*lines[:LINES_MAX], f"({left} lines more)"])


def section(step: Step, printed: Sequence[str]) -> str:
    """A step as the page has it."""
    wait = f" The next commands were typed when {step.when}." if step.when else ""
    shown = []
    for command, text in zip(step.commands, printed, strict=True):
        shown.append(f"$ {command}\n{text}".rstrip())
    blocks = "\n\n".join(shown)
    return f"## {step.title}\n\n{step.text}{wait}\n\n```\n{blocks}\n```\n"


HEAD = """\
# As an operator would

Made by `scripts/operator_transcript.py`: it has typed these commands, on one machine, and this is what they printed.
Only folders (`/data`, `/app`) and the name of the machine were changed. What the commands mean is in
[operations](operations.md) and [commands](commands.md).

"""


def transcript(folder: Path) -> str:
    """Run all steps; the page."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TIDEGATE_"))},
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "DATA": str(folder),
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }
    (folder / "job.yaml").write_text(CONFIG.replace("$DATA", str(folder)))
    sections = []
    with ray_head(folder, environ, port):
        shell = Shell(environ)
        try:
            for step in STEPS:
                if step.when:
                    await_status(CONDITIONS[step.when], environ, step.when)
                printed = []
                for command in step.commands:
                    print(f"$ {command}", flush=True)
                    text = shell.run(command)
                    print(text, flush=True)
                    printed.append(cut(neutral(text, folder)))
                sections.append(section(step, printed))
        finally:
            shell.close()
    return HEAD + "\n".join(sections)


def main() -> None:
    """Make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE, help="the page (default docs/operator-transcript.md)")
    parser.add_argument("--folder", default=None, help="where the folder of the run is made")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    folder = Path(tempfile.mkdtemp(prefix="operator-", dir=arguments.folder))
    try:
        page = transcript(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    arguments.out.write_text(page)


if __name__ == "__main__":
    main()
