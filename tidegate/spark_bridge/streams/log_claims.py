"""Claims: which job may write a log. A log has one writer, whichever jobs were restored from one another.

    <log>/claims/00000003    the claim of the third job, or run of a job, that has fed the log

Rules:
* The newest claim counts. It is taken by a conditional create, and only if the job of the previous claim is dead.
* Before a writer writes or deletes, it checks that its claim is still the newest. So a writer that was taken for dead
  stops when it comes back. If it writes between two checks, the conditional create of the commit lets one of the two
  win.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.spark_bridge.errors import SparkBridgeError
from tidegate.storage.checkpoints.lease import may_live, why_alive
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, CorruptionError
from tidegate.storage.files.envelope import seal, unseal
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import JobId

CLAIMS_FOLDER = "claims"
_MAGIC = b"TGCLAIM"
_VERSION = 1


@wire
@dataclass(frozen=True, slots=True)
class LogClaim:
    """A run of a job that feeds a log. `root` is where its checkpoints and its lease are."""

    root: str
    job_id: JobId
    job_name: str


class HeldClaim:
    """A claim that this process has taken."""

    def __init__(self, store: Store, number: int) -> None:
        self._store = store
        self._number = number

    def check(self) -> None:
        """SparkBridgeError if another job has claimed the log since."""
        if self._store.exists(_path(self._number + 1)):
            newer = newest_claim(self._store)[1]
            who = "another job" if newer is None else f"job {newer.job_name!r} ({newer.job_id})"
            raise SparkBridgeError(
                f"{who} feeds the log {self._store.url} now, so this one has to stop: leave that job alone if it does "
                "what this one was to do"
            )


def newest_claim(store: Store) -> tuple[int, LogClaim | None]:
    """The newest claim and its number; (0, None) without any. StorageError, CorruptionError."""
    numbers = [int(name) for name in store.list(CLAIMS_FOLDER) if name.isascii() and name.isdigit()]
    if not numbers:
        return 0, None
    newest = max(numbers)
    where = f"{store.url}/{_path(newest)}"
    claim = decode(unseal(_MAGIC, _VERSION, store.read(_path(newest)), where))
    if not isinstance(claim, LogClaim):
        raise CorruptionError(f"{where} holds a {type(claim).__name__}, and not a claim")
    return newest, claim


def check_free(store: Store, job_name: str, open_store: OpenStore, now_ms: int) -> int:
    """The number of the newest claim, if its job is dead. ConfigurationError while that job may live.

    A job of the same name is dead for certain: whoever runs under a name has made sure of that.
    """
    number, claim = newest_claim(store)
    if claim is None or claim.job_name == job_name:
        return number
    root = open_store(claim.root)
    if may_live(root, claim.job_id, now_ms):
        raise ConfigurationError(
            f"job {claim.job_name!r} ({claim.job_id}) feeds the log {store.url}, {why_alive(root, claim.job_id)}. Only "
            "one job can go on with a streaming DataFrame: stop or cancel that one first, or start this one without "
            "restore"
        )
    return number


def take_claim(store: Store, claim: LogClaim, open_store: OpenStore, now_ms: int) -> HeldClaim:
    """Claim the log. ConfigurationError if the job of the newest claim lives, or another job was faster."""
    number = check_free(store, claim.job_name, open_store, now_ms) + 1
    try:
        store.create(_path(number), seal(_MAGIC, _VERSION, encode(claim)))
    except AlreadyExistsError as error:
        raise ConfigurationError(
            f"another job has begun to feed the log {store.url} at the same moment: execute this one again when that "
            "one is over"
        ) from error
    return HeldClaim(store, number)


def _path(number: int) -> str:
    return f"{CLAIMS_FOLDER}/{number:08d}"
