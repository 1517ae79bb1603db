"""Who may see the page, and give orders. Each request goes through the guard, as over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from dataclasses import replace
from typing import Any

import pytest

from aggregator.security.certificates import make_ca
from edit.errors import TransportError
from edit.web.access import HEADERS, LINK_S, MOST_SESSIONS, SESSION_S, Certified, Guard, LocalAccess, MemberAccess
from edit.web.app import make_app
from edit.web.feed import Feed
from editpb.identity import Identity
from editpb.run_status import RunStatus, Setting
from tests.edit.web.asking import HOST, Answer, ask
from tests.support.loops import on_a_loop, until
from tests.support.statuses import HOSTILE, PEERS, busy_run, hostile_run

RUN = "ocean-5f3a91c2"
SAME_SITE = {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}
CROSS_SITE = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
EXPIRY = 1000.0
_, CERTIFICATE = make_ca(RUN, 0.0)
READS = ("/", "/stream", "/rounds/3", "/report.html", "/status.json")


class Page:
    """The page of a run on loopback, with a clock that a test moves."""

    def __init__(self, status: RunStatus | None = None, orders: bool = True) -> None:
        self.now = 0.0
        self.links: list[str] = []
        self.given: list[tuple[str, str]] = []
        self.refuse = False
        feed = Feed(no_source)
        feed.status = status or busy_run()
        access = LocalAccess(
            "operator", "operator", orders=orders, announce=self.links.append, monotonic=lambda: self.now, cookie="edit-8000"
        )
        self.app = Guard(make_app(feed, self.give, monotonic=lambda: self.now), access, {HOST, "localhost:8000"}, "http")

    async def give(self, order: str, peer_id: str) -> None:
        if self.refuse:
            raise TransportError("the coordinator does not answer")
        self.given.append((order, peer_id))

    async def open(self) -> dict[str, str]:
        """Follow the newest link; return the headers that a browser sends from then on."""
        answer = await ask(self.app, f"/?token={self.links[-1]}")
        assert answer.status == 200
        return {"cookie": answer.cookie}

    async def csrf(self, headers: dict[str, str]) -> str:
        """What the page has in it for orders."""
        text = (await ask(self.app, "/", headers=headers)).text
        return text.split('name="csrf" content="', 1)[1].split('"', 1)[0]


async def no_source() -> AsyncGenerator[RunStatus, None]:
    return
    yield


def stranger(answer: Answer) -> None:
    """Nothing of the run is in such an answer."""
    assert answer.status in (401, 403, 421)
    assert RUN not in answer.text and PEERS[0] not in answer.text
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("path", [*READS, "/nothing"])
@on_a_loop
async def test_without_a_session_nothing_is_shown(path: str) -> None:
    page = Page()
    for cookie in ("", "edit-8000=", "edit-8000=guessed", "edit-8000=\u00e9", 'edit-8000="', "other=1; ;;="):
        stranger(await ask(page.app, path, headers={"cookie": cookie}))


@on_a_loop
async def test_a_link_opens_a_session_once() -> None:
    page = Page()
    (token,) = page.links
    opened = await ask(page.app, f"/?token={token}")
    assert opened.status == 200
    flags = opened.headers["set-cookie"].lower()
    assert "httponly" in flags and "samesite=strict" in flags and "path=/" in flags
    assert RUN in (await ask(page.app, "/", headers={"cookie": opened.cookie})).text
    stranger(await ask(page.app, f"/?token={token}"))
    assert len(page.links) == 2 and page.links[1] != token  # the next browser's


@on_a_loop
async def test_a_link_that_is_too_old_opens_nothing_and_another_one_is_printed() -> None:
    page = Page()
    (token,) = page.links
    page.now = LINK_S + 1
    answer = await ask(page.app, f"/?token={token}")
    stranger(answer)
    assert "too old" in answer.text
    assert await page.open()  # the new one


@on_a_loop
async def test_who_guesses_links_prints_nothing_in_the_terminal() -> None:
    page = Page()
    for token in ("", "guess", page.links[0][:-1], page.links[0] + "x", "%C3%A9", "%00"):
        stranger(await ask(page.app, f"/?token={token}"))
    assert len(page.links) == 1


@on_a_loop
async def test_a_session_ends() -> None:
    page = Page()
    headers = await page.open()
    page.now = SESSION_S - 1
    assert (await ask(page.app, "/status.json", headers=headers)).status == 200
    page.now = SESSION_S + 1
    stranger(await ask(page.app, "/status.json", headers=headers))


@on_a_loop
async def test_sessions_are_bounded_and_the_oldest_ends() -> None:
    page = Page()
    first = await page.open()
    second = await page.open()
    for _ in range(MOST_SESSIONS - 1):
        await page.open()
    stranger(await ask(page.app, "/", headers=first))
    assert (await ask(page.app, "/", headers=second)).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1", "127.0.0.1:8001", "localhost:8000.evil.example", ""]
)
@on_a_loop
async def test_another_name_that_points_here_opens_nothing(host: str) -> None:
    """DNS rebinding: to the browser the page is then of that site, and its cookies and scripts with it."""
    page = Page()
    headers = await page.open()
    for path in (*READS, "/static/page.js", f"/?token={page.links[-1]}"):
        stranger(await ask(page.app, path, headers={**headers, "host": host}))
    assert len(page.links) == 2  # the token was not used up


@on_a_loop
async def test_a_page_of_another_site_causes_no_request() -> None:
    page = Page()
    headers = await page.open()
    for path in READS:  # fetch, <img>, <iframe>, EventSource of another site, were its cookies sent
        stranger(await ask(page.app, path, headers={**headers, **CROSS_SITE}))
        stranger(await ask(page.app, path, headers={**headers, "sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}))
        framed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}
        stranger(await ask(page.app, path, headers={**headers, **framed}))
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert (await ask(page.app, "/", headers={**headers, **followed})).status == 200  # a link


@on_a_loop
async def test_an_order_needs_the_token_of_its_own_session() -> None:
    page = Page()
    headers, other = await page.open(), await page.open()
    right, wrong = await page.csrf(headers), await page.csrf(other)
    assert right != wrong
    for csrf in ("", wrong, right[:-1], "\u00e9"):
        answer = await ask(page.app, "/orders/pause", "POST", headers={**headers, **SAME_SITE, "x-csrf-token": csrf})
        assert answer.status == 403
    for site in (
        CROSS_SITE,
        {"origin": ""},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:8000"},
        {"sec-fetch-site": "same-site"},
    ):
        answer = await ask(page.app, "/orders/pause", "POST", headers={**headers, **SAME_SITE, **site, "x-csrf-token": right})
        assert answer.status == 403
    stranger(await ask(page.app, "/orders/pause", "POST", headers={**SAME_SITE, "x-csrf-token": right}))
    assert page.given == []
    answer = await ask(page.app, "/orders/pause", "POST", headers={**headers, **SAME_SITE, "x-csrf-token": right})
    assert answer.status == 200 and page.given == [("pause", "")]


@on_a_loop
async def test_orders_reach_members_only_and_say_what_became_of_them() -> None:
    page = Page()
    headers = await page.open()
    allowed = {**headers, **SAME_SITE, "x-csrf-token": await page.csrf(headers)}

    async def order(path: str, body: str = "") -> int:
        return (await ask(page.app, path, "POST", body=body, headers=allowed)).status

    assert await order("/orders/evict", f"peer_id={PEERS[1]}") == 200
    assert page.given == [("evict", PEERS[1])]
    assert await order("/orders/evict", "peer_id=nobody") == 404
    assert await order("/orders/evict") == 404
    assert await order("/orders/found") == 404
    assert await order("/orders/pause", "x" * 5000) == 413
    assert await order("/orders/pause", "&".join("a=1" for _ in range(9))) == 400
    assert await order("/") == 405
    page.refuse = True
    answer = await ask(page.app, "/orders/drain", "POST", headers=allowed)
    assert answer.status == 502 and answer.text == "the coordinator does not answer"
    assert page.given == [("evict", PEERS[1])]


@on_a_loop
async def test_an_observers_page_has_no_orders() -> None:
    page = Page(orders=False)
    headers = await page.open()
    text = (await ask(page.app, "/", headers=headers)).text
    assert "/orders/" not in text and 'name="csrf" content=""' in text
    assert (await ask(page.app, "/orders/pause", "POST", headers={**headers, **SAME_SITE, "x-csrf-token": ""})).status == 403
    assert page.given == []


@on_a_loop
async def test_every_answer_has_the_strict_policy() -> None:
    page = Page()
    headers = await page.open()
    assert "unsafe" not in HEADERS["content-security-policy"] and "*" not in HEADERS["content-security-policy"]
    for path in ("/", "/status.json", "/static/page.js", "/static/nothing", "/nothing", "/rounds/999999"):
        for sent in (headers, {}, {"host": "evil.example"}):
            answer = await ask(page.app, path, headers=sent)
            assert {name: answer.headers[name] for name in HEADERS} == HEADERS


@on_a_loop
async def test_static_files_are_those_of_the_page_only() -> None:
    page = Page()
    assert (await ask(page.app, "/static/page.css")).status == 200
    for path in ("/static/../page.py", "/static/%2e%2e/page.py", "/static//etc/passwd", "/static/"):
        assert (await ask(page.app, path)).status in (401, 404)


# ---- members over TLS ------------------------------------------------------------------------------------------------------


def as_member(role: str, peer_id: str = "basel", run_id: str = RUN) -> dict[str, Any]:
    """What the connection's certificate names, as `edit.web.serve` puts it into the scope."""
    return {"scheme": "https", "edit.certified": Certified(Identity(run_id, role, peer_id), EXPIRY, CERTIFICATE)}


