"""Imports go one way, between rooms and inside them, and the contracts that say so can fail."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from repository import PACKAGE, ROOT, statements


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Check the imports of a tree with its own contracts."""
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_imports_go_down() -> None:
    """No module imports what stands above it, and no sibling that it may not meet."""
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


OFFENCES = (
    ("storage.ids", "import tidegate.recovery.checkpoints"),
    ("storage.codec", "def late() -> None:\n    import tidegate.protocol.identity"),
    ("recovery.deletion", "from tidegate.actors.graph import job_graph"),
    ("protocol.identity", "import tidegate.spark_bridge.errors"),
    ("spark_bridge.spark_calls", "import tidegate.api.name_checks"),
    ("connectors.files.source", "import tidegate.operators.operator"),
    ("state.kernels.jit", "import tidegate.operators.operator"),
    ("actors.graph.job_graph", "from tidegate import StreamEnvironment"),
    ("api.streams.stream", "import tidegate.testing.report"),
    ("api.streams.stream", "import tidegate.sql.queries"),
    ("actors.coordinator.phases", "import tidegate.actors.task.task_descriptor"),
    ("actors.drivers.ports", "from tidegate.actors.runtimes import running_job"),
    ("actors.local.local_runtime", "import tidegate.actors.ray.coordinator_status"),
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What is said of a copy of the house in which all of that is wrong."""
    copy = tmp_path_factory.mktemp("house")
    shutil.copy(ROOT / "pyproject.toml", copy)
    shutil.copytree(PACKAGE, copy / "tidegate", ignore=shutil.ignore_patterns("__pycache__"))
    for module, statement in OFFENCES:
        with (copy / "tidegate" / (module.replace(".", "/") + ".py")).open("a") as file:
            file.write(f"\n\n{statement}\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_imports_upwards_are_caught(report: str) -> None:
    """Each of them breaks a contract, wherever it hides, and the report names the module and what it imports."""
    wanted = set()
    for module, statement in OFFENCES:
        package, name = re.findall(r"(?:import|from) (\S+)(?: import (\S+))?", statement)[0]
        wanted.add((f"tidegate.{module}", f"{package}.{name}" if name.islower() and name else package))
    named = set(re.findall(r"(tidegate\S*) ->\s+(tidegate\S*)", report))
    assert wanted - named == set()


TYPES_ONLY = "tidegate.api.streams.stream"
"""The class whose short methods call builders, which take its objects: they import it for type checkers."""


def imports_of(file: Path, modules: dict[str, Path]) -> set[str]:
    """The modules that a file imports, also those for type checkers, except for `TYPES_ONLY`."""
    found = set()
    tree = ast.parse(file.read_text())
    for_types = {
        id(node)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module == TYPES_ONLY
    }
    for node in statements(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
    return found & modules.keys()


def modules_of(package: Path) -> dict[str, Path]:
    """Import names of the modules of a package, with their files."""
    files = {file: file.relative_to(package.parent).with_suffix("").parts for file in package.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): file for file, parts in files.items()}


@pytest.mark.slow
def test_no_modules_import_each_other() -> None:
    """Modules have an order in which each can be read after what it builds on, for type checkers as well."""
    modules = modules_of(PACKAGE)
    TopologicalSorter({name: imports_of(file, modules) - {name} for name, file in modules.items()}).prepare()


HIGHER = (
    "tidegate.recovery.state_processor",
    "tidegate.connectors.ray_data",
    "tidegate.sql.",
    "tidegate.storage.state.rocksdb.",
    "tidegate.storage.state.local_copies",
)
"""Parts that stand higher than the folder that users look for them in, or that a module below imports late."""


def circles_of_folders(package: Path) -> dict[str, list[str]]:
    """By folder: modules and folders in it that import each other in a circle. Faces (`__init__.py`) do not count."""
    modules = modules_of(package)
    graphs: dict[str, dict[str, set[str]]] = {}
    for name, file in modules.items():
        if file.name == "__init__.py":
            continue
        for other in imports_of(file, modules):
            if any(name.startswith(part) or other.startswith(part) for part in HIGHER):
                continue
            mine, theirs = name.split("."), other.split(".")
            shared = next(n for n, (one, two) in enumerate(zip(mine, [*theirs, ""], strict=False)) if one != two)
            if shared < len(theirs):
                graph = graphs.setdefault(".".join(mine[:shared]), {})
                graph.setdefault(mine[shared], set()).add(theirs[shared])
    found = {}
    for folder, graph in graphs.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            found[folder] = error.args[1]
    return found


@pytest.mark.slow
def test_no_folders_import_each_other() -> None:
    """What lies side by side in a folder has an order, also where no contract says which."""
    assert circles_of_folders(PACKAGE) == {}


def test_folders_that_import_each_other_are_found(tmp_path: Path) -> None:
    """Two folders are in a circle even if no two of their modules are; a face may import what is in its folder."""
    for folder in ("attic", "cellar"):
        (tmp_path / "house" / folder).mkdir(parents=True)
        (tmp_path / "house" / folder / "__init__.py").write_text("from house.cellar.low import thing\n")
    (tmp_path / "house" / "attic" / "high.py").write_text("from house.cellar.low import thing\n")
    (tmp_path / "house" / "attic" / "box.py").write_text("")
    (tmp_path / "house" / "cellar" / "low.py").write_text("thing = 1\n")
    assert circles_of_folders(tmp_path / "house") == {}
    (tmp_path / "house" / "cellar" / "stairs.py").write_text("from house.attic.box import other\n")
    assert {name: set(circle) for name, circle in circles_of_folders(tmp_path / "house").items()} == {
        "house": {"attic", "cellar"}
    }


def test_modules_that_import_each_other_are_found(tmp_path: Path) -> None:
    """A circle is found also where one of its imports is for type checkers alone."""
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "__init__.py").write_text("")
    (tmp_path / "house" / "first.py").write_text("from house.second import thing\n")
    (tmp_path / "house" / "second.py").write_text("if TYPE_CHECKING:\n    from house import first\n")
    modules = modules_of(tmp_path / "house")
    graph = {name: imports_of(file, modules) - {name} for name, file in modules.items()}
    with pytest.raises(CycleError, match="nodes are in a cycle"):
        TopologicalSorter(graph).prepare()
