"""Secure aggregation between real peers and a real coordinator: the bits of the in-process run, which needs no masks."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from torch import Tensor

from aggregator.control.status import run_status
from aggregator.resources import Clock
from aggregator.storage.state_folder import StateFolder
from edit import Collective, LocalRun
from edit.codecs.grid import words_in
from edit.config.run import RunConfig
from edit.errors import ConfigError, TransportError
from edit.fragments.shards import Shard
from edit.merging.merge import Merged
from edit.merging.outer_state import OuterState
from edit.records import EncodedTensor, Verdict
from edit.trust.mask_plan import FragmentPlan
from edit.trust.mask_roster import Advert
from edit.trust.masking import Confirm, Masks, Reveal, Shares, _box_said
from edit.trust.masks import LANES, lanes_of
from editpb import masking_pb2
from editpb.audit_log import PART, LogVerifier
from editpb.identity import Identity
from editpb.mask_messages import PeerMessage
from peers.carriers.hub import collective
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.hub.masking import Calls, MaskFolder, MaskingCalls
from peers.carriers.hub.site import Site
from peers.carriers.io_thread import IoThread
from tests.support.learner import Learner
from tests.support.running import WAIT_S, Running, address, enter_together, running
from tests.support.served import new_folder

NAMES, EVERY, ROUNDS = ("a", "b", "c", "d"), 2, 4
TOML = """
name = "masked"
[model]
name = "entry:mine"
[sync]
every = 2
outer_steps = {rounds}
{sync}
[penalty]
{penalty}
[secagg]
enabled = true
bits = {bits}
[rounds]
start_peers = 4
quorum = 3
grace_s = 0.2
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
{more}
"""


def toml(bits: int = 16, penalty: str = "", sync: str = "", rounds: int = ROUNDS, more: str = "") -> str:
    return TOML.format(bits=bits, penalty=penalty, sync=sync, rounds=rounds, more=more)


@contextmanager
def connected(
    folder: StateFolder, here: Running, home: Path, names: tuple[str, ...] = NAMES, members: Mapping[str, str] | None = None
) -> Iterator[Mapping[str, HubCollective]]:
    """Real connections, on one I/O thread."""
    with IoThread() as io, ExitStack() as stack:
        found = {}
        for name in names:
            key, certificate = here.served.certificate(name, "peer", None)
            credentials = grpc.ssl_channel_credentials(here.served.ca, key, certificate)
            found[name] = HubCollective(
                io,
                Channels([address(folder)], credentials),
                Identity(folder.run_id, "peer", name),
                site=Site(key=key, masks=MaskFolder(home / f"{name}.json", members)),
            )
            stack.callback(found[name].close)
        yield found


def train(
    collectives: Mapping[str, Collective], settings: RunConfig, *, threads: bool
) -> tuple[dict[str, Tensor], list[Learner]]:
    """Interleave the peers' loops step by step; return theta after all rounds."""
    with ExitStack() as stack:
        peers = [Learner(name, collective, settings) for name, collective in collectives.items()]
        if threads:
            enter_together(stack, [peer.worker for peer in peers])
        else:
            for peer in peers:
                stack.enter_context(peer.worker)
        for _ in range(settings.sync.outer_steps * EVERY):
            for peer in peers:
                peer.step()
        for peer in peers:
            peer.worker.synchronize()
        assert {peer.worker.outer_step for peer in peers} == {settings.sync.outer_steps}
        assert len({peer.worker.digest for peer in peers}) == 1
        return peers[0].worker.outer_state_dict(), peers


@pytest.mark.parametrize(
    ("bits", "penalty", "sync"),
    [(16, "", ""), (8, "enabled = false", "groups = 2"), (32, 'detector = "edit"', 'mode = "delayed"\ndelay = 1')],
)
def test_masked_rounds_give_the_bits_of_the_run_without_masks(tmp_path: Path, bits: int, penalty: str, sync: str) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(bits, penalty, sync))
    settings = folder.config()
    with running(folder) as here, connected(folder, here, tmp_path) as collectives:
        masked, peers = train(collectives, settings, threads=True)
    run = LocalRun(settings, NAMES)
    plain, _ = train({name: run.collective(name) for name in NAMES}, settings, threads=False)
    assert masked.keys() == plain.keys()
    for name, tensor in masked.items():
        assert torch.equal(tensor, plain[name]), name
    commit = peers[0].worker.last_commit
    assert commit is not None and all(each.verdict is Verdict.OK for each in commit.fragments[0].verdicts)
    assert all((tmp_path / f"{name}.json").exists() for name in NAMES)


