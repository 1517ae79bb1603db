"""The process of the page at a real address: loopback, and TLS with members' certificates."""

from __future__ import annotations

import asyncio
import http.client
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from aggregator.security.certificates import Issuer, key_pem, make_ca, new_key, public_hash
from edit.errors import ConfigError, RefusedError
from edit.web import check_installed
from edit.web.feed import Source
from edit.web.serve import PageServer, Tls, _bind, page_tls
from editpb.identity import Identity
from editpb.run_status import RunStatus
from tests.support.loops import on_a_loop
from tests.support.statuses import busy_run

RUN = busy_run(2).run_id
OPERATOR = Identity(RUN, "operator", "operator")


def source_of(status: RunStatus) -> Source:
    async def source() -> AsyncGenerator[RunStatus, None]:
        yield status
        await asyncio.Event().wait()

    return source


@asynccontextmanager
async def served(status: RunStatus, **options: Any) -> AsyncIterator[tuple[PageServer, list[str]]]:
    lines: list[str] = []
    server = PageServer(source_of(status), OPERATOR, **{"listen": "127.0.0.1:0", "say": lines.append, **options})
    running = asyncio.create_task(server.run())
    try:
        yield server, lines
    finally:
        server.stop()
        await running


async def get(connection: http.client.HTTPConnection, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], str]:
    """One request in a thread, on a connection of its own."""

    def run() -> tuple[int, dict[str, str], str]:
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(run)


@on_a_loop
async def test_the_printed_link_opens_the_page_over_loopback() -> None:
    async with served(busy_run(4)) as (server, lines):
        (link,) = lines
        assert link.startswith(f"{server.address}/?token=") and server.address.startswith("http://127.0.0.1:")
        host = server.address.removeprefix("http://")
        status, headers, _ = await get(http.client.HTTPConnection(host), link.removeprefix(server.address), {})
        assert status == 200
        cookie = {"cookie": headers["set-cookie"].split(";")[0]}
        status, headers, text = await get(http.client.HTTPConnection(host), "/", cookie)
        assert status == 200 and RUN in text and "default-src 'none'" in headers["content-security-policy"]
        status, _, _ = await get(http.client.HTTPConnection(host), "/", {**cookie, "Host": "evil.example"})
        assert status == 421


@on_a_loop
async def test_a_stream_that_is_open_does_not_keep_the_process() -> None:
    async with served(busy_run(2)) as (server, lines):
        host = server.address.removeprefix("http://")
        _, headers, _ = await get(http.client.HTTPConnection(host), lines[0].removeprefix(server.address), {})
        connection = http.client.HTTPConnection(host)

        def open_stream() -> http.client.HTTPResponse:
            connection.request("GET", "/stream", headers={"cookie": headers["set-cookie"].split(";")[0]})
            answer = connection.getresponse()
            assert answer.readline() == b"event: summary\n"
            return answer

        stream = await asyncio.to_thread(open_stream)
    rest = await asyncio.to_thread(stream.read)  # to its proper end: IncompleteRead if it was cut off
    assert b"event: charts" in rest
    connection.close()


@on_a_loop
async def test_a_run_that_refuses_ends_the_process_with_its_words() -> None:
    async def source() -> AsyncGenerator[RunStatus, None]:
        raise RefusedError("role peer may not do this")
        yield

    server = PageServer(source, OPERATOR, listen="127.0.0.1:0", say=lambda line: None)
    with pytest.raises(RefusedError, match="may not do this"):
        await server.run()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "example.org:443", "192.0.2.1:8000"])
