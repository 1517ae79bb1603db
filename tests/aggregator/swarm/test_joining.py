"""A new member whose swarm is gone, does not answer or lies: what it says, whom it asks next, and when it gives up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from aggregator.swarm import admission
from aggregator.swarm.admission import JOIN_S, SAY_S, take_settings
from edit.errors import EvictedError, TransportError
from editpb import council_pb2 as pb
from editpb.identity import Identity
from editpb.transport.abort_on_error import abort_on_error
from editpb.transport.chunk_frames import add_council_servicer
from tests.support.council.hosts import Hosts, hosts
from tests.support.loops import run_held

RIGHT = b"[model]\nlayers = 1\nwidth = 8\nheads = 1\ncontext = 8\n[swarm]\nparts = 2\n"
NOWHERE = "127.0.0.1:1"


def until_done(swarm: Hosts, task: asyncio.Future[Any]) -> Any:
    return swarm.until(task.done, passes=20.0)


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("waiting: ")]


def test_a_joiner_whose_swarm_does_not_answer_says_so_every_ten_seconds_and_gives_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            credentials = grpc.ssl_channel_credentials(swarm.ca, *swarm.certificate("new"))
            me, begun = Identity(swarm.run_id, "peer", "new"), asyncio.get_running_loop().time()
            asking = asyncio.ensure_future(take_settings(tmp_path, credentials, me, {"a": (NOWHERE, "127.0.0.1:2")}))
            await until_done(swarm, asking)
            with pytest.raises(
                TransportError, match=rf"gives up after {JOIN_S:.0f} s: no host says .*the same command tries again"
            ):
                asking.result()
            assert asyncio.get_running_loop().time() - begun >= JOIN_S
        lines = waits(caplog)
        assert JOIN_S / SAY_S / 3 <= len(lines) <= JOIN_S / SAY_S
        assert all(f"a at {NOWHERE}: " in line and "a at 127.0.0.1:2: " in line for line in lines)

    with caplog.at_level(logging.INFO):
        run_held(body())


def test_a_host_that_nobody_lets_in_says_whom_it_dials_and_ends_and_a_member_never_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b")
            new = await swarm.start("new", seeds={"z": (NOWHERE,)})
            await swarm.stop("a")  # so that b is a member that waits, too, for as long
            ended = asyncio.ensure_future(new.watch(asyncio.Event()))
            waiting = asyncio.ensure_future(swarm.running["b"].watch(asyncio.Event()))
            await until_done(swarm, ended)
            with pytest.raises(TransportError, match=f"gives up after {JOIN_S:.0f} s: new is not in the swarm yet"):
                ended.result()
            assert not waiting.done()
            waiting.cancel()
        assert any(f"new is not in the swarm yet: no member is reached (z at {NOWHERE}: " in line for line in waits(caplog))
        assert not any("b is not in the swarm yet" in line for line in waits(caplog))

    with caplog.at_level(logging.INFO):
        run_held(body())


class Liar:
    """A host that answers Describe as it likes, under the certificate of a member."""

    def __init__(self, answer: Callable[[], pb.SwarmDescription]) -> None:
        self._answer = answer

    def __getattr__(self, method: str) -> None:
        return None

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.SwarmDescription:
        async with abort_on_error(context):
            return self._answer()
        raise AssertionError("unreachable: abort raises")


@asynccontextmanager
async def lying(swarm: Hosts, answer: Callable[[], pb.SwarmDescription]) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_council_servicer(Liar(answer), server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([swarm.certificate("liar")], swarm.ca, True))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def evicted() -> pb.SwarmDescription:
    raise EvictedError("because I say so")


HOST = pb.HostAddresses(peer_id="../x", addresses=["127.0.0.1:1"])
HUGE = RIGHT + b"[outer]\nlr = 1" + b"0" * 400
LIES: dict[str, Callable[[], pb.SwarmDescription]] = {
    "no parts": lambda: pb.SwarmDescription(parts=0, run_toml=RIGHT),
    "no settings": lambda: pb.SwarmDescription(parts=2),
    "no TOML": lambda: pb.SwarmDescription(parts=2, run_toml=b"\xff\x00"),
    "a huge number": lambda: pb.SwarmDescription(parts=2, run_toml=HUGE),
    "a number of too many digits": lambda: pb.SwarmDescription(parts=2, run_toml=HUGE + b"0" * 5000),
    "no swarm": lambda: pb.SwarmDescription(parts=2, run_toml=RIGHT.partition(b"[swarm]")[0]),
    "huge settings": lambda: pb.SwarmDescription(parts=2, run_toml=b"#" * 2_000_000),
    "a name": lambda: pb.SwarmDescription(parts=2, hosts=[HOST], run_toml=RIGHT),
    "a model": lambda: pb.SwarmDescription(parts=2, run_toml=RIGHT + b"[model2]\n"),
    "an eviction": evicted,
}


@pytest.mark.parametrize("lie", LIES)
def test_of_a_host_that_lies_nothing_is_written_and_the_next_one_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    monkeypatch.setattr(admission, "JOIN_S", 3.0)

    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            credentials = grpc.ssl_channel_credentials(swarm.ca, *swarm.certificate("new"))
            me, home = Identity(swarm.run_id, "peer", "new"), tmp_path / "home"
            home.mkdir()
            honest = pb.SwarmDescription(parts=2, run_toml=RIGHT)
            async with lying(swarm, LIES[lie]) as liar, lying(swarm, lambda: honest) as other:
                asking = asyncio.ensure_future(take_settings(home, credentials, me, {"liar": (liar,)}))
                await until_done(swarm, asking)
                kind = EvictedError if lie == "an eviction" else TransportError
                with pytest.raises(kind) as caught:
                    asking.result()
                assert "\n" not in str(caught.value) and not any(home.iterdir())
                await take_settings(home, credentials, me, {"liar": (liar, other)})
                assert (home / "run.toml").read_bytes() == RIGHT

    run_held(body())