def started(stack: ExitStack, collectives: Mapping[str, HubCollective], settings: RunConfig) -> dict[str, Learner]:
    peers = {name: Learner(name, collective, settings) for name, collective in collectives.items()}
    enter_together(stack, [peer.worker for peer in peers.values()])
    return peers


def exchange(peers: Mapping[str, Learner], names: str) -> None:
    """One exchange of these peers, who wait for its outcome."""
    for _ in range(EVERY):
        for name in names:
            peers[name].step()
    for name in names:
        peers[name].worker.synchronize()


def test_who_is_killed_before_its_upload_is_left_out_and_the_round_ends(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml())
    with running(folder) as here, connected(folder, here, tmp_path) as collectives, ExitStack() as stack:
        peers = started(stack, collectives, folder.config())
        exchange(peers, "abcd")
        peers["d"].step()  # not at its exchange yet
        collectives["d"].close("killed")
        exchange(peers, "abc")
        here.await_(lambda run: run.rounds.published.outer_step == 2)
        verdicts = here.run.recent_rounds[-1].fragments[0].verdicts
        assert [each.peer_id for each in verdicts] == ["a", "b", "c"]
        assert {peers[name].worker.outer_step for name in "abc"} == {2}
        assert len({peers[name].worker.digest for name in "abc"}) == 1


def test_who_is_killed_before_the_plan_of_the_round_is_computed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, killed = new_folder(tmp_path / "run", toml=toml()), threading.Event()
    with running(folder) as here, connected(folder, here, tmp_path) as collectives, ExitStack() as stack:
        peers = started(stack, collectives, folder.config())
        here.await_(lambda run: "collecting" in run.rounds.masked.status.text)
        plan = here.run.rounds.outer.plan
        monkeypatch.setattr(here.run.rounds.outer, "plan", lambda i: plan(i) if killed.wait(WAIT_S) else None)
        exchange(peers, "abcd")
        collectives["d"].close("killed")
        here.await_(lambda run: "d" not in run.rounds.machine.expected)
        killed.set()
        exchange(peers, "abc")
        assert [each.peer_id for each in here.run.recent_rounds[-1].fragments[0].verdicts] == ["a", "b", "c"]


def test_who_is_lost_with_the_last_hope_of_a_round_is_not_waited_for_in_the_next_one(tmp_path: Path) -> None:
    text = toml().replace("quorum = 3", "quorum = 2").replace("bits = 16", "bits = 16\nmin_peers = 2")
    folder = new_folder(tmp_path / "run", toml=text)
    with running(folder) as here, connected(folder, here, tmp_path) as collectives, ExitStack() as stack:
        peers = started(stack, collectives, folder.config())
        here.await_(lambda run: "collecting" in run.rounds.masked.status.text)
        for name in "cd":
            tamper(collectives[name], lost=(Shares,))
        exchange(peers, "abcd")
        here.await_(lambda run: run.rounds.masked._round.server and len(run.rounds.masked._round.server._shares) == 2)
        for name in "cd":
            collectives[name].close("killed")
        here.await_(lambda run: run.rounds.masked.status.peers == ("a", "b"))
        exchange(peers, "ab")
        assert "2 of 4 peers shared their keys" in here.run.recent_rounds[-2].reason
        assert [each.peer_id for each in here.run.recent_rounds[-1].fragments[0].verdicts] == ["a", "b"]


def test_who_says_goodbye_takes_no_further_step_of_a_masked_round(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml())
    with running(folder) as here, connected(folder, here, tmp_path) as collectives, ExitStack() as stack:
        peers = started(stack, collectives, folder.config())
        here.await_(lambda run: "collecting" in run.rounds.masked.status.text)
        tampered = tamper(collectives["d"], held=(Advert,))
        exchange(peers, "abcd")
        here.await_(lambda run: tampered.holds)
        collectives["d"].close("killed")
        assert not tampered.holds
        exchange(peers, "abc")


