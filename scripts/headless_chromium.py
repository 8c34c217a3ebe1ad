"""`chromium`: a headless Chromium, driven by Playwright: the machine's own one, or else Debian's, got for the moment.

Playwright brings no browser along here; its protocol works with Debian's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from debian_program import get, library_path
from playwright.sync_api import Browser, sync_playwright

PACKAGE = "chromium-headless-shell"
INSTALLED = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
START_MS_MAX = 120_000


def find() -> tuple[str, dict[str, str]]:
    """The program, and the environment that it needs. Raises NotHadError."""
    for name in INSTALLED:
        if (path := shutil.which(name)) is not None:
            return path, dict(os.environ)
    folder: Path = get(PACKAGE)
    return str(folder / "usr/lib/chromium" / PACKAGE), {**os.environ, "LD_LIBRARY_PATH": library_path(folder)}


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, as long as the block lasts. Raises NotHadError."""
    program, environment = find()
    with sync_playwright() as playwright:
        variables: dict[str, str | float | bool] = {**environment}
        browser = playwright.chromium.launch(executable_path=program, env=variables, timeout=START_MS_MAX)
        try:
            yield browser
        finally:
            browser.close()
