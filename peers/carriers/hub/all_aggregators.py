"""One peer's connections to all aggregators of its run; where the coordinator is the only one, to that one."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from edit.collective import CompositeCollective
from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.fragments.schema import Schema
from edit.replica.ranks import Ranks
from edit.replica.replica import Outer
from editpb.identity import Identity
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import Follower, HubCollective, Siblings, read_configuration
from peers.carriers.hub.control_stream import ConfigParser
from peers.carriers.hub.site import NOWHERE, Site
from peers.carriers.hub.snapshot_server import SnapshotServer
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import Traffic, leaving

__all__ = ["AllAggregators", "agreed_configuration", "connect_hub"]

_log = logging.getLogger("peers")


@contextmanager
def connect_hub(
    io: IoThread,
    channels: Channels,
    identity: Identity,
    ranks: Ranks,
    server: SnapshotServer | None = None,
    *,
    site: Site = NOWHERE,
    ended: str = "the run has finished",
    failed: str = "the peer failed",
) -> Iterator[tuple[AllAggregators, RunConfig, int]]:
    """Connect one rank of a peer to its run; all ranks of the replica call it together.

    Yields the connection, the run's configuration and an outer step that every aggregator has reached. Waits for aggregators
    that are not there yet. Leaving says goodbye and closes everything. Raises ConfigError, RefusedError, EvictedError,
    Interrupted.

    Args:
        io: the I/O thread.
        channels: to the coordinator.
        identity: this peer's.
        ranks: of the replica.
        server: serves this peer's snapshots while the context is open.
        site: this peer's.
        ended, failed: what the goodbye says.
    """
    with _serving(io, server):
        parser = ConfigParser(site.check, site.configuration)
        config, steps = agreed_configuration(io, channels, identity, ranks, parser)
        if server is not None and config.aggregators.addresses:
            count = config.aggregators.count
            raise ConfigError(f"--serve-snapshots: not in a run of {count} aggregators, with a part each; leave it out")
        each = (channels, *(channels.to((address,)) for address in config.aggregators.addresses))
        hub = AllAggregators(io, each, identity, ranks, parser, server, site, reached=max(steps), config=config)
        with leaving(hub, ended, failed) as connection:
            yield connection, config, min(steps)


def agreed_configuration(
    io: IoThread, channels: Channels, identity: Identity, ranks: Ranks, parser: ConfigParser | None = None
) -> tuple[RunConfig, Sequence[int]]:
    """Return the run's configuration, once the coordinator and every further aggregator have said the same.

    Returns it with their outer steps, in their order. Waits for ever: a peer that entered while an aggregator is away would
    keep the others waiting for it. All ranks of a replica call it together. Raises ConfigError, RefusedError, EvictedError,
    Interrupted.
    """
    ranks.same("which peer they are", f"{identity.peer_id} of run {identity.run_id}")
    parser = parser or ConfigParser()
    config, outer_step = read_configuration(io, channels, identity, ranks, parser)
    steps = [outer_step]
    for number, address in enumerate(config.aggregators.addresses, start=1):
        theirs, outer_step = read_configuration(io, channels.to((address,)), identity, ranks, parser)
        steps.append(outer_step)
        if theirs is not config and theirs != config:
            raise ConfigError(
                f"aggregator {number} ({address}) has other settings than the coordinator: "
                f"{_first_difference(config, theirs)}; give it the same "
                "run.toml with `edit-coordinator new-aggregator`, and start it again"
            )
    return config, steps


def _first_difference(config: RunConfig, other: RunConfig) -> str:
    """Return the first setting in which `other`, which is another configuration, differs, as in `sync.every is 8, not 16`."""
    ours, theirs = _by_name(config), _by_name(other)
    name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return f"{name} is {theirs.get(name)!r:.200}, not {ours.get(name)!r:.200}"


def _by_name(config: RunConfig) -> dict[str, Any]:
    """Return all settings by name, those too that `to_json` leaves out at their defaults."""
    found: dict[str, Any] = {}
    for section, values in dataclasses.asdict(config).items():
        found |= {f"{section}.{key}": each for key, each in values.items()} if isinstance(values, dict) else {section: values}
    return found


@contextmanager
def _serving(io: IoThread, server: SnapshotServer | None) -> Iterator[None]:
    if server is None:
        yield
        return
    _log.info("serving snapshots at %s", io.call(server.start()))
    try:
        yield
    finally:
        io.resume()
        io.call(server.close())


class AllAggregators(CompositeCollective):
    """A `peers.carriers.run_connection.RunConnection`: one `HubCollective` for each aggregator, the coordinator's first.

    It is also what `EditWorker` takes as collective. Close it before the I/O thread ends.

    Args:
        io: the I/O thread.
        channels: to each aggregator, the coordinator's first.
        identity: this peer's.
        ranks: of the replica.
        parser: of the configuration, with what it has parsed.
        server: serves this peer's snapshots.
        site: this peer's.
        followers: of the connection to each aggregator, at rank 0; none: nobody follows.
        reached: see `CompositeCollective`.
        config: of the run; None: nobody asks for it.
    """

    def __init__(
        self,
        io: IoThread,
        channels: Sequence[Channels],
        identity: Identity,
        ranks: Ranks,
        parser: ConfigParser | None = None,
        server: SnapshotServer | None = None,
        site: Site = NOWHERE,
        followers: Sequence[Follower] = (),
        reached: int = 0,
        config: RunConfig | None = None,
    ) -> None:
        self._io = io
        self._server = server
        self._shown: Outer | None = None
        siblings = Siblings(len(channels), parser, server, channels[1:])
        following: Sequence[Follower | None] = followers or [None] * len(channels)
        self._connections = tuple(
            HubCollective(io, each, identity, ranks=ranks, siblings=siblings, site=site, follower=follower, aggregator=number)
            for number, (each, follower) in enumerate(zip(channels, following, strict=True))
        )
        super().__init__(self._connections, site.clip, reached)
        self.config = config

    @property
    def shares(self) -> tuple[HubCollective, ...]:
        """The connection to each aggregator, in their order."""
        return self._connections

    @property
    def connected(self) -> bool:
        """Whether every aggregator is heard at present."""
        return all(one.connected for one in self._connections)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and received on the data plane since the process started."""
        return Traffic(
            sum(one.traffic.sent for one in self._connections), sum(one.traffic.received for one in self._connections)
        )

    @property
    def ended(self) -> bool:
        """Whether all aggregators' runs have finished, at whatever outer step; all ranks ask together."""
        return all(one.ended for one in self._connections)

    def prefetch(self) -> None:
        """Begin to fetch the snapshots that joining will return, from a run that has parameters."""
        for one in self._connections:
            one.prefetch()

    def show(self, outer_of: Callable[[], tuple[Schema, Outer]]) -> None:
        """See `RunConnection.show`."""
        if (server := self._server) is None:
            return
        schema, outer = outer_of()
        if outer is not self._shown:
            self._shown = outer

            def serve() -> None:
                server.show(schema, outer)
                for one in self._connections:
                    one.tell()  # where others can read this outer step now

            self._io.post(serve)

    def check(self) -> None:
        """Raise EvictedError or RefusedError when an aggregator has expelled this peer, Interrupted when asked to stop.

        What is raised at one rank is raised at all.
        """
        for one in self._connections:
            one.check()

    def pause(self, seconds: float) -> None:
        """Wait. Raises Interrupted as soon as this process is asked to stop."""
        self._io.wait(lambda: None, timeout=seconds)

    def interrupt(self) -> None:
        """End the main thread's waits with Interrupted; safe in a signal handler."""
        self._io.interrupt()

    def close(self, reason: str = "the peer stopped") -> None:
        """Say goodbye to each, within two seconds, and close the connections. reason: for the run's operator."""
        for one in self._connections:
            one.close(reason)
