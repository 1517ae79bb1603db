"""Hosts behind links of a limited rate: real namespaces where the machine allows them, and what is said where it does not."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from edit.errors import ConfigError
from edit.lab import network
from edit.lab.network import LOOPBACK, Host, Network

RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection = server.accept()[0]
    count = 0
    while data := connection.recv(1 << 20): count += len(data)
    print(count, connection.getpeername()[0])
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2]))).sendall(bytes(int(sys.argv[3])))"
MEGABYTE = 1_000_000


def python(host: Host, code: str, *arguments: object) -> subprocess.Popen[str]:
    command = host.command((sys.executable, "-c", code, *map(str, arguments)))
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def said(host: Host, *argv: str) -> str:
    return subprocess.run(host.command(argv), capture_output=True, text=True, check=True, timeout=30).stdout


def namespaces_held() -> set[str]:
    """Of this process: the network namespaces that its open files hold."""
    opened = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}  # not the listing's own
    return {name for name in opened if name.startswith("net:")}


@pytest.mark.usefixtures("limited_links")
def test_bytes_between_hosts_are_counted_in_each_direction_of_each_link() -> None:
    with Network(["ada", "grace", "idle"], 1000.0) as three:
        ada, grace = three.hosts["ada"], three.hosts["grace"]
        before = three.traffic()
        assert set(before) == {f"{name} {way}" for name in three.hosts for way in ("up", "down")}
        with python(ada, RECEIVE, ada.address) as receiver:
            assert receiver.stdout is not None
            port = int(receiver.stdout.readline())
            with python(grace, SEND, ada.address, port, MEGABYTE) as sender:
                assert sender.wait(60) == 0
            assert receiver.stdout.read().split() == [str(MEGABYTE), grace.address]
        moved = {way: count - before[way] for way, count in three.traffic().items()}
    for way in ("grace up", "ada down"):
        assert MEGABYTE < moved.pop(way) < 1.2 * MEGABYTE
    assert all(count < 0.2 * MEGABYTE for count in moved.values())


@pytest.mark.usefixtures("limited_links")
def test_both_ends_of_each_link_have_the_rate() -> None:
    with Network(["ada", "grace"], 100.0) as two:
        ends = [said(two.hosts[name], "tc", "-j", "qdisc", "show", "dev", "eth0") for name in two.hosts]
        ports = said(two._switch, "tc", "-j", "qdisc", "show")
        limits = [each for end in (*ends, ports) for each in json.loads(end) if each["kind"] == "tbf"]
    assert [each["options"]["rate"] for each in limits] == 4 * [100_000_000 // 8]


@pytest.mark.usefixtures("limited_links")
def test_a_host_may_have_another_rate() -> None:
    with Network(["ada", "grace"], 100.0, {"grace": 10.0}, queue_ms=300) as two:
        ends = [json.loads(said(two.hosts[name], "tc", "-j", "qdisc", "show", "dev", "eth0")) for name in two.hosts]
        ports = json.loads(said(two._switch, "tc", "-j", "qdisc", "show"))
    rates = [[each["options"]["rate"] for each in end if each["kind"] == "tbf"] for end in (*ends, ports)]
    assert rates == [[100_000_000 // 8], [10_000_000 // 8], [100_000_000 // 8, 10_000_000 // 8]]


@pytest.mark.usefixtures("limited_links")
def test_a_hosts_name_is_its_address_and_its_loopback_is_its_own() -> None:
    with Network(["ada", "grace"], 1000.0) as two:
        ada, grace = two.hosts.values()
        assert [said(host, "hostname").strip() for host in (ada, grace)] == [ada.address, grace.address]
        with ada.listen() as listener:
            port = listener.getsockname()[1]
            with python(ada, SEND, "127.0.0.1", port, 1) as near:
                assert near.wait(60) == 0
            for elsewhere in (grace, LOOPBACK):
                tried = elsewhere.command((sys.executable, "-c", SEND, "127.0.0.1", str(port), "1"))
                done = subprocess.run(tried, capture_output=True, text=True, timeout=60)
                assert "ConnectionRefusedError" in done.stderr
    assert socket.gethostname() != ada.address


@pytest.mark.usefixtures("limited_links")
def test_nothing_holds_the_namespaces_afterwards() -> None:
    before = namespaces_held()
    with pytest.raises(KeyboardInterrupt), Network(["ada", "grace"], 1000.0):
        assert len(namespaces_held() - before) == 3  # with the switch
        raise KeyboardInterrupt
    assert namespaces_held() == before


@pytest.mark.usefixtures("limited_links")
def test_an_error_in_between_leaves_no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    before, run = namespaces_held(), network._run

    def refuse_limits(host: Host, argv: Sequence[str], lines: str = "") -> str:
        return run(host, ("tc", "qdisc", "add", "dev", "eth9", "root", "tbf") if argv[0] == "tc" else argv, lines)

    monkeypatch.setattr(network, "_run", refuse_limits)
    with pytest.raises(ConfigError, match=r"^links of a limited rate cannot be made: tc: .+$"), Network(["ada"], 1000.0):
        pass
    assert namespaces_held() == before


def test_without_a_rate_all_hosts_are_this_one() -> None:
    with Network(["ada", "grace"], 0.0) as two:
        assert set(two.hosts.values()) == {LOOPBACK}
        assert two.traffic() == {}
    assert LOOPBACK.command(["ls", "-l"]) == ("ls", "-l")


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    with pytest.raises(ConfigError, match="need nsenter, ip, tc; this machine has no tc"), Network(["ada"], 1000.0):
        pass


@pytest.mark.skipif(not all(map(shutil.which, ("setpriv", "nsenter", "ip", "tc"))), reason="needs setpriv, nsenter, ip, tc")
def test_without_the_right_to_make_namespaces_one_line_says_so() -> None:
    code = "import sys; from edit.lab.cli import main; sys.argv[0] = 'edit-lab'; main()"
    command = ("setpriv", "--bounding-set", "-all", sys.executable, "-c", code, "bench", "rivals", "--mbit", "100")
    done = subprocess.run(command if os.geteuid() == 0 else command[3:], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "links of a limited rate need network namespaces, as root: Operation not permitted" in last
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("limited_links")
def test_hosts_on_another_switch_reach_each_other_only_and_one_on_none_nobody() -> None:
    with Network(["ada", "grace", "joan", "mary"], 1000.0) as four, ExitStack() as opened:
        at = {}
        for name, host in four.hosts.items():
            server = opened.enter_context(host._inside(partial(socket.create_server, (host.address, 0), backlog=64)))
            at[name] = server.getsockname()

        def connects(source: str, name: str, within_s: float) -> bool:
            try:
                four.hosts[source]._inside(partial(socket.create_connection, at[name], timeout=within_s)).close()
            except OSError:
                return False
            return True

        def reaches(source: str, *wanted: str) -> bool:
            """Whether a host reaches these and no others. What the kernel asked for in vain before may fail once more."""
            return all(any(connects(source, name, 10.0) for _ in range(3)) for name in wanted) and not any(
                connects(source, name, 0.5) for name in {*at} - {source, *wanted}
            )

        four.move("joan", "other")
        four.move("mary", "other")
        assert reaches("joan", "mary") and reaches("ada", "grace")
        four.move("mary", "")
        assert reaches("mary") and reaches("joan")
        four.move("mary")
        four.move("joan")
        assert reaches("mary", "ada", "grace", "joan")


@pytest.mark.usefixtures("limited_links")
def test_a_link_can_be_given_another_rate() -> None:
    with Network(["ada", "grace"], 1000.0) as two:
        two.limit("ada", 2.0)
        rates = [
            each["options"]["rate"] for host in two.hosts.values() for each in network._qdiscs(host) if each["kind"] == "tbf"
        ]
        assert rates == [2_000_000 // 8, 1_000_000_000 // 8]
