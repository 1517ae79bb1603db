"""A host as a process: `python -m aggregator.swarm FOLDER`.

At SIGINT and SIGTERM it leaves the swarm, which takes 3 s at most, and ends; at a second one it ends at once. Where its
standard input is a pipe it leaves, too, when that is closed: whoever started it is gone. That one trains, and writes a line to
the pipe when it needs the host no more: then it ends, as one without a pipe does, when the run has finished and nobody needs
it. One that is started when the others have ended does so by itself. Once it serves it writes its address to standard output,
as a line of JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from aggregator.storage.state_folder import lock_folder
from aggregator.swarm.admission import OwnCertificate, open_authority, take_settings
from aggregator.swarm.host import Host, Place
from aggregator.swarm.host_folder import HostFolder, Settings, credentials, identity_of, members
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.relayed import RelayedPort
from aggregator.telemetry import RoundSpans
from edit import kernels, plugins
from edit.command_line import otlp_protocol
from edit.config.plugins import AGREED
from edit.config.run import RunConfig
from edit.durable_files import read_private
from edit.errors import ConfigError
from edit.heaps import limit_heaps, map_large_blocks
from edit.telemetry import Telemetry, telemetry
from edit.trust.signatures import Signer
from editpb.process_limits import check_limits, raise_file_limit
from editpb.transport.send_limit import SendLimit, send_limit

if TYPE_CHECKING:
    from aggregator.services.metrics_page import MetricsPage

__all__ = ["serve_host", "settings_here", "settle"]

_log = logging.getLogger(__name__)
QUIET_S = 3.0  # so long after the run's end nobody must have needed this host; a peer connects again sooner
LATE_S = 10.0  # so long nobody must lead a run that has finished; members that start at the same time agree sooner
_LEAVES_WITHIN_S = 10.0  # a host whose peer is gone; it takes 3 s
_LOOK_S = 0.25


async def serve_host(
    path: Path,
    *,
    threads: int = 1,
    max_mbit: float | None = None,
    allowed: frozenset[str] = frozenset(),
    metrics_listen: str = "",
) -> None:
    """Be a member of the swarm until a signal, or its end. Raises EditError, also when something failed that ends a host.

    threads: that torch computes with. max_mbit: what is sent per second; None: no bound. allowed: plug-ins that
    this member's operator trusts. metrics_listen: HOST:PORT of /metrics, /healthz and /readyz; empty: none.
    """
    await _lock(path)
    torch.set_num_threads(threads)
    limit_heaps()
    map_large_blocks()
    raise_file_limit()
    check_limits()
    stop, now, trained = asyncio.Event(), asyncio.Event(), asyncio.Event()
    _stop_at_the_end(stop, now, trained)
    _log.info(kernels.load())
    host: Host | None = None
    page = _metrics_page(metrics_listen, lambda: host)
    with ExitStack() as at_last:
        if page is not None:
            await page.start()
            _log.info("metrics on http://%s/metrics", page.listen)
        try:
            identity = identity_of(path)
            told = at_last.enter_context(telemetry(otlp_protocol(), "edit-host", identity.run_id, identity.peer_id))
            opening = asyncio.ensure_future(_open(path, send_limit(max_mbit, path), allowed, told))
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait([opening, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not opening.done():
                opening.cancel()
                return
            host = opening.result()
            await _serve(host, stop, now, trained)
        finally:
            if page is not None:
                await page.close()


async def _serve(host: Host, stop: asyncio.Event, now: asyncio.Event, trained: asyncio.Event) -> None:
    ending = asyncio.ensure_future(_end(host, stop, trained))
    try:
        await host.start()
        print(json.dumps({"listen": host.listen}), flush=True)  # noqa: T201
        await host.watch(stop)
        if not (host.is_leaving or ending.done()):
            await _leave(host, now)
    finally:
        ending.cancel()
        await host.close()


def _metrics_page(address: str, host: Callable[[], Host | None]) -> MetricsPage | None:
    """Return the page of a host, which is not there yet: healthy at once, ready once it is in the swarm. Raises ConfigError."""
    if not address:
        return None
    from aggregator.services.metrics_page import MetricsPage  # needs what only this needs, as the next one
    from aggregator.swarm.metrics import HostCollector

    return MetricsPage(HostCollector(host), address, lambda: (it := host()) is not None and it.let_in, named="--metrics-listen")


async def _lock(path: Path) -> None:
    """Lock the folder. Where a peer starts this host, one that an earlier start of it left behind may still be leaving."""
    give_up = time.monotonic() + (_LEAVES_WITHIN_S if _is_beside_a_peer() else 0.0)
    while True:
        try:
            lock_folder(path, "another host has this folder")
            return
        except ConfigError:
            if time.monotonic() > give_up:
                raise
        await asyncio.sleep(_LOOK_S)


def _is_beside_a_peer() -> bool:
    return stat.S_ISFIFO(os.fstat(0).st_mode)


async def _open(path: Path, limit: SendLimit, allowed: frozenset[str], told: Telemetry | None) -> Host:
    """Return the host that lies in the folder; a new member first asks others for the run's settings. told: takes its spans."""
    folder, identity = HostFolder.load(path), identity_of(path)
    client, server = credentials(path)
    await _take_settings(path)
    settings, config = Settings.load(path), RunConfig.from_toml(path / "run.toml")
    plugins.admit(config, allowed, AGREED)
    discovery = None
    if folder.uses_dht(settings.swarm(config)):
        from aggregator.swarm.discovery import Discovery  # needs what is not installed everywhere

        discovery = Discovery.of(folder, identity, path)
    return Host(
        identity.run_id,
        identity.peer_id,
        config,
        MemberFolder(path),
        [schema for _, schema in settings.schemas(config)],
        Place(folder.listen, folder.advertise, folder.relay),
        client,
        server,
        members(path),
        seeds=folder.seeds,
        timing=settings.timing(config),
        discovery=discovery,
        settings=settings,
        authority=open_authority(path),
        relayed=RelayedPort(folder.relay, path, identity) if folder.relay else None,
        certificate=OwnCertificate(path, identity, time.time),
        signer=Signer(read_private(path / "peer.key")),
        limit=limit,
        subscribers=lambda part: (RoundSpans(told, identity.run_id, part).on_event,) if told is not None else (),
    )


