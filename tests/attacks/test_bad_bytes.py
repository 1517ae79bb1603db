"""Bad bytes in a loop: they cost three rounds and a few lines of the log, then their sender is kept out for a while."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import pytest

from aggregator.resources import Clock
from edit.rounds import events
from editpb import control_pb2, control_pb2_grpc, tensors_pb2
from editpb.run_status import RunStatus
from editpb.status_messages import status_from_pb
from tests.support.loops import on_a_loop
from tests.support.served import TOML as served_toml
from tests.support.served import BarePeer, Served, found_run, found_together, new_folder, served, theta

TRIES = 60


TOML = served_toml.replace("[storage]", "[membership]\nlease_s = 1e6\n[storage]")


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.now, unix=lambda: 1.8e9)

    def move(self, at: Served, seconds: float) -> None:
        """Time passes, and the coordinator looks at the clock, which it does four times a second by itself."""
        self.now += seconds
        at.coordinator.run.rounds.feed(events.Tick())


async def bad_bytes(peer: BarePeer, at: Served) -> str:
    """Begin a contribution to the open round with a chunk that leaves a gap; return the answer."""
    machine = at.coordinator.run.rounds.machine
    total = 4 * peer.schema.fragments[0].numel
    header = peer.header(machine.round_id or 1, machine.outer_step, 0, total)
    try:
        await peer.send(header, [tensors_pb2.Chunk(offset=1, data=bytes(total - 1))])
    except grpc.aio.AioRpcError as error:
        return error.details() or ""
    return ""


async def status(at: Served) -> RunStatus:
    async with at.channel("watcher", "operator") as channel:
        return status_from_pb(await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest()))


@on_a_loop
async def test_bad_bytes_in_a_loop_cost_three_rounds_where_everybody_is_needed(tmp_path: Path) -> None:
    hands, folder = Hands(), new_folder(tmp_path / "run", toml=TOML, quorum=2)
    async with served(folder, hands.clock()) as at, at.peer("a") as honest, at.peer("bad") as bad, at.peer("c") as third:
        machine = await found_together(at, honest, bad)
        first = machine.round_id
        for _ in range(TRIES):  # 8 s
            await bad_bytes(bad, at)
            hands.move(at, 8.0 / TRIES)
        aborted = [report for report in (await status(at)).rounds if not report.committed]
        assert len(aborted) == 3 and aborted[-1].round_id == first + 2
        assert machine.round_id == 0
        shown = await status(at)
        members = {member.peer_id: member for member in shown.members}
        assert 50 < members["bad"].quarantined_s <= 60 and members["a"].quarantined_s == 0
        assert shown.reason == "too few peers without bad, quarantined for bad bytes"

        await third.attend()
        await third.report(0)
        view = await honest.view(lambda view: view.round_id > first + 2)
        assert machine.expected == {"a", "c"}
        assert "quarantined" in await bad_bytes(bad, at)
        for peer in (honest, third):
            await peer.contribute(view.round_id, 0, theta(1))
        assert (await honest.view(lambda view: view.outer_step == 1)).reason == ""


@on_a_loop
async def test_one_damaged_message_costs_an_honest_peer_no_waiting(tmp_path: Path) -> None:
    hands, folder = Hands(), new_folder(tmp_path / "run", toml=TOML, quorum=2)
    async with served(folder, hands.clock()) as at, at.peer("a") as a, at.peer("b") as b:
        machine = await found_together(at, a, b)
        assert "gap" in await bad_bytes(b, at)
        view = await a.view(lambda view: view.round_id == machine.round_id)
        assert machine.expected == {"a", "b"}
        for peer in (a, b):
            await peer.contribute(view.round_id, 0, theta(1))
        await a.view(lambda view: view.outer_step == 1)
        assert all(member.quarantined_s == 0 for member in (await status(at)).members)


@on_a_loop
async def test_a_quarantine_ends_with_time_and_with_the_operators_word(tmp_path: Path) -> None:
    hands, folder = Hands(), new_folder(tmp_path / "run", toml=TOML, quorum=2)
    async with served(folder, hands.clock()) as at, at.peer("a") as a, at.peer("b") as b:
        machine = await found_together(at, a, b)
        for _ in range(3):
            await bad_bytes(b, at)
            hands.move(at, 1.0)
        assert machine.quarantined_until("b") is not None
        hands.move(at, 60.0)
        assert machine.expected == {"a", "b"}
        await bad_bytes(b, at)
        assert machine.quarantined_until("b") == hands.now + 120.0
        async with at.channel("operator", "operator") as channel:
            await control_pb2_grpc.ControlStub(channel).Resume(control_pb2.ResumeRequest())
        assert machine.quarantined_until("b") is None
        assert machine.expected == {"a", "b"}


@on_a_loop
async def test_bad_bytes_in_a_loop_do_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hands, folder = Hands(), new_folder(tmp_path / "run", toml=TOML)
    with caplog.at_level(logging.INFO):
        async with served(folder, hands.clock()) as at, at.peer("a") as honest, at.peer("bad") as bad:
            await found_together(at, honest, bad)
            caplog.clear()
            for _ in range(TRIES):
                assert await bad_bytes(bad, at)
            assert len([line for line in caplog.messages if line.startswith("bad:")]) == 1


@on_a_loop
async def test_bad_bytes_in_a_loop_do_not_hold_up_arrivals(tmp_path: Path) -> None:
    toml = TOML.replace(
        "start_peers = {start}\nquorum = {quorum}\nfloor_s = 1000.0\nceiling_s = 1000.0",
        'merging = "arrivals"\nmax_staleness = 4',
    )
    hands, folder = Hands(), new_folder(tmp_path / "run", toml=toml)
    async with served(folder, hands.clock()) as at, at.peer("a") as honest, at.peer("bad") as bad:
        await found_run(honest)
        await bad.attend()
        await bad.report(0)
        machine = at.coordinator.run.rounds.machine
        for step in range(4):
            for _ in range(TRIES // 4):
                await bad_bytes(bad, at)
                hands.move(at, 1.0)
            await honest.contribute(machine.round_id, step, theta(1))
            await honest.view(lambda view, step=step: view.outer_step == step + 1)
        aborted = [report for report in (await status(at)).rounds if not report.committed]
        assert len(aborted) == 3
