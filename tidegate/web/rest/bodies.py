"""The bodies of requests that change a job, checked: JSON objects with Flink's names, and no others."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidegate.storage.checkpoints.layout import parse_pointer
from tidegate.storage.checkpoints.metadata import SavepointFormat
from tidegate.storage.files.file_system_store import check_savepoint_target
from tidegate.web.rest.answers import bad_request, quoted

_TRIGGER = re.compile(r"[0-9a-f]{32}")
_SAVEPOINT = {"target-directory": str, "cancel-job": bool, "formatType": str, "triggerId": str}
_STOP = {"targetDirectory": str, "drain": bool, "formatType": str, "triggerId": str}
_DISPOSAL = {"savepoint-path": str, "triggerId": str}
_CHECKPOINT = {"checkpointType": str, "triggerId": str}
_CHECKPOINT_TYPES = ("CONFIGURED", "FULL", "INCREMENTAL")
TARGET_CHARACTERS_MAX = 2_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client asks for. `ends`: the job is to end with the savepoint."""

    trigger_id: str
    target: str | None = None
    savepoint_format: SavepointFormat = SavepointFormat.CANONICAL
    ends: bool = False
    drain: bool = False


def savepoint_wanted(body: bytes) -> Wanted:
    """Of `POST /jobs/<id>/savepoints`. Raises RefusedError."""
    told = _object(body, _SAVEPOINT)
    target = _target(told.get("target-directory"), "target-directory")
    return Wanted(_trigger(told), target, _format(told), ends=told.get("cancel-job", False))


def stop_wanted(body: bytes) -> Wanted:
    """Of `POST /jobs/<id>/stop`. Raises RefusedError."""
    told = _object(body, _STOP)
    target = _target(told.get("targetDirectory"), "targetDirectory")
    return Wanted(_trigger(told), target, _format(told), ends=True, drain=told.get("drain", False))


def checkpoint_wanted(body: bytes) -> Wanted:
    """Of `POST /jobs/<id>/checkpoints`. Raises RefusedError."""
    told = _object(body, _CHECKPOINT)
    kind = told.get("checkpointType", "CONFIGURED")
    if kind not in _CHECKPOINT_TYPES:
        raise bad_request(f"checkpointType is {quoted(kind)!r}: it is one of {', '.join(_CHECKPOINT_TYPES)}")
    if kind != "CONFIGURED":
        raise bad_request(f"checkpointType {kind} is not there: a checkpoint is taken as the job is configured")
    return Wanted(_trigger(told))


def disposal_wanted(body: bytes) -> tuple[str, str]:
    """Of `POST /savepoint-disposal`: the trigger id, and the path of a savepoint. Raises RefusedError."""
    told = _object(body, _DISPOSAL)
    path = _target(told.get("savepoint-path"), "savepoint-path")
    if path is None:
        raise bad_request("which savepoint is to be deleted? Give savepoint-path")
    if not parse_pointer(path).savepoint:  # Raises ConfigurationError, which is answered with 400.
        raise bad_request(
            f"savepoint-path is {quoted(path)!r}, a checkpoint of a job: jobs delete their own checkpoints, and "
            "`tidegate checkpoints delete` those of jobs that are over"
        )
    return _trigger(told), path


def trigger_id_of(text: str) -> str:
    """An id in a path. Raises RefusedError."""
    if not _TRIGGER.fullmatch(text):
        raise bad_request(f"{quoted(text)!r} is no trigger id: that is 32 hexadecimal digits, in small letters")
    return text


def _object(body: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    """The object that a body is; none at all is an empty one. What is null is not given."""
    if not body.strip():
        return {}
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {quoted(str(error))}") from error
    if not isinstance(told, dict):
        raise bad_request(f"the body is a {type(told).__name__}: give an object with {_names(fields)}")
    for name, value in told.items():
        if name not in fields:
            raise bad_request(f"there is no field {quoted(name)!r}: an object may have {_names(fields)}")
        if value is not None and type(value) is not fields[name]:
            what = "true or false" if fields[name] is bool else "a text"
            raise bad_request(f"{name} is a {type(value).__name__}: give {what}")
    return {name: value for name, value in told.items() if value is not None}


def _names(fields: Mapping[str, type]) -> str:
    return ", ".join(fields)


def _trigger(told: Mapping[str, Any]) -> str:
    return trigger_id_of(told["triggerId"]) if "triggerId" in told else uuid.uuid4().hex


def _format(told: Mapping[str, Any]) -> SavepointFormat:
    given = told.get("formatType", "CANONICAL")
    try:
        return SavepointFormat[given]
    except KeyError:
        raise bad_request(f"formatType is {quoted(given)!r}: it is CANONICAL or NATIVE") from None


def _target(given: str | None, name: str) -> str | None:
    if given is None:
        return None
    if not given or not given.isprintable() or len(given) > TARGET_CHARACTERS_MAX:
        most = f"with {TARGET_CHARACTERS_MAX} characters at most"
        raise bad_request(f"{name} is {quoted(given)!r}: give a folder or a URL, {most}")
    if not given.startswith("/") and "://" not in given:
        raise bad_request(f"{name} is {quoted(given)!r}: give a whole path, or a URL such as s3://bucket/folder")
    check_savepoint_target(given, f"{name}: the savepoint")  # Raises ConfigurationError, which is answered with 400.
    return given
