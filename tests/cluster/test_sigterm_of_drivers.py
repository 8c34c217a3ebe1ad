"""A driver that gets SIGTERM while its job is being deployed ends as one that is asked to, and leaves nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from story import Story

from tidegate.actors.ray.connection import EXIT_CODE


@pytest.mark.slow
def test_a_driver_ends_with_the_code_of_sigterm(tmp_path: Path) -> None:
    """No SIGABRT, no stack on stderr, and no process of the job or of Ray that stays."""
    story = Story("sigterm_program.py", tmp_path)
    try:
        (status,) = story.told("submitted")
        assert status in ("created", "deploying")
        story.signal(signal.SIGTERM)
        story.check_nothing_is_left(code=EXIT_CODE)
        assert "Traceback" not in story.errors
        assert "SIGTERM received" not in story.errors
    finally:
        story.end()
