"""Hosts for `chaos.py`: a Ray whose nodes have a network each, on this machine, and links that can be cut.

Rules:

- The benchmark moves into namespaces of its own first: network, processes, mounts (`move_in`). Its network has no link
  to that of the machine, so nobody outside reaches the bridge, or what listens there. When its first process ends,
  however that happens, the kernel ends all others, and with them every namespace, bridge and link. None has a name.
- A host is a namespace for its network, with a host name of its own, and a raylet in it. A cable (a pair of veth) leads
  to the bridge, where the head of Ray, the S3 server and the benchmark itself are.
- A link is cut at the bridge: nothing goes through in either direction, and nobody is told. Connections stay open until
  one side gives up.
- The disk of this machine is everybody's. A host that Ray has given up never comes back: another one is started.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import ray
from chaos_cluster import CPUS_A_NODE, RAYLET, Nodes, end_of

from tidegate.actors.ray.coordinator_actor import CoordinatorProcess
from tidegate.actors.ray.worker_actor import WorkerProcess

BRIDGE, BRIDGE_ADDRESS, PREFIX_BITS = "hosts", "10.99.0.1", 16
HOSTS_MAX = 200
"""Started one after the other, each with an address of its own."""
START_S = 60
"""How long a raylet may take to join; Ray's own 30 s are short on a busy machine."""
STARTS_MAX = 5
"""A raylet ends itself where its agents take too long to start, so it is tried again, on another host."""
ENDS_S = 90.0
"""How long the processes of a host that Ray has given up may take to end by themselves, once its link is healed."""
KILLED_S = 15.0
POLL_S = 0.1
OBJECT_STORE_BYTES = 150 * 1024 * 1024
_MOVED = "CHAOS_MOVED"
_ACTORS = tuple(f"ray::{actor.__name__}" for actor in (WorkerProcess, CoordinatorProcess))
"""How Ray calls their processes."""
_TOOLS = ("ip", "nsenter", "setpriv", "unshare")
_UNSHARE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")


def move_in() -> None:
    """Go on in namespaces of this benchmark's own: the program starts again there. RuntimeError where that can't be."""
    if _MOVED in os.environ:
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "address", "add", f"{BRIDGE_ADDRESS}/{PREFIX_BITS}", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        return
    if os.geteuid() != 0:
        raise RuntimeError("only root can make network namespaces")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"there is no {', '.join(missing)} (Debian: apt install iproute2 util-linux)")
    _run(*_UNSHARE, "ip", "link", "add", BRIDGE, "type", "bridge")
    # `unshare` ignores what is to end it, but for SIGKILL: it gets that when this process ends, whatever ends it.
    inside = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *_UNSHARE, sys.executable, *sys.orig_argv[1:]],
        env=os.environ | {_MOVED: "yes"},
    )
    sys.exit(inside.wait())


@dataclass
class Host:
    """One host. `holder` keeps its namespaces, `ray` is `ray start --block` in them."""

    name: str
    address: str
    holder: subprocess.Popen[str]
    ray: subprocess.Popen[bytes]
    healed_at: float = 0.0
    """When its link was healed last, by the monotonic clock."""

    def processes(self) -> dict[int, str]:
        """What runs there, by process id."""
        network = _network(self.holder.pid)
        numbers = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
        return {pid: _command(pid) for pid in numbers if pid != self.holder.pid and _network(pid) == network}

    def actors(self) -> dict[int, str]:
        """Processes of jobs among them."""
        return {pid: command for pid, command in self.processes().items() if command.startswith(_ACTORS)}


