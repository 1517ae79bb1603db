"""The page beside a real coordinator: it sees the run as operator and as observer, and carries out the operator's orders."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from aggregator.operator_client import watch_run
from aggregator.page import give_order, statuses_of_operator
from aggregator.security.authority import Authority
from aggregator.storage.state_folder import StateFolder
from edit.durable_files import write_atomic
from edit.errors import ConfigError, EvictedError
from edit.web.feed import Feed, Source
from editpb.identity import Identity
from editpb.run_status import Curve
from peers.identity.peer_folder import PeerFolder
from peers.page import serve_members_page
from peers.watching import read_status
from peers.watching import statuses as statuses_of_member
from tests.support.loops import on_a_loop, until
from tests.support.ports import held_port
from tests.support.served import SCHEMA, TOML, Served, found_run, new_folder, served
from tests.support.statuses import busy_run


@contextlib.asynccontextmanager
async def following(source: Source) -> AsyncIterator[tuple[Feed, asyncio.Task[None]]]:
    feed = Feed(source)
    task = asyncio.create_task(feed.follow())
    try:
        yield feed, task
    finally:
        task.cancel()
        await asyncio.wait([task])


def home_of(at: Served, name: str, role: str, path: Path) -> PeerFolder:
    """A folder as an invitation leaves it."""
    key, certificate = at.certificate(name, role)
    path.mkdir()
    write_atomic(path / "peer.key", key, mode=0o600)
    own, ca = (x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER) for pem in (certificate, at.ca))
    folder = PeerFolder(path)
    folder.store(Identity(at.folder.run_id, role, name), [at.coordinator.listen], own, ca)
    return folder


def test_the_operators_page_sees_the_run_gives_orders_and_outlives_the_coordinator(tmp_path: Path) -> None:
    @on_a_loop
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with contextlib.AsyncExitStack() as coordinator:
            at = await coordinator.enter_async_context(served(folder))
            peer = await coordinator.enter_async_context(at.peer("a"))
            async with following(partial(watch_run, folder)) as (feed, task):
                await found_run(peer)
                await until(lambda: feed.status is not None and feed.status.parameters)
                assert feed.status is not None and [row.peer_id for row in feed.status.members if row.role == "peer"] == ["a"]
                for order, phase in (("pause", "paused"), ("resume", "collecting")):
                    await give_order(folder, order, "")
                    await until(lambda wanted=phase: feed.status is not None and feed.status.phase == wanted)
                await give_order(folder, "evict", "a")
                await until(lambda: feed.status is not None and any(row.state == "evicted" for row in feed.status.members))
                await coordinator.aclose()
                await until(lambda: feed.problem)
                assert "does not answer" in feed.problem
                assert feed.status is not None and not task.done()  # it shows what it saw last, and goes on asking

    scenario()


def test_the_operators_page_of_a_run_whose_coordinator_has_ended_shows_how_it_stood(tmp_path: Path) -> None:
    @on_a_loop
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder) as at, at.peer("a") as peer:
            await found_run(peer)
        async with following(statuses_of_operator(folder, {})) as (feed, task):
            await until(lambda: feed.problem)
            assert feed.status is not None and "does not answer" in feed.problem and not task.done()
            assert (feed.status.phase, feed.status.parameters) == ("stopped", SCHEMA.numel)
            assert [row.peer_id for row in feed.status.members] == ["a"]
            async with served(folder):
                await until(lambda: feed.status is not None and feed.status.phase == "gathering")

    scenario()


@pytest.mark.parametrize("role", ["observer", "peer"])
def test_any_member_sees_the_run(tmp_path: Path, role: str) -> None:
    @on_a_loop
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as at:
            home = home_of(at, "eve", role, tmp_path / "home")
            async with following(partial(statuses_of_member, home, itertools.count())) as (feed, task):
                await until(lambda: feed.status is not None)
                assert feed.status is not None and feed.status.run_id == at.folder.run_id
                at.coordinator.run.evict("eve", "looked too long")
                with pytest.raises(EvictedError, match="looked too long"):
                    await asyncio.wait_for(asyncio.shield(task), 30)

    scenario()


def test_a_members_page_draws_other_runs_beside_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = list[Source]()
    monkeypatch.setattr("peers.page.serve_page", lambda source, *_, **__: sources.append(source))
    curve = Curve(kind="norm", x=(1.0,), t=(10.0,), y=(2.0,))

    @on_a_loop
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as at:
            home = home_of(at, "eve", "observer", tmp_path / "home")
            beside = {"run other": replace(busy_run(), curves=(curve,))}
            serve_members_page(home.path, listen="127.0.0.1:0", certificate=None, key=None, beside=beside, say=print)
            async with following(sources[0]) as (feed, _):
                await until(lambda: feed.status is not None)
                assert feed.status is not None and feed.status.run_id == at.folder.run_id
                assert replace(curve, peer_id="run other") in feed.status.curves

    scenario()


def test_a_member_sees_the_share_of_every_aggregator(tmp_path: Path) -> None:
    """It knows the coordinator only, and asks the further aggregator that the run's settings name."""

    @on_a_loop
    async def scenario() -> None:
        address = f"127.0.0.1:{port}"
        folder = new_folder(tmp_path / "run", toml=f'{TOML}\n[aggregators]\naddresses = ["{address}"]\n')
        further = StateFolder.create_further(tmp_path / "further", folder, 1)
        Authority.load(folder.path, folder.run_id).equip(further.path, 1, "127.0.0.1", now=time.time())
        async with served(folder) as at, contextlib.AsyncExitStack() as second:
            home = home_of(at, "eve", "observer", tmp_path / "home")
            assert (await read_status(home)).reason == f"aggregator 1 ({address}) does not answer"
            await second.enter_async_context(served(further))
            told = await read_status(home)
            founder = "a first peer, which brings the initial parameters"
            assert (told.reason, told.waiting_for) == ("", f"part 0: {founder}; part 1: {founder}")

    with held_port() as port:
        scenario()


@on_a_loop
async def test_a_coordinator_that_was_never_started_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no coordinator was started here"):
        await Feed(partial(watch_run, new_folder(tmp_path / "run"))).follow()
