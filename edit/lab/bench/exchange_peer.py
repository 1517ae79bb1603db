"""One peer of `edit-lab bench exchange`: python -m edit.lab.bench.exchange_peer HOME INVITATION PARAMETERS CODEC PORT.

Its model is one tensor for each of twelve fragments, its inner steps are noise. An exchange is what a peer does between two
phases of training: pseudo-gradient, encoding, upload, update, new parameters, and their digest against the commit's.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from edit import kernels
from edit.codecs.error_feedback import ErrorFeedback
from edit.fragments.digest import combine
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.lab.bench.turns import Exchanger
from edit.records import Committed, Contribution, Here, RolledBack
from edit.replica.replica import Replica
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread
from peers.identity.enrolment import join
from peers.identity.peer_folder import PeerFolder

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


def main(home: Path, invitation: str, parameters: int, codec_name: str, port: int) -> None:
    """Enrol, join, and exchange whenever told to, until told that there is no further exchange."""
    torch.set_num_threads(1)
    kernels.load()
    join(invitation, home, time.time())
    enrolled = PeerFolder(home).load(time.time())
    replica = Replica(_Model(blocks(parameters)))
    feedback = ErrorFeedback(codec_name, replica.layout.owned)
    exchanger = Exchanger(port)
    with IoThread() as io:
        collective = HubCollective(io, Channels(enrolled.endpoints, enrolled.credentials), enrolled.identity)
        replica.start(collective.join(replica.schema, replica.local))
        generator = torch.Generator().manual_seed(os.getpid())
        _train(replica, generator)
        while exchanger.go():
            exchanger.report(_exchange(replica, feedback, collective))
            _train(replica, generator)
        collective.close("measured")


def _train(replica: Replica, generator: torch.Generator) -> None:
    with torch.no_grad():
        for i in range(len(replica.schema.fragments)):
            theta = replica.theta(i)
            replica.parameters(i)[0].copy_(theta).add_(torch.empty_like(theta).normal_(0, 1e-3, generator=generator))


def _exchange(replica: Replica, feedback: ErrorFeedback, collective: HubCollective) -> str:
    """Contribute, wait for the commit, move to it; return the digest."""
    step = replica.outer_step
    fragments = range(len(replica.schema.fragments))
    for i in fragments:
        payload = feedback.stage(i, replica.own_pseudo_gradient(i))
        collective.contribute(Contribution(outer_step=step, fragment_id=i, inner_steps=1, tokens=1, payload=payload))
    outcome = collective.outcome(step, block=True)
    assert isinstance(outcome, Committed), outcome
    steps = {part.fragment_id: Here(part.payload) for part in outcome.commit.fragments if part.payload is not None}
    hashes = replica.hashes_after(steps)
    assert combine(hashes) == outcome.commit.digest
    for i in fragments:
        residual = feedback.commit_parts(i, replica.own_pseudo_gradient(i) if feedback.needs_delta(i) else None)
        replica.apply_fragment(i, steps.get(i, RolledBack()), lambda _: None, hashes[i], residual)
    replica.applied(step + 1)
    return replica.digest


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
