"""Silences loggers of Spark's driver while tidegate does what makes them print, and reports the outcome itself."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pyspark import SparkContext

_lock = threading.Lock()
_silenced: Counter[str] = Counter()
_levels: dict[str, object] = {}


@contextmanager
def without_logs_of(context: SparkContext, names: Sequence[str]) -> Iterator[None]:
    """The loggers log nothing meanwhile. Blocks may overlap: the end of the last one restores the level of a logger."""
    jvm: Any = context._jvm
    log4j = jvm.org.apache.logging.log4j
    with _lock:
        for name in names:
            if not _silenced[name]:
                _levels[name] = log4j.LogManager.getLogger(name).getLevel()
                log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
            _silenced[name] += 1
    try:
        yield
    finally:
        with _lock:
            for name in names:
                _silenced[name] -= 1
                if not _silenced[name]:
                    log4j.core.config.Configurator.setLevel(name, _levels.pop(name))
