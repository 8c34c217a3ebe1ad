"""`CommandRunner`: runs commands of `tidegate` in this process, as typer's own runner does.

Typer makes all commands anew from their functions each time it is asked for them. That takes ten times as long as to
run one, and they do not change once `tidegate.cli.main` has added its own: so they are made once in a process.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

from typer import Typer, testing

import tidegate.cli.main  # noqa: F401 (it adds commands to those of recovery)

_made = cache(testing._get_command)


class CommandRunner(testing.CliRunner):
    """What its `invoke` is given and returns is as of `typer.testing.CliRunner`."""

    def invoke(self, app: Typer, *args: Any, **options: Any) -> testing.Result:
        """Run a command."""
        with mock.patch.object(testing, "_get_command", _made):
            return super().invoke(app, *args, **options)
