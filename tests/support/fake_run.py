"""A peer without a model in a run of the scripted coordinator: it contributes vectors and asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from edit.config.run import RunConfig
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.records import Contribution, Outcome
from editpb.identity import Identity
from editpb.messages import Heartbeat, PeerState, RunPhase
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective, read_configuration
from peers.carriers.hub.uplink import Stage, as_it_is
from peers.carriers.io_thread import IoThread
from tests.support.encoded import encode
from tests.support.fake_coordinator import FIRST_ROUND, RUN_ID, FakeCoordinator

HEARTBEAT_S = 0.05
SMALL = (24, 40)
LARGE = (24, 700_000)  # more than two chunks


def config(groups: int = 1, max_staleness: int = 0, mode: str = "blocking") -> RunConfig:
    return RunConfig.from_mapping(
        {
            "sync": {"groups": groups, "mode": mode},
            "penalty": {"enabled": False},
            "outer": {"optimizer": "sgd", "lr": 1.0},
            "codec": {"up": "fp32", "down": "fp32"},
            "rounds": {"max_staleness": max_staleness},
            "membership": {"heartbeat_s": HEARTBEAT_S, "lease_s": 1.0},
        }
    )


def schema_of(sizes: Sequence[int]) -> Schema:
    return Schema(
        tuple(
            FragmentSpec(fragment_id=i, name=f"f{i}", tensors=(TensorSpec(name=f"f{i}.weight", shape=(size,)),))
            for i, size in enumerate(sizes)
        )
    )


def vectors(sizes: Sequence[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


class Peer:
    """A peer without a model: it contributes vectors and asks."""

    def __init__(self, io: IoThread, fake: FakeCoordinator, stage: Stage = as_it_is) -> None:
        self.io = io
        self.schema = fake.schema
        self._port = fake.port
        self.collective = HubCollective(
            io, Channels([f"127.0.0.1:{fake.port}"]), Identity(RUN_ID, "peer", "a"), stage=stage, draw=lambda: 0.0
        )

    def configuration(self) -> tuple[RunConfig, int]:
        """What a peer reads before it builds its model."""
        channels = Channels([f"127.0.0.1:{self._port}"])
        return read_configuration(self.io, channels, Identity(RUN_ID, "peer", "a"), draw=lambda: 0.0)

    def contribute(self, deltas: Sequence[Tensor], outer_step: int = 0) -> None:
        for i, delta in enumerate(deltas):
            self.collective.contribute(
                Contribution(outer_step=outer_step, fragment_id=i, inner_steps=5, tokens=50, payload=encode("fp32", delta))
            )

    def ask(self, outer_step: int = 0) -> Outcome:
        """The outcome; carriers may answer None while cut off."""
        for _ in range(5):
            self.await_link(True)
            if (outcome := self.collective.outcome(outer_step, block=True)) is not None:
                return outcome
        raise AssertionError("no outcome")

    def await_link(self, up: bool) -> None:
        """Wait until the coordinator is heard, or no longer heard."""
        assert self.io.wait(lambda: self.collective.connected is up or None, timeout=10) is not None


@contextmanager
def run_of(
    sizes: Sequence[int] = SMALL,
    *,
    founded: bool = True,
    join: bool = True,
    mode: str = "blocking",
    groups: int = 1,
    max_staleness: int = 0,
    stage: Stage = as_it_is,
    ahead_bytes: int = 0,
) -> Iterator[tuple[FakeCoordinator, Peer]]:
    theta = vectors(sizes, seed=0)
    with (
        FakeCoordinator(config(groups, max_staleness, mode), schema_of(sizes), theta if founded else None) as fake,
        IoThread() as io,
    ):
        fake.change_view(ahead_bytes=ahead_bytes)
        peer = Peer(io, fake, stage)
        try:
            if join:
                snapshot = peer.collective.join(peer.schema, lambda: theta)
                assert snapshot.digest == digest(theta)
            yield fake, peer
        finally:
            peer.collective.close()


def open_when_ready(fake: FakeCoordinator, beat: Heartbeat) -> None:
    if beat.state is PeerState.TRAINING and fake.view.phase is RunPhase.GATHERING:
        fake.change_view(phase=RunPhase.COLLECTING, round_id=FIRST_ROUND)
