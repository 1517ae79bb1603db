"""One peer of `edit-lab bench exchange`: python -m edit.lab.bench.exchange_peer HOME THROUGH PARAMETERS CODEC PORT.

THROUGH: an invitation of a coordinator, or in a swarm HOST:PORT of this member's own host.

Its model is one tensor for each of twelve fragments, its inner steps are noise. An exchange is what a peer does between two
phases of training: pseudo-gradient, encoding, upload, update, new parameters, and their digest against the commit's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from aggregator.swarm.host_folder import credentials as credentials_of
from aggregator.swarm.host_folder import identity_of
from edit import kernels
from edit.codecs.error_feedback import ErrorFeedback
from edit.collective import Collective
from edit.fragments.digest import combine
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.lab.bench.turns import Exchanger
from edit.records import Committed, Contribution, Here, RolledBack
from edit.replica.replica import Replica
from editpb.invitation import is_endpoint
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread
from peers.carriers.swarm.connect import connect_swarm
from peers.carriers.swarm.hosts import describe_swarm, hosts_of
from peers.identity.enrolment import join
from peers.identity.peer_folder import PeerFolder
from peers.identity.policy import SitePolicy
from peers.own_site import site_of

__all__ = ["blocks"]

_FRAGMENTS = 12


def blocks(parameters: int) -> Schema:
    """Return twelve blocks of equal size, as a GPT-2 small has."""
    numel = parameters // _FRAGMENTS
    return Schema(
        tuple(
            FragmentSpec(fragment_id=i, name=f"blocks.{i}", tensors=(TensorSpec(name=f"blocks.{i}.weight", shape=(numel,)),))
            for i in range(_FRAGMENTS)
        )
    )


class _Model(torch.nn.Module):
    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Module() for _ in schema.fragments)
        for block, fragment in zip(self.blocks, schema.fragments, strict=True):
            block.weight = torch.nn.Parameter(torch.zeros(fragment.numel))


class _Share:
    """The fragments of one aggregator or part: all of them at a coordinator."""

    def __init__(self, replica: Replica, codec_name: str, collective: Collective) -> None:
        self._replica, self._collective = replica, collective
        self._feedback = ErrorFeedback(codec_name, replica.layout.owned)
        self._fragments = range(len(replica.schema.fragments))
        replica.start(collective.join(replica.schema, replica.local))

    def train(self, generator: torch.Generator) -> None:
        """Move the parameters by noise."""
        replica = self._replica
        with torch.no_grad():
            for i in self._fragments:
                theta = replica.theta(i)
                replica.parameters(i)[0].copy_(theta).add_(torch.empty_like(theta).normal_(0, 1e-3, generator=generator))

    def contribute(self) -> None:
        """Send the pseudo-gradient."""
        step = self._replica.outer_step
        for i in self._fragments:
            payload = self._feedback.stage(i, self._replica.own_pseudo_gradient(i))
            contribution = Contribution(outer_step=step, fragment_id=i, inner_steps=1, tokens=1, payload=payload)
            self._collective.contribute(contribution)

    def move(self) -> str:
        """Wait for the commit, move to it; return the digest."""
        replica, feedback = self._replica, self._feedback
        step = replica.outer_step
        while (outcome := self._collective.outcome(step, block=True)) is None:
            pass
        assert isinstance(outcome, Committed), outcome
        steps = {part.fragment_id: Here(part.payload) for part in outcome.commit.fragments if part.payload is not None}
        hashes = replica.hashes_after(steps)
        assert combine(hashes) == outcome.commit.digest
        for i in self._fragments:
            residual = feedback.commit_parts(i, replica.own_pseudo_gradient(i) if feedback.needs_delta(i) else None)
            replica.apply_fragment(i, steps.get(i, RolledBack()), lambda _: None, hashes[i], residual)
        replica.applied(step + 1)
        return replica.digest


def main(home: Path, through: str, parameters: int, codec_name: str, port: int) -> None:
    """Join, and exchange whenever told to, until told that there is no further exchange."""
    torch.set_num_threads(1)
    kernels.load()
    model, exchanger = _Model(blocks(parameters)), Exchanger(port)
    generator = torch.Generator().manual_seed(os.getpid())
    with IoThread() as io, _connected(io, home, through) as collectives:
        count = len(collectives)
        shares = [_Share(Replica(model, part=(i, count)), codec_name, each) for i, each in enumerate(collectives)]
        for share in shares:
            share.train(generator)
        while exchanger.go():
            for share in shares:
                share.contribute()
            exchanger.report(" ".join([share.move() for share in shares]))
            for share in shares:
                share.train(generator)


@contextmanager
def _connected(io: IoThread, home: Path, through: str) -> Iterator[Sequence[Collective]]:
    """Connect to the coordinator that an invitation leads to, or with HOST:PORT of this member's host to all parts."""
    if is_endpoint(through):
        identity, (credentials, _) = identity_of(home), credentials_of(home)
        swarm = io.call(describe_swarm(through, identity, credentials))
        hosts = hosts_of(swarm, identity.peer_id, through)
        with connect_swarm(io, hosts, swarm.parts, credentials, identity, ended="measured") as (connection, _, _):
            yield connection.shares
        return
    join(through, home, time.time())
    folder = PeerFolder(home)
    enrolled, site = folder.load(time.time()), site_of(SitePolicy(), folder)
    collective = HubCollective(io, Channels(enrolled.endpoints, enrolled.credentials), enrolled.identity, site=site)
    yield (collective,)
    collective.close("measured")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
