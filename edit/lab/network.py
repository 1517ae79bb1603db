"""Hosts on one switch, each behind a link of its own of a limited rate: network namespaces of this machine. Linux, as root.

A host has its own address, its own loopback, and its address as host name, so that whatever announces either is reached. A
token bucket (tc tbf) at both ends of a link bounds each direction; TCP is the kernel's own, its windows and losses included.
There is no delay but that of the queues.

The namespaces have neither a name nor a process: open files of this process hold them. So the kernel removes them, and the
interfaces in them, after the last process that runs there and this one, however they end.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from edit.errors import ConfigError

__all__ = ["LOOPBACK", "QUEUE_MS", "Host", "Network"]

QUEUE_MS = 20  # in front of each direction of a link
_BURST_MS = 1
_LARGEST_PACKET = 128 << 10  # of segmentation offload; a larger one than the bucket is cut up, which costs CPU
_ADDRESSES = ipaddress.ip_network("10.77.0.0/16")  # of no other network: nothing leads out of the switch's namespace
_PROGRAMS = ("nsenter", "ip", "tc")
_WITHIN_S = 30.0
_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000  # linux/sched.h; os.unshare and os.setns need Python 3.12

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Host:
    """Where processes run. address: where the other hosts reach it."""

    address: str = "127.0.0.1"
    _namespaces: tuple[int, int] | None = None  # open files: network, host name; None: where this process is

    def command(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Return the command line that runs `argv` on this host, as the same process."""
        if self._namespaces is None:
            return tuple(argv)
        network, name = (f"/proc/{os.getpid()}/fd/{file}" for file in self._namespaces)
        return ("nsenter", f"--net={network}", f"--uts={name}", *argv)

    def listen(self) -> socket.socket:
        """Return a socket of this process that listens on a free port of the host's own loopback."""
        return self._inside(lambda: socket.create_server(("127.0.0.1", 0)))

    def _inside(self, work: Callable[[], _T]) -> _T:
        """Return `work()` from a thread that is on this host. The thread ends: no other one is ever there."""
        if self._namespaces is None:
            return work()
        network = self._namespaces[0]

        def enter() -> _T:
            _system_call("setns", network, _CLONE_NEWNET)
            return work()

        return _in_a_thread(enter)


LOOPBACK = Host()
"""Where this process is: everything that runs there reaches everything else on loopback, without a limit."""


