"""What a frame costs between two processes of one node: by a call of Ray, and over the connection between them.

    python benchmarks/exchange.py [--frames 4000] [--rounds 5]

Two actors, as tasks are. Frames of three kinds (a barrier, the place of rows that lie in shared memory, 1,000 rows of
16 bytes) go from one to the other, by either way in turns, and a thread puts them into a queue from which another one
takes them, as a mailbox does. Counted is processor time of sender, receiver and all of Ray, for each frame: with a
queue that is never empty, and with frames that come one by one, where threads wake up for each.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from common import describe_machine, local_ray
from rich.console import Console
from rich.table import Table
from slices import cpu_by_kind

from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.protocol.stream_elements import Barrier
from tidegate.actors.runtimes.ray.exchange.connections import Connections, LinkOffer
from tidegate.actors.runtimes.ray.exchange.frame_heads import Head
from tidegate.actors.runtimes.ray.exchange.frames import Place
from tidegate.actors.runtimes.ray.exchange.ways import OFFER_AFTER_CALLS
from tidegate.actors.runtimes.ray.task.neighbour_links import NeighbourLinks
from tidegate.storage.ids import CheckpointId, SubtaskIndex, VertexId

SENDER, RECEIVER = (TaskId(VertexId(name), SubtaskIndex(0)) for name in ("sender", "receiver"))
AHEAD_MAX = 64
"""Frames that are on their way: what credit would allow."""
ONE_BY_ONE_S = 0.002
HEAD: Head = (0, 0, 0, 0, 0)
ROWS = pa.record_batch({"k": np.arange(1_000), "v": np.arange(1_000) * 0.5})
KINDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...] | None]] = {
    "a barrier": ((Barrier(CheckpointId(1), 5),), None),
    "a place": ((), tuple(Place(1, 1, 0, 524_288, False))),
    "1,000 rows": ((ROWS,), None),
}


class End:
    """An actor with one end."""

    def __init__(self) -> None:
        self.came: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.count = 0
        self.all_came = threading.Condition()
        self.actions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._mailbox, daemon=True).start()
        self.links = NeighbourLinks(
            Connections(lambda error: None), "node", True, self, self.actions.put, self._offer, lambda link: None
        )

    def _mailbox(self) -> None:
        while True:
            self.came.get()
            with self.all_came:
                self.count += 1
                if self.count % (AHEAD_MAX // 2) == 0:
                    self.all_came.notify_all()

    def _offer(self, receiver: TaskId, offer: LinkOffer) -> None:
        self.offered = offer

    def _act(self) -> None:
        while not self.actions.empty():
            self.actions.get()()

    @ray.method(concurrency_group="data", num_returns=0, enable_task_events=False)
    def frame(self, head: Head, elements: tuple[Any, ...], place: tuple[Any, ...] | None = None) -> None:
        """A frame came."""
        self.came.put((head, elements, place))

    def credit(self, head: Head, window_bytes: int) -> None:
        """Nobody grants any."""

    def make_offer(self) -> LinkOffer:
        """Offer a connection."""
        for _ in range(OFFER_AFTER_CALLS):
            self.links.called(RECEIVER, ())
        return self.offered

    def take(self, offer: LinkOffer) -> None:
        """Take it."""
        assert self.links.take(SENDER, offer) == ""
        self._act()

    @ray.method(concurrency_group="control")
    def wait_for(self, count: int) -> None:
        """Until so many have come."""
        with self.all_came:
            self.all_came.wait_for(lambda: self.count >= count)

    def send(self, peer: Any, kind: str, over_connection: bool, frames: int, pause_s: float, sent: int) -> None:
        """Send frames."""
        self._act()
        elements, place = KINDS[kind]
        call = peer.frame.remote
        for number in range(frames):
            if over_connection:
                while not self.links.send(RECEIVER, (HEAD, elements, place)):
                    time.sleep(ONE_BY_ONE_S)
            elif place is None:
                call(HEAD, elements)
            else:
                call(HEAD, elements, place)
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
        sender, receiver = actor.remote(), actor.remote()
        ray.get(receiver.take.remote(ray.get(sender.make_offer.remote())))
        sent = 0
        for turn in range(arguments.rounds + 1):
            for kind in KINDS:
                for pause_s in (0.0, ONE_BY_ONE_S):
                    for over_connection in (False, True):
                        frames = arguments.frames if not pause_s else arguments.frames // 8
                        before = sum(cpu_by_kind().values())
                        ray.get(sender.send.remote(receiver, kind, over_connection, frames, pause_s, sent))
                        used = (sum(cpu_by_kind().values()) - before) / frames / 1e3
                        sent += frames
                        if turn:  # the first one warms up
                            found[kind, pause_s, over_connection].append(used)
    table = Table(title="us of processor a frame, medians (least to most)")
    for name in ("frame", "frames come", "call of Ray", "connection", "ratio"):
        table.add_column(name, justify="right")
    for kind in KINDS:
        for pause_s in (0.0, ONE_BY_ONE_S):
            calls, connection = found[kind, pause_s, False], found[kind, pause_s, True]
            texts = (f"{np.median(each):.0f} ({min(each):.0f} to {max(each):.0f})" for each in (calls, connection))
            ratio = float(np.median(connection) / np.median(calls))
            table.add_row(kind, "one by one" if pause_s else "in a row", *texts, f"{ratio:.2f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
