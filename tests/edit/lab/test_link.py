"""A slow link: how it divides time, and that it carries, cuts and mends."""

import asyncio
import contextlib
import errno
import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

from edit.lab.link import BURST_S, PIECE_BYTES, Link, LinkShape, Rate
from tests.support.loops import until


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(65536):
            self.request.sendall(data)


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield ("127.0.0.1", server.server_address[1])
        server.shutdown()


def test_bytes_leave_one_after_the_other() -> None:
    rate = Rate(8000)
    assert rate.departs(1000, 0.0) == pytest.approx(1.0 - BURST_S)
    assert rate.departs(500, 0.0) == pytest.approx(1.5 - BURST_S)  # behind the first
    assert rate.departs(500, 10.0) == pytest.approx(10.5 - BURST_S)  # an idle link saves no more than a burst
    assert rate.departs(1, 20.0) == 20.0
    assert Rate(0).departs(10**9, 3.0) == 3.0


def test_who_is_a_little_late_with_each_piece_gets_the_whole_rate() -> None:
    rate, now = Rate(8e6), 0.0
    for _ in range(1000):
        now = rate.departs(10_000, now) + 0.002
    assert now == pytest.approx(10.0, abs=BURST_S)


def test_a_queue_takes_bytes_ahead_of_their_departure_and_no_more() -> None:
    rate = Rate(8000, queue_bytes=2000)
    for _ in range(3):
        rate.departs(1000, 0.0)
    assert rate.has_room() == pytest.approx(1.0 - BURST_S)  # then 2000 bytes still wait
    assert Rate(8000).has_room() < 0.0  # idle
    assert Rate(0, queue_bytes=1).has_room() < 0.0


def test_a_fast_rate_is_offered_larger_pieces() -> None:
    assert Rate(1e6).piece_bytes == PIECE_BYTES
    assert Rate(1e9).piece_bytes == 125_000
    assert Rate(1e12).piece_bytes == Rate(0).piece_bytes < 1 << 20


def _talk(port: int, data: bytes) -> bytes:
    """What comes back. Raises ConnectionError when the connection is reset, at whatever call that is noticed."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(data)
        try:
            connection.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            raise ConnectionResetError("reset before the end was said") from error
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def test_a_link_carries_everything_and_counts_it(echo: tuple[str, int]) -> None:
    data = bytes(range(256)) * 1000
    with Link(echo, LinkShape(up_bits_per_s=1e9, down_bits_per_s=1e9, latency_s=0.001)) as link:
        assert _talk(link.port, data) == data
        assert link.carried_bytes == [len(data), len(data)]


def test_a_cut_link_drops_and_refuses_until_it_is_mended(echo: tuple[str, int]) -> None:
    with Link(echo, LinkShape()) as link:
        with socket.create_connection(("127.0.0.1", link.port), timeout=10) as connection:
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"
            link.cut()
            assert connection.recv(1) == b""
        with contextlib.suppress(ConnectionError):  # the refusal may arrive as a reset
            assert _talk(link.port, b"y") == b""
        link.repair()
        assert _talk(link.port, b"z") == b"z"


def test_a_silent_link_holds_everything_back_and_loses_nothing(echo: tuple[str, int]) -> None:
    with Link(echo, LinkShape()) as link, socket.create_connection(("127.0.0.1", link.port), timeout=10) as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        link.silence()
        connection.sendall(b"y")
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        link.repair()
        assert connection.recv(1) == b"y"


def test_a_silent_link_lets_no_new_connection_through(echo: tuple[str, int]) -> None:
    with Link(echo, LinkShape()) as link:
        link.silence()
        with socket.create_connection(("127.0.0.1", link.port), timeout=0.1) as connection:
            connection.sendall(b"x")
            with pytest.raises(TimeoutError):
                connection.recv(1)
        assert link.carried_bytes == [0, 0]
        link.repair()
        assert _talk(link.port, b"z") == b"z"


def test_a_lossy_link_resets_connections_until_it_is_mended(echo: tuple[str, int]) -> None:
    data = bytes(1 << 20)  # 128 pieces each way
    with Link(echo, LinkShape()) as link:
        link.lossy(0.5, seed=1)
        with contextlib.suppress(OSError):
            assert len(_talk(link.port, data)) < len(data)
        assert sum(link.carried_bytes) < len(data)
        link.repair()
        assert _talk(link.port, data) == data


def test_a_link_is_reshaped_under_an_open_connection(echo: tuple[str, int]) -> None:
    with Link(echo, LinkShape()) as link, socket.create_connection(("127.0.0.1", link.port), timeout=10) as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        link.reshape(LinkShape(up_bits_per_s=1e-3))  # a byte takes two hours
        connection.settimeout(0.1)
        connection.sendall(b"y")
        with pytest.raises(TimeoutError):
            connection.recv(1)


@pytest.mark.timeout(30)
def test_a_latency_holds_as_many_bytes_back_as_the_rate_carries_in_that_time(echo: tuple[str, int]) -> None:
    count = 16 << 20  # more than the kernel's socket buffers hold: what is not taken makes sendall wait
    with (
        Link(echo, LinkShape(up_bits_per_s=8e9, latency_s=3600.0)) as link,
        socket.create_connection(("127.0.0.1", link.port), timeout=20) as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        connection.sendall(bytes(count))
        assert link.carried_bytes[0] > count - (8 << 20)


def test_nothing_goes_on_once_it_is_closed() -> None:
    """Nor what is still on its way in one direction when the other has broken."""
    with (
        socket.create_server(("127.0.0.1", 0)) as target,
        Link(target.getsockname(), LinkShape(latency_s=3600.0)) as link,
        socket.create_connection(("127.0.0.1", link.port), timeout=10) as connection,
    ):
        far, _ = target.accept()
        with far:
            far.sendall(b"down")
            link._run(until(lambda: link.carried_bytes[1] == 4))
            link.lossy(1.0, seed=1)
            connection.sendall(b"up")
            link._run(until(lambda: not link._connections))
    assert not asyncio.all_tasks(link._loop)
