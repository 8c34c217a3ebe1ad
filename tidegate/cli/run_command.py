"""The commands `tidegate run MODULE:FUNC` and `tidegate config check FILE`.

`run` starts a program with a configuration, waits for its jobs, and ends with their result. `config check` prints the
configuration in effect, each setting with its origin.

Rules:

- A function with an argument gets an environment, created as `execution.target` requires. Streams that it has not
  executed itself are executed when it returns, under its name. A function without arguments creates its own
  environment; the settings of the command apply to it, too.
- The first Ctrl-C or SIGTERM ends the jobs of that environment as `--on-interrupt` requires; a second one ends the
  program immediately. A detached job continues.
- Exit codes: 0 all jobs have finished, or were stopped with a savepoint; 1 one has failed or was cancelled, or the
  program has raised an error; 2 wrong usage or configuration; 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tidegate.cli.terminal import JsonOption
from tidegate.storage.errors import ConfigurationError, JobFailedError, TidegateError

if TYPE_CHECKING:
    from tidegate.api.config.config_file import Given
    from tidegate.api.environment import StreamEnvironment
    from tidegate.api.submission.job import Job

FAILED = 1
WRONG_USAGE = 2
SIGNALLED = 128
END_TIMEOUT = "1min"
"""Time limit for the cancellation of an interrupted job."""
OnInterrupt = Literal["cancel", "savepoint"]


SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting that overrides file and variables; repeatable."),
]


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread when the program receives SIGINT or SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_command(
    program: Annotated[str, typer.Argument(metavar="MODULE:FUNC", help="Or FILE.py:FUNC.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="The program finds them in sys.argv.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="A YAML file with settings; else TIDEGATE_CONFIG.")
    ] = None,
    settings: SetOption = None,
    on_interrupt: Annotated[
        OnInterrupt,
        typer.Option("--on-interrupt", help="What Ctrl-C and SIGTERM do: cancel jobs, or stop them with a savepoint."),
    ] = "cancel",
    restore: Annotated[
        str | None,
        typer.Option("--restore", metavar="PATH", help='Start from a checkpoint or savepoint, or from "latest".'),
    ] = None,
    runtime_env: Annotated[
        str | None,
        typer.Option("--runtime-env", metavar="FILE|JSON", help="Ray's runtime environment: a YAML file, or JSON."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only report what --restore would do. Nothing is started; Ray is not needed."),
    ] = False,
) -> None:
    """Run a program that makes streams, and wait for its jobs.

    A function with an argument receives an environment. Ctrl-C cancels the jobs. Exit codes: 0 finished, 1 failed
    or cancelled, 2 wrong usage or configuration, 130 after Ctrl-C, 143 after SIGTERM.
    """
    from tidegate.api.config.config_file import load_config, of_command_line, of_words

    try:
        words = [*(settings or []), *([] if restore is None else [f"execution.state-recovery.path={restore}"])]
        layer = [*of_words(words), *([] if runtime_env is None else [_runtime_env(runtime_env)])]
        with of_command_line(config, layer), _as_main_program(program, arguments or []):
            settings_in_effect = load_config()  # First, because loading the program may take long.
            job_settings = settings_in_effect.job
            if check and job_settings.restore is None:
                raise ConfigurationError(
                    "--check reports on a restore, and no restore is given; name its savepoint or checkpoint with "
                    "--restore PATH, or with --set execution.state-recovery.path=PATH"
                )
            function = load_function(program)
            if runtime_env is not None and settings_in_effect.topology.target == "local":
                _refuse_in_one_process(function)
            elif runtime_env is not None and not check:
                _check_runtime_env(settings_in_effect.topology.runtime_env)
            _send_by_value(function, program)
            with _signals():
                if check:
                    _check(function, job_settings.name, job_settings.restore)
                elif _takes_an_environment(function):
                    _run_in_environment(function, job_settings.name or function.__name__, on_interrupt)
                else:
                    function()
    except Interrupted as stopped:
        raise typer.Exit(SIGNALLED + stopped.number) from stopped
    except TidegateError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(WRONG_USAGE if isinstance(error, ConfigurationError) else FAILED) from error


def load_function(reference: str) -> Callable[..., Any]:
    """Returns the function for `MODULE:FUNC` or `FILE.py:FUNC`. Raises ConfigurationError if it does not exist."""
    place, separator, name = reference.rpartition(":")
    if not separator or not place or not name:
        raise ConfigurationError(f"{reference!r} does not name a function: write MODULE:FUNC or FILE.py:FUNC")
    module = _of_file(Path(place)) if place.endswith(".py") else _of_name(place, reference)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"{place} has no function {name!r}; correct the name after the colon")
    found: Callable[..., Any] = function
    return found


def _of_file(path: Path) -> ModuleType:
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigurationError(f"{path} does not exist, or is not a Python file; correct the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _of_name(name: str, reference: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # The module exists, and imports one that does not.
        raise ConfigurationError(
            f"there is no module {name!r} (from {reference!r}): {error}; correct the name, or install the module"
        ) from error


def _run_in_environment(function: Callable[..., Any], name: str, on_interrupt: OnInterrupt) -> None:
    from tidegate.api.environment import StreamEnvironment

    jobs: list[tuple[Job, bool]] = []
    with StreamEnvironment.from_config() as env:
        env._submitted = lambda job, detached: jobs.append((job, detached))
        try:
            function(env)
            _execute_the_rest(env, name, bool(jobs))
            cancelled = [job.name for job, detached in jobs if _ended(job, detached) == "cancelled"]
        except Interrupted as stopped:
            _end([job for job, detached in jobs if not detached], on_interrupt, stopped)
            raise
    if cancelled:
        raise JobFailedError(
            f"{', '.join(cancelled)}: cancelled from outside of this program"
            "; start the program again if that was not intended"
        )


def _runtime_env(given: str) -> Given:
    """Returns the setting `ray.options` for `--runtime-env`: the path of a YAML or JSON file, or JSON text.

    Raises ConfigurationError if it is invalid.
    """
    import yaml

    from tidegate.api.config.config_file import Given

    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = Path(given).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"--runtime-env {given}: cannot be read: {error}"
                "; give the path of a file of JSON or YAML that this user can read"
            ) from error
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"--runtime-env {given}: neither JSON nor YAML: {error}"
            f"; write a mapping such as {{working_dir: ., env_vars: {{A: b}}}}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"--runtime-env {given}: is not a mapping such as {{working_dir: ., env_vars: {{A: b}}}}; write one"
        )
    return Given("ray.options", {"runtime_env": found}, "--runtime-env")


def _refuse_in_one_process(function: Callable[..., Any]) -> None:
    """Raises ConfigurationError if a runtime environment is given and jobs run in this process.

    A function without arguments may start Ray itself, so it is accepted.
    """
    if _takes_an_environment(function):
        raise ConfigurationError(
            "--runtime-env is for Ray, and execution.target is local: add --set execution.target=ray"
        )


def _check_runtime_env(runtime_env: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for a runtime environment that Ray refuses.

    With Spark, Ray would ignore unknown names.
    """
    from tidegate.storage.extras import need

    need("--runtime-env", "ray")
    from tidegate.actors.ray.connection import check_runtime_env

    check_runtime_env(runtime_env)


