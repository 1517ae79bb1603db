"""The process of the page: its address, TLS and signals."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from cryptography import x509
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from edit.errors import ConfigError, RefusedError
from edit.plain_text import reason_of
from edit.web.access import Access, Certified, Guard, LocalAccess, MemberAccess
from edit.web.app import GiveOrder, make_app
from edit.web.feed import Feed, Source
from editpb.identity import Identity, from_certificate, is_signed_by

__all__ = ["EVERY_S", "PageServer", "Tls", "WhyRefused", "page_tls", "serve_page"]

WhyRefused = Callable[[Identity, x509.Certificate], str | None]  # why the run shuts somebody out; None: it does not

_log = logging.getLogger(__name__)
MOST_CONNECTIONS = 128
EVERY_S = 2.0  # between two statuses that the page asks the run for: each costs an aggregator a few milliseconds


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: what the page's server shows, and the authority whose members may open it."""

    certificate: Path  # names the hosts and addresses by which browsers reach the page
    key: Path
    authority: Path


def page_tls(
    listen: str, certificate: Path | None, key: Path | None, authority: Path, own: tuple[Path, Path] | None = None
) -> Tls | None:
    """Return the files with which a page at `listen` is served; None: without TLS.

    certificate, key: what the options --certificate and --key name.
    own: the two files without these options; None: there are none.

    Raises ConfigError for one option without the other, and for both on loopback, where they would have no effect.
    """
    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key belong together: give both")
    if _is_loopback(_host_port(listen)[0]):
        if certificate is not None:
            raise ConfigError(f"--certificate has no effect with --listen {listen}: on loopback a printed link opens the page")
        return None
    files = (certificate, key) if certificate is not None and key is not None else own
    return Tls(*files, authority) if files is not None else None


def serve_page(
    source: Source,
    identity: Identity,
    *,
    listen: str = "127.0.0.1:0",
    tls: Tls | None = None,
    give_order: GiveOrder | None = None,
    why_refused: WhyRefused | None = None,
    say: Callable[[str], None],
) -> None:
    """Serve the page until Ctrl-C or SIGTERM.

    Args:
        source: the run's statuses.
        identity: whom the certificate of this process names.
        listen: HOST:PORT. On loopback a printed link opens the page; elsewhere a member's certificate does.
        tls: see `page_tls`.
        give_order: carries out an order of whoever opened the printed link; None: there are none.
        why_refused: decides with `tls` who of the run's authority's members may look, at each request and each message of a
            stream. None: who was evicted by the status may not, and nobody before there is one.
        say: prints a line.

    Raises ConfigError for an address or a certificate that cannot be used, and what the source raises.
    """

    async def run() -> None:
        server = PageServer(source, identity, listen=listen, tls=tls, give_order=give_order, why_refused=why_refused, say=say)
        await server.run()

    asyncio.run(run())