class Network:
    """Context manager: one host for each of `names`, and links of `mbit` Mbit/s in each direction; 0: all are `LOOPBACK`.

    others: the rates of those of these hosts whose links have another one. queue_ms: in front of each direction of a link.
    On entry raises ConfigError where namespaces or limits cannot be made.
    """

    def __init__(
        self, names: Sequence[str], mbit: float, others: Mapping[str, float] | None = None, queue_ms: int = QUEUE_MS
    ) -> None:
        self._names, self._mbit = tuple(names), mbit
        self._others, self._queue_ms = others or {}, queue_ms
        self._open = ExitStack()
        self._switches = {"switch"}
        self.hosts: Mapping[str, Host] = dict.fromkeys(self._names, LOOPBACK)

    def __enter__(self) -> Self:
        if self._mbit > 0:
            if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
                raise ConfigError(f"links of a limited rate need {', '.join(_PROGRAMS)}; this machine has no {missing[0]}")
            with ExitStack() as opened:
                self.hosts = self._connected(opened)
                self._open = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def traffic(self) -> dict[str, int]:
        """Return the bytes that went through each direction of each link so far, headers included: "NAME up", "NAME down".

        Empty on loopback.
        """
        if self._mbit <= 0:
            return {}
        down = {port["dev"]: port["bytes"] for port in _qdiscs(self._switch) if port["kind"] == "tbf"}
        counted = {}
        for place, (name, host) in enumerate(self.hosts.items()):
            (counted[f"{name} up"],) = (each["bytes"] for each in _qdiscs(host) if each["kind"] == "tbf")
            counted[f"{name} down"] = down[_port(place)]
        return counted

    def move(self, name: str, switch: str = "switch") -> None:
        """Connect a host to another switch: only who is there reaches it. "": to none, as if its cable were pulled.

        The switch is made when it is first named. Connections stay open, and hear nothing.
        """
        port = _port(self._names.index(name))
        if not switch:
            _run(self._switch, ("ip", "-batch", "-"), f"link set {port} nomaster\n")
            return
        if switch not in self._switches:
            _run(self._switch, ("ip", "-batch", "-"), f"link add {switch} type bridge\nlink set {switch} up\n")
            self._switches.add(switch)
        _run(self._switch, ("ip", "-batch", "-"), f"link set {port} master {switch}\n")

    def limit(self, name: str, mbit: float) -> None:
        """Give a host's link another rate, in both directions."""
        limit = self._limit(mbit)
        _run(self._switch, ("tc", *f"qdisc replace dev {_port(self._names.index(name))} {limit}".split()))
        _run(self.hosts[name], ("tc", *f"qdisc replace dev eth0 {limit}".split()))

    def congestion_control(self) -> str:
        """Return what TCP has on the hosts, the system's choice: "cubic", for example."""
        setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # of the network of whoever reads it
        return next(iter(self.hosts.values()))._inside(lambda: setting.read_text(encoding="ascii").strip())

    def _connected(self, opened: ExitStack) -> dict[str, Host]:
        """Return the hosts. opened: will close their namespaces, also those that were made before an error."""
        self._switch = _new_host("", opened)
        _run(self._switch, ("ip", "-batch", "-"), "link add switch type bridge\nlink set switch up\n")
        hosts = {name: _new_host(str(_ADDRESSES[1 + place]), opened) for place, name in enumerate(self._names)}
        for place, (name, host) in enumerate(hosts.items()):
            port, limit = _port(place), self._limit(self._others.get(name, self._mbit))
            cable = f"link add {port} type veth peer name eth0 netns /proc/{os.getpid()}/fd/{_network_file(host)}\n"
            _run(self._switch, ("ip", "-batch", "-"), f"{cable}link set {port} master switch up\n")
            _run(self._switch, ("tc", *f"qdisc add dev {port} {limit}".split()))
            address = f"addr add {host.address}/{_ADDRESSES.prefixlen} dev eth0\n"
            _run(host, ("ip", "-batch", "-"), f"{address}link set eth0 up\nlink set lo up\n")
            _run(host, ("tc", *f"qdisc add dev eth0 {limit}".split()))
        return hosts

    def _limit(self, mbit: float) -> str:
        bits_per_s = round(1e6 * mbit)
        burst = max(_LARGEST_PACKET, bits_per_s * _BURST_MS // 8000)
        return f"root tbf rate {bits_per_s}bit burst {burst} latency {self._queue_ms}ms"


def _port(place: int) -> str:
    return f"port{place}"


def _network_file(host: Host) -> int:
    assert host._namespaces is not None
    return host._namespaces[0]


def _new_host(address: str, opened: ExitStack) -> Host:
    """Return a host with no interfaces but its loopback, down; its host name is its address."""

    def make() -> tuple[int, int]:
        _system_call("unshare", _CLONE_NEWNET | _CLONE_NEWUTS)
        if address:
            socket.sethostname(address)
        files = []
        for kind in ("net", "uts"):
            files.append(os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY))
            opened.callback(os.close, files[-1])
        return files[0], files[1]

    return Host(address, _in_a_thread(make))


def _qdiscs(host: Host) -> list[dict[str, Any]]:
    return list(json.loads(_run(host, ("tc", "-s", "-j", "qdisc", "show"))))


def _run(host: Host, argv: Sequence[str], lines: str = "") -> str:
    """Run one of the programs on a host; return its output. Raises ConfigError with what it says when it fails."""
    try:
        done = subprocess.run(host.command(argv), input=lines, capture_output=True, text=True, check=False, timeout=_WITHIN_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"links of a limited rate: {argv[0]} takes more than {_WITHIN_S:g} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"links of a limited rate cannot be made: {argv[0]}: {said[0]}")
    return done.stdout


def _in_a_thread(work: Callable[[], _T]) -> _T:
    """Return `work()` from a thread of its own: namespaces are a thread's, and this one's must stay."""
    with ThreadPoolExecutor(1, thread_name_prefix="namespace") as pool:
        return pool.submit(work).result()


def _system_call(name: str, *arguments: int) -> None:
    """Call unshare or setns. Raises ConfigError when the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise ConfigError(f"links of a limited rate need network namespaces, as root: {os.strerror(ctypes.get_errno())}")
