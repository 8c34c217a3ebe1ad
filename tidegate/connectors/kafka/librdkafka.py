"""Calls to librdkafka that `confluent_kafka` does not offer: whole batches of records in one call, without the GIL.

`confluent_kafka` handles one record per call, and needs the GIL and a Python object for each. `NativeProducer` and
`NativeConsumer` therefore call the librdkafka that it has loaded. Rules:

- Only functions and structs of the public header `rdkafka.h` are used. Their layout is the same in all versions 2.
- `library_for` returns None where this is not possible: on another major version, on a platform that does not find the
  functions, and for settings with callbacks of Python. The caller then uses the classes of `confluent_kafka`.
- Callbacks come only from the methods of a client, in the thread that calls them.
- Errors are raised as `confluent_kafka.KafkaException`, with the same flags as there.
- A handle is destroyed with its Python object, so never during a call of another thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from confluent_kafka import KafkaError, KafkaException, cimpl

PRODUCER, CONSUMER = 0, 1
"""Types of clients, `rd_kafka_type_t`."""
MESSAGE = np.dtype(
    {
        "names": ["err", "topic", "partition", "payload", "len", "key", "key_len", "offset", "private"],
        "formats": ["i4", "u8", "i4", "u8", "u8", "u8", "u8", "i8", "u8"],
    },
    align=True,
)
"""Memory layout of the C struct `rd_kafka_message_t`."""
TEXT_BYTES = 512
"""Size in bytes of the buffers for error texts of librdkafka."""
_MAJOR = 2
_CONF_OK = 0
_PYTHON_LEVELS = (50, 50, 50, 40, 30, 20, 20, 10)
"""The level of Python's `logging` for each syslog level."""


class Message(ctypes.Structure):
    """The C struct `rd_kafka_message_t`, for callbacks."""

    _fields_ = (
        ("err", ctypes.c_int),
        ("topic", ctypes.c_void_p),
        ("partition", ctypes.c_int32),
        ("payload", ctypes.c_void_p),
        ("len", ctypes.c_size_t),
        ("key", ctypes.c_void_p),
        ("key_len", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
        ("private", ctypes.c_void_p),
    )


DELIVERY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(Message), ctypes.c_void_p)
CLIENT_ERROR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)

Log: TypeAlias = Callable[[int, str, str], None]
"""A function that receives a line of a client's log: the level of Python's `logging`, the facility, and the text."""


def library_for(settings: Mapping[str, object]) -> Any:
    """Returns the functions of librdkafka, or None if a client with these settings needs the classes of
    `confluent_kafka`.
    """
    plain = all(isinstance(value, str | int | float) for value in settings.values())
    # Tokens of OAuth are obtained by `confluent_kafka`, in part.
    oauth = any(name.startswith("sasl.oauthbearer") for name in settings)
    return _library() if plain and not oauth else None


@cache
def _library() -> Any:
    """Loads the functions of librdkafka. Returns None if they cannot be called on this platform or version."""
    try:
        # The extension is linked with librdkafka, so its functions are found through it.
        library: Any = ctypes.CDLL(cimpl.__file__)
        library.rd_kafka_version.restype = ctypes.c_int
        if library.rd_kafka_version() >> 24 != _MAJOR:
            return None
        _declare(library)
        # These calls are shorter than giving the lock away.
        short: Any = ctypes.PyDLL(cimpl.__file__)
        library.produceva = short.rd_kafka_produceva
        library.produceva.restype = ctypes.c_void_p
        library.produceva.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        library.header_get_all = short.rd_kafka_header_get_all
        library.header_get_all.restype = ctypes.c_int
        library.header_get_all.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_void_p] * 3]
    except (OSError, AttributeError):
        return None
    return library