def test_elsewhere_than_on_loopback_it_needs_tls(listen: str) -> None:
    with pytest.raises(ConfigError, match="needs TLS"):
        PageServer(source_of(busy_run(2)), OPERATOR, listen=listen, say=lambda line: None)


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:", ":8000", "127.0.0.1:x", "127.0.0.1:65536"])
def test_an_address_that_is_none_is_an_error(listen: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        PageServer(source_of(busy_run(2)), OPERATOR, listen=listen, say=lambda line: None)


def test_a_name_that_no_host_can_have_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot be used .encoding with"):
        _bind("\udc80", 0, "?:0")


class Authority:
    """A run's authority, and files as the state folder has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        key, certificate = make_ca(RUN, time.time())
        self.issuer = Issuer(key, certificate)
        (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, role: str, peer_id: str, names: tuple[str, ...] = ()) -> tuple[Path, Path]:
        """The certificate and key of a member or, with names, of a server."""
        key = new_key()
        certificate = self.issuer.issue(
            Identity(RUN, role, peer_id), key.public_key(), lifetime_s=3600, now=time.time(), server_names=names
        )
        paths = self.folder / f"{role}-{peer_id}.pem", self.folder / f"{role}-{peer_id}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(key_pem(key))
        return paths

    def browser(self, trusts: Path, certificate: tuple[Path, Path] | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=trusts)
        if certificate is not None:
            context.load_cert_chain(*certificate)
        return context


@on_a_loop
async def test_over_tls_a_members_certificate_opens_the_page_and_no_other(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    certificate, key = ours.issue("coordinator", "coordinator", ("localhost",))
    tls = Tls(certificate, key, tmp_path / "ours" / "ca.pem")
    given: list[str] = []

    async def give(order: str, peer_id: str) -> None:
        given.append(order)

    status = busy_run(3)
    evicted = tuple(replace(row, state="evicted") if row.peer_id == "delft" else row for row in status.members)
    async with served(replace(status, members=evicted), tls=tls, give_order=give) as (server, lines):
        assert lines == [f"{server.address}  (with a certificate of a member of {RUN})"]
        host = server.address.removeprefix("https://")

        async def ask_as(member: tuple[Path, Path] | None, path: str = "/", name: str = "") -> tuple[int, str]:
            context = ours.browser(tls.authority, member)
            connection = http.client.HTTPSConnection(host, context=context)
            code, _, text = await get(connection, path, {"Host": name} if name else {})
            return code, text

        for role, name in (("peer", "basel"), ("observer", "ada"), ("operator", "op")):
            code, text = await ask_as(ours.issue(role, name))
            assert code == 200 and RUN in text and "/orders/" not in text
        assert (await ask_as(ours.issue("peer", "delft")))[0] == 403
        assert (await ask_as(ours.issue("peer", "basel"), name="evil.example"))[0] == 421
        for stranger in (None, others.issue("peer", "basel")):
            with pytest.raises(OSError):  # the handshake fails, or the connection is cut behind it
                await ask_as(stranger)
    assert given == []


@on_a_loop
async def test_who_may_look_is_decided_by_certificate_and_by_the_authority_of_now(tmp_path: Path) -> None:
    ours, later = Authority(tmp_path / "ours"), Authority(tmp_path / "later")
    tls = Tls(*ours.issue("coordinator", "coordinator", ("127.0.0.1",)), tmp_path / "ours" / "ca.pem")
    trusts = tmp_path / "trusts.pem"
    trusts.write_bytes(tls.authority.read_bytes())
    keys = set[str]()

    def why(identity: Identity, certificate: x509.Certificate) -> str | None:
        return f"{identity.peer_id} has another key" if public_hash(certificate) in keys else None

    async with served(busy_run(3), tls=tls, why_refused=why) as (server, _):
        host = server.address.removeprefix("https://")

        async def ask_as(member: tuple[Path, Path]) -> tuple[int, str]:
            code, _, text = await get(http.client.HTTPSConnection(host, context=ours.browser(trusts, member)), "/", {})
            return code, text

        old = ours.issue("peer", "basel")
        assert (await ask_as(old))[0] == 200
        open_ = http.client.HTTPSConnection(host, context=ours.browser(trusts, old))
        stream = await asyncio.to_thread(lambda: open_.request("GET", "/stream") or open_.getresponse())
        keys.add(public_hash(x509.load_pem_x509_certificate(old[0].read_bytes())))
        server._feed._changed()
        await asyncio.to_thread(stream.read)  # ends, and properly
        open_.close()
        code, text = await ask_as(old)
        assert code == 403 and "Not open to this certificate: basel has another key." in text
        ada, new = ours.issue("observer", "ada"), later.issue("observer", "ada")
        with pytest.raises(OSError):
            await ask_as(new)
        tls.authority.write_bytes((later.folder / "ca.pem").read_bytes() + tls.authority.read_bytes())
        assert [(await ask_as(who))[0] for who in (new, ada)] == [200, 200], "both, while there are certificates of both"
        tls.authority.write_bytes((later.folder / "ca.pem").read_bytes())
        code, text = await ask_as(ada)
        assert code == 403 and "the authority that signed it was replaced" in text
        tls.authority.write_bytes(b"damaged")
        assert [(await ask_as(who))[0] for who in (ada, new)] == [403, 200]


@on_a_loop
async def test_before_the_run_has_answered_nobody_looks_where_only_its_status_says_who_was_evicted(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    tls = Tls(*ours.issue("coordinator", "coordinator", ("localhost",)), tmp_path / "ours" / "ca.pem")
    async with served(busy_run(3), tls=tls) as (server, _):
        basel = Identity(RUN, "peer", "basel")
        status, server._feed.status = server._feed.status, None
        assert "has not answered yet" in (server._why_evicted(basel, ours.issuer.certificate) or "")
        server._feed.status = status or busy_run(3)
        assert server._why_evicted(basel, ours.issuer.certificate) is None


def test_a_certificate_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    certificate, _ = ours.issue("coordinator", "coordinator", ("localhost",))
    _, other_key = ours.issue("peer", "basel")
    nameless = ours.issue("observer", "ada")
    for pair, why in (
        ((certificate, other_key), "cannot be used"),
        ((certificate, tmp_path / "none.key"), "cannot be used"),
        (nameless, "names no host"),
        ((tmp_path / "none.pem", other_key), "cannot be used"),
    ):
        tls = Tls(*pair, tmp_path / "ours" / "ca.pem")
        with pytest.raises(ConfigError, match=why):
            PageServer(source_of(busy_run(2)), OPERATOR, listen="127.0.0.1:0", tls=tls, say=lambda line: None)


@pytest.mark.parametrize("module", ["aggregator.page", "peers.page"])
def test_the_process_of_the_page_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("package", ["jinja2", "starlette", "uvicorn"])
def test_without_the_extra_one_line_names_the_command_that_installs_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"^the page needs {package}: pip install 'edit-localsgd\[web\]'$"):
        check_installed()


FILE, OTHER, AUTHORITY = Path("a.pem"), Path("a.key"), Path("ca.pem")


@pytest.mark.parametrize("own", [None, (Path("own.pem"), Path("own.key"))])
def test_a_certificate_that_would_have_no_effect_is_refused(own: tuple[Path, Path] | None) -> None:
    for files in ((FILE, None), (None, OTHER)):
        for listen in ("127.0.0.1:0", "0.0.0.0:443"):
            with pytest.raises(ConfigError, match="--certificate and --key belong together"):
                page_tls(listen, *files, AUTHORITY, own)
    with pytest.raises(ConfigError, match=r"--certificate has no effect with --listen localhost:80"):
        page_tls("localhost:80", FILE, OTHER, AUTHORITY, own)
    assert page_tls("[::1]:0", None, None, AUTHORITY, own) is None
    assert page_tls("0.0.0.0:443", FILE, OTHER, AUTHORITY, own) == Tls(FILE, OTHER, AUTHORITY)
    assert page_tls("0.0.0.0:443", None, None, AUTHORITY, own) == (Tls(*own, AUTHORITY) if own else None)
