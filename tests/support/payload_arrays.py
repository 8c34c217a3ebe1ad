"""Payloads as decoders receive them: a part of an array, so that its offsets do not begin at 0."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tidegate.connectors.formats.payload_block import Block


def binary(payloads: Sequence[bytes | None]) -> pa.Array:
    """Returns payloads as an array; None becomes null."""
    return pa.array([b"\xff{before", *payloads, b"\0}behind"], pa.binary()).slice(1, len(payloads))


def block(payloads: Sequence[bytes]) -> Block:
    """Returns payloads as a block."""
    return Block.of(binary(payloads))
