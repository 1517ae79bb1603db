"""Who may see the page, and what every answer says to browsers.

On loopback: a link with a one-time token, printed in the terminal of the process, opens a session; its cookie is HttpOnly and
SameSite=Strict. A session of the operator's own process may give orders, each with the session's CSRF token. Elsewhere: TLS
with a member's certificate, and nothing but reading. Everywhere: only the Host names that the page is served under, so a name
that another site lets point here (DNS rebinding) opens nothing, and no request that a page of another site caused.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from http.cookies import CookieError, SimpleCookie
from typing import Protocol
from urllib.parse import urlsplit

from cryptography import x509
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edit.plain_text import printable
from edit.web.page import render_notice
from editpb.identity import Identity

__all__ = ["Access", "Certified", "Guard", "Link", "LocalAccess", "MemberAccess", "Viewer"]

LINK_S = 600.0  # a link that was not opened for so long opens nothing
SESSION_S = 12 * 3600.0
MOST_SESSIONS = 16  # the oldest ends
READERS = ("peer", "region", "observer", "scorer", "operator")  # roles whose certificates open the page

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks at the page. csrf: what an order must carry; empty: this viewer gives none."""

    peer_id: str
    role: str
    csrf: str = ""


@dataclass(frozen=True, slots=True)
class Certified:
    """The certificate of a TLS connection, and what it says. until: its end, in seconds since 1970."""

    identity: Identity
    until: float
    certificate: x509.Certificate


class Access(Protocol):
    """Decides who a request comes from."""

    def viewer(self, request: Request) -> Viewer | Response:
        """Return who asks, or the answer for somebody who may not."""
        ...


class Link(Enum):
    """What became of a token: it opened a session, was right but too old, or is not the present one."""

    OPENED = "opened"
    EXPIRED = "expired"
    UNKNOWN = "unknown"


class LocalAccess:
    """Sessions that a printed link opens. One token is good at a time; once it was used, or came too late, another is printed.

    Args:
        peer_id, role: whom the process's own certificate names, and so whoever opens the page.
        orders: whether that certificate may give orders.
        announce: prints a link, given its token.
        monotonic: the clock, in seconds.
        cookie: its name; browsers share the cookies of all ports of a host, so the port should be in it.
    """

    def __init__(
        self,
        peer_id: str,
        role: str,
        *,
        orders: bool,
        announce: Callable[[str], None],
        monotonic: Callable[[], float],
        cookie: str,
    ) -> None:
        self._peer_id, self._role, self._orders = peer_id, role, orders
        self._announce, self._monotonic, self._cookie = announce, monotonic, cookie
        self._secret = secrets.token_bytes(32)
        self._sessions: OrderedDict[str, float] = OrderedDict()  # until when
        self._token, self._made = "", 0.0
        self.new_link()

    def new_link(self) -> None:
        """Make the present token invalid, and print another one."""
        self._token, self._made = secrets.token_urlsafe(32), self._monotonic()
        self._announce(self._token)

    def redeem(self, token: str) -> tuple[Link, str]:
        """Return what becomes of a token, and the session that it opened or ''."""
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return Link.UNKNOWN, ""
        late = self._monotonic() - self._made > LINK_S
        self.new_link()
        if late:
            return Link.EXPIRED, ""
        session = secrets.token_urlsafe(32)
        self._sessions[session] = self._monotonic() + SESSION_S
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return Link.OPENED, session

    def viewer(self, request: Request) -> Viewer | Response:
        """Return the viewer of a session; a link with a token opens one."""
        if self._alive(session := _cookie(request, self._cookie)):
            return Viewer(self._peer_id, self._role, self._csrf(session) if self._orders else "")
        if request.method != "GET" or request.url.path != "/" or not (token := request.query_params.get("token", "")):
            return _refused(request, "This page needs the link that was printed where it was started.", 401)
        result, session = self.redeem(token)
        if result is not Link.OPENED:
            why = "This link is too old." if result is Link.EXPIRED else "This link was used before, or is not of this process."
            return _refused(request, f"{why} The newest one is in the terminal where the page was started.", 401)
        # Not a redirect: after one that began at a link in another page, browsers would not send a SameSite=Strict cookie.
        opened = HTMLResponse(render_notice("Opened", "The page opens now.", refresh="/"))
        opened.set_cookie(self._cookie, session, httponly=True, samesite="strict", path="/", max_age=int(SESSION_S))
        return opened

    def _alive(self, session: str) -> bool:
        until = self._sessions.get(session)
        return until is not None and self._monotonic() < until

    def _csrf(self, session: str) -> str:
        return hmac.new(self._secret, session.encode(), hashlib.sha256).hexdigest()


