"""Writes archives of checkpoints that later commits must restore: `old_program.py` says how one is made."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import local_jobs
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg

ROWS = 60
FIRST, SECOND = 20, 40
"""Rows of each split before the first checkpoint, and before the second."""

Program = Callable[[tg.StreamEnvironment, GatedSource], object]


def write_archives(
    program: Program, backends: Sequence[str], commit: str, folder: str, *, inline_bytes: int = 0
) -> None:
    """`FOLDER/COMMIT-BACKEND.zip` for each backend."""
    local_jobs.WAIT_S = 600  # kernels may have to be compiled first
    for backend in backends:
        with tempfile.TemporaryDirectory() as root:
            _write(program, Path(root), backend, inline_bytes)
            with zipfile.ZipFile(Path(folder, f"{commit}-{backend}.zip"), "w", zipfile.ZIP_DEFLATED) as archive:
                for path in sorted(Path(root).rglob("*")):
                    if path.is_file():
                        archive.write(path, path.relative_to(root))


def _write(program: Program, root: Path, backend: str, inline_bytes: int) -> None:
    """A job that takes two checkpoints, the second on top of the first, and is cancelled: what it leaves."""
    work = tempfile.TemporaryDirectory()
    with work, opening(GatedSource(ROWS, ROWS, gates=[FIRST, SECOND])) as source, local(2, 7) as env:
        program(env, source)
        settings = {"backend_directory": work.name} if backend == "rocksdb" else {}
        kept = config(root, backend=backend, incremental=True, inline_bytes=inline_bytes, **settings)
        job = env.execute("old job", checkpoints=kept, restart=NO_RESTART)
        for gate in (FIRST, SECOND):
            source.await_gate(gate)
            job.trigger_checkpoint("10min")
            if gate == FIRST:
                source.open_gate(gate)
        job.cancel()
        assert job.wait("10min") == "cancelled"
