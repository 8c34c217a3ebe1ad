"""Lines of the log: one a record, bounded, escaped; as text or as JSON."""

from __future__ import annotations

import io
import json
import logging

import pytest

from tidegate.actors.drivers.log_lines import LogSettings, log_fields, log_to, one_line

log = logging.getLogger("tidegate.actors.task")
EVIL = "first\nsecond\r\x1b[31mred\u2028\x00"


def lines(settings: LogSettings, *known: tuple[str, object]) -> tuple[io.StringIO, dict[str, object]]:
    """A stream that gets the lines, and what is known of the process."""
    stream, about = io.StringIO(), dict(known)
    log_to(stream, settings, "INFO", about)
    return stream, about


@pytest.mark.parametrize("as_json", [False, True])
def test_a_value_cannot_pass_for_another_line(as_json: bool) -> None:
    """Ends of lines, escapes of terminals and halves of characters are written out, also in stack traces."""
    stream, _ = lines(LogSettings(as_json=as_json))
    try:
        raise ValueError(EVIL)
    except ValueError:
        log.warning("a value: %s", EVIL, exc_info=True)
    written = stream.getvalue()
    assert written.count("\n") == 1
    assert written.removesuffix("\n").isprintable()
    message = json.loads(written)["message"] if as_json else written
    assert r"a value: first\nsecond\r\x1b[31mred\u2028\x00" in message
    assert "Traceback" in written


def test_halves_of_characters_are_written_out() -> None:
    """UTF-8 has no bytes for them."""
    assert one_line("half: " + chr(0xD800)) == "half: \\ud800"


def test_a_line_has_a_limit() -> None:
    """A value as long as a batch does not fill the disk."""
    stream, _ = lines(LogSettings())
    log.warning("a value: %s", "x" * 10_000_000)
    assert len(stream.getvalue()) < 5_000
    assert len(one_line("\x00" * 10_000_000)) < 20_000


def test_json_has_what_is_known() -> None:
    """Of the process, which may change, and of the record; nothing that is not known."""
    stream, about = lines(LogSettings(as_json=True), ("process", "task"), ("job_id", "delays-1"))
    log.info("it is so", extra=log_fields(checkpoint=17, cause=4, task=None))
    about["attempt"] = 3
    log.info("it is %s", "so", extra=log_fields(attempt=0))
    log.debug("nobody has asked")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "INFO",
        "logger": "tidegate.actors.task",
        "message": "it is so",
        "process": "task",
        "job_id": "delays-1",
        "checkpoint": 17,
        "cause": 4,
    }
    assert (second["attempt"], second["message"]) == (0, "it is so")


def test_levels_are_those_of_the_settings() -> None:
    """Of all loggers, and of one; where nothing is said the process decides."""
    stream, _ = lines(LogSettings())
    log.debug("no")
    log.info("yes")
    stream, _ = lines(LogSettings(level="ERROR", levels={"tidegate.actors.task": "DEBUG"}))
    log.debug("of one")
    logging.getLogger("tidegate.storage").warning("no")
    assert [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()] == ["of one"]


def test_a_second_call_takes_the_place_of_the_first() -> None:
    """No line comes twice."""
    first, _ = lines(LogSettings())
    second, _ = lines(LogSettings())
    log.info("once")
    assert (first.getvalue(), second.getvalue().count("once")) == ("", 1)
