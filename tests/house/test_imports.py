"""Imports between rooms go one way, and the contracts that say so can fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT, package_dir


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Link a repository as it would be installed, and check its imports with its own contracts."""
    subprocess.run([sys.executable, root / "scripts" / "link_typings.py"], check=True, capture_output=True)
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / ".typings"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def small_house(tmp_path: Path) -> Path:
    """The real pyproject.toml and link script around rooms that hold one innocent module each."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in package_dir().values():
        (tmp_path / folder / "inner").mkdir(parents=True)
        for name in ("__init__.py", "module.py", "inner/__init__.py", "inner/module.py"):
            (tmp_path / folder / name).write_text('"""Nothing."""\n')
    return tmp_path


def test_rooms_import_downwards_only() -> None:
    """No module of tidegate imports one of a room above its own."""
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_allowed_imports_pass(small_house: Path) -> None:
    """Everything that the table of rooms allows is allowed."""
    allowed = {
        "api/module.py": [
            "spark_bridge.module",
            "actors.module",
            "recovery.inner.module",
            "storage.module",
            "inner",
        ],
        "api/inner/module.py": ["storage.inner.module", "module"],
        "spark_bridge/module.py": ["storage.module", "actors.inner.module"],
        "actors/module.py": ["storage.module", "recovery.module", "actors.inner.module"],
        "recovery/module.py": ["storage.module", "storage"],
        "storage/module.py": ["storage.inner.module"],
    }
    for file, modules in allowed.items():
        (small_house / file).write_text("".join(f"import tidegate.{module}\n" for module in modules))
    result = lint_imports(small_house)
    assert result.returncode == 0, result.stdout + result.stderr


OFFENCES = {
    "storage/one.py": "import tidegate.recovery.module",
    "storage/inner/one.py": "from tidegate.actors import module",
    "storage/two.py": "from tidegate import spark_bridge",
    "recovery/one.py": "import tidegate.actors.inner.module",
    "recovery/two.py": "import tidegate.spark_bridge.module",
    "actors/inner/one.py": "import tidegate.spark_bridge.module",
    "spark_bridge/one.py": "import tidegate.recovery.module",
    "spark_bridge/two.py": "import tidegate.module",
    "spark_bridge/__init__.py": "import tidegate.inner.module",
    "actors/one.py": "from tidegate import StreamEnvironment",
    "recovery/inner/one.py": "from tidegate.module import anything",
    "storage/three.py": "import tidegate",
    "storage/four.py": "def late() -> None:\n    import tidegate.module",
}


def test_forbidden_imports_are_caught(small_house: Path) -> None:
    """Each import upwards breaks a contract, wherever it hides, and the report names the module."""
    for file, statement in OFFENCES.items():
        (small_house / file).write_text(statement + "\n")
    result = lint_imports(small_house)
    assert result.returncode == 1, result.stdout + result.stderr
    named = set(re.findall(r"(tidegate\S+) -> ", result.stdout))
    modules = {"tidegate." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in OFFENCES}
    assert modules == named
