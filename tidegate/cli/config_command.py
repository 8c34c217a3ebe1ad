"""`tidegate config check FILE`: whether a configuration is right, what follows from it, and who says each part."""

from __future__ import annotations

from typing import Annotated

import typer

from tidegate.cli.checkpoints_command import JsonOption
from tidegate.storage.errors import ConfigurationError

# A command imports what it needs when it runs, so that `--help` is fast.

WRONG = 2

config_app = typer.Typer(help="Configuration: whether it is right, and what follows from it.", no_args_is_help=True)

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting that counts more than file and variables; often."),
]


@config_app.callback()
def config_command() -> None:
    """Configuration: whether it is right, and what follows from it."""


@config_app.command("check")
def check_command(
    path: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="A YAML file; without one, variables and defaults alone.")
    ] = None,
    settings: SetOption = None,
    changed: Annotated[bool, typer.Option("--changed", help="Leave out what has its default.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the configuration in effect, a setting a line, with the place that says it. Exit code 2 for a wrong one."""
    import json

    from tidegate.api.config.config_file import load_config
    from tidegate.api.config.settings_table import effective
    from tidegate.api.config.sources import of_command_line, of_words

    try:
        with of_command_line(None, of_words(settings or [])):
            rows = [row for row in effective(load_config(path)) if not changed or row[2] != "default"]
    except ConfigurationError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(WRONG) from error
    for key, value, origin in rows:
        if as_json:
            typer.echo(json.dumps({"key": key, "value": value, "origin": origin}))
        else:
            typer.echo(f"{key}: {value}  # {origin}")
