"""Packages that offer public names load nothing for them, and type checkers know each name and no other."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from repository import PACKAGE, ROOT

from tidegate.lazy_names import lazy_names

FACES = ("tidegate", "tidegate.recovery", "tidegate.spark_bridge")

PUBLIC = """
    MAX_WATERMARK_MS MIN_WATERMARK_MS Aggregate AggregateFunction AggregatingState BatchAggregateFunction
    BatchContext BatchFunction BroadcastContext BroadcastProcessFunction BroadcastState CheckpointConfig
    CheckpointError CoProcessFunction CollectedRows ConfigurationError ConnectedStreams CorruptionError Count
    Cumulating DataPlaneOptions IncompatibleStateError Job JobFailedError JobProgress JobTimeoutError KeyGroups
    KeyedBroadcastProcessFunction KeyedStream ListState MapState MasterHook OperatorError OperatorListState
    OutputTable OutputTag Pickled ProcessBatchContext ProcessContext ProcessFunction ReadResult ReducingState
    RestartStrategy RestoreReport Session Sliding Source SourceReader SourceSplit StateTtl StorageError Stream
    StreamEnvironment TableError TidegateError TimeDomain TimerService Tumbling ValueState WindowedStream
    approx_count_distinct approx_quantile arg_max arg_min bool_and bool_or collect_list count count_distinct first last
    load_config max
    mean min open_table stddev_pop stddev_samp sum udaf var_pop var_samp CommitContext Sink SinkContext
    ProcessWindowContext ProcessWindowFunction WatermarkAlignment
    CommitToken Committable Committer CommittingContext CommittingSink CommittingWriter SinkFiles
    DebeziumFormat DatabaseTable AvroFormat CsvFormat JsonFormat JsonSchemaFormat ProtobufFormat SchemaRegistry
"""
"""What `import tidegate as tg` offers. A name that is added here is a promise; one that goes breaks programs."""


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh Python has loaded for this code, and would not have without it."""
    script = (
        f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stderr.split())


def ours_and_libraries(modules: set[str]) -> tuple[set[str], set[str]]:
    """Modules of tidegate, and top names of those that come neither from it nor with Python."""
    top = {module.split(".")[0] for module in modules}
    return {m for m in modules if m.split(".")[0] == "tidegate"}, top - set(sys.stdlib_module_names) - {"tidegate"}


def test_importing_tidegate_loads_nothing() -> None:
    """`import tidegate` costs two small modules, and no library."""
    assert ours_and_libraries(loaded_by("import tidegate")) == ({"tidegate", "tidegate.lazy_names"}, set())


@pytest.mark.parametrize("module", ["tidegate.storage.ids", "tidegate.storage.errors"])
def test_a_small_module_is_small(module: str) -> None:
    """A module that needs nothing loads nothing but the packages that it lies in."""
    ours, libraries = ours_and_libraries(loaded_by(f"import {module}"))
    assert ours == {"tidegate", "tidegate.lazy_names", "tidegate.storage", module}
    assert libraries == set()


def test_an_error_is_there_without_the_house() -> None:
    """To catch an error of tidegate nobody has to load what raises it."""
    assert ours_and_libraries(loaded_by("import tidegate as tg; tg.StorageError"))[1] == set()


def test_help_of_the_command_loads_no_data_libraries() -> None:
    """`tidegate --help` answers at once: it loads the library of the command line, and little else."""
    code = "import sys; sys.argv = ['tidegate', '--help']\nfrom tidegate.cli.main import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass"
    ours, libraries = ours_and_libraries(loaded_by(code))
    assert libraries & {"numpy", "pyarrow", "polars", "numba", "ray", "pyspark", "fsspec", "rich", "pydantic"} == set()
    assert len(ours) < 16


@pytest.mark.slow
def test_a_process_of_a_job_loads_no_library_that_the_job_may_not_need() -> None:
    """Starting one is most of what a job's start costs, and of its recovery where no spare process waits."""
    _, libraries = ours_and_libraries(loaded_by("import tidegate.actors.ray.worker_actor"))
    assert libraries & {"polars", "pandas", "pyspark", "raydp", "rocksdict", "s3fs", "pydantic"} == set()


@pytest.mark.slow
def test_a_first_program_loads_no_library_that_it_may_not_need() -> None:
    """A local program without expressions waits for none of them: importing is most of what it waits for."""
    _, libraries = ours_and_libraries(loaded_by("import tidegate as tg; tg.StreamEnvironment, tg.sum, tg.count"))
    assert libraries & {"polars", "pandas", "ray", "pyspark", "rocksdict", "s3fs", "uvicorn", "deltalake"} == set()


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_as_it_was(collects: bool) -> None:
    """It waits while a name is imported, also where that fails; a program that has switched it off keeps it off."""
    get, _ = lazy_names("tidegate", {"now_ms": "storage.clock", "gone": "storage.no_such_module"})
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        assert callable(get("now_ms"))
        assert gc.isenabled() is collects
        with pytest.raises(ModuleNotFoundError):
            get("gone")
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()
        vars(sys.modules["tidegate"]).pop("now_ms", None)


@pytest.mark.slow
def test_subpackages_answer_without_being_imported() -> None:
    """`tg.recovery.latest` works in a process that has imported `tidegate` alone; so does `tg.testing`."""
    code = "import tidegate as tg; print(tg.recovery.latest.__name__, tg.testing.Faults.__name__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["latest", "Faults"]


def test_public_names_are_these() -> None:
    """The list above, and what `tidegate` says of itself."""
    assert sorted(PUBLIC.split()) == sorted(import_module("tidegate").__all__)


@pytest.mark.parametrize("face", FACES)
def test_every_name_leads_to_what_type_checkers_see(face: str) -> None:
    """The table of lazy names, the imports for type checkers and `__all__` say the same."""
    package = import_module(face)
    tree = ast.parse((PACKAGE / Path(*face.split(".")[1:]) / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    seen = {alias.name: node.module for node in imports for alias in node.names if node.module is not None}
    del seen["TYPE_CHECKING"], seen["lazy_names"]
    assert set(seen) == set(package.__all__) <= set(dir(package))
    for name, module in seen.items():
        assert getattr(package, name) is getattr(import_module(module), name)


@pytest.mark.parametrize("face", FACES)
def test_a_name_that_is_none_is_an_attribute_error(face: str) -> None:
    """As of any module, so that `hasattr` and `from ... import` say what they always say."""
    with pytest.raises(AttributeError, match=f"module '{face}' has no attribute 'NoSuchName'"):
        _ = import_module(face).NoSuchName


@pytest.mark.slow
def test_mypy_refuses_a_name_that_is_none(tmp_path: Path) -> None:
    """A `__getattr__` that type checkers can see would make them accept every name."""
    programs = {face: tmp_path / f"{face.replace('.', '_')}_program.py" for face in FACES}
    for face, program in programs.items():
        program.write_text(f"import {face} as face\n\nprint(face.{import_module(face).__all__[-1]}, face.NoSuchName)\n")
    faces = [PACKAGE / Path(*face.split(".")[1:]) / "__init__.py" for face in FACES]
    command = [sys.executable, "-m", "mypy", "--config-file", "", "--cache-dir", tmp_path, "--follow-imports=skip"]
    run = subprocess.run([*command, *faces, *programs.values()], cwd=ROOT, capture_output=True, text=True, check=False)
    errors = re.findall(r"(\w+)_program\.py:(\d+): error: (.*?)  \[", run.stdout)
    refused = 'Module has no attribute "NoSuchName"'
    assert sorted(errors) == [(face.replace(".", "_"), "3", refused) for face in FACES], run.stdout + run.stderr
