"""`peers.connect`: what a user's own loop opens; examples/ show it at work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

import peers
from aggregator.security.authority import Authority
from edit.config.run import RunConfig
from edit.errors import ConfigError
from editpb.identity import Identity
from peers import connection
from peers.connection import connect, without_effect
from peers.identity.peer_folder import PeerFolder
from tests.support.served import new_folder


def test_it_is_the_packages_one_name_and_loads_nothing_before_it_is_asked_for() -> None:
    assert peers.connect is connect
    assert peers.__all__ == ["connect"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = peers.nothing
    code = "import sys, peers; print(sorted({'torch', 'grpc'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


_CALLS = """
import grpc

async def answer(request, context):
    await asyncio.sleep(0.001)
    return request

async def start():
    server = grpc.aio.server()
    echo = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Echo": echo}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, grpc.aio.insecure_channel(f"127.0.0.1:{port}")

async def calls(channel):
    while True:
        await channel.unary_unary("/t.T/Echo")(b"x")

def fork():
    if (pid := os.fork()) == 0:
        os._exit(0)
    return os.waitpid(pid, 0)[1]

with IoThread() as io:
    server, channel = io.call(start())
    io.spawn(calls(channel))
    print([status for _ in range(80) if (status := fork())], flush=True)
    os._exit(0)
"""


def test_what_is_forked_beside_calls_does_not_abort() -> None:
    """As a DataLoader's workers. With gRPC's own support of forks about one of ten here does."""
    code = (
        "import asyncio, os, warnings; warnings.simplefilter('ignore')\nfrom peers.carriers.io_thread import IoThread\n"
        + _CALLS
    )
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize(
    ("first", "given", "said"),
    [("peers", None, "0 False"), ("peers", "1", "1 False"), ("grpc", None, "0 True"), ("grpc", "0", "0 False")],
)
def test_grpc_supports_forks_only_where_that_is_asked_for(first: str, given: str | None, said: str) -> None:
    code = f"import os, {first}, peers.forks; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'], peers.forks.GRPC_CAME_FIRST)"
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    environment |= {} if given is None else {"GRPC_ENABLE_FORK_SUPPORT": given}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout == f"{said}\n"


@pytest.mark.parametrize("first", [True, False])
def test_that_grpc_came_first_is_told(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "GRPC_CAME_FIRST", first)
    assert ["import peers first" in line for line in connection._forks()] == [True] * first


def test_a_folder_without_an_invitation_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="edit-peer join INVITATION"), connect(tmp_path / "home"):
        pass


def enrol(tmp_path: Path, role: str) -> None:
    folder = new_folder(tmp_path / "run")
    authority = Authority.load(folder.path, folder.run_id)
    home, identity = PeerFolder(tmp_path / "home"), Identity(folder.run_id, role, "eve")
    certificate = authority.issuer.issue(identity, home.make_key().public_key(), lifetime_s=3600, now=time.time())
    ca = (folder.path / "ca.pem").read_bytes()
    der = x509.load_pem_x509_certificate(ca).public_bytes(serialization.Encoding.DER)
    home.store(identity, ("127.0.0.1:1",), certificate.public_bytes(serialization.Encoding.DER), der)


def test_an_observer_cannot_train(tmp_path: Path) -> None:
    enrol(tmp_path, "observer")
    with pytest.raises(ConfigError, match="enrolled as observer"), connect(tmp_path / "home"):
        pass


def test_under_torchrun_the_ranks_must_have_found_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each rank would come as a replica of its own, with the identity of the others."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    enrol(tmp_path, "peer")
    with pytest.raises(ConfigError, match=r"rank 1 of 2, but torch\.distributed is not"), connect(tmp_path / "home"):
        pass


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({}, []),
        ({"model": {"name": "entry:mine"}}, []),
        ({"model": {"name": "hf:llama"}}, ["[model] hf:llama"]),
        ({"model": {"name": "entry:mine", "options": {"depth": 3}}}, ["[model] entry:mine"]),
        ({"inner": {"lr": 1e-4}}, ["[inner]"]),
        ({"model": {"name": "hf:llama"}, "inner": {"batch_size": 8}}, ["[inner]", "[model] hf:llama"]),
    ],
)
def test_settings_that_an_own_loop_does_not_follow_are_named(tables: dict[str, object], told: list[str]) -> None:
    lines = without_effect(RunConfig.from_mapping({"name": "r", "sync": {"outer_steps": 4}, **tables}))
    assert [line.split(" is ")[0] for line in lines] == [f"run.toml's {each}" for each in told]
