"""Memory that two processes map outlives the one that has made it, and nothing else does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pyarrow as pa
import pytest

from tidegate.actors.runtimes.ray.exchange.frames import FrameReader, Place
from tidegate.actors.runtimes.ray.exchange.shared_segment import ForeignSegment, Offer

_SENDER = """
import pyarrow as pa
from tidegate.actors.runtimes.ray.exchange.frames import FrameWriter
from tidegate.actors.runtimes.ray.exchange.shared_segment import OwnSegment
own = OwnSegment(2**18)
offer = own.offer("node")
place = FrameWriter(own).write([pa.record_batch({"n": pa.array(range(1_000), pa.int64())})])
print([offer.pid, offer.descriptor, offer.token.hex(), offer.size_bytes, *place], flush=True)
input()
"""


def test_what_a_killed_sender_has_written_stays_until_it_is_read() -> None:
    """`kill -9` leaves nothing behind but what the receiver maps, and that is whole."""
    sender = subprocess.Popen([sys.executable, "-c", _SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert sender.stdout is not None
    pid, descriptor, token, size_bytes, *place = eval(sender.stdout.readline())
    reader = FrameReader(ForeignSegment.open(Offer("node", pid, descriptor, bytes.fromhex(token), size_bytes)))
    sender.send_signal(signal.SIGKILL)
    sender.communicate()
    assert reader.read(Place(*place)) == [pa.record_batch({"n": pa.array(range(1_000), pa.int64())})]
    with pytest.raises(OSError, match="No such file"):
        ForeignSegment.open(Offer("node", pid, descriptor, bytes.fromhex(token), size_bytes))
