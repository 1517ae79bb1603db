"""Peers and hosts whose only way out is an HTTP proxy: it alone knows where the others are."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from edit.errors import TransportError
from edit.records import Committed, Contribution
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective, read_configuration
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import Interrupted
from peers.consent import ask_terms
from peers.identity.enrolment import join
from peers.identity.peer_folder import PeerFolder
from peers.watching import read_status
from tests.support.connect_proxy import ConnectProxy, connect_proxy, proxy_in_a_thread
from tests.support.council.hosts import SIZES, hosts
from tests.support.encoded import encode
from tests.support.fork_server import REPOSITORY
from tests.support.loops import run_held
from tests.support.ports import held_port
from tests.support.running import Running, running
from tests.support.served import SCHEMA, TOML, new_folder, theta

NAME = "coordinator.test"  # no resolver knows it
ADDRESS = "[2001:db8::7]"  # and nobody has this one (RFC 3849)
pytestmark = pytest.mark.usefixtures("no_other_proxy")


@pytest.fixture
def no_other_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def invited(here: Running, host: str) -> str:
    """An invitation that is redeemed at a host that only the proxy reaches."""
    authority = here.served.coordinator.authority
    enrol = (f"{host}:{here.served.coordinator.enrol_listen.rpartition(':')[2]}",)
    return authority.invite("me", role="peer", enrol=enrol, lifetime_s=3600.0, now=time.time()).encode()


@pytest.mark.parametrize("host", [NAME, ADDRESS])
@pytest.mark.parametrize("user", ["", "me:p@ss"])
def test_a_peer_joins_and_takes_an_outer_step_only_through_a_proxy(
    host: str, user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_folder(tmp_path / "run", toml=f'{TOML}advertise = ["{host}"]\n')
    with running(folder) as here, proxy_in_a_thread(user=user, leads={host: "127.0.0.1"}) as proxy:
        monkeypatch.setenv("https_proxy", f"http://{user.replace('@', '%40')}@127.0.0.1:{proxy.port}".replace("/@", "/"))
        join(invited(here, host), tmp_path / "me", time.time())
        enrolled = PeerFolder(tmp_path / "me").load(time.time())
        with IoThread() as io:
            collective = HubCollective(io, Channels(enrolled.endpoints, enrolled.credentials), enrolled.identity)
            try:
                collective.join(SCHEMA, theta)
                for i, size in enumerate(fragment.numel for fragment in SCHEMA.fragments):
                    payload = encode("fp32", torch.ones(size))
                    contribution = Contribution(fragment_id=i, payload=payload, outer_step=0, inner_steps=2, tokens=10)
                    collective.contribute(contribution)
                outcome = collective.outcome(0, block=True)
                assert isinstance(outcome, Committed) and outcome.commit.outer_step == 1
            finally:
                collective.close()
        ports = {here.served.coordinator.listen.rpartition(":")[2], here.served.coordinator.enrol_listen.rpartition(":")[2]}
        assert set(proxy.asked) == {f"{host}:{port}" for port in ports}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"refuses": "403 Forbidden"}, "answers 403: it does not let this machine connect"),
        ({"user": "a:b"}, "answers 407: it asks for a user and a password"),
        ({"refuses": "502 Bad Gateway"}, "answers 502"),
    ],
)
def test_a_proxy_that_refuses_is_one_line(
    options: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(new_folder(tmp_path / "run")) as here, proxy_in_a_thread(**options) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(TransportError, match=words) as caught:
            join(invited(here, NAME), tmp_path / "me", time.time())
        assert "\n" not in str(caught.value)


def test_a_proxy_that_does_not_answer_is_named_with_the_coordinator_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_folder(tmp_path / "run", toml=f'{TOML}advertise = ["{NAME}"]\n')
    with running(folder) as here, proxy_in_a_thread(leads={NAME: "127.0.0.1"}) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        invitation = invited(here, NAME)
        join(invitation, tmp_path / "me", time.time())
        home = PeerFolder(tmp_path / "me")
    with held_port() as port:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        way = f":[0-9]+ .through the HTTP proxy 127.0.0.1:{port}, which the environment's https_proxy names."
        with pytest.raises(TransportError, match=f"no answer from {NAME}{way}: cannot be reached"):
            join(invitation, tmp_path / "me", time.time())
        with pytest.raises(TransportError, match=f"the coordinator at {NAME}{way}: cannot be reached"):
            ask_terms(tmp_path / "me", time.time())
        with pytest.raises(TransportError, match=f"the coordinator at {NAME}{way} does not answer"):
            asyncio.run(read_status(home))
        enrolled = home.load(time.time())
        with IoThread() as io, stopped_at(f"{NAME}{way}: cannot be reached.*; trying again", io), pytest.raises(Interrupted):
            read_configuration(io, Channels(enrolled.endpoints, enrolled.credentials), enrolled.identity)


@contextmanager
def stopped_at(words: str, io: IoThread) -> Iterator[None]:
    """Stop the main thread's waits once this is logged."""

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if re.search(words, record.getMessage()):
                io.interrupt()

    log, handler = logging.getLogger("peers"), Heard()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def test_a_command_that_a_proxy_refuses_says_so_in_one_line(tmp_path: Path) -> None:
    """gRPC itself would log each refusal, over several lines."""
    with running(new_folder(tmp_path / "run")) as here, proxy_in_a_thread(refuses="403 Forbidden") as proxy:
        (tmp_path / "invitation").write_text(invited(here, NAME))
        words = [sys.executable, "-m", "peers", "join", tmp_path / "invitation", "--home", tmp_path / "me"]
        environment = {**os.environ, "https_proxy": f"http://127.0.0.1:{proxy.port}"}
        environment.pop("GRPC_VERBOSITY", None)
        done = subprocess.run(words, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == TransportError.exit_code
    (line,) = done.stderr.splitlines()
    assert f"the HTTP proxy 127.0.0.1:{proxy.port} answers 403" in line


def test_hosts_of_a_swarm_that_dial_only_through_a_proxy_take_outer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c accepts no connections and has no way out but the proxy: one outbound port is enough. It holds and votes."""

    async def body() -> None:
        async with hosts(tmp_path) as swarm, connect_proxy(leads={"a.test": "127.0.0.1", "b.test": "127.0.0.1"}) as proxy:
            monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
            swarm.found()
            await swarm.start("a", advertise="a.test")
            await swarm.until(lambda: swarm.leader == "a", passes=1.0)
            known = {"a": (f"a.test:{port_of(swarm.running['a'].listen)}",)}
            await swarm.start("b", advertise="b.test", seeds=known)
            await swarm.until(lambda: swarm.settled("ab"), passes=1.0)
            await swarm.start("c", advertise="", seeds=known)
            await swarm.until(lambda: swarm.settled("abc"), passes=1.0)
            await swarm.contribute(0, [torch.ones(size) for size in SIZES])
            await swarm.until(lambda: swarm.steps() == dict.fromkeys("abc", 1))
            assert swarm.same()
            assert all_asked(proxy, swarm.running["a"].listen, swarm.running["b"].listen)

    run_held(body())


def test_hosts_go_on_when_the_proxy_cuts_all_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm, connect_proxy(leads={"a.test": "127.0.0.1"}) as proxy:
            monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
            swarm.found()
            await swarm.start("a", advertise="a.test")
            await swarm.until(lambda: swarm.leader == "a", passes=1.0)
            await swarm.start("c", advertise="", seeds={"a": (f"a.test:{port_of(swarm.running['a'].listen)}",)})
            await swarm.until(lambda: swarm.settled("ac"), passes=1.0)
            await proxy.end()
            await swarm.until(lambda: "c" not in swarm.running["a"].links.connected)
            await swarm.until(lambda: "c" in swarm.running["a"].links.connected, passes=1.0)
            await swarm.contribute(0, [torch.ones(size) for size in SIZES])
            await swarm.until(lambda: swarm.steps() == dict.fromkeys("ac", 1), passes=1.0)

    run_held(body())


def port_of(address: str) -> str:
    return address.rpartition(":")[2]


def all_asked(proxy: ConnectProxy, a: str, b: str) -> bool:
    return {*proxy.asked} == {f"a.test:{port_of(a)}", f"b.test:{port_of(b)}"}
