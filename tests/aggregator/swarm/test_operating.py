"""What an operator does with a swarm: status in words, orders to the leader, leaving, recovering."""

from __future__ import annotations

import asyncio
import io
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from aggregator.security.certificates import Issuer, make_ca
from aggregator.storage import store
from aggregator.swarm import commands, operate
from aggregator.swarm.commands import print_report
from aggregator.swarm.host_folder import HostFolder
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.process import settle
from aggregator.swarm.standing import PartStanding, PeerStanding, Report, Standing, report
from edit.command_line import run_command
from edit.config.run import RunConfig
from edit.council.record import Member, Part, Phase, Record, Saved
from edit.durable_files import read_json, write_atomic, write_json
from edit.errors import ConfigError, EvictedError, RefusedError, RemoteProtocolError, TransportError
from edit.plain_text import json_text
from edit.rounds.machine import RoundMachine
from editpb.identity import Identity
from editpb.messages import Expel
from editpb.seen_entries import seen_file
from peers.training.options import PeerOptions
from tests.support.council.hosts import SIZES, Hosts, hosts, schema_of
from tests.support.loops import run_held
from tests.support.served import TOML, new_folder

ONES = [torch.ones(size) for size in SIZES]


def equip(swarm: Hosts, peer_id: str, *, authority: bool = False) -> Path:
    """Make the folder of a member what a host process is started with."""
    folder, (key, certificate) = swarm.path / peer_id, swarm.certificate(peer_id)
    write_atomic(folder / "peer.key", key, mode=0o600)
    write_atomic(folder / "peer.pem", certificate)
    write_atomic(folder / "ca.pem", swarm.ca)
    write_atomic(folder / "run.toml", (swarm.path / "run" / "run.toml").read_bytes())
    if authority:
        (folder / "authority").mkdir(mode=0o700, exist_ok=True)
        write_atomic(folder / "authority" / "ca.key", (swarm.path / "run" / "ca.key").read_bytes(), mode=0o600)
        write_atomic(folder / "authority" / "ca.pem", swarm.ca)
    seeds = {other: (host.listen,) for other, host in swarm.running.items() if other != peer_id}
    HostFolder(advertise="127.0.0.1", seeds=seeds).save(folder)
    return folder