async def _take_settings(path: Path) -> None:
    """Ask others for the run's settings, where the folder has none. Raises as `take_settings`."""
    if not (path / "run.toml").exists():
        await take_settings(path, credentials(path)[0], identity_of(path), HostFolder.load(path).seeds)


async def settings_here(path: Path) -> dict[str, int]:
    """Bring the run's settings to the folder, as a host does; return what its operator may want to know before it serves.

    Raises as `take_settings`.
    """
    await _take_settings(path)
    settings = Settings.load(path)
    return {"parameters": sum(schema.numel for _, schema in settings.schemas(settings.config()))}


async def _end(host: Host, stop: asyncio.Event, trained: asyncio.Event) -> None:
    """Stop once the run has finished, and nobody has needed this host for a while.

    When all others have ended before, a peer beside it finds nobody that it could train with, and is not waited for.
    """
    quiet_s = late_s = 0.0
    while quiet_s < QUIET_S and late_s < LATE_S:
        await asyncio.sleep(_LOOK_S)
        quiet_s = quiet_s + _LOOK_S if trained.is_set() and host.started and host.settled else 0.0
        late_s = late_s + _LOOK_S if host.started and host.came_late else 0.0
    if quiet_s < QUIET_S:
        _log.info("the run has finished: this member has all of it, and the others have ended")
    else:
        _log.info("the run has finished, and all members that are here have it")
    stop.set()


async def _leave(host: Host, now: asyncio.Event) -> None:
    """Let the host leave, until `now` is set, or something fails."""
    _log.info("leaving; once more ends it at once")
    leaving = asyncio.ensure_future(host.leave())
    leaving.add_done_callback(lambda _: now.set())
    try:
        await host.watch(now)
    finally:
        leaving.cancel()


def _stop_at_the_end(stop: asyncio.Event, now: asyncio.Event, trained: asyncio.Event) -> None:
    """Set `stop` at the first signal, or the end of the standard input, and `now` at each further signal."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (now if stop.is_set() else stop).set())

    def read() -> None:
        trained.set()
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set()

    if _is_beside_a_peer():
        loop.add_reader(0, read)
    else:
        trained.set()


def settle(
    path: Path,
    listen: str | None,
    advertise: str | None,
    seeds: Mapping[str, tuple[str, ...]],
    dht_peers: tuple[str, ...] = (),
    relay: str | None = None,
) -> HostFolder:
    """Change host.json to what the command line says; what it leaves out stays, and so do other seeds.

    Of --advertise and --relay the one that is named takes the place of the other. Raises ConfigError, StorageError.
    """
    folder = HostFolder.load(path)
    changed = dataclasses.replace(
        folder.with_seeds(seeds),
        listen=folder.listen if listen is None else listen,
        advertise=("" if relay else folder.advertise) if advertise is None else advertise,
        relay=("" if advertise else folder.relay) if relay is None else relay,
        dht_peers=dht_peers or folder.dht_peers,
    )
    if changed != folder or not (path / "host.json").exists():
        changed.save(path)
    return changed