@dataclass
class Tampered:
    """Calls of a masked round that lose what a peer says, or change what it hears."""

    calls: Calls
    lost: tuple[type, ...] = ()
    plan_changes: Mapping[str, int] = field(default_factory=dict)
    held: tuple[type, ...] = ()  # what is never said, however long it waits
    holds: bool = False

    async def plan(self, round_id: int, fragment_id: int) -> FragmentPlan:
        return replace(await self.calls.plan(round_id, fragment_id), **self.plan_changes)  # type: ignore[arg-type]

    async def tell(self, round_id: int, said: PeerMessage) -> masking_pb2.MaskReply:
        if isinstance(said, self.held):
            self.holds = True
            try:
                await asyncio.Event().wait()
            finally:
                self.holds = False
        if isinstance(said, self.lost):
            raise TransportError("the connection broke")
        return await self.calls.tell(round_id, said)


def tamper(collective: HubCollective, **how: object) -> Tampered:
    masking = collective._masking
    assert masking is not None
    masking._calls = Tampered(masking._calls, **how)  # type: ignore[arg-type]
    return masking._calls  # type: ignore[return-value]


@pytest.mark.parametrize("lost", [Confirm, Reveal])
def test_who_is_silent_after_its_upload_is_in_the_sum_that_the_others_open(tmp_path: Path, lost: type) -> None:
    folder = new_folder(tmp_path / "run", toml=toml())
    with running(folder) as here, connected(folder, here, tmp_path) as collectives, ExitStack() as stack:
        peers = started(stack, collectives, folder.config())
        tamper(collectives["d"], lost=(lost,))
        exchange(peers, "abcd")
        exchange(peers, "abcd")
        assert len({peer.worker.digest for peer in peers.values()}) == 1
        verdicts = here.run.recent_rounds[-1].fragments[0].verdicts
        assert [(each.peer_id, each.verdict) for each in verdicts] == [(name, Verdict.OK) for name in NAMES]
    assert not (tmp_path / "d.json").exists() or lost is Reveal  # it is written before it is told


def test_a_sum_that_too_few_help_to_open_is_not_opened_and_the_round_is_tried_again(tmp_path: Path) -> None:
    folder, now = new_folder(tmp_path / "run", toml=toml()), [100.0]
    clock = Clock(monotonic=lambda: now[0])
    with running(folder, clock) as here, connected(folder, here, tmp_path) as collectives, ExitStack() as stack:
        peers = started(stack, collectives, folder.config())
        silent = [tamper(collectives[name], lost=(Reveal,)) for name in "cd"]
        for _ in range(EVERY):
            for name in NAMES:
                peers[name].step()
        here.await_(lambda run: len(run.rounds.masked._round.server._reveals) == 2)
        now[0] += 6.0  # more than rounds.floor_s
        for name in NAMES:
            peers[name].worker.synchronize()
        assert {peer.worker.outer_step for peer in peers.values()} == {0}
        (failed,) = here.run.recent_rounds
        assert not failed.committed and "too few helped to open the sum: 2 of 3; missing: c, d" in failed.reason
        for each in silent:
            each.lost = ()
        exchange(peers, "abcd")
        assert {peer.worker.outer_step for peer in peers.values()} == {1}
        assert len({peer.worker.digest for peer in peers.values()}) == 1


