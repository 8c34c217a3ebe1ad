"""`Story`: a program with a Spark and a Ray of its own, of which a process has one each, and what it tells of itself.

It prints a line of JSON for each thing that it has done, by `tell`. Tests look at what it told.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from waiting import until

HERE = Path(__file__).parent
WAIT_S = 1_080
"""For one step of the program: a test that takes 1,200 s fails."""
MARK = "MARK_OF_A_TEST"


class Story:
    """The program, and what it has told so far. A test waits for what it looks at, while the program goes on."""

    def __init__(self, program: str, folder: Path, **variables: str) -> None:
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        self._told: dict[str, Any] = {}
        self._over = False
        self._new = threading.Condition()
        self._errors = folder / "errors"
        path = os.pathsep.join(map(str, (HERE, HERE.parent / "support", HERE.parent.parent / "examples")))
        name, _, value = self._mark.partition("=")
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / program), str(folder)],
                env={**os.environ, **variables, name: value, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def told(self, *keys: str) -> list[Any]:
        """What the program tells of these. AssertionError if it ends before that, or takes too long."""
        with self._new:
            self._new.wait_for(lambda: self._over or all(key in self._told for key in keys), WAIT_S)
            missing = [key for key in keys if key not in self._told]
            assert not missing, f"{missing} after {self._told}:\n{self._errors.read_text()[-5_000:]}"
            return [self._told[key] for key in keys]

    @property
    def errors(self) -> str:
        """What the program has written to its standard error."""
        return self._errors.read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send the program a signal."""
        self._process.send_signal(number)

    def check_nothing_is_left(self, code: int = 0) -> None:
        """The program ends with this exit code, and so does all that it has started: Spark's Java ends a bit later."""
        assert self._process.wait(WAIT_S) == code, self._errors.read_text()[-5_000:]
        until(
            "the end of what it has started", lambda: not processes_with(self._mark), lambda: processes_with(self._mark)
        )

    def end(self) -> None:
        """End what of it still runs."""
        for pid, _ in processes_with(self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._new:
                self._told |= json.loads(line) if line.startswith("{") else {}
                self._new.notify_all()
        with self._new:
            self._over = True
            self._new.notify_all()


def processes_with(variable: str) -> list[tuple[int, str]]:
    """Ids and command lines of the processes that have a variable in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append((int(folder.name), line))
        except OSError:
            continue  # It has ended meanwhile, or is not this user's.
    return found


def tell(**facts: object) -> None:
    """A line for the test."""
    print(json.dumps(facts), flush=True)