class PageServer:
    """The page of one run at one address, which is known once it was made. As `serve_page`; with `tls` no link opens it."""

    def __init__(
        self,
        source: Source,
        identity: Identity,
        *,
        listen: str,
        tls: Tls | None = None,
        give_order: GiveOrder | None = None,
        why_refused: WhyRefused | None = None,
        say: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        host, port = _host_port(listen)
        if tls is None and not _is_loopback(host):
            raise ConfigError(
                f"--listen {listen}: on an address that others reach, the page needs TLS: give --certificate and --key"
            )
        context = _ssl_context(tls) if tls is not None else None
        roots = _Roots(tls.authority, context) if tls is not None and context is not None else None
        told = why_refused or self._why_evicted
        names = ("localhost", "127.0.0.1", "[::1]") if tls is None else _names_in(tls.certificate)
        self._socket = _bind(host, port, listen)
        self._feed = Feed(source)
        port = self._socket.getsockname()[1]
        scheme = "https" if tls else "http"
        self.address = f"{scheme}://{_bracketed(host) if tls is None else names[0]}:{port}"
        access: Access
        if roots is None:
            access = LocalAccess(
                identity.peer_id,
                identity.role,
                orders=give_order is not None,
                announce=lambda token: say(f"{self.address}/?token={token}"),
                monotonic=monotonic,
                cookie=f"edit-{port}",
            )
        else:

            def why(who: Certified) -> str | None:
                return roots.why_refused(who.certificate) or told(who.identity, who.certificate)

            access = MemberAccess(identity.run_id, why, time.time)
            say(f"{self.address}  (with a certificate of a member of {identity.run_id})")
        hosts = {f"{name.lower()}:{port}" for name in names} | (
            {name.lower() for name in names} if port in (80, 443) else set()
        )
        app = make_app(self._feed, give_order if tls is None else None, monotonic=monotonic)
        self._server = _Server(_config(Guard(app, access, hosts, scheme), context), self._feed)

    def _why_evicted(self, identity: Identity, certificate: x509.Certificate) -> str | None:
        if (status := self._feed.status) is None:
            return "the run has not answered yet, and who was evicted is not known"
        evicted = any(row.peer_id == identity.peer_id and row.state == "evicted" for row in status.members)
        return "this member was evicted from the run" if evicted else None

    async def run(self) -> None:
        """Serve until a signal, or until the source fails for good; then raise what it raised."""
        following = asyncio.create_task(self._feed.follow())
        following.add_done_callback(lambda task: self.stop() if not task.cancelled() and task.exception() else None)
        try:
            await self._server.serve([self._socket])
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    def stop(self) -> None:
        """End `run` soon."""
        self._server.should_exit = True


class _Roots:
    """The run's authorities, as their file names them now: a swarm can put another in the place of its own.

    A context forgets none that it was told. So handshakes go on with one that was replaced, and here its members are refused.

    Args:
        file: in PEM.
        context: of the server. It is told before each handshake who is new.
    """

    def __init__(self, file: Path, context: ssl.SSLContext) -> None:
        self._file, self._context = file, context
        self._pem, self._roots = b"", list[x509.Certificate]()
        self._look()
        context.sni_callback = lambda *_: self._look()

    def why_refused(self, certificate: x509.Certificate) -> str | None:
        """Return that none of the authorities signed this, or None."""
        self._look()
        signed = any(is_signed_by(certificate, root) for root in self._roots)
        return None if signed else "the authority that signed it was replaced"

    def _look(self) -> None:
        """Read the file; while that cannot be done, what it said last counts."""
        try:
            pem = self._file.read_bytes()
            if pem != self._pem:
                roots = x509.load_pem_x509_certificates(pem)
                self._context.load_verify_locations(self._file)
                self._pem, self._roots = pem, roots
        except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
            _log.debug("%s: cannot be read (%s)", self._file, error)


class _Server(uvicorn.Server):
    """Ends the streams of those who watch before it waits for its connections, and takes signals as requests to stop."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        def stop() -> None:
            self.should_exit = True

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread: a test
                loop.add_signal_handler(number, stop)
        yield


class _MemberProtocol(H11Protocol):
    """Puts whom the certificate of a TLS connection names into the scope of its requests."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if tls is not None and (der := tls.getpeercert(binary_form=True)):
            self.app = _Named(self.app, _certified(der))


class _Named:
    def __init__(self, app: Any, certified: Certified | None) -> None:
        self._app, self._certified = app, certified

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["edit.certified"] = self._certified
        await self._app(scope, receive, send)


def _certified(der: bytes) -> Certified | None:
    """Return what a verified certificate says; None: it names no member, or several."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        return Certified(from_certificate(certificate), certificate.not_valid_after_utc.timestamp(), certificate)
    except (RefusedError, ValueError):
        return None


def _config(app: ASGIApp, context: ssl.SSLContext | None) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # broken requests of strangers are not worth a line each
    config = uvicorn.Config(
        app,
        http=_MemberProtocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=16_384,
        timeout_graceful_shutdown=2,
    )
    config.load()
    config.ssl = context
    return config


def _ssl_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        context.load_verify_locations(tls.authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{tls.certificate}: cannot be used with {tls.key} and {tls.authority} ({error})") from error
    return context


def _names_in(certificate: Path) -> tuple[str, ...]:
    """Return the hosts and addresses that a certificate is for. Raises ConfigError when there are none."""
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"{certificate}: no certificate with the names of a host ({error})") from error
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    if not hosts:
        raise ConfigError(f"{certificate}: names no host by which browsers could reach the page")
    return tuple(_bracketed(host) for host in hosts)


def _host_port(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"--listen {listen}: must be HOST:PORT")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind(host: str, port: int, listen: str) -> socket.socket:
    try:
        host.encode("idna")  # a name that no host can have: create_server would raise TypeError, and leave its socket open
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--listen {listen}: cannot be used ({reason_of(error)})") from error


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
