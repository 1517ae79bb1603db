"""Whoever has no certificate fills no log. In processes that are not forked: gRPC is silent or not from its import on."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator.swarm.host_folder import HostFolder
from tests.processes.test_swarm_hosts import Swarm
from tests.support.daemons import Site, small
from tests.support.fork_server import REPOSITORY

HANDSHAKES = 40
Started = tuple[list[object], str, Callable[[], str]]  # the arguments, what it says once it serves, where it then listens


def coordinator(path: Path) -> Started:
    state = Site(path, small("strangers")).state
    return (
        ["aggregator", "serve", "--state", state],
        " serving ",
        lambda: json.loads((state / "addresses.json").read_text())["listen"],
    )


def host(path: Path) -> Started:
    swarm = Swarm(path, members="a")
    HostFolder(advertise="127.0.0.1", discovery="addresses").save(path / "a")
    return ["aggregator.swarm", path / "a"], "listens on", lambda: swarm.address("a")


@pytest.mark.parametrize("program", [coordinator, host])
def test_a_handshake_without_a_certificate_leaves_no_line_in_the_log(
    tmp_path: Path, program: Callable[[Path], Started]
) -> None:
    arguments, serves, address = program(tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    command = [sys.executable, "-m", *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=pipe, text=True, cwd=REPOSITORY, env=environment
    ) as process:
        assert process.stderr is not None
        try:
            assert any(serves in line for line in process.stderr)
            where, _, port = address().rpartition(":")
            assert asyncio.run(handshakes(where, int(port))) == HANDSHAKES
        finally:
            process.terminate()
        lines = process.stderr.readlines()
    assert process.returncode == 0
    foreign = [line for line in lines if "andshake" in line or "ssl" in line]
    assert not foreign, f"{len(foreign)} lines, the first: {foreign[0]}"


async def handshakes(host: str, port: int) -> int:
    """Return how many handshakes without a certificate were refused."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    refused = 0
    for _ in range(HANDSHAKES):
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        try:
            refused += not await reader.read()
        except ssl.SSLError:
            refused += 1
        finally:
            writer.close()
    return refused