class _Executed(BaseException):
    """Raised by the environment of `--check` when the program calls `execute`, to return its arguments."""


def _check(function: Callable[..., Any], name: str | None, restore: str | None) -> None:
    """Implements `--check`: prints what a restore would do with the streams that a function creates.

    Does not start Ray.
    """
    from tidegate.api.environment import StreamEnvironment

    if not _takes_an_environment(function):
        raise ConfigurationError(
            f"--check: {function.__name__} makes its own environment; let it take one as its argument, or call "
            "env.check_restore(path) in the program"
        )
    assert restore is not None, "a check without a restore"
    calls: list[dict[str, Any]] = []

    class Checked(StreamEnvironment):
        """An environment whose `execute` only records its arguments."""

        def execute(self, name: str | None = None, **options: Any) -> Job:
            calls.append({"name": name, **options})
            raise _Executed

    with Checked.local() as env:
        with suppress(_Executed):
            function(env)
        call = calls[0] if calls else {}
        report = env.check_restore(
            restore,
            call.get("name") or name or function.__name__,
            checkpoints=call.get("checkpoints"),
            allow_non_restored_state=call.get("allow_non_restored_state"),
        )
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(FAILED)


def _execute_the_rest(env: StreamEnvironment, name: str, executed: bool) -> None:
    """Executes the streams that the function has created and not executed."""
    if not env._program.nodes:
        if not executed:
            raise ConfigurationError(f"{name} made no stream in its environment; begin one with env.from_...")
        return
    if executed:
        raise ConfigurationError(f"{name} made streams after its last execute(); execute them too, or remove them")
    env.execute(name)