def shown(told: Report, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(console, told)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(rows: Any, key: str, value: object) -> Any:
    (found,) = [each for each in rows if each[key] == value]
    return found


def scenario(tmp_path: Path, body: Callable[[Hosts], Any], members: str = "abc", parts: int = 1) -> None:
    async def run() -> None:
        async with hosts(tmp_path, parts=parts) as swarm:
            await swarm.grow(*members)
            await body(swarm)
            assert all(host.failure is None for host in swarm.running.values())

    run_held(run())


def in_thread(call: Callable[..., Any], *arguments: object, **named: object) -> Any:
    """A command has a loop of its own, in a process of its own."""
    return asyncio.to_thread(call, *arguments, **named)


# -- status ----------------------------------------------------------------------------------------------------------------


def test_status_says_who_leads_owns_holds_and_what_each_round_waits_for(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        await swarm.contribute(0, ONES)
        await swarm.until(lambda: swarm.steps() == dict.fromkeys("abc", 1))
        owner = swarm.record.parts[0].owner
        folder = equip(swarm, "b")
        await swarm.until(lambda: all(len(swarm.running["a"].council.known(p, 0).states) for p in "bc"), passes=1.0)

        told = await in_thread(operate.status, folder)
        assert (told.leader, told.phase, told.has_quorum) == ("a", "running", True)
        assert told.quorum == "3 of 3 here, 2 needed"
        (part,) = told.parts
        assert (part["owner"], part["outer_step"], part["holders"]) == (owner, 1, ["a", "b", "c"])
        assert part["waits"] == "waits for peer (0 in, quorum 1)", "and nothing of how many were enrolled, which nobody knows"
        assert [(each["peer_id"], each["state"], each["voter"]) for each in told.members] == [
            ("a", "leads", True),
            ("b", "here", True),
            ("c", "here", True),
        ]
        text = shown(told)
        assert all(len(line) <= 80 for line in text.splitlines()), text
        assert "a leads" in text and "3 of 3 here, 2 needed" in text and "waits for peer (0 in," in text
        assert json.loads(json_text(told.as_json()))["leader"] == "a"

    scenario(tmp_path, body)


def test_status_says_who_is_away_and_why(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        folder = equip(swarm, "a")
        await swarm.stop("c")
        await swarm.until(lambda: "c" in swarm.running["a"].links.refusals, passes=1.0)
        told = await in_thread(operate.status, folder)
        assert told.quorum == "2 of 3 here, 2 needed" and told.has_quorum
        away = row(told.members, "peer_id", "c")
        assert away["state"] == "away" and away["why"].startswith("not connected for ") and "refused" in away["why"]

    scenario(tmp_path, body)


def test_without_its_host_status_says_what_the_files_say_and_who_could_be_asked(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        folder = equip(swarm, "c")
        await swarm.stop("c")
        before = {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
        told = await in_thread(operate.status, folder)
        assert told.source.endswith("council.json") and told.leader == "" and told.has_quorum is None
        assert told.quorum == "3 vote, 2 needed"
        assert any("nobody answers at" in note and "what its files say" in note for note in told.notes)
        assert f"b at {swarm.running['b'].listen}" in "\n".join(told.notes)
        assert before == {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}, "nothing is written"
        other = await in_thread(operate.status, folder, at="b")
        assert other.leader == "a" and row(other.members, "peer_id", "c")["state"] == "away"
        with pytest.raises(ConfigError, match="z is not known here"):
            await in_thread(operate.status, folder, at="z")

    scenario(tmp_path, body)


GOSSIP = {
    "outer_step": 1,
    "settlings": 0,
    "trains": True,
    "partner": "b",
    "said": "",
    "distance": 0.5,
    "together": 1,
    "alone": 0,
}


@pytest.mark.parametrize(
    "change",
    [
        {"role": "king"},
        {"term": -1},
        {"term": 1 << 80},
        {"notices": ["x"] * 99},
        {"notices": ["x" * 9999]},
        {"peers": [{}]},
        {"parts": [{"outer_step": "1", "digest": "", "work": "", "engine": None}]},
        {"record": {}},
        {"committed": "yes"},
        {"more": 1},
        {"gossip": GOSSIP | {"distance": 10**301}},
        {"gossip": GOSSIP | {"distance": 10**200}},
        {"gossip": GOSSIP | {"distance": math.inf}},
    ],
)
def test_a_host_that_says_what_cannot_be_is_not_believed(change: dict[str, Any]) -> None:
    standing = Standing(
        run_id="r", peer_id="a", role="leader", leader="a", term=1, committed=True, record=None, parts=(), peers=()
    )
    assert Standing.decode(standing.encode()) == standing
    assert Standing.decode(json.dumps(json.loads(standing.encode()) | {"gossip": GOSSIP}).encode()).gossip is not None
    with pytest.raises(RemoteProtocolError) as caught:
        Standing.decode(json.dumps(json.loads(standing.encode()) | change).encode())
    assert "\n" not in str(caught.value)


def test_what_a_host_says_cannot_command_a_terminal(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        told = await in_thread(operate.status, equip(swarm, "a"))
        evil = replace(told, notes=("\x1b[2Jgone\nb leads",), evicted={"m": "[red]\x07"})
        text = shown(evil)
        assert "\x1b[2J" not in text and "\x07" not in text and "[red]" in text

    scenario(tmp_path, body, "a")


def test_status_says_what_auto_chose(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        folder = equip(swarm, "a")
        told = await in_thread(operate.status, folder)
        assert told.outer_chosen == "" and "outer.preset" not in shown(told)
        text = '[swarm]\n[outer]\npreset = "auto"\nlr = 0.7\nchosen = "nesterov 0.7 / 0.6: measured"\n'
        (folder / "run.toml").write_text(text)
        told = await in_thread(operate.status, folder)
        assert "outer.preset = auto chose nesterov 0.7 / 0.6: measured" in shown(told)
        (folder / "run.toml").unlink()
        assert (await in_thread(operate.status, folder)).outer_chosen == ""

    scenario(tmp_path, body, "a")


# -- orders ----------------------------------------------------------------------------------------------------------------


def test_orders_find_the_leader_and_every_member_follows(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        folder = equip(swarm, "b", authority=True)
        engine = swarm.owner().parts[0].engine
        assert await in_thread(operate.pause, folder) == "paused"
        assert {host.council.committed.phase for host in swarm.running.values()} >= {Phase.PAUSED}
        await swarm.until(lambda: engine.run.rounds.machine.phase.value == "paused")
        told = await in_thread(operate.status, folder)
        assert told.phase == "paused" and told.parts[0]["waits"] == "waits for the operator: resume"
        assert await in_thread(operate.pause, folder) == "paused", "again is as once"
        assert await in_thread(operate.resume, folder) == "resumed"
        assert swarm.record.phase is Phase.RUNNING
        await swarm.contribute(0, ONES)
        await swarm.until(lambda: swarm.steps() == dict.fromkeys("abc", 1))
        await in_thread(operate.drain, folder)
        await swarm.contribute(0, ONES)
        await swarm.until(lambda: swarm.record.phase is Phase.FINISHED)
        with pytest.raises(RefusedError, match="the run is finished"):
            await in_thread(operate.pause, folder)

    scenario(tmp_path, body)


def test_without_the_authoritys_key_nobody_gives_orders(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        folder = equip(swarm, "a")
        with pytest.raises(ConfigError, match="only who has the authority's key"):
            await in_thread(operate.evict, folder, "b")
        assert not swarm.record.evicted

    scenario(tmp_path, body, "ab")


def test_who_is_evicted_ends_with_the_reason_and_its_parts_move(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        await swarm.until(lambda: len({part.owner for part in swarm.record.parts}) == 3, passes=3.0)
        folder = equip(swarm, "a", authority=True)
        evicted, stop = swarm.running["c"], asyncio.Event()
        watching = asyncio.ensure_future(evicted.watch(stop))
        async with swarm.peer("a", "c", swarm.record.parts.index(row_of(swarm, "a"))) as trainer:
            await trainer.attend()
            assert "c is evicted" in await in_thread(operate.evict, folder, "c", "it lies")
            assert (await trainer.receive(Expel)).reason == "it lies"
        with pytest.raises(EvictedError, match="it lies"):
            await watching
        await swarm.stop("c")
        assert "c" not in {part.owner for part in swarm.record.parts} and swarm.record.evicted == {"c": "it lies"}
        await swarm.until(lambda: all(swarm.owner(part) is not None for part in range(3)))
        told = await in_thread(operate.status, folder)
        assert told.evicted == {"c": "it lies"} and [each["peer_id"] for each in told.members] == ["a", "b"]
        told = await in_thread(operate.evict, folder, "z")
        assert "z is evicted" in told and "nobody had this name" in told and told.endswith("members are a, b")
        assert "nobody" not in await in_thread(operate.evict, folder, "c")
        again = await swarm.start("c")  # from its folder, with its certificate: both others say what became of it
        with pytest.raises(EvictedError, match="it lies"):
            await again.watch(asyncio.Event())
        await swarm.stop("c")
        lost = swarm.folder("c")
        for each in lost.of_lineage():  # as `rejoin` does, which forgets that it was evicted
            each.rename(each.with_name(f"aside-{each.name}"))
        anew = await swarm.start("c")
        with pytest.raises(EvictedError, match="it lies"):
            await anew.watch(asyncio.Event())
        await swarm.stop("c")

    def row_of(swarm: Hosts, owner: str) -> Any:
        return next(part for part in swarm.record.parts if part.owner == owner)

    scenario(tmp_path, body, parts=3)


def test_one_member_that_says_that_another_is_evicted_ends_nobody(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        b = swarm.running["b"]
        b.refused("c", EvictedError("says c"))
        b.refused("m", EvictedError("says a stranger"))
        assert not b._stop.is_set()
        b.refused("a", EvictedError("says a, too"))
        with pytest.raises(EvictedError, match="says a, too"):
            await b.watch(b._stop)

    scenario(tmp_path, body)


def test_an_order_without_a_quorum_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "ORDER_S", 0.5)

    async def body(swarm: Hosts) -> None:
        folder = equip(swarm, "c", authority=True)
        for peer_id in "ab":
            await swarm.stop(peer_id)
        with pytest.raises(TransportError, match="takes no orders now: no leader is heard"):
            await in_thread(operate.pause, folder)

    scenario(tmp_path, body)


# -- leaving ---------------------------------------------------------------------------------------------------------------


def test_a_member_leaves_and_its_parts_go_on_elsewhere_and_it_joins_again(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        await swarm.until(lambda: len({part.owner for part in swarm.record.parts}) == 3, passes=3.0)
        folder, leaver = equip(swarm, "c"), swarm.running["c"]
        stop = asyncio.Event()
        watching = asyncio.ensure_future(leaver.watch(stop))
        leaving = asyncio.ensure_future(in_thread(operate.leave, folder))
        await swarm.until(leaving.done, passes=0.2)
        assert leaving.result() == "c has left; the same command joins again"
        await watching
        await swarm.stop("c")
        assert {*swarm.record.members} == {"a", "b"} and "c" not in {part.owner for part in swarm.record.parts}
        await swarm.until(lambda: all(swarm.owner(part) is not None for part in range(3)))
        await swarm.start("c")
        await swarm.until(lambda: swarm.settled("abc"), passes=1.0)

    scenario(tmp_path, body, parts=3)


def test_a_member_that_is_alone_just_ends(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        assert await swarm.running["a"].leave() == "is the only member; the same command goes on"
        assert {*swarm.record.members} == {"a"}

    scenario(tmp_path, body, "a")


def test_a_member_that_nobody_votes_out_ends_all_the_same(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        await swarm.stop("a")
        leaving = asyncio.ensure_future(swarm.running["b"].leave())
        await swarm.until(leaving.done, passes=3.0)
        assert leaving.result().startswith("is not voted out after 3 s")

    scenario(tmp_path, body, "ab")


def test_a_drain_ends_all_parts_at_one_outer_step(tmp_path: Path) -> None:
    async def body() -> None:
        config = RunConfig.from_text(TOML.format(start=1, quorum=1).encode(), "run.toml")
        async with hosts(tmp_path, parts=2, config=config) as swarm:
            await swarm.grow(*"abc")

            def machine(number: int) -> RoundMachine:
                return swarm.owner(number).parts[number].engine.run.rounds.machine

            for number, step in ((0, 1), (0, 2), (1, 1)):
                await swarm.until(lambda number=number: swarm.owner(number) is not None)
                await swarm.contribute(number, ONES)
                await swarm.until(lambda number=number, step=step: machine(number).outer_step == step)
            await in_thread(operate.drain, equip(swarm, "a", authority=True))
            assert swarm.record.phase is Phase.DRAINING and swarm.record.last_step == 3
            for number, step in ((0, 3), (1, 2), (1, 3)):
                await swarm.until(lambda number=number: machine(number).draining)
                await swarm.contribute(number, ONES)
                await swarm.until(lambda number=number, step=step: machine(number).outer_step == step)
            await swarm.until(lambda: swarm.record.phase is Phase.FINISHED)
            assert [part.outer_step for part in swarm.record.parts] == [3, 3]

    run_held(body())


def test_a_member_that_is_started_again_while_the_run_drains_waits_for_its_peer(tmp_path: Path) -> None:
    async def body() -> None:
        config = RunConfig.from_text(TOML.format(start=1, quorum=1).encode(), "run.toml")
        async with hosts(tmp_path, parts=2, config=config) as swarm:
            await swarm.grow("a")

            def machine(number: int) -> RoundMachine:
                return swarm.owner(number).parts[number].engine.run.rounds.machine

            async def train(number: int, step: int) -> None:
                await swarm.contribute(number, ONES, "a")
                await swarm.until(lambda: machine(number).outer_step == step)

            for number in (0, 1):
                await swarm.until(lambda number=number: swarm.owner(number) is not None)
            await train(0, 1)
            await in_thread(operate.drain, equip(swarm, "a", authority=True))
            assert swarm.record.last_step == 2
            await swarm.stop("a")
            await swarm.start("a")
            await swarm.until(lambda: swarm.leader == "a" and swarm.owner(0) and swarm.owner(1), passes=1.0)
            await swarm.pass_time(1.0)
            for number, step in ((1, 1), (0, 2), (1, 2)):
                await train(number, step)
            await swarm.until(lambda: swarm.record.phase is Phase.FINISHED)
            assert [part.outer_step for part in swarm.record.parts] == [2, 2]

    run_held(body())


def test_who_gets_a_part_of_a_run_that_was_drained_tells_peers_that_it_has_finished(tmp_path: Path) -> None:
    """A peer that was away during the drain would else wait for an outer step that nobody makes."""

    async def body(swarm: Hosts) -> None:
        await in_thread(operate.drain, equip(swarm, "a", authority=True))
        await swarm.until(lambda: swarm.record.phase is Phase.FINISHED, passes=1.0)
        first = swarm.owner()
        assert first is not None
        await swarm.stop(first.peer_id)
        await swarm.until(lambda: swarm.owner() not in (None, first), passes=1.0)
        engine = swarm.owner().parts[0].engine
        await swarm.until(lambda: engine.run.finished)
        assert swarm.record.phase is Phase.FINISHED

    scenario(tmp_path, body)


def test_who_gets_a_part_after_its_last_outer_step_says_that_it_has_ended(tmp_path: Path) -> None:
    """Its owner has gone before the run had finished. Else all members would wait for ever for that part's end."""

    async def body() -> None:
        config = RunConfig.from_text(TOML.format(start=1, quorum=1).encode(), "run.toml")
        config = replace(config, sync=replace(config.sync, outer_steps=1))
        async with hosts(tmp_path, parts=2, config=config) as swarm:
            await swarm.grow(*"abc")
            await swarm.until(lambda: len({part.owner for part in swarm.record.parts}) == 2, passes=3.0)
            await swarm.contribute(0, ONES)
            await swarm.until(lambda: swarm.record.parts[0].outer_step == 1)
            first = swarm.owner()
            assert first is not None
            await swarm.stop(first.peer_id)
            await swarm.until(lambda: swarm.owner() not in (None, first), passes=1.0)
            assert swarm.record.phase is Phase.RUNNING
            await swarm.contribute(1, ONES)
            await swarm.until(lambda: swarm.record.phase is Phase.FINISHED)
            assert all(host.failure is None for host in swarm.running.values())

    run_held(body())


def test_a_finished_run_is_not_left_and_a_member_waits_for_peers_that_still_take_the_last_step(tmp_path: Path) -> None:
    """Nobody is voted out: `resume` finds the swarm as it was. All that ends, ends with exit code 0."""

    async def body(swarm: Hosts) -> None:
        owner = swarm.owner()
        assert owner is not None
        async with swarm.peer(owner.peer_id, "peer") as trainer:
            await trainer.attend()
            await in_thread(operate.drain, equip(swarm, "a", authority=True))
            await swarm.until(lambda: swarm.record.phase is Phase.FINISHED, passes=1.0)
            leaving = asyncio.ensure_future(owner.leave())
            await asyncio.sleep(0)
            await swarm.until(lambda: owner.is_leaving)
            assert not leaving.done(), "the peer is here"
        await swarm.until(leaving.done, passes=0.2)
        assert leaving.result() == "stops; the run is finished"
        await owner.watch(owner._stop)
        before = swarm.record
        for peer_id in "abc":
            await swarm.stop(peer_id)
        for peer_id in "abc":
            await swarm.start(peer_id)
        await swarm.until(lambda: swarm.leader and swarm.settled("abc"), passes=1.0)
        assert swarm.record.phase is Phase.FINISHED and swarm.record.voters == before.voters
        told = await in_thread(operate.status, tmp_path / "a")
        assert told.phase == "finished" and told.parts[0]["waits"] == ""
        await in_thread(operate.resume, tmp_path / "a")
        await swarm.contribute(0, ONES)
        await swarm.until(lambda: swarm.steps() == dict.fromkeys("abc", 1))

    scenario(tmp_path, body)


# -- recovery --------------------------------------------------------------------------------------------------------------


def test_a_survivor_recovers_and_who_returns_rejoins_with_a_snapshot(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        await swarm.contribute(0, ONES)
        await swarm.until(lambda: swarm.steps() == dict.fromkeys("abc", 1))
        folders = {peer_id: equip(swarm, peer_id) for peer_id in "abc"}
        at_a = {"a": (swarm.running["a"].listen,)}  # who invited both, before either joined
        for peer_id in "bc":
            HostFolder(advertise="127.0.0.1", seeds=at_a).save(folders[peer_id])

        def seeds(peer_id: str) -> dict[str, tuple[str, ...]]:
            """As where the same command is repeated, with the invitation."""
            return dict(settle(folders[peer_id], None, None, at_a).seeds)

        with pytest.raises(RefusedError, match="the swarm goes on"):
            await swarm.stop("c")
            await in_thread(operate.recover, folders["c"], lambda plan: True)
        for peer_id in "ab":
            await swarm.stop(peer_id)
        plans: list[operate.Recovery] = []
        with pytest.raises(RefusedError, match="not confirmed; nothing was changed"):
            await in_thread(operate.recover, folders["c"], plans.append)
        assert plans[0].lines[0] == "lineage 1 -> 2, with c as the only member and voter"
        assert plans[0].lines[1].startswith("a, b must rejoin")
        note = folders["c"] / "part-0" / store.FORKED
        write_json(note, {"name": "that of its state"}, version=store.FORKED_FORMAT)
        said = await in_thread(operate.recover, folders["c"], lambda plan: True)
        assert said.startswith("recovered: lineage 2")
        assert read_json(note, version=store.FORKED_FORMAT)["name"] == "", "what it has is not another history any more"
        assert seeds("c").keys() == {"a", "b"}
        await swarm.start("c", seeds=seeds("c"))
        await swarm.until(lambda: swarm.leader == "c" and swarm.owner() is not None, passes=1.0)
        with pytest.raises(RefusedError, match="recovered already: c is of lineage 2"):
            await in_thread(operate.recover, folders["b"], lambda plan: True)

        b = await swarm.start("b")  # of the old lineage: it is let in nowhere, and says why
        await swarm.until(lambda: any("recovered" in text for text in b.standing().notices), passes=1.0)
        assert {*swarm.running["c"].council.record.members} == {"c"}
        await swarm.stop("b")
        seen_file(folders["b"], 0).write_text("what its peer has seen of the audit log of that lineage")
        await in_thread(operate.rejoin, folders["b"])
        (aside,) = folders["b"].glob("lineage-1-*")
        with pytest.raises(
            ConfigError, match=f"`rejoin` has moved what it had to {aside.name}: move what is in one of them back"
        ):
            await in_thread(operate.recover, folders["b"], lambda plan: True)
        assert seen_file(aside, 0).exists() and not seen_file(folders["b"], 0).exists()
        await swarm.start("b", seeds=seeds("b"))
        await swarm.until(lambda: swarm.settled("cb") and swarm.steps() == {"c": 1, "b": 1}, passes=1.0)
        assert swarm.same()
        await swarm.contribute(0, ONES)
        await swarm.until(lambda: swarm.steps() == {"c": 2, "b": 2})

    scenario(tmp_path, body)


def test_who_rejoins_knows_where_the_others_were(tmp_path: Path) -> None:
    """Whoever invited it may be lost; who was evicted is not asked, and what is known already stays."""
    own, ca = make_ca("run", time.time()), tmp_path / "ca.pem"
    certificate = Issuer(*own).issue(Identity("run", "peer", "b"), own[0].public_key(), lifetime_s=60.0, now=time.time())
    pem = serialization.Encoding.PEM
    for file, each in ((ca, own[1]), (tmp_path / "peer.pem", certificate)):
        write_atomic(file, each.public_bytes(pem))
    many = {f"m{number:03}": f"h:{number}" for number in range(1, 100)}
    addresses = {"a": "new:1", "b": "h:1", "d": "h:2", "e": "h:3", **many}
    record = Record(
        run_id="run",
        lineage=1,
        term=1,
        version=1,
        members={peer_id: Member(incarnation=1, addresses=(each,)) for peer_id, each in addresses.items()},
        voters=("a#1",),
        parts=(Part(owner="a", grant=1, outer_step=0, digest="0" * 64),),
        evicted={"e": "it lied"},
    )
    HostFolder(seeds={"a": ("old:1",), "z": ("h:4",)}).save(tmp_path)
    MemberFolder(tmp_path).save(Saved(incarnation=1, record=record))
    operate.rejoin(tmp_path)
    found = settle(tmp_path, None, None, {"a": ("old:1",)}).seeds  # the command with the invitation, again
    kept = {peer_id: (each,) for peer_id, each in list(many.items())[: operate.MOST_KEPT - 2]}
    assert found == {"a": ("old:1", "new:1"), "d": ("h:2",), "z": ("h:4",), **kept}


def test_who_rejoins_keeps_nothing_that_belongs_to_the_lost_lineage(tmp_path: Path) -> None:
    parts, members = (Part(owner="a", grant=1, outer_step=0, digest="0" * 64),), {"a": Member(incarnation=1)}
    record = Record(run_id="run", lineage=1, term=1, version=1, members=members, voters=("a#1",), parts=parts)
    folder, options = MemberFolder(tmp_path), PeerOptions(home=tmp_path, data=tmp_path)
    lost = {folder.part(0), folder.engine(0), folder.phi, folder.settling, options.checkpoint_folder}
    for each in lost:
        each.mkdir()
        (each / "model").write_text("of the lost lineage")
    seen_file(tmp_path, 0).write_text("seen")
    folder.save(Saved(incarnation=1, record=record))
    kept = {"privacy-ledger.jsonl", "members.json", "host.json", "peer.key", "peer.pem", "run.toml"}
    for name in kept:
        (tmp_path / name).write_text("stays")
    assert "in lineage-1-1;" in operate.rejoin(tmp_path)
    names = {path.name for path in lost} | {"receipts-part-0.jsonl", "council.json"}
    assert {path.name for path in (tmp_path / "lineage-1-1").iterdir()} == names
    assert {path.name for path in tmp_path.iterdir()} == kept | {"lineage-1-1", "lock"}


def test_recover_says_what_it_needs_where_nobody_can_be_asked_and_where_there_is_no_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    hub = new_folder(tmp_path / "hub").path
    for folder in (tmp_path / "nothing", tmp_path / "empty", hub):
        there = sorted(tmp_path.rglob("*"))
        for words in (["recover"], ["rejoin"], ["invite"], ["audit", "verify"], ["audit", "usage"]):
            error = CliRunner().invoke(commands.app, [*words, str(folder), *(["x"] if words == ["invite"] else [])]).exception
            assert isinstance(error, ConfigError), (words, error)
            assert str(error) == f"{folder}: is not the folder of a member; name it with --home", words
        assert sorted(tmp_path.rglob("*")) == there, "not even a lock"
    parts, members = (Part(owner="a", grant=1, outer_step=0, digest="0" * 64),), {"a": Member(incarnation=1)}
    record = Record(run_id="run", lineage=1, term=1, version=1, members=members, voters=("a#1",), parts=parts)
    monkeypatch.setattr(operate, "recover", lambda _, confirm: str(confirm(operate.Recovery(record, record, ("a plan",)))))
    said = CliRunner().invoke(commands.app, ["recover", str(tmp_path)])  # its standard input is at its end
    assert isinstance(said.exception, ConfigError) and "recover with: --yes" in str(said.exception)
    assert CliRunner().invoke(commands.app, ["recover", str(tmp_path)], input="y\n").stdout.endswith("True\n")
    assert CliRunner().invoke(commands.app, ["recover", "--yes", str(tmp_path)]).stdout.endswith("True\n")


def test_the_plan_of_a_recovery_says_that_a_run_that_had_finished_goes_on() -> None:
    parts, members = (Part(owner="a", grant=1, outer_step=2, digest="0" * 64),), {"a": Member(incarnation=1)}
    finished = Record(
        run_id="run", lineage=1, term=1, version=1, members=members, voters=("a#1",), parts=parts, phase=Phase.FINISHED
    )
    back = replace(finished, lineage=2, phase=Phase.RUNNING, parts=(replace(parts[0], outer_step=1),))
    assert operate._recovery_words("a", finished, back)[2:4] == [
        "part 0 goes on from outer step 1, not 2",
        "the run, which had finished, goes on from there; drain it again if it was drained",
    ]
    assert not any("finished" in line for line in operate._recovery_words("a", finished, replace(finished, lineage=2)))


def test_a_host_that_runs_is_neither_recovered_nor_rejoined(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        folder = equip(swarm, "a")
        with operate._locked(folder):
            for call in (lambda: operate.recover(folder, lambda plan: True), lambda: operate.rejoin(folder)):
                with pytest.raises(ConfigError, match="its host runs, or another command is at work in it; end it first"):
                    await in_thread(call)

    scenario(tmp_path, body, "a")


def test_the_verbs_and_their_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from aggregator.swarm import cli

    async def body(swarm: Hosts) -> None:
        folder = equip(swarm, "a", authority=True)
        for words, code, said in (
            (["status", str(folder), "--json"], 0, '"leader": "a"'),
            (["pause", str(folder)], 0, "paused"),
            (["resume", str(folder)], 0, "resumed"),
            (["evict", str(folder), "operator"], 3, "operator is the name of no member"),
            (["evict", str(folder), "z"], 0, "nobody had this name, so only invitations for it are void now: members are a"),
            (["status", str(tmp_path / "nothing")], 2, "peer.pem"),
        ):
            monkeypatch.setattr("sys.argv", ["aggregator.swarm", *words])
            with pytest.raises(SystemExit) as ended:
                await in_thread(run_command, "aggregator.swarm", cli.program)
            out = capsys.readouterr()
            assert (ended.value.code or 0) == code and said in out.out + out.err, (words, out)

    scenario(tmp_path, body, "a")


def test_the_average_that_a_swarm_keeps_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from aggregator.swarm import cli

    toml = TOML + '[average]\nkind = "ema"\ndecay = 0.5\n'

    async def body() -> None:
        async with hosts(tmp_path, toml=toml) as swarm:
            await swarm.grow("a", "b")
            for outer_step in (1, 2):
                await swarm.contribute(0, ONES)
                await swarm.until(lambda: swarm.steps() == {"a": outer_step, "b": outer_step})  # noqa: B023
            outer = swarm.running["b"].parts[0].replica.outer
            folder, out = equip(swarm, "b"), tmp_path / "model.safetensors"
            settings = toml.format(start=1, quorum=1).replace("[server]", "[swarm]\nparts = 1")
            (folder / "run.toml").write_text("\n".join(line for line in settings.splitlines() if "listen" not in line))
            (folder / "schema.json").write_text(schema_of(0).to_json())
            for options, expected, said in (
                (["--averaged"], outer.averaged, "outer step 2, their average (ema 0.5)"),
                ([], outer.theta, "outer step 2, digest"),
            ):
                words = ["aggregator.swarm", "export", str(folder), "--out", str(out), *options]
                monkeypatch.setattr("sys.argv", words)
                with pytest.raises(SystemExit) as ended:
                    await in_thread(run_command, "aggregator.swarm", cli.program)
                assert not ended.value.code and said in capsys.readouterr().out
                written = load_file(out)
                for fragment, right in zip(schema_of(0).fragments, expected, strict=True):
                    assert torch.equal(written[fragment.tensors[0].name], right)

    run_held(body())


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ((5, "d" * 64), ("here", "")),
        ((4, "c" * 64), ("here", "part 0 is at outer step 4 of 5")),  # the newest update counts once a quorum holds it
        ((3, "c" * 64), ("late", "part 0 is at outer step 3 of 5")),
        ((5, "c" * 64), ("late", "part 0 is damaged, or of another history")),
        ((6, "c" * 64), ("late", "part 0 is at outer step 6, the swarm at 5: were others restored from an earlier backup?")),
        ((5, ""), ("late", "it has no state yet: a snapshot is fetched")),
    ],
)
@pytest.mark.parametrize("reachable", [True, False])
def test_a_member_is_late_by_more_than_the_newest_update(
    state: tuple[int, str], expected: tuple[str, str], reachable: bool
) -> None:
    record = Record(
        run_id="r",
        lineage=1,
        term=1,
        version=1,
        members={"a": Member(incarnation=1, addresses=("a:1",)), "b": Member(incarnation=1, reachable=reachable)},
        voters=("a#1", "b#1"),
        parts=(Part(owner="a", grant=1, outer_step=5, digest="d" * 64),),
    )
    b = PeerStanding(peer_id="b", connected=True, since_s=1.0, why="", live=True, silent_s=0.1, states=(state,))
    own = PartStanding(outer_step=5, digest="d" * 64, work="", engine=None)
    leads = Standing(
        run_id="r", peer_id="a", role="leader", leader="a", term=1, committed=True, record=record, parts=(own,), peers=(b,)
    )
    told = row(report(record, "a", {"a": leads}, {}).members, "peer_id", "b")
    words = (() if reachable else ("nobody can dial it, so it owns no part and does not lead",)) + (expected[1],)
    assert (told["state"], told["why"]) == (expected[0], "; ".join(filter(None, words)))


def test_status_says_who_is_not_trusted_with_a_part() -> None:
    record = Record(
        run_id="r",
        lineage=1,
        term=1,
        version=1,
        members={name: Member(incarnation=1) for name in "abc"},
        voters=("a#1",),
        parts=(Part(owner="a", grant=1, outer_step=5, digest="d" * 64),),
    )
    once = record.disputed("b", "a")
    assert not any("owns and verifies" in note for note in report(once, "a", {}, {}).notes)
    told = "b owns and verifies nothing while others can: a and c came to other bits; find out who is wrong, and evict"
    assert told in report(once.disputed("b", "c"), "a", {}, {}).notes
