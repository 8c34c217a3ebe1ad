"""`Outcome`: how an attempt of a subtask has ended in its worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tidegate.actors.drivers.threads import is_unfit
from tidegate.protocol.failure_reasons import failure_text, fingerprint, is_permanent


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt of a subtask has ended in its worker."""

    kind: Literal["finished", "failed"]
    reason: str | None = None
    permanent: bool = False
    """Whether no restart can help."""
    unfit: bool = False
    """The process is of no use any more: another attempt in it would fail for the same reason."""
    fingerprint: str = ""
    """As of `TaskFailed`."""

    @staticmethod
    def failed(error: BaseException) -> Outcome:
        """The attempt failed with this error."""
        return Outcome("failed", failure_text(error), is_permanent(error), is_unfit(error), fingerprint(error))
