"""Memory that two processes map outlives the one that has made it, and nothing else does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pyarrow as pa
import pytest

from tidegate.actors.ray.shared_memory import ForeignSegment, FrameReader, OwnSegment, Place

_SENDER = """
import socket, sys
import pyarrow as pa
from tidegate.actors.ray.shared_memory import EdgeSchema, FrameWriter, OwnSegment
own, schema, rows = OwnSegment(2**18), EdgeSchema(), [pa.record_batch({"n": pa.array(range(1_000), pa.int64())})]
assert schema.fits(rows)
place = FrameWriter(own).write(rows, schema)
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [repr(tuple(place)).encode()], [own.descriptor])
input()
"""


@pytest.mark.slow
def test_what_a_killed_sender_has_written_stays_until_it_is_read() -> None:
    """`kill -9` leaves nothing behind but what the receiver maps, and that is whole."""
    here, there = socket.socketpair()
    with here:
        with there:
            command = [sys.executable, "-c", _SENDER, str(there.fileno())]
            sender = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[there.fileno()])
        place, [descriptor], _, _ = socket.recv_fds(here, 1_000, 1)
    reader = FrameReader(ForeignSegment.open(descriptor))
    sender.send_signal(signal.SIGKILL)
    sender.communicate()
    assert reader.read(Place(*eval(place))) == [pa.record_batch({"n": pa.array(range(1_000), pa.int64())})]


def test_the_receiver_cannot_change_rows_and_nobody_the_size() -> None:
    """A page that is gone would end the process that reads it."""
    own = OwnSegment(2**18)
    assert own.descriptor is not None
    foreign = ForeignSegment.open(os.dup(own.descriptor))
    assert not foreign.part(0, 64).is_mutable
    assert own.part(0, 64).is_mutable
    with pytest.raises(PermissionError):
        os.ftruncate(own.descriptor, 0)
