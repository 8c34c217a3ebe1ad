"""Checks names and locations that users give, in the call that gives them: URLs, uids of operators, names of jobs."""

from __future__ import annotations

import os
import sys
from typing import get_args

from tidegate.operators.local_aggregation import CombiningMode
from tidegate.storage.checkpoints.layout import escape
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.user_values import without_secrets

_NAME_CHARACTERS_MAX = 200
_ESCAPED_UID_BYTES_MAX = 110
"""Greatest length of a uid in bytes, after escaping.

Some file names contain two uids, and file systems allow 255 bytes for a name.
"""


def location(given: object, setting: str) -> str:
    """Returns a folder or URL that a user gave, as a string with `~` replaced by the user's home. `setting` is the
    beginning of errors.

    Raises ConfigurationError if it is not a folder or URL, or contains a password or key.
    """
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigurationError(
            f"{setting}: {path!r} is not a folder or URL; give a folder, or a URL such as s3://bucket/folder"
        )
    if without_secrets(path) != path:
        raise ConfigurationError(
            f"{setting}: {without_secrets(path)!r} contains a password or a key, and URLs are written to logs and "
            "checkpoints. Remove it from the URL, and set it in the environment variables that the storage reads"
        )
    check_name(setting, "a place", path, characters_max=None)
    return os.path.expanduser(path)


def pointer(restore: str | os.PathLike[str] | None) -> str | None:
    """Returns the value of `restore=` as a string.

    A word such as "latest" is returned unchanged. Any other value must be a folder or URL.
    """
    if restore is None or (isinstance(restore, str) and "/" not in restore):
        return restore
    return location(restore, "restore")


def script_name() -> str:
    """Returns the name of the running script without `.py`, or "job" if there is no script.

    It is the default name of a job.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    stem = "" if file is None else os.path.splitext(os.path.basename(file))[0]
    return stem if stem.isidentifier() and not stem.startswith("__") else "job"


def check_name(setting: str, what: str, name: object, characters_max: int | None = _NAME_CHARACTERS_MAX) -> None:
    """Raises ConfigurationError for a name that is empty, too long, or has characters that cannot be printed.

    `setting` and `what` name it in the error.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{setting}: {what} must be a string that is not empty, not {name!r}")
    if not name.isprintable():
        raise ConfigurationError(
            f"{setting}: {what} cannot have control characters or halves of surrogate pairs; choose another name"
        )
    if characters_max is not None and len(name) > characters_max:
        raise ConfigurationError(f"{setting}: {what} has {len(name)} characters; use at most {characters_max}")


def check_uid(uid: object, name: str) -> None:
    """Raises ConfigurationError for a uid that cannot be part of a file name."""
    setting = f"operator {name!r}"
    check_name(setting, "uid", uid)
    text = str(uid)
    if text in (".", "..") or "/" in text:
        raise ConfigurationError(
            f"{setting}: uid {uid!r} cannot be part of a file name; use a uid without slashes that is not a dot"
        )
    if len(escape(text)) > _ESCAPED_UID_BYTES_MAX:
        raise ConfigurationError(
            f"{setting}: uid {uid!r} is too long for a file name; use at most {_ESCAPED_UID_BYTES_MAX} letters and "
            "digits (any other character counts for up to 12)"
        )


def check_given(setting: str, given: object, kind: type, example: str) -> None:
    """Raises ConfigurationError if the argument `setting` of `execute` is neither None nor of the type `kind`.

    `example` is a valid value for the error.
    """
    if given is not None and not isinstance(given, kind):
        raise ConfigurationError(f"execute({setting}=...): give {example}, not {given!r}")


def combining_mode(given: str | None, configured: CombiningMode) -> CombiningMode:
    """Returns the argument `local_aggregation=` of `execute` (`given`), or the configured mode if it is None.

    Raises ConfigurationError for an unknown mode.
    """
    modes: dict[str, CombiningMode] = {mode: mode for mode in get_args(CombiningMode)}
    if given is not None and given not in modes:
        raise ConfigurationError(
            f"execute(local_aggregation=...): {given!r} is not known; give one of {', '.join(modes)}"
        )
    return configured if given is None else modes[given]
