"""Inner steps and tokens are claims: they end no run, break no status, take no weight and slow nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path

from edit.rounds.machine import RoundMachine
from editpb import control_pb2, control_pb2_grpc
from editpb.control_messages import peer_message_to_pb
from editpb.messages import Heartbeat, PeerState
from editpb.run_status import RunStatus
from editpb.status_messages import status_from_pb
from editpb.transport.chunks import make_chunks
from tests.attacks.test_bad_bytes import TOML, Hands
from tests.support.encoded import encode
from tests.support.loops import on_a_loop, until
from tests.support.served import BarePeer, Served, found_together, new_folder, served, theta

EVERY = 50
STEP_TOKENS = 4 * 128  # inner.batch_size * model.context
LIE = {"inner_steps": 1 << 48, "tokens": (1 << 63) - 1}
HONEST = {"inner_steps": EVERY, "tokens": EVERY * STEP_TOKENS}


def toml(**sections: str) -> str:
    """The run's settings, with lines added to some sections."""
    text = TOML.replace("every = 2", f"every = {EVERY}")
    for section, lines in sections.items():
        text = text.replace(f"[{section}]", f"[{section}]\n{lines}")
    return text


async def contribute(peer: BarePeer, round_id: int, outer_step: int, work: dict[str, int], scale: float = 1.0) -> None:
    """A whole contribution to an open round that says `work` is behind it."""
    for i, delta in enumerate(theta(1)):
        data = bytes(encode("fp32", scale * delta).data)
        await peer.send(peer.header(round_id, outer_step, i, len(data), dict(work)), make_chunks(data, 512))


async def status(at: Served) -> RunStatus:
    async with at.channel("watcher", "observer") as channel:
        return status_from_pb(await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest()))


async def beat(peer: BarePeer, outer_step: int, step_s: float) -> None:
    await peer._call.write(peer_message_to_pb(Heartbeat(state=PeerState.TRAINING, outer_step=outer_step, step_s=step_s)))


def heard(at: Served, peer_id: str, outer_step: int) -> bool:
    """Whether the peer's report of this outer step is here."""
    member = at.coordinator.run.attendances.membership.members[peer_id]
    return member.heartbeat is not None and member.heartbeat.outer_step == outer_step and member.heartbeat.step_s > 0


async def one_round(machine: RoundMachine, step: int, *work: tuple[BarePeer, dict[str, int]]) -> None:
    """Everybody reports and contributes with the work that it claims, and the round commits."""
    for peer, _ in work:
        await peer.report(step)
    await until(lambda: machine.round_id and machine.expected == {peer.peer_id for peer, _ in work})
    round_id = machine.round_id
    await asyncio.gather(*(contribute(peer, round_id, step, claimed) for peer, claimed in work))
    await until(lambda: machine.outer_step == step + 1)


@on_a_loop
async def test_a_claim_ends_no_run_and_the_status_can_be_read(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(sync="tokens = 100_000_000"), quorum=2)
    async with served(folder) as at, at.peer("a") as honest, at.peer("liar") as liar:
        machine = await found_together(at, honest, liar)
        for step in range(3):
            await one_round(machine, step, (honest, HONEST), (liar, LIE))
            shown = await status(at)
            assert shown.phase != "finished"
            assert (step + 1) * HONEST["tokens"] < shown.tokens <= (step + 1) * 9 * HONEST["tokens"]
        counted = shown.tokens
    async with served(folder) as at:
        assert (await status(at)).tokens == counted, "the journal has the same"


@on_a_loop
async def test_a_claim_takes_no_weight_from_the_others_beyond_a_few_contributions(tmp_path: Path) -> None:
    settings = toml(penalty='weighting = "tokens"')
    folder = new_folder(tmp_path / "run", toml=settings, quorum=3)
    async with served(folder) as at, at.peer("a") as a, at.peer("b") as b, at.peer("liar") as liar:
        machine = await found_together(at, a, b, liar)
        await one_round(machine, 0, (a, HONEST), (b, HONEST), (liar, LIE))
        weights = {verdict.peer_id: verdict.weight for verdict in (await status(at)).rounds[-1].fragments[0].verdicts}
        assert weights["a"] == weights["b"] == 0.1


