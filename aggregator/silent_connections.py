"""Connections over which nobody has called yet: how many one source may have, so that it cannot take all descriptors.

gRPC bounds the connections of all together, and the time of a handshake. Whose they are it does not ask, nor does it say: so
the process looks at its own sockets. A source is an IPv4 address, or the /64 network of an IPv6 address: whoever has one has
all of it. Members behind one address are not affected by how many they are: from its first call on a connection is no longer
silent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

__all__ = ["Remote", "SilentConnections"]

SWEEP_S = 0.5  # how often they are counted
_MOST_KNOWN = 4096  # connections over which somebody called, before those that are gone are forgotten
_FOLDERS = ("/proc/self/fd", "/dev/fd")  # where a process sees its descriptors: Linux, macOS
_log = logging.getLogger(__name__)


class Remote(NamedTuple):
    """The other end of a connection."""

    host: str
    port: int

    @property
    def source(self) -> str:
        """Who is counted as one."""
        return _source(self.host)


class SilentConnections:
    """The connections to some ports of this process. `spoke` is called on the event loop, `cut` in another thread."""

    def __init__(self) -> None:
        self._spoke: set[Remote] = set()
        self._seen: dict[Remote, int] = {}  # silent ones, and the sweep that saw each first
        self._sweeps = 0

    def spoke(self, peer: str) -> None:
        """Take note that a member called. peer: as gRPC names it (ipv4:HOST:PORT, ipv6:[HOST]:PORT)."""
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        with suppress(ValueError):  # another kind of address, which no port of ours has
            self._spoke.add(_remote(host.strip("[]"), int(port)))

    async def keep_few(self, files: Executor, most: Mapping[int, int]) -> None:
        """`cut` again and again, in this executor, a small part of its time however many there are."""
        loop, took_s = asyncio.get_running_loop(), 0.0
        while True:
            await asyncio.sleep(max(SWEEP_S, 20 * took_s))
            began = loop.time()
            with suppress(OSError):  # no descriptor is free at present
                await loop.run_in_executor(files, self.cut, most)
            took_s = loop.time() - began

    def cut(self, most: Mapping[int, int]) -> None:
        """Close what is too many, the oldest first. most: silent connections of one source, by port of this process."""
        if len(_descriptors()) <= min(most.values()) and len(self._spoke) <= _MOST_KNOWN:
            return  # nothing can be too many
        known = frozenset(self._spoke)
        self._sweeps += 1
        silent: defaultdict[tuple[str, int], list[Remote]] = defaultdict(list)
        present: set[Remote] = set()
        for remote, port, _ in _connections(most):
            present.add(remote)
            if remote not in self._spoke:
                self._seen.setdefault(remote, self._sweeps)
                silent[remote.source, port].append(remote)
        self._spoke -= known - present  # without what spoke meanwhile
        self._seen = {remote: first for remote, first in self._seen.items() if remote in present and remote not in self._spoke}
        surplus = set[Remote]()
        for (_, port), remotes in silent.items():
            surplus.update(sorted(remotes, key=lambda each: self._seen.get(each, self._sweeps))[: -most[port]])
        if surplus:
            self._close(surplus, most)

    def _close(self, surplus: set[Remote], ports: Collection[int]) -> None:
        closed: Counter[str] = Counter()
        for remote, _, connection in _connections(ports):
            if remote in surplus:
                with suppress(OSError):  # it is closed already
                    connection.shutdown(socket.SHUT_RDWR)
                    closed[remote.source] += 1
        if closed:
            source, count = closed.most_common(1)[0]
            others = f", and {closed.total() - count} of {len(closed) - 1} other sources" if len(closed) > 1 else ""
            _log.warning("closed %d connections from %s over which nobody called%s", count, source, others)


def _connections(ports: Collection[int]) -> Iterator[tuple[Remote, int, socket.socket]]:
    """Yield each connection that these ports have accepted: its other end, its port, and a handle that is closed afterwards."""
    for descriptor in _descriptors():
        with suppress(OSError):  # closed meanwhile, or one that listens
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with _socket(os.dup(descriptor)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if (port := connection.getsockname()[1]) in ports:
                    yield _remote(*connection.getpeername()[:2]), port, connection


def _descriptors() -> list[int]:
    folder = next((folder for folder in _FOLDERS if Path(folder).is_dir()), None)
    return [int(name) for name in os.listdir(folder)] if folder is not None else []  # noqa: PTH208 (there may be thousands)


def _socket(descriptor: int) -> socket.socket:
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise


def _remote(host: str, port: int) -> Remote:
    return Remote(_normal(host), port)


@lru_cache(4096)
def _normal(host: str) -> str:
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


@lru_cache(4096)
def _source(host: str) -> str:
    address = ip_address(host)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64" if isinstance(address, IPv6Address) else host