def members_page(status: RunStatus, evicted: Collection[str] = (), now: float = 0.0) -> Guard:
    feed = Feed(no_source)
    feed.status = status
    return guard_for_members(feed, evicted, now)


def guard_for_members(feed: Feed, evicted: Collection[str] = (), now: float = 0.0) -> Guard:
    return Guard(
        make_app(feed, monotonic=lambda: 0.0),
        MemberAccess(RUN, lambda who: "<b>evicted" if who.identity.peer_id in evicted else None, lambda: now),
        {HOST},
        "https",
    )


@on_a_loop
async def test_elsewhere_members_read_and_nobody_orders() -> None:
    page = members_page(busy_run(), evicted=("delft",))
    for role in ("peer", "region", "observer", "operator"):
        answer = await ask(page, "/", **as_member(role))
        assert answer.status == 200 and RUN in answer.text and "/orders/" not in answer.text
    for who in (as_member("coordinator"), as_member("peer", run_id="other-00000000"), as_member("peer", "delft"), {}):
        stranger(await ask(page, "/", **who))
    same = {"origin": f"https://{HOST}", "sec-fetch-site": "same-origin", "x-csrf-token": ""}
    assert (await ask(page, "/orders/pause", "POST", headers=same, **as_member("operator"))).status == 403