@pytest.mark.parametrize(
    ("signs", "reason"),
    [
        (True, "the shares that d dealt to . cannot be opened"),
        (False, "d has not signed the shares that it dealt to . as they are"),
    ],
)
def test_who_deals_shares_that_nobody_can_open_is_quarantined_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signs: bool, reason: str
) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(more="[membership]\nlease_s = 1000.0"))
    honest = MaskingCalls.tell
    with running(folder, Clock()) as here, connected(folder, here, tmp_path) as collectives, ExitStack() as stack:

        async def lies(calls: MaskingCalls, round_id: int, said: PeerMessage) -> masking_pb2.MaskReply:
            if isinstance(said, Shares) and said.peer_id == "d":
                boxes, signatures = tuple(bytes(len(each)) for each in said.boxes), said.signatures
                masking = collectives["d"]._masking
                if signs and masking is not None:
                    roster = here.run.rounds.masked._round.server.roster
                    digests = zip(said.self_digests, said.recovery_digests, strict=True)
                    dealt = [_box_said(roster.hash, 3, place, boxes[place], each) for place, each in enumerate(digests)]
                    signatures = (*map(masking._signer.sign, dealt[:3]), b"")
                said = replace(said, boxes=boxes, signatures=signatures)
            return await honest(calls, round_id, said)

        def await_keys(outer_step: int, peers: int) -> None:
            """Wait until so many have shared keys for what follows this outer step."""
            text = f"collecting masked vectors: {peers} peers share keys"
            here.await_(
                lambda run: (
                    run.rounds.machine.outer_step == outer_step and (now := run.rounds.masked.status) and text in now.text
                )
            )

        peers = started(stack, collectives, folder.config())
        exchange(peers, NAMES)  # the first one would wait for rounds.start_peers
        await_keys(1, peers=4)
        monkeypatch.setattr(MaskingCalls, "tell", lies)
        exchange(peers, NAMES)
        here.await_(lambda run: run.rounds.machine.quarantined_until("d") is not None)
        _, _, *failed = here.run.recent_rounds
        assert len(failed) == 3 and all(re.fullmatch(reason, each.reason) for each in failed)
        await_keys(2, peers=3)
        exchange(peers, "abc")
        *_, committed = here.run.recent_rounds
        assert committed.committed and [each.peer_id for each in committed.fragments[0].verdicts] == ["a", "b", "c"]
        assert {peers[name].worker.outer_step for name in "abc"} == {3}
        machine = here.run.rounds.machine
        assert [machine.quarantined_until(name) is not None for name in NAMES] == [False, False, False, True]