def _ended(job: Job, detached: bool) -> str:
    """Waits for the end of a job, unless it is detached. Returns its status."""
    typer.echo(f"{job.name} ({job.job_id}) is {job.status()}", err=True)
    if detached:
        return job.status()
    status = job.wait()
    typer.echo(f"{job.name} ({job.job_id}) is {status}", err=True)
    return status


def _end(jobs: list[Job], on_interrupt: OnInterrupt, why: Interrupted) -> None:
    """Ends the jobs that are still running. If that fails for one of them, continues with the next one."""
    for job in jobs:
        if job.status() in ("finished", "failed", "cancelled", "suspended"):
            continue
        try:
            if on_interrupt == "savepoint":
                typer.echo(f"{job.name} ({job.job_id}) has a savepoint: {job.stop()}", err=True)
            else:
                job.cancel()
                typer.echo(f"{job.name} ({job.job_id}) is {job.wait(END_TIMEOUT)} ({why})", err=True)
        except TidegateError as error:
            typer.echo(f"{job.name} ({job.job_id}): {error}", err=True)


def _send_by_value(function: Callable[..., Any], program: str) -> None:
    """Configures pickling so that other machines get the definitions in a FILE.py, because they do not have the
    file.
    """
    import cloudpickle

    module = inspect.getmodule(function)
    if program.rpartition(":")[0].endswith(".py") and module is not None:
        cloudpickle.register_pickle_by_value(module)


def _takes_an_environment(function: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.kind in kinds and each.default is inspect.Parameter.empty
    ]
    if len(required) > 1:
        raise ConfigurationError(
            f"{function.__name__} takes {len(required)} arguments: it receives one, the environment; read other "
            "arguments from sys.argv"
        )
    return bool(required)


@contextmanager
def _as_main_program(program: str, arguments: list[str]) -> Iterator[None]:
    """Returns a context in which modules are imported from the folder of the program and sys.argv is set, as
    `python` does.
    """
    place = program.rpartition(":")[0]
    folder = str(Path(place).resolve().parent) if place.endswith(".py") else os.getcwd()
    before_path = sys.path[:]
    before_argv = sys.argv[:]
    sys.path.insert(0, folder)
    sys.argv = [place, *arguments]
    try:
        yield
    finally:
        sys.path[:], sys.argv = before_path, before_argv


@contextmanager
def _signals() -> Iterator[None]:
    """Returns a context in which SIGINT and SIGTERM raise Interrupted in the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


config_app = typer.Typer(help="Check a configuration.", no_args_is_help=True)


@config_app.callback()
def config_command() -> None:
    """Check a configuration."""


@config_app.command("check")
def check_command(
    path: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="A YAML file; without it, only variables and defaults count.")
    ] = None,
    settings: SetOption = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Print only settings that differ from their default.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the configuration in effect, one setting a line with its origin. Exit code 2 if it is not valid."""
    import json

    from tidegate.api.config.config_file import load_config, of_command_line, of_words
    from tidegate.api.config.settings_table import effective

    try:
        with of_command_line(None, of_words(settings or [])):
            rows = [row for row in effective(load_config(path)) if not changed or row[2] != "default"]
    except ConfigurationError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(WRONG_USAGE) from error
    for key, value, origin in rows:
        if as_json:
            typer.echo(json.dumps({"key": key, "value": value, "origin": origin}))
        else:
            typer.echo(f"{key}: {value}  # {origin}")
