"""What is installed is tidegate alone, and all of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import BytesParser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from repository import PACKAGE, ROOMS, ROOT, package_files

PAGE_FOLDERS = ("templates", "static")
"""What the job page is made of, beside its code."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and an sdist, built from a copy of what is committed, links and all."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "tidegate", ignore=shutil.ignore_patterns("__pycache__"))
    for room in ROOMS:
        shutil.copy(ROOT / room, source / room, follow_symlinks=False)
    build = "import setuptools.build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,), (sdist,) = (source / "dist").glob("*.whl"), (source / "dist").glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module")
def wheel_names(built: dict[str, Path]) -> set[str]:
    """Names of the files in the wheel."""
    with zipfile.ZipFile(built["wheel"]) as archive:
        return set(archive.namelist())


def core_folders(requirements: Iterable[str]) -> Iterator[Path]:
    """The folders and files of what is required without any extra, and of what that requires."""
    waiting, seen = [*requirements], {"tidegate"}
    while waiting:
        needed = Requirement(waiting.pop())
        if needed.name in seen or (needed.marker is not None and not needed.marker.evaluate({"extra": ""})):
            continue
        seen.add(needed.name)
        found = distribution(needed.name)
        assert found.files is not None, needed.name
        for name in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            yield Path(str(found.locate_file(name)))
        waiting += found.requires or []


@pytest.fixture(scope="module")
def clean_python(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with tidegate from the wheel, and what it requires without any extra."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    with zipfile.ZipFile(built["wheel"]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        required = BytesParser().parsebytes(archive.read(name)).get_all("Requires-Dist") or []
    for path in core_folders(required):
        (packages / path.name).symlink_to(path)
    install = ["install", "--quiet", "--no-index", "--no-deps", str(built["wheel"])]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True, capture_output=True)
    return python


def run_there(python: Path, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in an environment and in an empty folder."""
    (folder / "orders.py").write_text(program)
    return subprocess.run([python, "-I", "orders.py"], cwd=folder, capture_output=True, text=True, check=False)


def content(wheel: Path) -> dict[str, int]:
    """The files of a wheel, with their checksums, but for the list of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist() if not info.filename.endswith("/RECORD")}


@pytest.mark.slow
def test_the_sdist_installs_as_the_same_wheel(built: dict[str, Path], tmp_path: Path) -> None:
    """So what is shown of one holds for the other."""
    command = ["wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", *command, str(built["sdist"])], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert content(wheel) == content(built["wheel"])


@pytest.mark.slow
def test_the_quick_start_runs_where_only_that_was_installed(clean_python: Path, tmp_path: Path) -> None:
    """`pip install tidegate`, the first program of the README, and what it prints; no Ray, no Spark, no pandas."""
    page = (ROOT / "README.md").read_text()
    found = re.search(r"```python\n(.*?)```.*?<!-- prints -->\n```\n(.*?)```", page, re.DOTALL)
    assert found is not None
    run = run_there(clean_python, found[1], tmp_path)
    assert run.stdout == found[2], run.stderr
    listing = "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
    installed = set(run_there(clean_python, listing, tmp_path).stdout.split())
    assert "tidegate" in installed
    assert (
        installed & {"ray", "pyspark", "raydp", "pandas", "s3fs", "rocksdict", "deltalake", "confluent-kafka"} == set()
    )


@pytest.mark.slow
def test_what_needs_an_extra_says_which(clean_python: Path, tmp_path: Path) -> None:
    """Where a program asks for it, not where it would fail an hour later."""
    program = """
import pyarrow as pa
import tidegate as tg

def job(table="out", **settings):
    with tg.StreamEnvironment.local() as env:
        rows = env.from_batches(pa.table({"k": [1]}))
        rows.to_delta("out") if table == "delta" else rows.to_table("out", mode="append")
        env.execute("job", checkpoints=tg.CheckpointConfig(**settings))

for use in (
    tg.StreamEnvironment.ray,
    tg.StreamEnvironment.raydp,
    lambda: tg.StreamEnvironment.on_spark(None),
    lambda: job(storage="s3://bucket/x"),
    lambda: job(storage="checkpoints", backend="rocksdb"),
    lambda: job(table="delta"),
    lambda: tg.StreamEnvironment.local().from_kafka("localhost:1", topics=["x"]),
    lambda: tg.approx_quantile("x", 0.5),
):
    try:
        use()
    except tg.ConfigurationError as error:
        print(error)
"""
    run = run_there(clean_python, program, tmp_path)
    named = re.findall(r"pip install 'tidegate\[(.*?)\]'", run.stdout)
    assert named == ["ray", "raydp", "ray,spark", "s3", "rocksdb", "delta", "kafka", "sketches"], (
        run.stdout + run.stderr
    )
    assert not (tmp_path / "out" / "_tidegate").exists()


@pytest.mark.slow
def test_the_command_is_installed(clean_python: Path) -> None:
    """`tidegate` is on the path of the environment, and says what it can do."""
    run = subprocess.run([clean_python.with_name("tidegate"), "--help"], capture_output=True, text=True, check=True)
    assert "checkpoints" in run.stdout


@pytest.mark.slow
def test_wheel_holds_one_import_root(wheel_names: set[str]) -> None:
    """No package called `storage` or `actors` gets into anybody's site-packages."""
    assert {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name} == {"tidegate"}


@pytest.mark.slow
def test_wheel_holds_every_module(wheel_names: set[str]) -> None:
    """Each module is in the wheel, and the job page, and nothing besides; the types are marked as such."""
    inside = {name for name in wheel_names if ".dist-info/" not in name}
    pages = [path for folder in PAGE_FOLDERS for path in (PACKAGE / "web" / "page" / folder).iterdir()]
    assert pages
    assert inside == {str(file.relative_to(ROOT)) for file in (*package_files(), *pages)} | {"tidegate/py.typed"}


def test_every_folder_is_a_package() -> None:
    """A folder without `__init__.py` would be left out of the wheel, and of every contract."""
    folders = {file.parent for file in package_files()}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("room", ROOMS)
def test_the_root_shows_the_rooms(room: str) -> None:
    """`actors`, `recovery`, `spark_bridge` and `storage` at the root are relative links into the package."""
    assert (ROOT / room).is_symlink()
    assert (ROOT / room).readlink() == Path("tidegate", room)
    assert (ROOT / room / "__init__.py").is_file()


def test_installed_tidegate_is_this_repository() -> None:
    """The suite tests the package that lies beside it, not some other installation."""
    code = "import tidegate, tidegate.storage; print(tidegate.__file__); print(tidegate.storage.__file__)"
    run = subprocess.run([sys.executable, "-c", code], cwd="/", check=True, capture_output=True, text=True)
    assert [Path(line) for line in run.stdout.split()] == [
        PACKAGE / "__init__.py",
        PACKAGE / "storage" / "__init__.py",
    ]
