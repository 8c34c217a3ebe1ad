"""Optional libraries: which extra installs each one, and the error that names a missing one.

`pip install tidegate` installs what the local runtime needs. The rest comes with extras: `pip install 'tidegate[ray]'`.
Rules:

- Code that needs such a library calls `need` before the import: where a program is submitted, if the program shows the
  need, and where a task begins to use the library, because another machine may lack it.
- A module that imports an optional library at its top is imported late, after that check.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tidegate.storage.errors import ConfigurationError

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "avro": ("fastavro",),
    "azure": ("adlfs",),
    "databases": ("adbc_driver_postgresql", "sqlalchemy"),
    "delta": ("deltalake",),
    "gcs": ("gcsfs",),
    "hdfs": ("requests",),
    "iceberg": ("pyiceberg",),
    "json-schema": ("jsonschema_rs",),
    "kafka": ("confluent_kafka",),
    "postgres": ("psycopg",),
    "protobuf": ("ptars",),
    "ray": ("ray",),
    "raydp": ("ray", "pyspark", "raydp"),
    "rocksdb": ("rocksdict",),
    "s3": ("s3fs",),
    "sketches": ("datasketches",),
    "spark": ("pyspark",),
    "sql": ("sqlglot",),
    "web": ("starlette", "uvicorn", "jinja2"),
}
"""The modules that each extra of `pyproject.toml` installs, by the name of the extra."""


def need(what: str, *extras: str) -> None:
    """Raises ConfigurationError unless the libraries of all `extras` are installed. Imports nothing.

    The error names the extra, the library, and the feature `what` that needs them.
    """
    missing = {extra: [name for name in EXTRAS[extra] if not _is_installed(name)] for extra in extras}
    names = [name for lacking in missing.values() for name in lacking]
    if names:
        asked = ",".join(extra for extra, lacking in missing.items() if lacking)
        raise ConfigurationError(
            f"{what} needs {' and '.join(names)}, not installed in {sys.prefix}: pip install 'tidegate[{asked}]', "
            "here and on each machine of the cluster"
        )


def load(what: str, extra: str, name: str) -> Any:
    """Imports and returns the module `name` of an extra. `what` is the feature that needs it, for errors.

    Raises ConfigurationError if the module is not installed, or cannot be loaded.
    """
    need(what, extra)
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"{what} needs {name}, which is installed in {sys.prefix} but cannot be loaded ({error}): "
            f"pip install --force-reinstall 'tidegate[{extra}]'"
        ) from error


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return find_spec(name) is not None
    except ImportError:
        return False
