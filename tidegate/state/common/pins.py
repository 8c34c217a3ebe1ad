"""`Pins`: which pages of a state snapshots still read. Their owner copies such a page before it writes to it.

The thread that writes a snapshot releases each page once it is encoded. Rules:
- Only the owner's thread pins, and tells what it has copied or put back. Any thread may release.
- The owner reads the pins without the lock. At worst it sees a pin that has just gone, and copies a page needlessly.
- Each copy gets a version of its own. So a page that was put back is known to the snapshots that still read it.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
from numpy.typing import NDArray

_PAGES_MIN = 16


class Pins:
    """How many snapshots still read page n of a state. It counts for page n of all its columns."""

    __slots__ = ("_any", "_held", "_last_version", "_lock", "_pages", "_versions", "counts", "shared")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages = 0
        self._any = False
        """Whether any page may be pinned. Only the owner pins, so only the owner sets it."""
        self._held: weakref.WeakSet[Pinned] = weakref.WeakSet()
        self._last_version = 0
        self._versions = np.zeros(_PAGES_MIN, dtype=np.int64)
        self.counts: NDArray[np.int32] = np.zeros(_PAGES_MIN, dtype=np.int32)
        """For each page, how many snapshots read it. For kernels."""
        self.shared = self.counts.data
        """The same memory, for code that looks at single pages."""

    def grow(self, pages: int) -> None:
        """Grow to this many pages."""
        with self._lock:
            self._pages = pages
            if pages > len(self.counts):
                added = np.zeros(max(pages, 2 * len(self.counts)) - len(self.counts), dtype=np.int32)
                self.counts = np.concatenate((self.counts, added))
                self._versions = np.concatenate((self._versions, added), dtype=np.int64)
                self.shared = self.counts.data

    def any(self) -> bool:
        """Whether any page is pinned."""
        self._any = self._any and bool(self.counts[: self._pages].any())
        return self._any

    def pin(self) -> Pinned:
        """Pin all pages as they are."""
        with self._lock:
            self.counts[: self._pages] += 1
            self._any = True
            pinned = Pinned(self, self._versions[: self._pages].copy())
            self._held.add(pinned)
            return pinned

    def replaced(self, pages: NDArray[np.int32]) -> NDArray[np.int64]:
        """The owner has replaced pages by copies, which nobody has pinned. Returns the versions of the former pages."""
        with self._lock:
            former = self._versions[pages]
            self.counts[pages] = 0
            self._versions[pages] = np.arange(self._last_version + 1, self._last_version + 1 + len(pages))
            self._last_version += len(pages)
            return former

    def still_read(self, pages: NDArray[np.int32], versions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these pages, in these versions, some snapshot still reads."""
        read = np.zeros(len(pages), dtype=np.bool_)
        with self._lock:
            for pinned in self._held:
                read |= pinned.reads(pages, versions)
        return read

    def put_back(self, pages: NDArray[np.int32], versions: NDArray[np.int64]) -> None:
        """The owner has put former pages back. They are pinned by the snapshots that still read them."""
        with self._lock:
            self._versions[pages] = versions
            self.counts[pages] = 0
            self._any = True
            for pinned in self._held:
                self.counts[pages] += pinned.reads(pages, versions)

    def release(self, pinned: Pinned, stop: int) -> None:
        """A snapshot does not read its pages below `stop` any more."""
        with self._lock:
            start, versions = pinned.next, pinned.versions[pinned.next : stop]
            self.counts[start : start + len(versions)] -= self._versions[start : start + len(versions)] == versions
            pinned.next = max(start, stop)


class Pinned:
    """The pages that one snapshot has pinned. Releases them in order."""

    __slots__ = ("__weakref__", "_pins", "next", "versions")

    def __init__(self, pins: Pins, versions: NDArray[np.int64]) -> None:
        self._pins = pins
        self.versions = versions
        """Of each page, when it was pinned."""
        self.next = 0
        """The first page that is still read. Changed under the lock of the pins alone."""

    def release(self, stop: int) -> None:
        """Release the pages below `stop`. Idempotent."""
        self._pins.release(self, stop)

    def reads(self, pages: NDArray[np.int32], versions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these pages the snapshot still reads in this version."""
        known = (pages >= self.next) & (pages < len(self.versions))
        known[known] = self.versions[pages[known]] == versions[known]
        return known
