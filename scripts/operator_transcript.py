"""Makes docs/operator-transcript.md: a job on Ray, run as an operator runs it, with every command and what it printed.

    .venv/bin/python scripts/operator_transcript.py [--out docs/operator-transcript.md]

It starts a Ray and a Prometheus of its own on this machine, in folders of its own, and ends them again. Rules:

- `operator_steps.py` has all commands. They run one after the other in one shell, so variables stay; a command that
  fails ends the script, and the page stays as it was.
- What a command printed comes into the page as it is, but for folders and the host of this machine, which get names
  that mean the same anywhere.
- Where the next command needs something that takes time, the script waits for it, and the page says so.
- The picture of Ray's dashboard, `docs/images/ray-dashboard-actors.png`, is taken in the middle, with a real Chromium.
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
from pathlib import Path
from typing import Any

from debian_program import get
from headless_chromium import chromium
from operator_steps import BEFORE_KILL, CONFIG, HEAD, JOB, PROMETHEUS, STEPS, Step

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PAGE = ROOT / "docs" / "operator-transcript.md"
WAIT_S, LOOK_S = 600.0, 0.5
LINES_MAX = 40

Status = Mapping[str, Any]
Condition = Callable[[Status], bool]


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
PICTURE = ROOT / "docs" / "images" / "ray-dashboard-actors.png"


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
def ray_head(folder: Path, environ: Mapping[str, str], port: int, dashboard: int) -> Iterator[None]:
    """A Ray of our own. `--block` keeps its processes below one that is ours, with which they end."""
    command = [str(BIN / "ray"), "start", "--head", f"--port={port}", "--num-cpus=4", "--block"]
    command += ["--node-ip-address=127.0.0.1", f"--temp-dir={folder / 'ray'}"]
    command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
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


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[None]:
    """A Prometheus of our own, of Debian's package, that scrapes that Ray."""
    program = shutil.which("prometheus") or str(get("prometheus") / "usr" / "bin" / "prometheus")
    config = folder / "prometheus.yaml"
    config.write_text(PROMETHEUS.replace("$DATA", str(folder)))
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'prometheus'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def photograph(dashboard: int, token: str) -> None:
    """Take the picture of the list of actors in Ray's dashboard."""
    with chromium() as browser:
        headers = {"Authorization": f"Bearer {token}"}
        with browser.new_context(viewport={"width": 1_300, "height": 760}, extra_http_headers=headers) as context:
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{dashboard}/#/actors")
            page.get_by_text(f"{JOB}/coordinator").first.wait_for(timeout=WAIT_S * 1_000)
            page.screenshot(path=PICTURE)
    size_bytes = PICTURE.stat().st_size
    print(f"{PICTURE.name}: {size_bytes:,} bytes", flush=True)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> list[int]:
    """Ports of loopback at which nobody listens."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


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


def neutral(text: str, folder: Path, web_port: int = 8081) -> str:
    """A text without what is this machine's own."""
    text = text.replace(str(folder), "/data").replace(str(ROOT), "/app").replace(socket.gethostname(), "head")
    text = re.sub(rf"\b{web_port}\b", "8081", text)
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


def transcript(folder: Path) -> str:
    """Run all steps; the page."""
    port, dashboard, web, scraper = free_ports(4)
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TIDEGATE_"))},
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "TIDEGATE_REST_TOKEN": secrets.token_hex(32),
        "DATA": str(folder),
        "WEB": f"http://127.0.0.1:{web}",
        "PROMETHEUS": f"http://127.0.0.1:{scraper}",
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }
    (folder / "job.yaml").write_text(CONFIG.replace("$DATA", str(folder)).replace("$PORT", str(web)))
    sections = []
    with ray_head(folder, environ, port, dashboard), prometheus(folder, scraper):
        shell = Shell(environ)
        try:
            for step in STEPS:
                if step.when:
                    await_status(CONDITIONS[step.when], environ, step.when)
                if step.title == BEFORE_KILL:
                    photograph(dashboard, environ["RAY_AUTH_TOKEN"])
                printed = []
                for command in step.commands:
                    print(f"$ {command}", flush=True)
                    text = shell.run(command)
                    print(text, flush=True)
                    printed.append(cut(neutral(text, folder, web)))
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
