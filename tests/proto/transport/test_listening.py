"""A server listens at every address of a name, or is refused; an address that the machine lacks is passed over."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import grpc
import pytest

from edit.errors import ConfigError
from editpb.transport.listening import listen_at

V4, V6 = "127.0.0.1", "::1"


class Server:
    """Takes addresses as gRPC's server does: those that others have are refused."""

    def __init__(self) -> None:
        self.at: list[str] = []

    def add_secure_port(self, address: str, credentials: Any) -> int:
        self.at.append(address)
        port = int(address.rpartition(":")[2])
        if port == 1:
            raise RuntimeError
        return port or 4711


def listen(server: Any, address: str) -> int:
    return listen_at(server, address, grpc.ssl_server_credentials([(b"", b"")]))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the errors of binding, by address; `both.test` is a name for two addresses, one of them named twice."""
    errors: dict[str, int] = {}

    class Socket:
        def __init__(self, family: int) -> None:
            pass

        def __enter__(self) -> Socket:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def setsockopt(self, *_: int) -> None:
            pass

        def bind(self, place: tuple[Any, ...]) -> None:
            if number := errors.get(place[0]):
                raise OSError(number, os.strerror(number))

    def resolve(host: str, port: int, **_: object) -> list[tuple[int, int, int, str, tuple[Any, ...]]]:
        if host != "both.test":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        v4, v6 = (socket.AF_INET, 1, 6, "", (V4, port)), (socket.AF_INET6, 1, 6, "", (V6, port, 0, 0))
        return [v6, v4, v4]

    monkeypatch.setattr(socket, "socket", Socket)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return errors


@pytest.mark.parametrize(("address", "at"), [("both.test:7", ["[::1]:7", f"{V4}:7"]), ("[::]:7", ["[::]:7"])])
def test_it_listens_at_every_address_of_a_name(taken: dict[str, int], address: str, at: list[str]) -> None:
    server = Server()
    assert listen(server, address) == 7
    assert server.at == at


def test_a_port_that_the_system_chooses_is_the_same_at_each(taken: dict[str, int]) -> None:
    server = Server()
    assert listen(server, "both.test:0") == 4711
    assert server.at == ["[::1]:0", f"{V4}:4711"]


@pytest.mark.parametrize("other", [V4, V6])
def test_where_another_program_has_one_of_them_it_listens_nowhere(taken: dict[str, int], other: str) -> None:
    server, taken[other] = Server(), errno.EADDRINUSE
    with pytest.raises(ConfigError, match=r"^both.test:7 cannot be bound \(Address already in use\); is the port in use\?$"):
        listen(server, "both.test:7")
    assert not server.at


def test_a_link_local_address_is_bound_with_its_interface(taken: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the name of the machine itself has one, where systemd looks it up."""
    there = [(socket.AF_INET6, 1, 6, "", ("fe80::1", 7, 0, 4)), (socket.AF_INET, 1, 6, "", (V4, 7))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: there)
    server = Server()
    assert listen(server, "own.test:7") == 7
    assert server.at == ["[fe80::1%4]:7", f"{V4}:7"]


@pytest.mark.parametrize("missing", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EINVAL])
def test_a_machine_without_ipv6_listens_at_the_others(taken: dict[str, int], missing: int) -> None:
    server, taken[V6] = Server(), missing
    assert listen(server, "both.test:7") == 7
    assert server.at == [f"{V4}:7"]
    taken[V4] = missing
    with pytest.raises(ConfigError, match="cannot be bound"):
        listen(server, "both.test:7")


@pytest.mark.parametrize(("address", "why"), [("nosuch.test:7", "Name or service not known"), (f"{V4}:1", "in use")])
def test_what_cannot_be_bound_is_named(taken: dict[str, int], address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^{address} cannot be bound.*{why}"):
        listen(Server(), address)