@on_a_loop
async def test_few_claimed_steps_take_no_weight_either(tmp_path: Path) -> None:
    settings = toml(penalty='weighting = "tokens2_per_step"')
    folder = new_folder(tmp_path / "run", toml=settings, quorum=2)
    async with served(folder) as at, at.peer("a") as honest, at.peer("liar") as liar:
        machine = await found_together(at, honest, liar)
        few = {"inner_steps": 1, "tokens": HONEST["tokens"]}
        await one_round(machine, 0, (honest, HONEST), (liar, few))
        weights = {verdict.peer_id: verdict.weight for verdict in (await status(at)).rounds[-1].fragments[0].verdicts}
        assert weights == {"a": 0.5, "liar": 0.5}


@on_a_loop
async def test_the_log_says_once_that_a_claim_is_not_believed(tmp_path: Path) -> None:
    said: list[str] = []
    async with served(new_folder(tmp_path / "run", toml=toml(), quorum=2)) as at:
        at.coordinator.run.feed.subscribe(lambda event, unix: said.append(getattr(event, "advice", "")))
        async with at.peer("a") as honest, at.peer("liar") as liar:
            machine = await found_together(at, honest, liar)
            for step in range(2):
                await one_round(machine, step, (honest, HONEST), (liar, LIE))
        (line,) = [text for text in said if "inner steps" in text]
        assert f"they count as {2 * EVERY} and {8 * HONEST['tokens']}" in line


@on_a_loop
async def test_a_claimed_number_of_steps_does_not_set_the_pace(tmp_path: Path) -> None:
    hands, folder = Hands(), new_folder(tmp_path / "run", toml=toml(sync="dylu = true"), quorum=2)
    async with served(folder, hands.clock()) as at, at.peer("a") as honest, at.peer("liar") as liar:
        machine = await found_together(at, honest, liar)
        for step in range(3):
            await beat(honest, step, 0.1)
            await beat(liar, step, 1e-6)
            await until(lambda step=step: heard(at, "a", step) and heard(at, "liar", step) and machine.round_id)
            hands.move(at, 0.1 * EVERY)
            round_id = machine.round_id
            await contribute(liar, round_id, step, LIE)
            await contribute(honest, round_id, step, HONEST)
            await until(lambda step=step: machine.outer_step == step + 1)
        assert machine.deadlines.measured_step_s("liar") >= 0.1 / 2
        assert (await honest.view(lambda view: view.outer_step == 3)).inner_steps >= EVERY // 8


@on_a_loop
async def test_who_stays_away_and_claims_one_step_holds_no_round_up(tmp_path: Path) -> None:
    settings = toml(sync='schedule = "time"\ntime_s = 1.0').replace("1000.0\nceiling_s = 1000.0", "1.0\nceiling_s = 60.0")
    hands, folder = Hands(), new_folder(tmp_path / "run", toml=settings)
    async with served(folder, hands.clock()) as at, at.peer("a") as honest, at.peer("liar") as liar:
        machine = await found_together(at, honest, liar)
        for step in range(5):
            await honest.report(step)
            await until(lambda step=step: machine.round_id and machine.outer_step == step)
            await contribute(honest, machine.round_id, step, HONEST)
            hands.move(at, 3600.0)
            await until(lambda step=step: machine.outer_step == step + 1)
        round_id = machine.round_id
        await beat(liar, 5, 1e6)
        await contribute(liar, round_id, 5, {"inner_steps": 1, "tokens": 0})
        await contribute(honest, round_id, 5, HONEST)
        await until(lambda: machine.outer_step == 6)
        await beat(liar, 6, 1e6)
        await honest.report(6)
        await until(lambda: machine.expected == {"a", "liar"})
        assert machine.deadlines.measured_step_s("liar") >= 3600.0
        assert machine.deadline is not None and machine.deadline <= hands.now + 2 * 60.0
