"""A scorer of a real coordinator: what it reads, says and changes; restarts, refusals, and what the audit log makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from aggregator.audit_replay import replay_step
from aggregator.data.scores import Scores
from aggregator.security.certificates import key_pem, new_key
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import load_outer
from edit.errors import EvictedError, GoneError, RefusedError, RemoteProtocolError, StaleError
from edit.merging.trust import Trust, after_scores
from edit.records import Verdict
from editpb import data_pb2, data_pb2_grpc
from editpb.audit_log import LogFault, LogVerifier
from editpb.signed_scores import ScoreSigner
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.data_calls import DataCalls, once
from peers.carriers.run_connection import Traffic
from peers.scoring import Scorer
from tests.integration.test_audit import verified
from tests.support.loops import on_a_loop, until
from tests.support.served import SCHEMA, TOML, BarePeer, Served, found_run, new_folder, served, theta
from tests.support.wire import commit

SCORED = TOML + '[robust]\ntrust = "loss"\n'
AUDITED = SCORED + "[audit]\nenabled = true\nkeep_contributions = 3\n"
AUDITED = AUDITED.replace("checkpoint_every = 3", "checkpoint_every = 3\nkeep_checkpoints = 2")
NAMES = ("a", "b", "c", "x")
TARGET = [part + 1 for part in theta(0)]
DEADLINE_S = 30.0


class Nearness:
    """The held-out loss: how far the outer parameters are from TARGET."""

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def draw(self, digest: str) -> None:
        self.drawn.append(digest)

    def loss(self, fragments: Sequence[Tensor]) -> float:
        return sum(float((part - goal).square().sum()) for part, goal in zip(fragments, TARGET, strict=True)) / SCHEMA.numel


def sent(name: str, theta_now: Sequence[Tensor], seed: int) -> list[Tensor]:
    """What a peer contributes: a part of the way to TARGET, with noise; x goes the other way."""
    random = torch.Generator().manual_seed(1000 * seed + ord(name))
    sign = -0.3 if name == "x" else 0.3
    return [
        sign * (part - goal) + 0.15 * torch.randn(part.shape, generator=random)
        for part, goal in zip(theta_now, TARGET, strict=True)
    ]


@contextlib.asynccontextmanager
async def data_calls(run: Served, name: str = "judge") -> AsyncIterator[DataCalls]:
    async with signing_calls(run, name) as (calls, _):
        yield calls


@contextlib.asynccontextmanager
async def signing_calls(run: Served, name: str = "judge") -> AsyncIterator[tuple[DataCalls, ScoreSigner]]:
    key, certificate = run.certificate(name, "scorer")
    channels = Channels((run.coordinator.listen,), grpc.ssl_channel_credentials(run.ca, key, certificate))
    try:
        yield DataCalls(channels, run.folder.run_id, Traffic()), ScoreSigner(key, name)
    finally:
        await channels.close()


async def all_peers(run: Served, stack: AsyncExitStack, outer_step: int) -> list[tuple[BarePeer, Any]]:
    peers = [await stack.enter_async_context(run.signing_peer(name)) for name in NAMES]
    if outer_step == 0:
        await found_run(*(peer for peer, _ in peers))
    else:
        for peer, _ in peers:
            await peer.attend()
            await peer.report(outer_step)
    return peers


async def commit_one(run: Served, peers: Sequence[tuple[BarePeer, Any]], step: int) -> None:
    first, signed = peers[0][0], run.folder.config().audit.enabled
    view = await first.view(lambda v: v.outer_step == step and v.round_id > 0)
    now = run.coordinator.run.rounds.outer.theta
    for peer, sign in peers:
        delta = sent(peer.peer_id, now, step)
        await (
            peer.contribute_signed(sign, view.round_id, step, delta) if signed else peer.contribute(view.round_id, step, delta)
        )
    for peer, _ in peers:
        await peer.view(lambda v: v.outer_step == step + 1)
        await peer.report(step + 1)


def run_to(folder: StateFolder, steps: int, since: int = 0) -> dict[int, dict[str, float]]:
    """Commit outer steps, each scored; the coordinator is killed at the end. Returns the scores by outer step."""
    found: dict[int, dict[str, float]] = {}

    async def scenario() -> None:
        async with served(folder, kill=True) as run, signing_calls(run) as (calls, sign), AsyncExitStack() as stack:
            peers = await all_peers(run, stack, since)
            scorer = Scorer(calls, Nearness(), SCHEMA, folder.config().sync, sign)
            assert await scorer.take() == since
            for step in range(since, steps):
                await commit_one(run, peers, step)
                found[step + 1] = await scorer.score()
                assert await scorer.advance() == step + 1

    asyncio.run(scenario())
    return found


def trusted(said: Mapping[int, Mapping[str, float]], steps: int) -> dict[str, Trust]:
    """The trust after the scores of so many outer steps."""
    trust: dict[str, Trust] = {}
    for step in range(1, steps + 1):
        trust = after_scores(trust, said[step])
    return trust


@pytest.mark.parametrize("toml", [SCORED, AUDITED], ids=["plain", "audited"])
def test_a_hostile_peer_loses_its_weight_and_a_restart_gives_the_same_bits(tmp_path: Path, toml: str) -> None:
    whole, halves = (new_folder(tmp_path / name, start=4, toml=toml) for name in ("whole", "halves"))
    said = run_to(whole, 6)
    assert all(scores["x"] < 0 < min(scores[name] for name in "abc") for scores in said.values())
    run_to(halves, 4)
    assert load_outer(halves).trust == trusted(said, 3)  # from the checkpoint of outer step 3 and the journal
    run_to(halves, 6, since=4)
    one, other = load_outer(whole), load_outer(halves)
    assert one.outer_step == other.outer_step == 6 and one.trust == trusted(said, 5)
    assert {name: each.count for name, each in other.trust.items()} == dict.fromkeys(NAMES, 4)  # those of step 4 were lost


def test_who_is_harmful_is_said_and_without_scores_all_count_alike(tmp_path: Path) -> None:
    scored, blind = new_folder(tmp_path / "scored", start=4, toml=SCORED), new_folder(tmp_path / "blind", start=4, toml=SCORED)

    async def verdicts(folder: StateFolder, *, scoring: bool) -> dict[str, tuple[Verdict, float]]:
        async with served(folder) as run, data_calls(run) as calls, AsyncExitStack() as stack:
            peers = await all_peers(run, stack, 0)
            scorer = Scorer(calls, Nearness(), SCHEMA, folder.config().sync)
            await scorer.take()
            for step in range(3):
                await commit_one(run, peers, step)
                if scoring:
                    await scorer.score()
                await scorer.advance()
            update = await peers[0][0].fetch(3)
            return {each.peer_id: (each.verdict, each.weight) for each in update.fragments[1].verdicts}

    with_scores = asyncio.run(verdicts(scored, scoring=True))
    assert with_scores["x"] == (Verdict.HARMFUL, 0.0)
    assert sum(weight for _, weight in with_scores.values()) == pytest.approx(1)
    assert asyncio.run(verdicts(blind, scoring=False)) == dict.fromkeys(NAMES, (Verdict.OK, 0.25))
    assert load_outer(blind).trust == {}


def test_only_a_scorer_reads_contributions_and_scores(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=4, toml=SCORED)

    async def scenario() -> None:
        async with served(folder) as run, AsyncExitStack() as stack:
            peers = await all_peers(run, stack, 0)
            await commit_one(run, peers, 0)
            for role in ("peer", "observer", "operator", "region"):
                async with run.channel(f"{role}-1", role) as channel:
                    stub = data_pb2_grpc.DataStub(channel)
                    listing = data_pb2.ContributionsRequest(run_id=folder.run_id, outer_step=1)
                    one = data_pb2.ContributionRequest(run_id=folder.run_id, outer_step=1, peer_id="a")
                    report = data_pb2.Scores(run_id=folder.run_id, outer_step=1)
                    with pytest.raises(grpc.aio.AioRpcError, match="needs scorer"):
                        await stub.DescribeContributions(listing, timeout=DEADLINE_S).read()
                    with pytest.raises(grpc.aio.AioRpcError, match="needs scorer"):
                        await stub.FetchContribution(one, timeout=DEADLINE_S).read()
                    with pytest.raises(grpc.aio.AioRpcError, match="needs scorer"):
                        await stub.Score(report)
            async with run.channel("judge", "scorer") as channel:
                judge = BarePeer("judge", folder.run_id, channel, SCHEMA)
                await judge.open_stream()
                await until(lambda: bool(judge.received))
                assert "a scorer takes no part in the rounds" in str(judge.received[0])
                with pytest.raises(grpc.aio.AioRpcError, match="role scorer may not do this"):
                    await judge.contribute(1, 1, theta(1))

    asyncio.run(scenario())


def test_contributions_are_read_from_anywhere_and_only_with_a_deadline(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=4, toml=SCORED)

    async def scenario() -> None:
        async with served(folder) as run, data_calls(run) as calls, AsyncExitStack() as stack:
            peers = await all_peers(run, stack, 0)
            now = [part.clone() for part in run.coordinator.run.rounds.outer.theta]
            with pytest.raises(StaleError, match="outer step 1 is not committed yet"):
                await calls.contributions(1, SCHEMA, once)
            for step in range(3):
                await commit_one(run, peers, step)
            with pytest.raises(GoneError, match="kept of the last outer steps only"):
                await calls.contributions(1, SCHEMA, once)
            headers = await calls.contributions(2, SCHEMA, once)
            assert [(one.peer_id, one.fragment_id) for one in headers] == [(name, i) for i in (0, 1) for name in NAMES]
            last = await calls.contributions(3, SCHEMA, once)
            assert [len((await calls.contribution(one, 3, once)).data) for one in last] == [20] * 4 + [1200] * 4
            async with run.channel("other", "scorer") as channel:
                stub = data_pb2_grpc.DataStub(channel)
                request = data_pb2.ContributionRequest(
                    run_id=folder.run_id, outer_step=3, peer_id="a", fragment_id=1, offset=700, limit=100
                )
                (chunk,) = [each async for each in stub.FetchContribution(request, timeout=DEADLINE_S)]
                whole = bytes((await calls.contribution(last[4], 3, once)).data)
                assert (chunk.offset, chunk.data) == (700, whole[700:800]) and last[4].peer_id == "a"
                with pytest.raises(grpc.aio.AioRpcError, match="with a deadline of at most 600 s"):
                    await stub.FetchContribution(request).read()
                request.peer_id = "nobody"
                with pytest.raises(grpc.aio.AioRpcError, match="fragment 1 of nobody, rank 0 is not in the commit"):
                    await stub.FetchContribution(request, timeout=DEADLINE_S).read()
                listing = data_pb2.ContributionsRequest(run_id=folder.run_id, outer_step=3)
                with pytest.raises(grpc.aio.AioRpcError, match="with a deadline of at most 600 s"):
                    await stub.DescribeContributions(listing).read()
            assert len(now) == 2

    asyncio.run(scenario())


def test_scores_that_cannot_count_are_refused_with_a_reason(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=4, toml=SCORED)

    async def scenario() -> None:
        async with served(folder) as run, data_calls(run) as calls, AsyncExitStack() as stack:
            peers = await all_peers(run, stack, 0)
            with pytest.raises(StaleError, match="scores of outer step 1; the last one is 0"):
                await calls.score(1, {"a": 0.1}, once)
            await commit_one(run, peers, 0)
            for wrong, why in (
                ({"a": math.nan}, "the score of a is nan, not -1 to 1"),
                ({"a": math.inf}, "the score of a is inf"),
                ({"a": 1.5}, "the score of a is 1.5"),
                ({"somebody": 0.1}, "scores of somebody, who is not in the commit to outer step 1"),
            ):
                with pytest.raises(RemoteProtocolError, match=why):
                    await calls.score(1, wrong, once)
            await calls.score(1, {"a": 0.1, "x": -0.1}, once)
            await calls.score(1, {"a": 0.1, "x": -0.1}, once)  # a retry
            with pytest.raises(RefusedError, match="judge has scored outer step 1 already"):
                await calls.score(1, {"a": 0.2}, once)
            async with run.channel("other", "scorer") as channel:
                twice = [data_pb2.PeerScore(peer_id="a", score=0.1)] * 2
                with pytest.raises(grpc.aio.AioRpcError, match="a is scored twice"):
                    await data_pb2_grpc.DataStub(channel).Score(
                        data_pb2.Scores(run_id=folder.run_id, outer_step=1, scores=twice)
                    )
            await commit_one(run, peers, 1)
            with pytest.raises(StaleError, match="scores of outer step 1; the last one is 2, and only that is scored"):
                await calls.score(1, {"a": 0.1}, once)
            assert run.coordinator.run.rounds.outer.trust == {"a": Trust(0.1, 1), "x": Trust(-0.1, 1)}

    asyncio.run(scenario())


def test_in_a_run_with_the_audit_log_a_scorer_signs_with_the_key_of_its_certificate(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=4, toml=AUDITED)

    async def scenario() -> None:
        async with served(folder) as run, signing_calls(run) as (calls, sign), AsyncExitStack() as stack:
            await commit_one(run, await all_peers(run, stack, 0), 0)
            other = ScoreSigner(key_pem(new_key()), "judge")
            for wrong, why in (
                (lambda report: report, "the scores of judge are not signed, which the run asks for"),
                (lambda report: replace(sign(report), scores={"a": 0.2}), "the scores of judge are not signed with the key"),
                (lambda report: replace(sign(report), outer_step=2), "the scores of judge are not signed with the key"),
                (other, "judge signs its scores with another key than its certificate's"),
                (lambda report: replace(sign(report), signature=b"short"), "a signature of 5 bytes"),
            ):
                with pytest.raises(RemoteProtocolError, match=why):
                    await calls.score(1, {"a": 0.1}, once, sign=wrong)
            await calls.score(1, {"a": 0.1}, once, sign=sign)

    asyncio.run(scenario())
    assert verified(folder.path).keys["judge"]


def test_a_run_without_trust_by_loss_has_nothing_for_scorers(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=1)

    async def scenario() -> None:
        async with served(folder) as run, data_calls(run) as calls, run.peer("a") as a:
            view = await found_run(a)
            await a.contribute(view.round_id, 0, sent("a", theta(0), 0))
            await a.view(lambda v: v.outer_step == 1)
            with pytest.raises(RefusedError, match=r'robust.trust is not "loss"'):
                await calls.contributions(1, SCHEMA, once)
            with pytest.raises(RefusedError, match=r'robust.trust is not "loss"'):
                await calls.score(1, {"a": 0.1}, once)
            assert not folder.contributions.exists()

    asyncio.run(scenario())


def evict(run: Served) -> None:
    run.coordinator.run.evict("judge", "it lies")


def replace_key(run: Served) -> None:
    run.coordinator.run.end_replaced()  # notes the key until now, as each tick does
    run.certificate("judge", "scorer", anew=True)
    run.coordinator.run.end_replaced()


@pytest.mark.parametrize("shut_out", [evict, replace_key])
@on_a_loop
async def test_the_report_of_a_scorer_that_is_shut_out_counts_no_more(
    tmp_path: Path, shut_out: Callable[[Served], None]
) -> None:
    folder = new_folder(tmp_path / "run", start=4, toml=SCORED)
    async with served(folder) as run, data_calls(run) as calls, data_calls(run, "other") as others, AsyncExitStack() as stack:
        peers = await all_peers(run, stack, 0)
        await commit_one(run, peers, 0)
        await calls.score(1, {"a": -1.0, "x": 1.0}, once)
        await others.score(1, {"a": 0.1}, once)
        shut_out(run)
        await commit_one(run, peers, 1)
        assert run.coordinator.run.rounds.outer.trust == {"a": Trust(0.1, 1)}


@on_a_loop
async def test_a_report_that_is_being_logged_when_its_scorer_is_evicted_does_not_count(tmp_path: Path) -> None:
    folder, logged = new_folder(tmp_path / "run", start=4, toml=AUDITED), threading.Event()
    async with served(folder) as run, signing_calls(run) as (calls, sign), AsyncExitStack() as stack:
        peers = await all_peers(run, stack, 0)
        await commit_one(run, peers, 0)
        scores = run.coordinator.run.rounds.scores
        assert scores is not None
        holding = asyncio.ensure_future(run.coordinator.background.in_worker(logged.wait))
        report = asyncio.ensure_future(calls.score(1, {"a": -1.0, "x": 1.0}, once, sign=sign))
        await until(lambda: scores._being_logged)
        evict(run)
        logged.set()
        with pytest.raises(EvictedError, match="it lies"):
            await report
        await holding
        await commit_one(run, peers, 1)
        assert run.coordinator.run.rounds.outer.trust == {}
    verified(folder.path)


def test_what_comes_while_a_commit_is_made_is_late_and_a_commit_that_fails_keeps_what_was_said() -> None:
    scores = Scores(commit())
    step = commit().outer_step
    (peer, *_) = {said.peer_id for part in commit().fragments for said in part.verdicts}
    with scores.report("judge", step, {peer: 0.5}) as new:
        assert new
        with pytest.raises(RefusedError, match="judge has scored"), scores.report("judge", step, {peer: 0.5}):
            pass
    assert scores.begin_commit() == (("judge",), {peer: 0.5})
    with pytest.raises(StaleError, match="the next one is being committed"), scores.report("other", step, {peer: 0.5}):
        pass
    scores.undo_commit()
    with scores.report("other", step, {peer: 0.1}) as new:
        assert new
    assert scores.begin_commit() == (("judge", "other"), {peer: 0.3})
    scores.withdraw("judge")  # the commit has taken it; the next try has not
    scores.undo_commit()
    assert scores.begin_commit() == (("other",), {peer: 0.1})
    scores.undo_commit()
    with pytest.raises(StaleError, match="only that is scored"), scores.report("third", step, {peer: 0.1}):
        scores.committed(commit())
        scores._outer_step += 1  # another commit has come while the report was logged
    assert Scores(None).begin_commit() == ((), {})


def test_the_audit_log_has_the_scores_and_whoever_verifies_it_computes_the_trust(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=4, toml=AUDITED)
    said = run_to(folder, 4)
    log, outer = verified(folder.path), load_outer(folder)
    assert log.trust == {name: (each.mean, each.count) for name, each in outer.trust.items()} and log.trust
    lines = (folder.path / "audit-log.jsonl").read_bytes().splitlines()
    entries = [json.loads(line) for line in lines]
    scores = [entry for entry in entries if entry["kind"] == "score"]
    assert [(one["scorer"], one["outer_step"]) for one in scores] == [("judge", step) for step in (1, 2, 3, 4)]
    assert {peer: float.fromhex(value) for peer, value in scores[0]["scores"].items()} == said[1]
    commits = {entry["outer_step"]: entry for entry in entries if entry["kind"] == "commit"}
    assert "trust" not in commits[1] and commits[2]["trust"]["scorers"] == ["judge"]
    assert commits[2]["trust"]["peers"]["x"] == [said[1]["x"].hex(), 1]
    for step in (2, 3, 4):
        assert replay_step(folder.path, step, len(lines)).peers == NAMES


@on_a_loop
async def test_a_trust_that_no_scorer_has_brought_about_is_found_in_a_replay(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=4, toml=AUDITED)
    async with served(folder) as run, AsyncExitStack() as stack:
        peers = await all_peers(run, stack, 0)
        for step in range(4):
            if step == 2:  # the coordinator's own idea
                run.coordinator.run.rounds.outer._trust = {"a": Trust(-1.0, 9), "b": Trust(0.5, 9), "c": Trust(0.5, 9)}
            await commit_one(run, peers, step)
    entries = len((folder.path / "audit-log.jsonl").read_bytes().splitlines())
    assert verified(folder.path).trust == {}
    with pytest.raises(LogFault, match="the trust in peers is not what the log says"):
        await asyncio.to_thread(replay_step, folder.path, 4, entries)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda entry: entry["trust"]["peers"]["x"].__setitem__(0, (0.5).hex()), "does not follow from the scores"),
        (lambda entry: entry["trust"].__setitem__("scorers", []), "does not follow from the scores"),
        (lambda entry: entry["trust"].__setitem__("scorers", ["nobody"]), "lacks 'nobody'"),
        (lambda entry: entry["scores"].__setitem__("x", (0.5).hex()), "the scores of judge are not signed with the key"),
        (lambda entry: entry["scores"].pop("a"), "the scores of judge are not signed with the key"),
        (
            lambda entry: entry["scores"] and entry.__setitem__("scorer", "other"),
            "the scores of other are not signed with the key",
        ),
        (lambda entry: entry["scores"] and entry.__setitem__("signature", ""), "the scores of judge are not signed, which"),
        (lambda entry: entry["scores"] and entry.pop("signature"), "lacks 'signature'"),
    ],
)
def test_a_log_whose_trust_does_not_follow_is_found(tmp_path: Path, change: Any, why: str) -> None:
    from edit.trust.canonical import canonical, parse_canonical

    folder = new_folder(tmp_path / "run", start=4, toml=AUDITED)
    run_to(folder, 2)
    log = LogVerifier()
    with pytest.raises(LogFault, match=why):
        for line in (folder.path / "audit-log.jsonl").read_bytes().splitlines():
            entry = parse_canonical(line)
            with contextlib.suppress(KeyError):  # an entry of another kind
                change(entry)
            log.take(canonical(entry))
