"""Writes the page of all settings to stdout: `python -m tidegate.api.config > docs/settings.md`."""

from __future__ import annotations

from tidegate.api.config.settings_table import render

if __name__ == "__main__":
    print(render(), end="")
