"""The coordinator's own round runner as the engine of an owner: what peers contribute becomes an outer step of a swarm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from queue import Queue

import pytest
import torch

from aggregator.resources import Clock
from aggregator.security.members import Members
from aggregator.swarm.engine import Engine
from aggregator.swarm.engine_store import Proposal
from edit.config.run import RunConfig
from edit.council import events as ev
from edit.council.record import Update
from edit.errors import LocalProtocolError, RefusedError, TransportError
from edit.fragments.digest import digest
from edit.lab.council.parts_on_disk import merged_round
from edit.merging.outer_state import OuterState
from edit.rounds.events import MemberReady
from editpb.messages import ContributionHeader
from tests.support.council.replicated_table import ReplicatedTable
from tests.support.council.table import LEASE_S
from tests.support.encoded import encode
from tests.support.rounds import Rounds, open_rounds
from tests.support.served import SCHEMA, WAIT_S, theta

ONES = [torch.ones(fragment.numel) for fragment in SCHEMA.fragments]
SETTINGS = RunConfig.from_mapping(
    {
        "penalty": {"enabled": False},
        "outer": {"optimizer": "sgd", "lr": 1.0},
        "codec": {"up": "fp32", "down": "fp32"},
        "storage": {"checkpoint_every": 2},
    }
)


class Table(ReplicatedTable):
    def first_state(self) -> OuterState:
        return OuterState(SCHEMA, self.config, theta())


class Owner:
    """The host of a, who owns the part; c leads."""

    def __init__(self, table: Table, rounds: Rounds, proposals: asyncio.Queue[Proposal]) -> None:
        self.table, self.rounds, self._proposals = table, rounds, proposals

    async def contribute(self) -> None:
        self.rounds.ready("peer")
        await self.rounds.contribute("peer", ONES)

    async def made(self) -> Update:
        """Wait for the engine's next proposal, and tell its council."""
        async with asyncio.timeout(WAIT_S):
            proposal = await self._proposals.get()
        offer = self.table.replicas["a"].made(self.table.record.parts[0].grant, proposal)
        update = self.table.offer("a", offer, proposal.records)
        self.table.handle("a", ev.Made(update))
        return update


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Owner]:
    table = Table(path, "abc", config=SETTINGS)
    table.elect("c")
    table.run(LEASE_S / 2)
    (served,) = table.done(ev.Serve, "a")
    loop, proposals, replica = asyncio.get_running_loop(), asyncio.Queue[Proposal](), table.replicas["a"]
    store = replica.serve(path / "a", lambda proposal: loop.call_soon_threadsafe(proposals.put_nowait, proposal))
    async with open_rounds(path / "engine", founded=(store, replica.outer)) as rounds:
        assert served.grant == table.record.parts[0].grant
        try:
            yield Owner(table, rounds, proposals)
        finally:
            replica.cease("the test is over")


def test_what_peers_contribute_is_the_outer_step_of_all_members(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path) as owner:
            expected = theta()
            for step in (1, 2, 3):
                await owner.contribute()
                await owner.made()
                assert owner.rounds.published.outer_step == step - 1, "held, and nobody was told"
                owner.table.deliver()
                await owner.rounds.closed(step)
                assert owner.rounds.runner.last_closed[:2] == (step, True)
                assert owner.table.steps() == dict.fromkeys("abc", step)
                expected = [part - 1 for part in expected]
                commit = owner.rounds.published.update(step)
                assert commit.digest == owner.rounds.published.digest == digest(expected)
                assert owner.table.taken[step] == {commit.digest}
            owner.table.check_equal()

    asyncio.run(body())


def test_an_owner_that_lost_its_grant_loses_its_round_and_follows(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path) as owner:
            table = owner.table
            table.cut = {"a"}
            await owner.contribute()
            lost = await owner.made()
            table.run(3 * LEASE_S)
            other = table.record.parts[0].owner
            assert other != "a"
            won = table.make(other)
            table.run(LEASE_S)
            assert table.steps() == {"a": 0, "b": 1, "c": 1} and owner.rounds.published.outer_step == 0
            table.cut = set()
            table.run(2 * LEASE_S)
            await owner.rounds.closed(1)
            assert owner.rounds.runner.last_closed == (1, False, f"grant {lost.grant} is over")
            assert table.steps() == dict.fromkeys("abc", 1) and table.record.parts[0].update == won.id
            table.check_equal()

    asyncio.run(body())


