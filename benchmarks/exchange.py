"""What a frame costs between two processes of one node: by a call of Ray, and over the socket between them.

    python benchmarks/exchange.py [--frames 4000] [--rounds 5]

Two actors, as workers are. Frames of two kinds (a barrier, 1,000 rows of 16 bytes, which go through shared memory
beside the socket) go from one to the other, by either way in turns, and a thread puts them into a queue from which
another one takes them, as a mailbox does. Counted is processor time of sender, receiver and all of Ray, for each
frame: with a queue that is never empty, and with frames that come one by one, where threads wake up for each.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from common import describe_machine, local_ray
from rich.console import Console
from rich.table import Table
from slices import cpu_by_kind

from tidegate.actors.ray.framed_connections import Connections
from tidegate.actors.ray.peer_connections import Head, PeerConnection, PeerConnections, Way
from tidegate.actors.ray.task_deployment import Peer
from tidegate.actors.task.instructions import SendFrame
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Barrier, Element
from tidegate.storage.ids import AttemptNumber, CheckpointId, SubtaskIndex

AHEAD_MAX = 64
"""Frames that are on their way: what credit would allow."""
ONE_BY_ONE_S = 0.002
HEAD: Head = (0, 0, 0, 0, 0)
CHANNEL = ChannelId(0, SubtaskIndex(0), SubtaskIndex(0))
MEMORY_BYTES = 16 * 1024 * 1024
ROWS = pa.record_batch({"k": np.arange(1_000), "v": np.arange(1_000) * 0.5})
KINDS: dict[str, tuple[Element, ...]] = {"a barrier": (Barrier(CheckpointId(1), 5),), "1,000 rows": (ROWS,)}


class End:
    """An actor with one end (an `Inbox`)."""

    def __init__(self, name: str) -> None:
        self.came: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.count = 0
        self.all_came = threading.Condition()
        threading.Thread(target=self._mailbox, daemon=True).start()
        self.open = threading.Event()
        self.links = PeerConnections(name, "node", MEMORY_BYTES, self)
        connections = Connections(b"secret", name, self.links.accept, lambda error: None)
        self.links.use(connections)
        self.name, self.address = name, connections.listen()

    def _mailbox(self) -> None:
        while True:
            self.came.get()
            with self.all_came:
                self.count += 1
                if self.count % (AHEAD_MAX // 2) == 0:
                    self.all_came.notify_all()

    @ray.method(concurrency_group="data", num_returns=0, enable_task_events=False)
    def frame(self, head: Head, elements: tuple[Any, ...]) -> None:
        """A frame came by a call."""
        self.came.put((head, elements))

    def frame_came(self, head: Head, elements: tuple[Element, ...]) -> None:
        """A frame came over the socket."""
        self.came.put((head, elements))

    def credit_came(self, head: Head, window_bytes: int) -> None:
        """Nobody grants any."""

    def later(self, action: Callable[[], object]) -> None:
        """Do it at once: nothing else happens while the link opens."""
        action()

    def settled(self) -> None:
        """The link is open."""
        self.open.set()

    def broke(self, link: PeerConnection, reason: str) -> None:
        """The other actor has ended."""

    def peer(self) -> Peer:
        """How it is reached."""
        return Peer(None, self.name, "node", self.address)

    def connect(self, peer: Peer) -> None:
        """Have a link to the other one."""
        self.link = self.links.to(peer)

    @ray.method(concurrency_group="control")
    def wait_for(self, count: int) -> None:
        """Until so many have come."""
        with self.all_came:
            self.all_came.wait_for(lambda: self.count >= count)

    def send(self, peer: Any, kind: str, over_socket: bool, frames: int, pause_s: float, sent: int) -> None:
        """Send frames."""
        self.open.wait()
        assert self.link.way is Way.SOCKET
        elements = KINDS[kind]
        call = peer.frame.remote
        for number in range(frames):
            if over_socket:
                self.link.send(SendFrame(AttemptNumber(0), CHANNEL, number, elements))
            else:
                call(HEAD, elements)
            if pause_s:
                time.sleep(pause_s)
            elif number % AHEAD_MAX == AHEAD_MAX - 1:
                ray.get(peer.wait_for.remote(sent + number + 1 - AHEAD_MAX // 2))
        ray.get(peer.wait_for.remote((sent + frames) // (AHEAD_MAX // 2) * (AHEAD_MAX // 2)))


def main() -> int:
    """Both ways, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=4_096, help="of each turn (default 4,096)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default 5)")
    arguments = parser.parse_args()
    console = Console(width=120, highlight=False)
    describe_machine(console)
    found: dict[tuple[str, float, bool], list[float]] = defaultdict(list)
    with local_ray():
        remote: Any = ray.remote
        actor = remote(num_cpus=0, concurrency_groups={"data": 1, "control": 1})(End)
        sender, receiver = actor.remote("a"), actor.remote("b")
        ray.get(receiver.connect.remote(ray.get(sender.peer.remote())))
        ray.get(sender.connect.remote(ray.get(receiver.peer.remote())))
        sent = 0
        for turn in range(arguments.rounds + 1):
            for kind in KINDS:
                for pause_s in (0.0, ONE_BY_ONE_S):
                    for over_socket in (False, True):
                        frames = arguments.frames if not pause_s else arguments.frames // 8
                        before = sum(cpu_by_kind().values())
                        ray.get(sender.send.remote(receiver, kind, over_socket, frames, pause_s, sent))
                        used = (sum(cpu_by_kind().values()) - before) / frames / 1e3
                        sent += frames
                        if turn:  # the first one warms up
                            found[kind, pause_s, over_socket].append(used)
    table = Table(title="us of processor a frame, medians (least to most)")
    for name in ("frame", "frames come", "call of Ray", "socket", "ratio"):
        table.add_column(name, justify="right")
    for kind in KINDS:
        for pause_s in (0.0, ONE_BY_ONE_S):
            calls, socket = found[kind, pause_s, False], found[kind, pause_s, True]
            texts = (f"{np.median(each):.0f} ({min(each):.0f} to {max(each):.0f})" for each in (calls, socket))
            ratio = float(np.median(socket) / np.median(calls))
            table.add_row(kind, "one by one" if pause_s else "in a row", *texts, f"{ratio:.2f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
