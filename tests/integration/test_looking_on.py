"""`edit-peer status` and `watch`: what `join` tells each role to run works for it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shlex
import subprocess
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from aggregator.storage.state_folder import StateFolder
from aggregator.swarm.beside import kept_status
from edit.errors import ConfigError, EditError, EvictedError, RefusedError, TransportError
from edit.view.overlaid import HANDED_ON
from editpb.run_status import RunStatus
from peers.cli import app
from peers.identity.peer_folder import PeerFolder
from peers.swarm.beside import runs_beside
from peers.swarm.cli import beside_words
from peers.watching import reached
from tests.integration.test_readme import run
from tests.support.loops import on_a_loop, until
from tests.support.served import found_run, new_folder, served, theta

Source = Callable[[], AsyncGenerator[RunStatus, None]]


async def joined(folder: StateFolder, home: Path, role: str) -> list[str]:
    """Invite and join; return the command that `join` says is next."""
    invitation = await asyncio.to_thread(
        run, ["edit-coordinator", "invite", home.name, "--role", role, "--state", str(folder.path)]
    )
    said = await asyncio.to_thread(run, ["edit-peer", "join", invitation.splitlines()[0], "--home", str(home)])
    return shlex.split(next(line for line in said.splitlines() if line.startswith("next: ")).removeprefix("next: "))


async def status(home: Path, *options: str) -> str:
    """Run `edit-peer status`; raise what it raises."""
    result = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--home", str(home), *options])
    if isinstance(result.exception, EditError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("role", ["observer", "operator", "peer"])
def test_a_member_that_has_no_folder_of_the_run_sees_how_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    async def first(source: Source, console: Console, _: Callable[[], float]) -> None:
        async with aclosing(source()) as told:
            console.print(f"watched {(await anext(told)).run_id}")

    monkeypatch.setattr("edit.view.live.show", first)

    @on_a_loop
    async def scenario() -> None:
        folder, home = new_folder(tmp_path / "run"), tmp_path / "someone"
        async with served(folder) as at, at.peer("a") as a:
            await found_run(a)
            told = await joined(folder, home, role)
            assert told[:2] == ["edit-peer", "run" if role == "peer" else "watch"]
            watch = ["edit-peer", "watch", "--home", str(home)]
            assert role == "peer" or told == watch
            assert f"watched {folder.run_id}" in await asyncio.to_thread(run, watch)
            at.coordinator.run.looked_at = -1.0
            assert "outer step 0 of 100" in await status(home)
            assert at.coordinator.run.looked_at >= 0, "so it stays a moment longer at the end of the run"
            shown = json.loads(await status(home, "--json"))
            assert shown["run_id"] == folder.run_id and shown["members"][0]["peer_id"] == "a"
            sent = json.loads(await asyncio.to_thread(run, ["edit-peer", "explain", "--home", str(home), "--json"]))["sent"]
            assert ("(codec.up)" in sent[0]["form"]) == (role == "peer") and len(sent) == (5 if role == "peer" else 1)
            at.coordinator.run.evict("someone", "talks")
            with pytest.raises(EvictedError, match="talks"):
                await status(home)

    scenario()


@on_a_loop
async def test_an_observer_compares_a_run_with_others(tmp_path: Path) -> None:
    folder, ended, home = new_folder(tmp_path / "run"), new_folder(tmp_path / "ended"), tmp_path / "eve"
    out = tmp_path / "both.html"
    async with served(ended) as at, at.peer("a") as a:
        await found_run(a)
        view = await a.view(lambda view: view.round_id)
        await a.contribute(view.round_id, 0, theta(1))
        await until(lambda: at.coordinator.run.recent_rounds)
    async with served(folder):
        await joined(folder, home, "observer")
        others = [word for path in (home, ended.path) for word in ("--beside", str(path))]
        said = await asyncio.to_thread(run, ["edit-peer", "report", "--home", str(home), "--out", str(out), *others])
        # The report of a swarm is another program, which is given how the run stands.
        beside = await asyncio.to_thread(beside_words, [home, ended.path])
    assert beside[::2] == ["--beside", "--beside"] and beside[3] == ended.path
    told = beside[1]
    assert isinstance(told, Path) and told.parent == HANDED_ON and kept_status(told).run_id == folder.run_id
    heard = await asyncio.to_thread(partial(subprocess.check_output, ["cat", told], close_fds=False))
    assert RunStatus.from_json(json.loads(heard)).run_id == folder.run_id
    os.close(int(told.name))
    with pytest.raises(ConfigError, match="does not say how a run stands"):
        kept_status(told)
    with pytest.raises(TransportError, match=f"--beside {home}: the coordinator at"):
        await asyncio.to_thread(beside_words, [home])
    assert said.startswith(f"{out}: ") and f'"run {ended.run_id}"' in out.read_text(encoding="utf-8")
    nobody = tmp_path / "nobody"
    with pytest.raises(ConfigError, match="nobody"):
        runs_beside([nobody])
    with pytest.raises(ConfigError, match="at most 8 runs"):
        runs_beside([nobody] * 9)
    with pytest.raises(ConfigError, match=rf"compare that run from there: edit-peer report --home {home} --beside FOLDER"):
        kept_status(home)


@on_a_loop
async def test_all_addresses_of_the_coordinator_are_asked(tmp_path: Path) -> None:
    folder, home = new_folder(tmp_path / "run"), tmp_path / "eve"
    async with served(folder):
        await joined(folder, home, "observer")
        identity = json.loads((home / "identity.json").read_text())
        unreachable = "127.0.0.1:1"
        identity["endpoints"] = [unreachable, *identity["endpoints"]]
        (home / "identity.json").write_text(json.dumps(identity))
        assert folder.run_id in await status(home)
        for turn in (0, 1):  # `watch`: whichever is asked first
            async with aclosing(reached(PeerFolder(home), itertools.count(turn))) as told:
                assert (await anext(told)).run_id == folder.run_id
    with pytest.raises(TransportError, match=rf"the coordinator at {unreachable} does not answer; the coordinator at"):
        await status(home)
    identity["endpoints"] = []
    (home / "identity.json").write_text(json.dumps(identity))
    with pytest.raises(ConfigError, match="its run has no coordinator"):
        PeerFolder(home).load()


@on_a_loop
async def test_another_run_at_the_first_address_is_passed_over_and_at_all_of_them_refused(tmp_path: Path) -> None:
    folder, home = new_folder(tmp_path / "run"), tmp_path / "eve"
    async with served(folder), served(new_folder(tmp_path / "other")) as other, served(new_folder(tmp_path / "third")) as third:
        await joined(folder, home, "observer")
        identity = json.loads((home / "identity.json").read_text())
        strangers = [other.coordinator.listen, third.coordinator.listen]

        async def at(*endpoints: str) -> str:
            (home / "identity.json").write_text(json.dumps({**identity, "endpoints": endpoints}))
            return await status(home)

        assert folder.run_id in await at(strangers[0], *identity["endpoints"])
        words = r"its certificate is not from this run's authority \(is another run served there\?\)"
        with pytest.raises(RefusedError, match=rf"^the coordinator at {strangers[0]}: {words}$"):
            await at(strangers[0])
        told = "; ".join(f"the coordinator at {each}: {words}" for each in strangers)
        with pytest.raises(RefusedError, match=f"^{told}$"):
            await at(*strangers)
        with pytest.raises(TransportError, match=r"another run served there.*127\.0\.0\.1:1 does not answer"):
            await at(strangers[0], "127.0.0.1:1")