@pytest.mark.parametrize("delivered", [False, True], ids=["held", "agreed on"])
def test_an_owner_that_is_killed_while_its_engine_waits(tmp_path: Path, delivered: bool) -> None:
    async def body() -> None:
        async with serving(tmp_path) as owner:
            table = owner.table
            await owner.contribute()
            made = await owner.made()
            if delivered:  # to the leader, and from it to the others
                table.deliver(lambda mail: mail[1] != "a")
            owner.table.mail.clear()
            table.replicas["a"].cease("killed")
            table.kill("a")
            table.run(3 * LEASE_S)
            assert (table.record.parts[0].update == made.id) or not delivered
            table.go_on()
            table.start("a")
            table.run(2 * LEASE_S)
            table.go_on()
            table.check_equal()

    asyncio.run(body())


def test_an_engine_that_does_not_apply_what_is_agreed_on_is_a_bug_and_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aggregator.swarm.engine_store.APPLIES_WITHIN_S", 0.01)
    table, proposals = Table(tmp_path, "abc", config=SETTINGS), Queue[Proposal]()
    replica = table.replicas["a"]
    store = replica.serve(tmp_path / "a", proposals.put)
    with ThreadPoolExecutor(1) as engine:
        for record in merged_round(replica.outer, 2, 1):
            store.begin_fragment(1, record).result()
        committing = engine.submit(store.append_commit, 1, 1, "all are in")
        proposal = proposals.get(timeout=WAIT_S)
        offer = replica.made(1, proposal)
        replica.hold(offer, proposal.records)
        with pytest.raises(LocalProtocolError, match="has not applied outer step 1"):
            replica.adopt(offer.update.id)
        committing.result(timeout=WAIT_S)
    assert replica.state.outer_step == 0 and replica.state.held == offer.update


def test_only_the_replica_writes_checkpoints(tmp_path: Path) -> None:
    """One of an engine, beside an update that is held, would begin a segment in which that is not."""
    table = Table(tmp_path, "abc", config=SETTINGS)
    replica = table.replicas["a"]
    replica.serve(tmp_path / "a", lambda _: None).checkpoint(replica.outer)
    assert [path.name for path in tmp_path.rglob("a/**/*.safetensors")] == ["step-00000000.safetensors"]


def test_a_grant_that_is_over_takes_no_proposal(tmp_path: Path) -> None:
    table = Table(tmp_path, "abc", config=SETTINGS)
    proposals: list[Proposal] = []
    store = table.replicas["a"].serve(tmp_path / "a", proposals.append)
    with pytest.raises(LocalProtocolError, match="without its fragments"):
        store.append_commit(1, 1, "all are in")
    table.replicas["a"].cease("another owns it")
    for record in merged_round(table.replicas["a"].outer, 2, 1):
        store.begin_fragment(1, record).result()
    with pytest.raises(RefusedError, match="another owns it"):
        store.append_commit(1, 1, "all are in")
    assert not proposals


def test_a_contribution_that_arrives_as_the_part_moves_is_told_so(tmp_path: Path) -> None:
    """Its last bytes are in, and are measured nowhere: the peer sends it to the next owner."""

    async def body() -> None:
        table = Table(tmp_path, "abc", config=SETTINGS)
        table.elect("c")
        table.run(LEASE_S / 2)
        (served,) = table.done(ev.Serve, "a")
        replica, failed = table.replicas["a"], list[BaseException]()
        store = replica.serve(tmp_path / "a", lambda proposal: None)
        members = Members(tmp_path / "members.json", new=True, enrols=False)
        with ThreadPoolExecutor(1) as files:
            engine = Engine(
                "run", 0, served.grant, SETTINGS, replica.outer, store, tmp_path / "engine", members, {*"bc"}, files,
                Clock(), lambda: None, failed.append,
            )  # fmt: skip
            await engine.start()
            rounds = engine.run.rounds
            rounds.feed(MemberReady("peer", 0, 0.0))
            header = ContributionHeader(
                run_id="run",
                round_id=rounds.machine.round_id,
                outer_step=0,
                peer_id="peer",
                fragment_id=0,
                schema_hash=SCHEMA.schema_hash,
                inner_steps=2,
                tokens=10,
                codec="fp32",
                numel=ONES[0].numel(),
                total_bytes=4 * ONES[0].numel(),
            )
            shard = rounds.offer(header)
            assert shard is not None
            await rounds.receive(shard, 0, bytes(encode("fp32", ONES[0]).data))
            replica.cease("the grant is over")
            await engine.close()
            with pytest.raises(TransportError, match="no longer serves part 0"):
                await rounds.arrived(shard)
        assert not failed

    asyncio.run(body())
