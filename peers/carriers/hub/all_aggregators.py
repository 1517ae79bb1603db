"""One peer's connections to all aggregators of its run; where the coordinator is the only one, that one.

Owns: who is dialled, and that a peer enters only when every aggregator is there and has the coordinator's settings. Must not
know: models, fragments, what is exchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import overload

from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.replica.ranks import Ranks
from editpb.identity import Identity
from peers.carriers.hub.channels import Channels, Traffic
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread

__all__ = ["AllAggregators", "agreed_configuration"]


def agreed_configuration(bridge: IoThread, dial: Channels, identity: Identity, ranks: Ranks) -> tuple[RunConfig, int]:
    """The run's configuration, once the coordinator and every further aggregator have said the same, and the least of their
    outer steps: none of them is behind it from now on. Waits for ever.

    A peer that entered while one of them is away would keep the others waiting for it. Raises ConfigError, RefusedError,
    EvictedError, Interrupted; all ranks of a replica call it together.
    """
    config, outer_step = _configuration(bridge, dial, identity, ranks)
    for number, address in enumerate(config.aggregators.addresses, start=1):
        theirs, reached = _configuration(bridge, Channels((address,), dial.credentials), identity, ranks)
        outer_step = min(outer_step, reached)
        if (difference := _first_difference(config, theirs)) is not None:
            raise ConfigError(
                f"aggregator {number} ({address}) has other settings than the coordinator: {difference}; give it the same "
                "run.toml with `edit-coordinator new-aggregator`, and start it again"
            )
    return config, outer_step


def _configuration(bridge: IoThread, dial: Channels, identity: Identity, ranks: Ranks) -> tuple[RunConfig, int]:
    with closing(HubCollective(bridge, dial, identity, ranks=ranks)) as reader:
        return reader.configuration()


def _first_difference(config: RunConfig, other: RunConfig) -> str | None:
    """`sync.every is 8, not 16`: the first setting in which `other` differs, or None."""
    ours, theirs = json.loads(config.to_json()), json.loads(other.to_json())
    for name in sorted(ours):
        if not isinstance(ours[name], dict):
            ours[name], theirs[name] = {"": ours[name]}, {"": theirs[name]}
        for key, value in ours[name].items():
            if theirs[name][key] != value:
                return f"{f'{name}.{key}'.rstrip('.')} is {theirs[name][key]!r}, not {value!r}"
    return None


class AllAggregators(Sequence[HubCollective]):
    """In the order of the aggregators, the coordinator's first; what `EditWorker` takes. Close it before the bridge ends."""

    def __init__(self, bridge: IoThread, dial: Channels, identity: Identity, config: RunConfig, ranks: Ranks) -> None:
        lazy = config.sync.mode == "forward"
        dials = [dial, *(Channels((address,), dial.credentials) for address in config.aggregators.addresses)]
        self._each = tuple(HubCollective(bridge, one, identity, ranks=ranks, lazy=lazy) for one in dials)
        for one in self._each:
            one.together = ()
        self._each[-1].together = self._each  # no aggregator waits for this peer while it still reads the others' snapshots

    @property
    def peer_id(self) -> str:
        """This peer's identity in verdicts."""
        return self._each[0].peer_id

    @property
    def connected(self) -> bool:
        """Whether every aggregator is heard at present."""
        return all(one.connected for one in self._each)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and received on the data plane since the process started."""
        return Traffic(sum(one.traffic.sent for one in self._each), sum(one.traffic.received for one in self._each))

    @property
    def ended(self) -> bool:
        """Whether all aggregators' runs have finished, at whatever outer step; all ranks ask together."""
        return all(one.ended for one in self._each)

    def prefetch(self) -> None:
        """Begin to fetch the snapshots that joining will return, from a run that has parameters."""
        for one in self._each:
            one.ahead.begin()

    def check(self) -> None:
        """Raises EvictedError or RefusedError when one of them has expelled this peer, Interrupted when asked to stop: so for
        any rank, at every rank."""
        for one in self._each:
            one.check()

    def interrupt(self) -> None:
        """End the main thread's waits with Interrupted; for signal handlers."""
        self._each[0].interrupt()

    def close(self, reason: str = "the peer stopped") -> None:
        """Say goodbye to each, within two seconds, and close the connections. reason: told to the run's operator."""
        for one in self._each:
            one.close(reason)

    def __len__(self) -> int:
        return len(self._each)

    def __iter__(self) -> Iterator[HubCollective]:
        return iter(self._each)

    @overload
    def __getitem__(self, index: int) -> HubCollective: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[HubCollective]: ...
    def __getitem__(self, index: int | slice) -> HubCollective | Sequence[HubCollective]:
        return self._each[index]
