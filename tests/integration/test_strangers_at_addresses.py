"""A peer whose coordinator has several addresses, at some of which the server of another run answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edit.config.run import RunConfig
from edit.errors import EditError, RefusedError, TransportError
from editpb import governance_pb2
from editpb.identity import Identity
from peers import approve, audit_fetch
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import read_configuration
from peers.carriers.io_thread import IoThread
from tests.support.loops import on_a_loop
from tests.support.served import Served, new_folder, served


async def configuration(run: Served, *endpoints: str) -> tuple[RunConfig, int]:
    """What a peer of the run that dials these is told, or raises."""

    def read() -> tuple[RunConfig, int]:
        with IoThread() as io:
            return read_configuration(io, Channels(endpoints, credentials), Identity(run.folder.run_id, "peer", "a"))

    credentials = run.credentials("a")
    return await asyncio.to_thread(read)


@on_a_loop
async def test_one_at_the_first_address_is_passed_over_and_at_all_of_them_it_is_final(tmp_path: Path) -> None:
    async with (
        served(new_folder(tmp_path / "run")) as run,
        served(new_folder(tmp_path / "other")) as other,
        served(new_folder(tmp_path / "third")) as third,
    ):
        own, strangers = run.coordinator.listen, [other.coordinator.listen, third.coordinator.listen]
        assert (await configuration(run, strangers[0], own))[1] == 0
        words = r"its certificate is not from this run's authority \(is another run served there\?\)"
        with pytest.raises(RefusedError, match=f"^{strangers[0]}: {words}$"):
            await configuration(run, strangers[0])
        with pytest.raises(RefusedError, match="^" + "; ".join(f"{each}: {words}" for each in strangers) + "$"):
            await configuration(run, *strangers)


@pytest.mark.parametrize("command", ["approve", "fetch"])
@on_a_loop
async def test_a_command_says_it_as_the_daemon_does(tmp_path: Path, command: str) -> None:
    async with served(new_folder(tmp_path / "run")) as run, served(new_folder(tmp_path / "other")) as other:
        out = tmp_path / "out"
        out.mkdir()

        async def told(*endpoints: str) -> EditError:
            enrolled: Any = SimpleNamespace(endpoints=endpoints, credentials=run.credentials("a"), run_id=run.folder.run_id)

            def ask() -> None:
                if command == "approve":
                    approve._ask(enrolled, lambda stub: stub.Proposal(governance_pb2.ProposalRequest()))
                else:
                    audit_fetch._from_any(enrolled, endpoints, out, 0)

            with pytest.raises(EditError) as caught:
                await asyncio.to_thread(ask)
            return caught.value

        words = f"the coordinator at {other.coordinator.listen}: its certificate is not from this run's authority"
        alone, beside = await told(other.coordinator.listen), await told(other.coordinator.listen, "127.0.0.1:1")
        assert isinstance(alone, RefusedError) and str(alone).startswith(words)
        assert isinstance(beside, TransportError) and str(beside).startswith(words) and "127.0.0.1:1: " in str(beside)