def test_where_an_opened_sum_came_to_no_commit_and_a_peer_is_gone_the_outer_step_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others have helped to open the sum of all four, so they never open that of three: it would show what d sent."""
    folder = new_folder(tmp_path / "run", toml=toml(more="[membership]\nlease_s = 1000.0"))
    clock = Clock(monotonic=lambda: 5.0 * time.monotonic())  # who says nothing is awaited for rounds.floor_s = 5.0
    with running(folder, clock) as here, connected(folder, here, tmp_path) as collectives, ExitStack() as stack:
        peers = started(stack, collectives, folder.config())
        exchange(peers, "abcd")  # the first one would wait for rounds.start_peers
        silent = [tamper(collectives[name], lost=(Reveal,)) for name in "cd"]
        exchange(peers, "abcd")
        assert "too few helped to open the sum: 2 of 3; missing: c, d" in here.run.recent_rounds[-1].reason
        for each in silent:
            each.lost = ()
        collectives["d"].close("killed")
        before = here.run.rounds.outer.theta[0].clone()
        for step in (2, 3):
            while {peers[name].worker.outer_step for name in "abc"} != {step}:
                exchange(peers, "abc")
        _, given_up, committed = (each for each in here.run.recent_rounds if each.committed)
        assert "outer step 2: its sum failed to be opened 3 times" in caplog.text
        verdicts = {(each.verdict, each.weight) for each in given_up.fragments[0].verdicts}
        assert verdicts == {(Verdict.REJECTED, 0.0)}
        verdicts = committed.fragments[0].verdicts
        assert [(each.peer_id, each.verdict) for each in verdicts] == [(name, Verdict.OK) for name in "abc"]
        assert len({peers[name].worker.digest for name in "abc"}) == 1
        assert not torch.equal(here.run.rounds.outer.theta[0], before)


@pytest.mark.parametrize(
    ("fits", "reason"),
    [(False, "is not what its peers say it is: a masked vector is wrong"), (True, "by the norms that they say")],
)
def test_where_the_opened_sum_is_wrong_the_outer_step_is_given_up_after_three_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fits: bool, reason: str
) -> None:
    """d's vector does not fit its lanes, or is longer than the norm that it says. Nobody can tell that it is d's."""
    folder = new_folder(tmp_path / "run", toml=toml(more="[membership]\nlease_s = 100000.0"))
    honest = collective.masked

    def lies(masks: Masks, payload: EncodedTensor, shard: Shard, bits: int) -> EncodedTensor:
        sent = honest(masks, payload, shard, bits)
        if masks.place == NAMES.index("d"):
            words = words_in(sent.data, bits)
            more = np.full(len(words) - LANES, 1 << (bits - 3), words.dtype)
            words[:-LANES] += more
            words[-LANES:] += lanes_of(more) if fits else 0
        return sent

    with running(folder, Clock()) as here, connected(folder, here, tmp_path) as collectives, ExitStack() as stack:
        peers = started(stack, collectives, folder.config())
        exchange(peers, NAMES)
        before = here.run.rounds.outer.theta[0].clone()
        monkeypatch.setattr(collective, "masked", lies)
        for _ in range(4):
            exchange(peers, NAMES)
        monkeypatch.undo()
        _, *failed, given_up = here.run.recent_rounds
        assert [each.committed for each in failed] == 3 * [False]
        assert all(reason in each.reason for each in failed) and given_up.committed
        assert {(each.verdict, each.weight) for each in given_up.fragments[0].verdicts} == {(Verdict.REJECTED, 0.0)}
        assert torch.equal(here.run.rounds.outer.theta[0], before)
        assert caplog.text.count("outer step 2: its sum failed to be opened 3 times") == 1
        assert not [each for each in caplog.records if each.exc_info and each.name.startswith("aggregator")]
        exchange(peers, NAMES)
        assert {(peer.worker.outer_step, peer.worker.digest) for peer in peers.values()} == {(3, here.run.rounds.outer.digest)}
        assert not torch.equal(here.run.rounds.outer.theta[0], before)


def test_what_was_in_an_opened_sum_goes_into_no_other_one_whatever_the_coordinator_says_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It opens the sum of all, and commits that nobody was in it. Then the sum of three would show what the fourth sent."""
    folder = new_folder(tmp_path / "run", toml=toml())
    with running(folder) as here, connected(folder, here, tmp_path) as collectives, ExitStack() as stack:
        peers = started(stack, collectives, folder.config())
        exchange(peers, "abcd")
        honest = OuterState.reduce_sum

        def lies(*given: Any) -> Merged:
            return replace(honest(*given), merged=None, verdicts=())

        monkeypatch.setattr(OuterState, "reduce_sum", lies)
        exchange(peers, "abcd")
        monkeypatch.undo()
        assert {peer.worker.outer_step for peer in peers.values()} == {2}
        assert [each.verdicts for each in here.run.recent_rounds[-1].fragments] == [(), ()]
        assert caplog.text.count("outer step 2 lacks a contribution whose masked sum was opened; it is dropped") == len(NAMES)
        for peer in peers.values():
            theta = peer.worker.outer_state_dict()
            assert not peer.worker.pending and all(torch.equal(own, theta[name]) for name, own in peer.model.named_parameters())
            assert peer.worker.last_commit is not None
            assert {mine.verdict for part in peer.worker.last_commit.fragments if (mine := part.verdict_of(peer.name))} == {
                Verdict.REJECTED
            }
        exchange(peers, "abcd")
        assert {peer.worker.outer_step for peer in peers.values()} == {3}


