"""What is installed is tidegate alone, and all of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from repository import PACKAGE, ROOMS, ROOT, package_files


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel that is built from a copy of what is committed, links and all."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "tidegate", ignore=shutil.ignore_patterns("__pycache__"))
    for room in ROOMS:
        shutil.copy(ROOT / room, source / room, follow_symlinks=False)
    build = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, "dist"], cwd=source, check=True, capture_output=True)
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.slow
def test_wheel_holds_one_import_root(wheel_names: set[str]) -> None:
    """No package called `storage` or `actors` gets into anybody's site-packages."""
    assert {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name} == {"tidegate"}


def test_wheel_holds_every_module(wheel_names: set[str]) -> None:
    """Each module is in the wheel, and nothing besides; the types are marked as such."""
    inside = {name for name in wheel_names if ".dist-info/" not in name}
    assert inside == {str(file.relative_to(ROOT)) for file in package_files()} | {"tidegate/py.typed"}


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