@pytest.mark.parametrize("shared", [False, True])
@on_a_loop
async def test_a_peer_sees_the_losses_of_others_only_if_the_run_shares_them(shared: bool) -> None:
    losses = {name: 70.0123 + place for place, name in enumerate(PEERS)}  # numbers that nothing else on the page is
    setting = Setting(name="membership.share_losses", value=str(shared).lower(), default="false")
    status = busy_run()
    status = replace(
        status,
        settings=(setting,),
        members=tuple(replace(row, loss=losses.get(row.peer_id, 0.0)) for row in status.members),
        curves=tuple(
            replace(curve, y=tuple(losses[curve.peer_id] + 10 for _ in curve.y)) if curve.kind == "loss" else curve
            for curve in status.curves
        ),
    )
    for role, seen in (("peer", {"basel"}), ("observer", set()), ("operator", set(PEERS))):
        expected = set(PEERS) if shared else seen
        who = as_member(role, "basel" if role == "peer" else "ada")
        for path in ("/", "/report.html", "/status.json"):
            text = (await ask(members_page(status), path, **who)).text
            assert {name for name in PEERS if f"{losses[name]:.3f}" in text} == expected, (path, role)
            assert {name for name in PEERS if f"{losses[name] + 10:.4f}" in text} == expected, (path, role)
        text = await first_of_the_stream(status, **who)
        assert {name for name in PEERS if f"{losses[name]:.3f}" in text} == expected, role
        assert {name for name in PEERS if f"{losses[name] + 10:.4f}" in text} == expected, role


@on_a_loop
async def test_a_certificate_that_has_expired_opens_nothing_though_its_connection_stands() -> None:
    assert (await ask(members_page(busy_run(), now=EXPIRY - 1), "/", **as_member("peer"))).status == 200
    stranger(await ask(members_page(busy_run(), now=EXPIRY + 1), "/", **as_member("peer")))


@on_a_loop
async def test_a_stream_ends_with_the_eviction_of_who_reads_it() -> None:
    feed, evicted = Feed(no_source), set[str]()
    feed.status = busy_run(2)
    watching = asyncio.create_task(ask(guard_for_members(feed, evicted), "/stream", **as_member("peer", "basel")))
    await until(lambda: feed._news._waiters)
    evicted.add("basel")
    feed.status = replace(feed.status, waiting_for="what nobody evicted is told")
    feed._changed()
    assert "what nobody evicted is told" not in (await watching).text


async def first_of_the_stream(status: RunStatus, **who: Any) -> str:
    """What a watcher is sent at first."""
    feed = Feed(no_source)
    feed.status = status
    watching = asyncio.create_task(ask(guard_for_members(feed), "/stream", **who))
    await until(lambda: feed._news._waiters)
    feed.close()
    return (await watching).text


# ---- what others wrote -----------------------------------------------------------------------------------------------------


@on_a_loop
async def test_markup_of_others_is_text() -> None:
    page = Page(hostile_run())
    headers = await page.open()
    for path in ("/", "/report.html"):
        text = (await ask(page.app, path, headers=headers)).text
        assert "&lt;img src=x onerror" in text
        assert "<img" not in text and "<script>alert" not in text and HOSTILE not in text and "\u202e" not in text