def test_where_too_few_are_sound_nothing_is_opened_or_merged_and_all_go_back_to_the_outer_parameters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tried again with what they have trained since, they would be no nearer."""
    folder = new_folder(tmp_path / "run", toml=toml(more="[audit]\nenabled = true"))
    with running(folder) as here, connected(folder, here, tmp_path) as collectives, ExitStack() as stack:
        peers = started(stack, collectives, folder.config())
        exchange(peers, NAMES)
        before = here.run.rounds.outer.theta[0].clone()
        for name in "ac":
            with torch.no_grad():
                next(peers[name].model.parameters()).fill_(torch.nan)
        exchange(peers, NAMES)
        assert (
            "outer step 2: a is NONFINITE, c is NONFINITE: 2 sound contributions are left, and a sum has at least 3"
            in caplog.text
        )
        rejected, lost = Verdict.REJECTED, Verdict.NONFINITE
        verdicts = [each.verdict for each in here.run.recent_rounds[-1].fragments[0].verdicts]
        assert verdicts == [lost, rejected, lost, rejected]
        assert torch.equal(here.run.rounds.outer.theta[0], before)
        assert all(torch.isfinite(each).all() for name in NAMES for each in peers[name].model.parameters())
        exchange(peers, NAMES)
        assert {(peer.worker.outer_step, peer.worker.digest) for peer in peers.values()} == {(3, here.run.rounds.outer.digest)}
        assert not torch.equal(here.run.rounds.outer.theta[0], before)
    log = LogVerifier()
    for line in (folder.path / "audit-log.jsonl").read_bytes().splitlines():
        log.take(line)
    assert (log.commits, log.confirmed, log.unconfirmed) == (3, 2, 0)


def test_who_is_shown_another_plan_shares_no_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, now = new_folder(tmp_path / "run", toml=toml()), [100.0]
    clock = Clock(monotonic=lambda: now[0])
    with running(folder, clock) as here, connected(folder, here, tmp_path) as collectives, ExitStack() as stack:
        peers = started(stack, collectives, folder.config())
        for _ in range(EVERY):
            peers["a"].step()
        tamper(collectives["d"], plan_changes={"limit": 7})  # all have the plan of this round: a has their keys
        for _ in range(EVERY):
            for name in "bcd":
                peers[name].step()
        for peer in peers.values():
            peer.worker.synchronize()
        here.await_(lambda run: "the advert of d is not signed for this round" in caplog.text)
        assert here.run.rounds.masked is not None and here.run.rounds.masked.status is not None
        assert here.run.rounds.masked.status.step == "waiting for keys"
        now[0] += 6.0  # more than rounds.floor_s: nobody waits for d any longer
        exchange(peers, "abcd")
        assert [each.peer_id for each in here.run.recent_rounds[-1].fragments[0].verdicts] == ["a", "b", "c"]


def test_a_peer_that_starts_again_takes_part_in_the_next_round(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml())
    with running(folder) as here, ExitStack() as stack:
        collectives = stack.enter_context(connected(folder, here, tmp_path))
        peers = started(stack, collectives, folder.config())
        exchange(peers, "abcd")
        here.await_(lambda run: "collecting" in run.rounds.masked.status.text)
        collectives["d"].close("killed")
        again = stack.enter_context(connected(folder, here, tmp_path, ("d",)))
        peers["d"] = started(stack, again, folder.config())["d"]
        exchange(peers, "abcd")
        assert [each.peer_id for each in here.run.recent_rounds[-1].fragments[0].verdicts] == ["a", "b", "c"]
        exchange(peers, "abcd")
        assert [each.peer_id for each in here.run.recent_rounds[-1].fragments[0].verdicts] == list(NAMES)
        assert len({peer.worker.digest for peer in peers.values()}) == 1


def test_a_peer_that_was_killed_after_its_upload_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """It makes the contribution once more that the run has committed already, and has no grid for it."""
    folder = new_folder(tmp_path / "run", toml=toml(more="[membership]\nlease_s = 1000.0"))
    with running(folder) as here, ExitStack() as stack:
        collectives = stack.enter_context(connected(folder, here, tmp_path))
        peers = started(stack, collectives, folder.config())
        exchange(peers, "abcd")
        here.await_(lambda run: "collecting" in run.rounds.masked.status.text)
        d = peers["d"]
        d.step()
        saved = [copy.deepcopy(each.state_dict()) for each in (d.worker, d.model, d.optimizer)]
        d.step()
        here.await_(lambda run: "d" in run.rounds.machine.arrived)
        collectives["d"].close("killed")
        again = Learner("d", stack.enter_context(connected(folder, here, tmp_path, ("d",)))["d"], folder.config())
        for each, state in zip((again.worker, again.model, again.optimizer), saved, strict=True):
            each.load_state_dict(state)
        stack.enter_context(again.worker)
        exchange(peers, "abc")
        assert [each.peer_id for each in here.run.recent_rounds[-1].fragments[0].verdicts] == list(NAMES)
        again.step()
        again.worker.synchronize()
        assert again.worker.outer_step == 2 and again.worker.digest == peers["a"].worker.digest
        peers["d"] = again
        exchange(peers, "abcd")
        assert {peer.worker.outer_step for peer in peers.values()} == {3}
        assert len({peer.worker.digest for peer in peers.values()}) == 1


def test_a_round_that_has_no_quorum_without_a_peer_that_starts_again_ends_at_once(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(more="[membership]\nlease_s = 1000.0").replace("quorum = 3", "quorum = 4"))
    with running(folder, Clock()) as here, ExitStack() as stack:
        collectives = stack.enter_context(connected(folder, here, tmp_path))
        peers = started(stack, collectives, folder.config())
        exchange(peers, "abcd")
        here.await_(lambda run: "collecting" in run.rounds.masked.status.text)
        collectives["d"].close("killed")
        again = stack.enter_context(connected(folder, here, tmp_path, ("d",)))
        peers["d"] = started(stack, again, folder.config())["d"]
        here.await_(lambda run: not run.recent_rounds[-1].committed)
        assert "too few share keys without d, which came too late for them: 3 of quorum 4" in here.run.recent_rounds[-1].reason
        here.await_(lambda run: "collecting masked vectors: 4 peers" in run_status(run).masks)
        exchange(peers, "abcd")
        assert [each.peer_id for each in here.run.recent_rounds[-1].fragments[0].verdicts] == list(NAMES)


def test_a_coordinator_that_starts_again_tries_the_round_again_with_new_keys(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml())
    with ExitStack() as stack:
        with running(folder) as here:
            collectives = stack.enter_context(connected(folder, here, tmp_path))
            peers = started(stack, collectives, folder.config())
            exchange(peers, "abcd")
            before = here.run.rounds.outer.plan(0)
            for name in NAMES:
                peers[name].step()
        with running(folder) as here:
            assert here.run.rounds.outer.plan(0) == before
            here.await_(lambda run: "collecting" in run_status(run).masks)
            for name in NAMES:
                peers[name].step()
            for name in NAMES:
                peers[name].worker.synchronize()
            here.await_(lambda run: all((view := each.last_view) and view.outer_step == 2 for each in collectives.values()))
            for name in NAMES:  # who came too late for the keys has only learned of the commit
                peers[name].worker.synchronize()
            assert len({peer.worker.digest for peer in peers.values()}) == 1


def test_the_status_and_the_audit_log_of_a_masked_run(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(more="[audit]\nenabled = true"))
    with running(folder) as here, connected(folder, here, tmp_path) as collectives, ExitStack() as stack:
        peers = started(stack, collectives, folder.config())
        exchange(peers, "abcd")
        here.await_(lambda run: "4 peers share keys, any 3 of them open the sum" in run_status(run).masks)
    log = LogVerifier()
    for line in (folder.path / "audit-log.jsonl").read_bytes().splitlines():
        log.take(line)
    assert log.commits == 1 and log.verified == 2 * 4 + 3 and (log.confirmed, log.unconfirmed) == (1, 0)
    entry = json.loads((folder.path / "audit-log.jsonl").read_bytes().splitlines()[-1])
    assert {len(part) for each in entry["contributions"].values() for part in each["parts"]} == {len(PART) + 1}  # and its norm


def test_keys_are_shared_with_known_members_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = new_folder(tmp_path / "run", toml=toml())
    members = {"a": ("0" * 64,), "d": ("1" * 64,)}  # other keys than the authority has enrolled
    with running(folder) as here, ExitStack() as stack:
        collectives = stack.enter_context(connected(folder, here, tmp_path, NAMES[:3]))
        wary = stack.enter_context(connected(folder, here, tmp_path, ("d",), members))
        started(stack, {**collectives, **wary}, folder.config())
        here.await_(lambda run: "a is not a pinned member, or has another key than the pinned one" in caplog.text)


def test_known_members_without_masks_are_an_error(tmp_path: Path) -> None:
    text = toml().replace("enabled = true\nbits = 16", "enabled = false")
    folder = new_folder(tmp_path / "run", toml=text.replace("start_peers = 4", "start_peers = 3"))
    with running(folder) as here, connected(folder, here, tmp_path, ("a",), {}) as collectives:
        peer = Learner("a", collectives["a"], folder.config())
        with pytest.raises(ConfigError, match=r"--members: has no effect in a run that neither masks \(secagg.enabled\) nor"):
            peer.worker.__enter__()