class Hosts(Nodes):
    """A Ray whose nodes are hosts."""

    def __init__(self) -> None:
        super().__init__(node_ip_address=BRIDGE_ADDRESS)
        self._hosts: dict[str, Host] = {}
        """By the ids of their nodes."""
        self._started = 0

    def start_one(self) -> None:
        """One more."""
        for _ in range(STARTS_MAX):
            host = self._start_host()
            node_id = self._node_of(host)
            if node_id is not None:
                self._hosts[node_id] = host
                return
            _end(host)
        raise RuntimeError(f"{STARTS_MAX} hosts have not joined Ray; see host*.log and raylet*.err in {self.logs}")

    def _start_host(self) -> Host:
        if self._started == HOSTS_MAX:
            raise RuntimeError(f"{HOSTS_MAX} hosts have been started: choose fewer faults")
        self._started += 1
        name = f"host{self._started}"
        address = f"{BRIDGE_ADDRESS.rpartition('.')[0]}.{self._started + 1}"
        holder = subprocess.Popen(
            [
                "unshare",
                "--net",
                "--uts",
                "sh",
                "-c",
                'echo "$0" > /proc/sys/kernel/hostname; echo; exec sleep inf',
                name,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        inside = ("nsenter", f"--target={holder.pid}", "--net", "--uts")
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        _run("ip", "link", "set", name, "master", BRIDGE, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "address", "add", f"{address}/{PREFIX_BITS}", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "eth0", "up")
        command = [
            *inside,
            str(Path(sysconfig.get_path("scripts")) / "ray"),
            "start",
            f"--address={self.address}",
            f"--node-ip-address={address}",
            f"--num-cpus={CPUS_A_NODE}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            "--block",
        ]
        with (self.logs / f"{name}.log").open("wb") as output:
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"RAY_raylet_start_wait_time_s": str(START_S)},
            )
        return Host(name, address, holder, started)

    def _node_of(self, host: Host) -> str | None:
        deadline = time.monotonic() + START_S
        while host.ray.poll() is None and time.monotonic() < deadline:
            for node in ray.nodes():
                if node["Alive"] and node["NodeManagerAddress"] == host.address:
                    return str(node["NodeID"])
            time.sleep(POLL_S)
        return None

    @property
    def ids(self) -> set[str]:
        """Those that may be lost, or cut off."""
        return set(self._hosts)

    def name(self, node_id: str) -> str:
        """What a host is called."""
        return self._hosts[node_id].name

    def kill(self, node_id: str) -> None:
        """The raylet of a host; everything on the host goes with it."""
        commands = self._hosts[node_id].processes()
        (raylet,) = (pid for pid, command in commands.items() if Path(command.split()[0]).name == RAYLET)
        os.kill(raylet, signal.SIGKILL)

    def clear_up(self, node_id: str) -> None:
        """What is left of a host; its link goes with its namespace."""
        _end(self._hosts.pop(node_id))

    def cut(self, node_id: str) -> None:
        """Nothing comes to this host any more, and nothing from it."""
        _run("ip", "link", "set", self.name(node_id), "down")

    def heal(self, node_id: str) -> None:
        """The link is as before."""
        host = self._hosts[node_id]
        _run("ip", "link", "set", host.name, "up")
        host.healed_at = time.monotonic()

    def replace_lost(self) -> list[tuple[str, dict[int, str]]]:
        """Another host for each that Ray has given up. What is to be said of each, and its processes that did not end.

        They have time to end by themselves; then they are killed.
        """
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        ends = []
        for node_id in self.ids - alive:
            host = self._hosts[node_id]
            while (left := host.processes()) and time.monotonic() < host.healed_at + ENDS_S:
                time.sleep(POLL_S)
            passed_s = time.monotonic() - host.healed_at
            what = f"{len(left)} of its processes had to be killed" if left else "its processes had ended by themselves"
            ends.append((f"{host.name} was lost to Ray: {what} {passed_s:.1f} s after its link was healed", left))
            self.clear_up(node_id)
            self.start_one()
        return ends

    def actors(self) -> dict[int, str]:
        """Processes of jobs on all hosts."""
        return {pid: f"{host.name}: {what}" for host in self._hosts.values() for pid, what in host.actors().items()}

    def close(self) -> None:
        """Stop all of them."""
        ray.shutdown()
        for node_id in self.ids:
            self.clear_up(node_id)
        self._cluster.shutdown()


def _end(host: Host) -> None:
    deadline = time.monotonic() + KILLED_S
    while left := host.processes():
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of {host.name} cannot be killed: {left}")
        for pid in left:
            end_of(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    host.ray.wait()
    host.holder.kill()
    host.holder.wait()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def _network(pid: int) -> str | None:
    """The network namespace of a process; None where it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() or "?"
    except OSError:
        return "?"