class MemberAccess:
    """Members, by the certificates of their TLS connections, which `edit.web.serve` has put into the scope.

    Args:
        run_id: of the certificates.
        why_refused: why the run shuts the holder of a certificate out, in words; None: it does not.
        unix: seconds since 1970.
    """

    def __init__(self, run_id: str, why_refused: Callable[[Certified], str | None], unix: Callable[[], float]) -> None:
        self._run_id, self._why_refused, self._unix = run_id, why_refused, unix

    def viewer(self, request: Request) -> Viewer | Response:
        """Return the member, who gives no orders."""
        certified: Certified | None = request.scope.get("edit.certified")
        identity = certified.identity if certified is not None else None
        if certified is None or identity is None or identity.run_id != self._run_id or identity.role not in READERS:
            return _refused(request, "This page needs the certificate of a member of the run.", 403)
        if self._unix() > certified.until:  # the connection may be older
            return _refused(request, "The certificate has expired.", 403)
        if (why := self._why_refused(certified)) is not None:
            return _refused(request, f"Not open to this certificate: {printable(why)}.", 403)
        return Viewer(identity.peer_id, identity.role)


class Guard:
    """Lets through only requests of viewers, to the hosts that are served, that no other site caused. Reads are GET and HEAD.

    What is under `/static/` is public: the style of the answer to somebody who may not see the page. An order is a POST with
    the session's CSRF token, from this page itself.

    Args:
        hosts: `HOST:PORT` as browsers write it, without the port where it is the scheme's own.
        scheme: of the page's address: http or https.
    """

    def __init__(self, app: ASGIApp, access: Access, hosts: Collection[str], scheme: str) -> None:
        self._app, self._access, self._hosts, self._scheme = app, access, frozenset(hosts), scheme

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"the page answers no {scope['type']}")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        answer = self._check(Request(scope))
        if answer is None:
            await self._app(scope, receive, send_with_headers)
        else:
            await answer(scope, receive, send_with_headers)

    def _check(self, request: Request) -> Response | None:
        """Return the answer to a request that goes no further; else note its viewer in the scope."""
        headers = request.headers
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return PlainTextResponse("This page is not served under that name.\n", 421)
        if request.method not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("Only GET, HEAD and POST are answered.\n", 405)
        if self._foreign(request.method, headers):
            return PlainTextResponse("Another site asked for this.\n", 403)
        if request.method != "POST" and request.url.path.startswith("/static/"):
            return None
        viewer = self._access.viewer(request)
        if isinstance(viewer, Response):
            return viewer
        if request.method == "POST":
            given = headers.get("x-csrf-token", "")
            if not viewer.csrf or not hmac.compare_digest(given.encode(), viewer.csrf.encode()):
                return PlainTextResponse("Orders are given by the operator's own page only.\n", 403)
        request.scope["edit.viewer"] = viewer
        request.scope["edit.allowed"] = lambda: isinstance(self._access.viewer(request), Viewer)  # for what lasts
        return None

    def _foreign(self, method: str, headers: Headers) -> bool:
        """Return whether a page of another site caused this request; a link that is followed is none of its doing."""
        site = headers.get("sec-fetch-site", "none")
        followed = (
            method == "GET" and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        )
        if site not in ("none", "same-origin") and not followed:
            return True
        origin = headers.get("origin")
        if origin is None:
            return method == "POST"  # browsers always say it then
        said = urlsplit(origin)
        return said.scheme != self._scheme or said.netloc.lower() not in self._hosts


def _cookie(request: Request, name: str) -> str:
    try:
        found = SimpleCookie(request.headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _refused(request: Request, why: str, status: int) -> Response:
    if request.url.path == "/" and "text/html" in request.headers.get("accept", "text/html"):
        return HTMLResponse(render_notice("Not open", why), status)
    return PlainTextResponse(f"{why}\n", status)
