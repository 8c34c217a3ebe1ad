"""What is installed is tidegate alone, and all of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from repository import ROOT, package_dir, room_files, setuptools_table


def expected_name(file: Path) -> str:
    """The path that a file of a room has inside a wheel."""
    relative = file.relative_to(ROOT)
    for package, folder in package_dir().items():
        if relative.parts[0] == folder:
            return str(Path(*package.split("."), *relative.parts[1:]))
    raise AssertionError(f"{relative} lies in no room")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel that is built from a copy of the rooms."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in package_dir().values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, "dist"], cwd=source, check=True, capture_output=True)
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_one_import_root(wheel_names: set[str]) -> None:
    """No package called `storage` or `actors` gets into anybody's site-packages."""
    assert {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name} == {"tidegate"}


def test_wheel_holds_every_module(wheel_names: set[str]) -> None:
    """Each module of each room is in the wheel under its import name, and nothing besides."""
    modules = {name for name in wheel_names if ".dist-info/" not in name and name.endswith(".py")}
    assert modules == {expected_name(file) for file in room_files()}


def test_every_package_is_listed() -> None:
    """Each folder of a room that holds modules has an `__init__` and is a listed package, and the reverse."""
    folders = {file.parent for file in room_files()}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
    packages = {str(Path(expected_name(folder / "x")).parent).replace("/", ".") for folder in folders}
    listed = setuptools_table()["packages"]
    assert isinstance(listed, list)
    assert set(listed) == packages


def test_installed_tidegate_is_this_repository() -> None:
    """The suite tests the rooms that lie beside it, not some other installation."""
    code = "import tidegate, tidegate.storage; print(tidegate.__file__); print(tidegate.storage.__file__)"
    run = subprocess.run([sys.executable, "-c", code], cwd="/", check=True, capture_output=True, text=True)
    assert [Path(line) for line in run.stdout.split()] == [
        ROOT / "api" / "__init__.py",
        ROOT / "storage" / "__init__.py",
    ]