def _declare(library: Any) -> None:
    pointer, text, number, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t
    for name, result, arguments in (
        ("conf_new", pointer, []),
        ("conf_destroy", None, [pointer]),
        ("conf_set", number, [pointer, text, text, text, size]),
        ("conf_set_dr_msg_cb", None, [pointer, DELIVERY]),
        ("conf_set_error_cb", None, [pointer, CLIENT_ERROR]),
        ("conf_set_log_cb", None, [pointer, _LOG]),
        ("new", pointer, [number, pointer, text, size]),
        ("destroy", None, [pointer]),
        ("set_log_queue", number, [pointer, pointer]),
        ("topic_new", pointer, [pointer, text, pointer]),
        ("topic_destroy", None, [pointer]),
        ("topic_name", text, [pointer]),
        ("produce_batch", number, [pointer, ctypes.c_int32, number, pointer, number]),
        ("poll", number, [pointer, number]),
        ("flush", number, [pointer, number]),
        ("purge", number, [pointer, number]),
        ("outq_len", number, [pointer]),
        ("err2str", text, [number]),
        ("fatal_error", number, [pointer, text, size]),
        ("init_transactions", pointer, [pointer, number]),
        ("begin_transaction", pointer, [pointer]),
        ("commit_transaction", pointer, [pointer, number]),
        ("abort_transaction", pointer, [pointer, number]),
        ("last_error", number, []),
        ("poll_set_consumer", number, [pointer]),
        ("queue_get_consumer", pointer, [pointer]),
        ("queue_destroy", None, [pointer]),
        ("consume_batch_queue", ctypes.c_ssize_t, [pointer, number, pointer, size]),
        ("consumer_close", number, [pointer]),
        ("incremental_assign", pointer, [pointer, pointer]),
        ("incremental_unassign", pointer, [pointer, pointer]),
        ("topic_partition_list_new", pointer, [number]),
        ("topic_partition_list_add", pointer, [pointer, text, ctypes.c_int32]),
        ("topic_partition_list_set_offset", number, [pointer, text, ctypes.c_int32, ctypes.c_int64]),
        ("topic_partition_list_destroy", None, [pointer]),
        ("get_watermark_offsets", number, [pointer, text, ctypes.c_int32, pointer, pointer]),
        ("query_watermark_offsets", number, [pointer, text, ctypes.c_int32, pointer, pointer, number]),
        ("message_errstr", text, [pointer]),
        ("message_destroy", None, [pointer]),
        ("message_timestamp", ctypes.c_int64, [pointer, pointer]),
        ("message_headers", number, [pointer, pointer]),
        ("header_cnt", size, [pointer]),
        ("error_code", number, [pointer]),
        ("error_string", text, [pointer]),
        ("error_is_fatal", number, [pointer]),
        ("error_is_retriable", number, [pointer]),
        ("error_txn_requires_abort", number, [pointer]),
        ("error_destroy", None, [pointer]),
    ):
        function = getattr(library, f"rd_kafka_{name}")
        function.restype = result
        function.argtypes = arguments
        setattr(library, name, function)


def new_handle(library: Any, kind: int, settings: Mapping[str, object], log: Any, callbacks: Mapping[str, Any]) -> int:
    """Creates a client and returns its handle. `kind`: PRODUCER or CONSUMER. `log`: of `log_callback`.

    `callbacks`: C functions by the name of the function of librdkafka that sets them. The caller keeps them, and `log`,
    until the handle is destroyed. Raises KafkaException for settings that librdkafka refuses.
    """
    conf = library.conf_new()
    problem = ctypes.create_string_buffer(TEXT_BYTES)
    # With this setting the log comes from the methods of the client, and not from its threads.
    for name, value in {**settings, "log.queue": True}.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if library.conf_set(conf, name.encode(), text.encode(), problem, TEXT_BYTES) != _CONF_OK:
            library.conf_destroy(conf)
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text_of(problem.value)))
    library.conf_set_log_cb(conf, log)
    for name, callback in callbacks.items():
        getattr(library, name)(conf, callback)
    handle = library.new(kind, conf, problem, TEXT_BYTES)
    if not handle:
        library.conf_destroy(conf)
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text_of(problem.value)))
    library.set_log_queue(handle, None)
    made: int = handle
    return made


def log_callback(log: Log) -> Any:
    """Returns a C function that passes lines of a client's log to `log`."""
    return _LOG(lambda _handle, level, facility, text: log(_level(level), text_of(facility), text_of(text)))


def raise_error(library: Any, error: int | None) -> None:
    """Raises KafkaException for an error object that a function of librdkafka returned, unless it is null."""
    if not error:
        return
    found = KafkaError(
        library.error_code(error),
        text_of(library.error_string(error)),
        bool(library.error_is_fatal(error)),
        bool(library.error_is_retriable(error)),
        bool(library.error_txn_requires_abort(error)),
    )
    library.error_destroy(error)
    raise KafkaException(found)


def error_of(library: Any, code: int) -> KafkaError:
    """Returns the error with a code, with the text of librdkafka."""
    return KafkaError(code, text_of(library.err2str(code)))


def text_of(value: bytes | None) -> str:
    """Decodes a C string. Returns "" for a null pointer."""
    return (value or b"").decode(errors="replace")


def _level(syslog: int) -> int:
    return _PYTHON_LEVELS[min(max(syslog, 0), len(_PYTHON_LEVELS) - 1)]
