"""A host as a process: `python -m aggregator.swarm FOLDER`. No command starts it yet.

At SIGINT and SIGTERM it leaves the swarm, which takes 3 s at most, and ends; at a second one it ends at once. Where its
standard input is a pipe it leaves, too, when that is closed: whoever started it is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
from pathlib import Path

import torch

from aggregator.resources import raise_file_limit
from aggregator.storage.state_folder import lock_folder
from aggregator.swarm.host import Host, Place
from aggregator.swarm.host_folder import HostFolder, credentials, members
from aggregator.swarm.member_folder import MemberFolder
from edit import kernels
from edit.config.run import RunConfig
from edit.heaps import limit_heaps, map_large_blocks

__all__ = ["serve_host"]

_log = logging.getLogger(__name__)


async def serve_host(path: Path, *, threads: int = 1) -> None:
    """Be a member of the swarm until a signal. Raises EditError, also when something failed that ends a host.

    threads: that torch computes with.
    """
    lock_folder(path, "another host has this folder")
    folder, config = HostFolder.load(path), RunConfig.from_toml(path / "run.toml")
    torch.set_num_threads(threads)
    limit_heaps()
    map_large_blocks()
    raise_file_limit()
    stop, now = asyncio.Event(), asyncio.Event()
    _stop_at_the_end(stop, now)
    _log.info(kernels.load())
    client, server = credentials(path)
    discovery = None
    if folder.uses_dht():
        from aggregator.swarm.discovery import Discovery  # needs what is not installed everywhere

        discovery = Discovery.of(folder, path)
    host = Host(
        folder.run_id,
        folder.peer_id,
        config,
        MemberFolder(path),
        folder.schemas(path, config),
        Place(folder.listen, folder.advertise),
        client,
        server,
        members(path),
        seeds=folder.seeds,
        timing=folder.timing,
        discovery=discovery,
    )
    try:
        await host.start()
        await host.watch(stop)
        if not host.is_leaving:
            await _leave(host, now)
    finally:
        await host.close()


async def _leave(host: Host, now: asyncio.Event) -> None:
    """Let the host leave, until `now` is set, or something fails."""
    _log.info("leaving; once more ends it at once")
    leaving = asyncio.ensure_future(host.leave())
    leaving.add_done_callback(lambda _: now.set())
    try:
        await host.watch(now)
    finally:
        leaving.cancel()


def _stop_at_the_end(stop: asyncio.Event, now: asyncio.Event) -> None:
    """Set `stop` at the first signal, or the end of the standard input, and `now` at each further signal."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (now if stop.is_set() else stop).set())

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set()

    if stat.S_ISFIFO(os.fstat(0).st_mode):
        loop.add_reader(0, read)
