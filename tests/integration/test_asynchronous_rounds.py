"""A real coordinator over mutual TLS where peers need not wait for one another: late contributions, arrivals, drain, tokens."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import torch

from aggregator.control.pace_advice import dylu_steps, fastest, impossible, too_slow, unanchored
from aggregator.resources import Clock
from aggregator.run_feed import RunEnded
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import load_outer
from edit.config.robust import RobustConfig
from edit.config.run import RoundsConfig, RunConfig
from edit.fragments.digest import digest
from edit.records import Verdict
from editpb import control_pb2, control_pb2_grpc
from editpb.control_messages import peer_message_to_pb
from editpb.data_messages import contribution_header_to_pb
from editpb.messages import Heartbeat, PeerState, RunPhase
from editpb.status_messages import status_from_pb
from editpb.transport.chunks import make_chunks
from tests.support.encoded import encode
from tests.support.served import SCHEMA, TOML, BarePeer, Served, found_run, new_folder, served, theta

PLAIN = "start_peers = {start}\nquorum = {quorum}\nfloor_s = 1000.0\nceiling_s = 1000.0\n"
ARRIVALS = TOML.replace(PLAIN, 'merging = "arrivals"\nmax_staleness = 2\n')
UNDAMPED = TOML.replace("enabled = false\n", "enabled = false\nstaleness = 0.0\n")  # so that a step is exactly the contribution
CARRYING = UNDAMPED.replace("[rounds]\n", "[rounds]\nmax_staleness = 1\n")


def delta(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [0.1 * torch.randn(fragment.numel, generator=generator) for fragment in SCHEMA.fragments]


def stepped(parameters: list[torch.Tensor], *seeds: int) -> list[torch.Tensor]:
    """After one outer step with each of these contributions alone, lr 1."""
    for seed in seeds:
        parameters = [t - d for t, d in zip(parameters, delta(seed), strict=True)]
    return parameters


async def send_half(peer: BarePeer, round_id: int, outer_step: int, seed: int) -> None:
    """Fragment 0 whole, the first bytes of fragment 1; then the stream ends."""
    small, large = (bytes(encode("fp32", d).data) for d in delta(seed))
    await peer.send(peer.header(round_id, outer_step, 0, len(small)), make_chunks(small, 512))
    receipt = await peer.send(peer.header(round_id, outer_step, 1, len(large)), list(make_chunks(large, 512))[:1])
    assert not receipt.complete and receipt.received_bytes == 512


async def send_rest(peer: BarePeer, round_id: int, outer_step: int, seed: int) -> None:
    """Where the last stream broke."""
    large = bytes(encode("fp32", delta(seed)[1]).data)
    header = peer.header(round_id, outer_step, 1, len(large))
    known = await peer.data.Probe(contribution_header_to_pb(header))
    assert known.received_bytes == 512
    assert (await peer.send(header, list(make_chunks(large, 512))[1:])).complete


async def status(run: Served) -> dict[str, object]:
    async with run.channel("watcher", "observer") as channel:
        return status_from_pb(await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest())).as_json()


async def two_peers(a: BarePeer, b: BarePeer) -> int:
    """Both attend and report; returns the open round, which expects both where anybody is expected."""
    return (await found_run(b, a)).round_id


def test_peers_of_different_speed_commit_independently_by_arrival(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", toml=ARRIVALS)) as run, run.peer("a") as a, run.peer("b") as b:
            first = await two_peers(a, b)
            await send_half(b, first, 0, 9)
            await a.contribute(first, 0, delta(1))
            one = await a.view(lambda v: v.outer_step == 1 and v.round_id > 0)
            assert one.digest == digest(stepped(theta(), 1))
            await a.contribute(one.round_id, 1, delta(2))
            two = await a.view(lambda v: v.outer_step == 2 and v.round_id > 0)
            await send_rest(b, first, 0, 9)
            three = await a.view(lambda v: v.outer_step == 3 and v.round_id > 0)
            assert three.digest == digest(stepped(theta(), 1, 2, 9))
            assert two.round_id == first + 2
            verdict = (await b.fetch(3)).fragments[1].verdict_of("b")
            assert verdict is not None and (verdict.verdict, verdict.weight, verdict.staleness) == (Verdict.OK, 1.0, 2)
            with pytest.raises(grpc.aio.AioRpcError) as refused:  # never counted twice
                await b.contribute(first, 0, delta(9))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    asyncio.run(scenario())


def test_a_late_contribution_counts_in_the_next_round_and_its_staleness_survives_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run", start=2, toml=CARRYING)
        async with served(folder, kill=True) as run, run.peer("a") as a, run.peer("b") as b:
            first = await two_peers(a, b)
            await send_half(b, first, 0, 9)
            await a.contribute(first, 0, delta(1))
            await b.disconnect()  # lost: the round closes without b
            one = await a.view(lambda v: v.outer_step == 1 and v.round_id > first)
            assert one.digest == digest(stepped(theta(), 1))
            await a.report(1)
            held = {m["peer_id"]: (m["upload_bytes"], m["upload_total_bytes"]) for m in (await status(run))["members"]}
            assert held["b"] == (532, 1220) and held["a"] == (0, 0)
            await b.open_stream()
            await send_rest(b, first, 0, 9)
            await a.contribute(one.round_id, 1, delta(2))
            two = await a.view(lambda v: v.outer_step == 2)
            mean = [x * 0.5 + y * 0.5 for x, y in zip(delta(2), delta(9), strict=True)]
            assert two.digest == digest([t - d for t, d in zip(stepped(theta(), 1), mean, strict=True)])
            rounds = (await status(run))["rounds"]
            assert [line["carried"] for line in rounds] == [["b"], []]
            assert rounds[1]["verdicts"][0]["staleness"] == {"b": 1}
        async with served(folder) as run, run.peer("b") as b:  # from the journal
            await b.attend()
            verdict = (await b.fetch(2)).fragments[0].verdict_of("b")
            assert verdict is not None and verdict.staleness == 1
        async with served(folder) as run, run.peer("b") as b:  # from the checkpoint
            await b.attend()
            verdict = (await b.fetch(2)).fragments[0].verdict_of("b")
            assert verdict is not None and verdict.staleness == 1
            with pytest.raises(grpc.aio.AioRpcError, match="was never opened since the coordinator started"):
                await b.contribute(1_000_001, 1, delta(3))

    asyncio.run(scenario())


def test_a_contribution_that_is_too_stale_is_refused_and_its_memory_given_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", toml=ARRIVALS)) as run, run.peer("a") as a, run.peer("b") as b:
            first = await two_peers(a, b)
            await send_half(b, first, 0, 9)
            for step in range(3):
                view = await a.view(lambda v, step=step: v.outer_step == step and v.round_id > 0)
                await a.contribute(view.round_id, step, delta(step))
                await a.view(lambda v, step=step: v.outer_step == step + 1)
            with pytest.raises(grpc.aio.AioRpcError, match="computed against outer step 0; the run is at 3, max_staleness = 2"):
                await send_rest(b, first, 0, 9)
            assert run.coordinator.run._resources.uploads.held_bytes == 0

    asyncio.run(scenario())


def test_bad_bytes_cost_their_sender_its_contribution_and_nobody_else_anything(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", toml=ARRIVALS)) as run, run.peer("a") as a, run.peer("b") as b:
            first = await two_peers(a, b)
            await send_half(b, first, 0, 9)
            data = bytes(encode("fp32", delta(1)[1]).data)
            chunks = list(make_chunks(data, 512))
            chunks[1].offset += 1
            with pytest.raises(grpc.aio.AioRpcError, match="gap"):
                await a.send(a.header(first, 0, 1, len(data)), chunks)
            second = await a.view(lambda v: v.round_id > first)
            assert (second.outer_step, second.last_committed) == (0, False)
            await a.contribute(second.round_id, 0, delta(1))
            await a.view(lambda v: v.outer_step == 1)
            await send_rest(b, first, 0, 9)
            last = await b.view(lambda v: v.outer_step == 2)
            assert last.digest == digest(stepped(theta(), 1, 9))

    asyncio.run(scenario())


def test_what_is_carried_counts_towards_the_memory_bound(tmp_path: Path) -> None:
    async def scenario() -> None:
        toml = ARRIVALS.replace("[storage]\n", "[storage]\nbuffer_bytes = 2000\n")
        async with served(new_folder(tmp_path / "run", toml=toml)) as run, run.peer("a") as a, run.peer("b") as b:
            uploads = run.coordinator.run._resources.uploads
            first = await two_peers(a, b)
            await send_half(b, first, 0, 9)  # 1220 bytes reserved
            await a.contribute(first, 0, delta(1))
            one = await a.view(lambda v: v.outer_step == 1 and v.round_id > 0)
            assert uploads.held_bytes == 1220
            large = bytes(encode("fp32", delta(2)[1]).data)
            await a.send(a.header(one.round_id, 1, 1, len(large)), list(make_chunks(large, 512))[:1])
            (spilled,) = run.folder.spill.iterdir()
            assert uploads.held_bytes == 1220 and spilled.stat().st_size == 512

    asyncio.run(scenario())


def test_a_drained_run_is_finished_for_everybody_and_a_resume_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder) as run, run.peer("a") as a, run.channel("boss", "operator") as channel:
            boss, ended = control_pb2_grpc.ControlStub(channel), asyncio.Event()
            run.coordinator.run.feed.subscribe(lambda event, unix: ended.set() if isinstance(event, RunEnded) else None)
            first = await found_run(a)
            await boss.Drain(control_pb2.DrainRequest())
            assert (await a.view(lambda v: v.draining)).phase is RunPhase.COLLECTING
            await a.contribute(first.round_id, 0, delta(1))
            end = await a.view(lambda v: v.phase is RunPhase.FINISHED)
            assert (end.outer_step, end.round_id) == (1, 0)
            await asyncio.wait_for(ended.wait(), 30)
            assert (folder.outer / "step-00000001.safetensors").exists()
        async with served(folder) as run, run.peer("a") as a, run.channel("boss", "operator") as channel:
            boss = control_pb2_grpc.ControlStub(channel)
            await a.attend()
            await a.report(1)
            still = await a.view(lambda v: v.phase is RunPhase.FINISHED)
            assert (still.outer_step, still.round_id, still.draining) == (1, 0, True)
            await boss.Resume(control_pb2.ResumeRequest())
            again = await a.view(lambda v: v.outer_step == 1 and v.round_id > first.round_id)
            assert not again.draining
            await a.report(1)
            await a.contribute(again.round_id, 1, delta(2))
            await a.view(lambda v: v.outer_step == 2)

    asyncio.run(scenario())


def test_a_run_that_drains_is_not_paused_until_it_is_resumed(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder) as run, run.peer("a") as a, run.channel("boss", "operator") as channel:
            boss = control_pb2_grpc.ControlStub(channel)
            first = await found_run(a)
            await boss.Drain(control_pb2.DrainRequest())
            with pytest.raises(grpc.aio.AioRpcError, match="the run drains; resume it first"):
                await boss.Pause(control_pb2.PauseRequest())
            assert (await a.view(lambda v: v.draining)).round_id == first.round_id, "the open round is not aborted"
            await boss.Resume(control_pb2.ResumeRequest())
            await boss.Pause(control_pb2.PauseRequest())
            await a.view(lambda v: v.phase is RunPhase.PAUSED and not v.draining)

    asyncio.run(scenario())


def test_there_is_nothing_to_drain_before_the_founding(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.channel("boss", "operator") as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="nothing to drain") as refused:
                await control_pb2_grpc.ControlStub(channel).Drain(control_pb2.DrainRequest())
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        async with served(new_folder(tmp_path / "other")) as run, run.channel("eve", "observer") as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="role observer may not do this"):
                await control_pb2_grpc.ControlStub(channel).Drain(control_pb2.DrainRequest())

    asyncio.run(scenario())


def test_the_run_stops_at_so_many_tokens_also_over_restarts(tmp_path: Path) -> None:
    """Ten tokens a contribution; a kill after 2 (from the journal) and a polite stop after 3 (from the checkpoint)."""

    async def scenario() -> None:
        folder = new_folder(tmp_path / "run", toml=TOML.replace("[sync]\n", "[sync]\ntokens = 45\n"))
        for step, until, kill in ((0, 2, True), (2, 3, False), (3, 5, False)):
            async with served(folder, kill=kill) as run, run.peer("a") as a:
                if step == 0:
                    await found_run(a)
                else:
                    await a.attend()
                    await a.report(step)
                assert run.coordinator.run.rounds.machine.tokens == 10 * step
                for now in range(step, until):
                    view = await a.view(lambda v, now=now: v.outer_step == now and v.round_id > 0)
                    await a.contribute(view.round_id, now, delta(now))
                    await a.view(lambda v, now=now: v.outer_step == now + 1)
                    await a.report(now + 1)
                said = await status(run)
                assert (said["tokens"], said["stop_tokens"]) == (10 * until, 45)
                assert (said["phase"] == "finished") == (until == 5)
        assert load_outer(folder).outer_step == 5

    asyncio.run(scenario())


def test_measured_times_survive_a_restart_and_a_damaged_file_is_passed_over(tmp_path: Path) -> None:
    class Time:
        now = 0.0

    async def scenario() -> None:
        folder, clock = new_folder(tmp_path / "run"), Clock(monotonic=lambda: Time.now)
        async with served(folder, clock) as run, run.peer("a") as a:
            view = await found_run(a)
            for step in range(3):
                view = await a.view(lambda v, step=step: v.outer_step == step and v.round_id > 0)
                Time.now += 4
                await a.contribute(view.round_id, step, delta(step))
                await a.view(lambda v, step=step: v.outer_step == step + 1)
                await a.report(step + 1)
                await _until(run, lambda step=step: _outer_step(run, "a") == step + 1)
        times = {(peer, phase): seconds for peer, phase, seconds in json.loads(folder.deadlines.read_text())}
        assert times["a", "compute"] == [4.0, 4.0, 4.0] and times["a", "upload"] == [0.0, 0.0, 0.0]
        async with served(folder) as run:
            assert run.coordinator.run.rounds.machine.expected_s("a") == 1000.0  # floor_s, not "unmeasured"
        folder.deadlines.write_text('[["a", "compute", [')
        async with served(folder) as run:
            assert run.coordinator.run.rounds.machine.expected_s("a") is None

    asyncio.run(scenario())


def test_each_peer_is_told_its_inner_steps_by_its_measured_speed(tmp_path: Path) -> None:
    now = 0.0

    async def scenario() -> None:
        nonlocal now
        folder = new_folder(tmp_path / "run", toml=TOML.replace("every = 2", "every = 100\ndylu = true"))
        async with served(folder, Clock(monotonic=lambda: now)) as run, run.peer("a") as a, run.peer("b") as b:
            first = await two_peers(a, b)
            for peer, step_s in ((a, 0.1), (b, 0.3)):
                beat = Heartbeat(state=PeerState.TRAINING, outer_step=0, step_s=step_s)
                await peer._call.write(peer_message_to_pb(beat))
                await _until(run, lambda peer=peer, step_s=step_s: _step_s(run, peer.peer_id) == step_s)
            now += 0.5  # for two inner steps: both are measured
            await a.contribute(first, 0, delta(1))
            await b.contribute(first, 0, delta(2))
            assert (await a.view(lambda v: v.outer_step == 1)).inner_steps == 100
            assert (await b.view(lambda v: v.outer_step == 1)).inner_steps == 33

    asyncio.run(scenario())


def _outer_step(run: Served, peer_id: str) -> int:
    beat = run.coordinator.run.attendances.membership.members[peer_id].heartbeat
    return beat.outer_step if beat is not None else 0


def _step_s(run: Served, peer_id: str) -> float:
    beat = run.coordinator.run.attendances.membership.members[peer_id].heartbeat
    return beat.step_s if beat is not None else 0.0


async def _until(run: Served, condition: Callable[[], bool]) -> None:
    """Until a message that was sent is handled; asks the coordinator meanwhile, so it never spins."""
    async with asyncio.timeout(30):
        while not condition():
            await status(run)


def test_dylu_gives_every_peer_at_least_one_step_and_the_fastest_all() -> None:
    assert fastest([0.0, 0.4, 0.1]) == 0.1 and fastest([1e-6, 0.1, 0.4, 0.4]) == 0.1 and fastest([0.0]) == fastest([]) == 0.0
    assert fastest([1e-6, 0.8]) == 0.1, "of two, at most eight times as fast as the other"
    assert [dylu_steps(30, step_s, 0.1) for step_s in (0.1, 0.2, 0.35, 1e9)] == [30, 15, 8, 1]
    assert dylu_steps(30, 0.05, 0.1) == 30  # its report is newer than the fastest known
    assert dylu_steps(30, 0.0, 0.1) == dylu_steps(30, 0.1, 0.0) == 0
    assert dylu_steps(30, float("nan"), 0.1) == 0


def test_a_quorum_that_can_never_come_together_is_said_plainly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", quorum=2)) as run, run.peer("a") as a:
            await a.attend()
            await a.view(lambda v: v.found)
            await a.found(theta())
            words = "rounds.quorum = 2, but only 1 peer has joined the run; invite more, or lower it in run.toml"
            assert (await a.view(lambda v: bool(v.reason))).reason == words
            assert (await status(run))["reason"] == words
            assert caplog.text.count(words) == 1
            async with run.peer("b") as b:
                await b.attend()
                assert (await b.view()).reason == ""

    asyncio.run(scenario())


def test_start_peers_matter_before_the_first_outer_step_only() -> None:
    config = RoundsConfig(start_peers=3)
    assert "start_peers = 3, but only 2 peers have joined" in impossible(config, 0, 2)
    assert impossible(config, 1, 2) == "" and impossible(config, 0, 3) == ""
    assert impossible(RoundsConfig(merging="arrivals", max_staleness=1, quorum=9), 0, 1) == ""


def test_a_run_none_of_whose_anchors_has_joined_says_so() -> None:
    config = RobustConfig(trust="anchors", anchors=("acme", "bell"))
    assert "robust.anchors names acme, bell, and no peer of theirs has joined" in unanchored(config, ["acm.1", "x"])
    assert unanchored(config, ["x", "bell.gpu1"]) == "" and unanchored(RobustConfig(), ["x"]) == ""


def test_a_claimed_inner_step_above_the_ceiling_is_told_and_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        toml = TOML.replace("floor_s = 1000.0\nceiling_s = 1000.0", "floor_s = 0.5\nceiling_s = 1.0")
        clock = Clock(monotonic=lambda: 7.0)
        async with served(new_folder(tmp_path / "run", toml=toml), clock) as run, run.peer("a") as a:
            await a.attend()
            await a.view(lambda view: view.found)
            await a.found(theta())
            for _ in range(2):
                beat = Heartbeat(state=PeerState.TRAINING, outer_step=0, step_s=40.0)
                await a._call.write(peer_message_to_pb(beat))
            await a.view(lambda view: view.round_id > 0)
            machine = run.coordinator.run.rounds.machine
            assert machine.deadline == 8.0
            words = "a: one inner step takes 40 s, but rounds.ceiling_s = 1 s: no round waits so long for a claim; raise it"
            await _until(run, lambda: words in caplog.text)
            assert caplog.text.count(words) == 1

    asyncio.run(scenario())


def test_a_deadline_below_what_is_computed_between_two_exchanges_names_the_fields() -> None:
    def warning(step_s: float, **sync: object) -> str:
        return too_slow(RunConfig.from_mapping({"sync": {"every": 40, **sync}, "rounds": {"ceiling_s": 20.0}}), step_s)

    words = "it computes {} s from one exchange to the next, but rounds.ceiling_s = 20 s: no round waits so long; raise it, or "
    assert warning(2.0) == words.format(80) + "lower sync.every"
    assert warning(0.5, schedule="time", time_s=60.0, groups=2) == words.format(30) + "lower sync.time_s"
    assert "no round waits so long for a claim" in warning(21.0)
    assert warning(0.0) == warning(0.4) == warning(2.0, groups=8) == warning(2.0, dylu=True) == ""


def test_status_shows_where_each_member_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", start=2)) as run, run.peer("a") as a, run.peer("b") as b:
            first = await two_peers(a, b)
            await send_half(b, first, 0, 9)
            rows = {row["peer_id"]: row for row in (await status(run))["members"]}
            assert (rows["a"]["phase"], rows["a"]["upload_total_bytes"]) == ("compute", 0)
            assert (rows["b"]["phase"], rows["b"]["upload_bytes"], rows["b"]["upload_total_bytes"]) == ("upload", 532, 1220)
            await send_rest(b, first, 0, 9)
            rows = {row["peer_id"]: row for row in (await status(run))["members"]}
            assert (rows["b"]["phase"], rows["b"]["upload_bytes"]) == ("waiting", 1220)

    asyncio.run(scenario())


@pytest.mark.exhaustive
def test_a_second_coordinator_on_one_folder_is_refused_with_one_line(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    before = sorted(path.name for path in folder.path.rglob("*"))
    StateFolder(folder.path).lock()
    second = subprocess.run(
        [sys.executable, "-m", "aggregator", "serve", "--state", str(folder.path)], capture_output=True, text=True, timeout=60
    )
    assert second.returncode == 2
    assert second.stderr.strip().splitlines()[-1].endswith("another coordinator is serving this folder; end it first")
    assert "Traceback" not in second.stderr
    assert sorted(path.name for path in folder.path.rglob("*")) == sorted([*before, "lock"])


def test_a_flipped_journal_record_is_one_line_that_names_the_file_and_loses_nothing(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")

    async def two_steps() -> None:
        async with served(folder, kill=True) as run, run.peer("a") as a:
            await found_run(a)
            for step in range(2):
                view = await a.view(lambda v, step=step: v.outer_step == step and v.round_id > 0)
                await a.contribute(view.round_id, step, delta(step))
                await a.view(lambda v, step=step: v.outer_step == step + 1)
                await a.report(step + 1)

    asyncio.run(two_steps())
    journal = folder.outer / "step-00000000.journal"
    whole, before = journal.read_bytes(), load_outer(folder)
    flipped = bytearray(whole)
    flipped[whole.index(b"EdJ1", 4) + 60] ^= 1  # of the first commit; the second one is after it
    journal.write_bytes(flipped)
    kept = {path.name: path.read_bytes() for path in folder.outer.iterdir()}
    ended = subprocess.run(
        [sys.executable, "-m", "aggregator", "serve", "--state", str(folder.path)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert f"{journal}: damaged at byte" in ended.stderr.strip().splitlines()[-1]
    assert {path.name: path.read_bytes() for path in folder.outer.iterdir()} == kept
    journal.write_bytes(whole)
    after = load_outer(folder)
    assert (after.outer_step, after.digest) == (2, before.digest)
