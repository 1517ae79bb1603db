"""The routes of the page. Everything but orders is reading.

GET /                 the page
GET /stream           Server-Sent Events: each part of the page when it changed, and the charts
GET /rounds/ROUND_ID  a round in full, as JSON
GET /report.html      the page as one file
GET /status.json      the status, as `status --json` prints it
POST /orders/ORDER    pause, resume, drain or evict, at the operator's own page
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from edit.errors import EditError
from edit.plain_text import json_text, printable
from edit.web import view
from edit.web.access import Viewer
from edit.web.feed import Feed
from edit.web.page import PARTS, STATIC, charts_json, render_live, render_notice, render_page, render_part, round_json
from editpb.run_status import RunStatus

__all__ = ["ORDERS", "GiveOrder", "make_app"]

GiveOrder = Callable[[str, str], Awaitable[None]]  # order, peer_id; raises EditError
ORDERS = {
    "pause": "The run is paused.",
    "resume": "The run goes on.",
    "drain": "The run ends soon, at the outer step that is shown.",
    "evict": "{} is evicted.",
}
MOST_STREAMS = 64
MOST_BODY_BYTES = 4096
_CHARTS_S = 3.0  # between two times that the charts are sent, unless a round closed
_SILENT_S = 15.0  # then a comment is sent, which proxies and browsers take as a sign of life


def make_app(
    feed: Feed,
    give_order: GiveOrder | None = None,
    *,
    monotonic: Callable[[], float],
) -> Starlette:
    """Return the application, without the guard before it.

    Args:
        give_order: carries out an order; None: there are none.
        monotonic: the clock, in seconds.
    """
    pages = _Pages(feed, give_order, monotonic)
    return Starlette(
        routes=[
            Route("/", pages.page),
            Route("/stream", pages.stream),
            Route("/rounds/{round_id:int}", pages.round),
            Route("/report.html", pages.report),
            Route("/status.json", pages.status),
            Route("/orders/{order}", pages.order, methods=["POST"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
    )


class _Pages:
    def __init__(self, feed: Feed, give_order: GiveOrder | None, monotonic: Callable[[], float]) -> None:
        self._feed, self._give_order, self._monotonic = feed, give_order, monotonic
        self._streams = 0

    def _status(self, request: Request) -> RunStatus:
        """Return what this viewer may see. Raises HTTPException while there is nothing."""
        status = self._feed.status
        if status is None:
            raise HTTPException(503, "The run has not answered yet.")
        return _shown(status, request.scope["edit.viewer"])

    async def page(self, request: Request) -> Response:
        viewer: Viewer = request.scope["edit.viewer"]
        if self._feed.status is None:
            return HTMLResponse(
                render_notice("Connecting", self._feed.problem or "The run is asked for its status.", refresh="/")
            )
        status = self._status(request)
        name = f"{viewer.peer_id} ({viewer.role})"
        return HTMLResponse(render_live(status, problem=self._feed.problem, csrf=viewer.csrf, viewer=name))

    async def round(self, request: Request) -> Response:
        text = round_json(self._status(request), request.path_params["round_id"])
        return Response(text, media_type="application/json") if text else PlainTextResponse("This round is not kept.\n", 404)

    async def report(self, request: Request) -> Response:
        status = self._status(request)
        headers = {"content-disposition": f'attachment; filename="{_file_name(status.run_id)}.html"'}
        return HTMLResponse(render_page(status), headers=headers)

    async def status(self, request: Request) -> Response:
        return Response(json_text(self._status(request).as_json()), media_type="application/json")

    async def order(self, request: Request) -> Response:
        order = request.path_params["order"]
        if self._give_order is None or order not in ORDERS:
            return PlainTextResponse("There is no such order.\n", 404)
        form = await _form(request)
        peer_id = form.get("peer_id", "")
        if (order == "evict") != any(row.peer_id == peer_id for row in self._status(request).members):
            return PlainTextResponse("No member has that name.\n", 404)
        try:
            await self._give_order(order, peer_id)
        except EditError as error:
            return PlainTextResponse(printable(str(error)), 502)
        return PlainTextResponse(ORDERS[order].format(peer_id))

    async def stream(self, request: Request) -> Response:
        if self._streams >= MOST_STREAMS:
            return PlainTextResponse("Too many pages are open.\n", 503)
        return _Events(self._events(request.scope["edit.viewer"], request.scope["edit.allowed"]))

    async def _events(self, viewer: Viewer, allowed: Callable[[], bool]) -> AsyncGenerator[str, None]:
        """Yield what changed, whenever something did, until the feed is closed, or the viewer is gone or may see no more."""
        sent: dict[str, str] = {}
        version, charts_at, rounds = -1, float("-inf"), 0
        self._streams += 1
        try:
            while not self._feed.closed:
                try:
                    async with asyncio.timeout(_SILENT_S):
                        version = await self._feed.newer(version)
                except TimeoutError:
                    yield ": still here\n\n"
                if not allowed():
                    return
                if self._feed.status is None:
                    continue
                status = _shown(self._feed.status, viewer)
                for name in PARTS:
                    text = render_part(name, status, problem=self._feed.problem, csrf=viewer.csrf)
                    if sent.get(name, "") != text:  # a part that says nothing of this run is not sent
                        sent[name] = text
                        yield _event(name, text)
                newest = status.rounds[-1].round_id if status.rounds else 0
                if newest != rounds or self._monotonic() - charts_at >= _CHARTS_S:
                    charts_at, rounds = self._monotonic(), newest
                    yield _event("charts", charts_json(status))
        finally:
            self._streams -= 1


class _Events(StreamingResponse):
    """A stream whose generator is closed when the viewer goes, not when the garbage is collected."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


def _shown(status: RunStatus, viewer: Viewer) -> RunStatus:
    return status.shown_to(viewer.role, viewer.peer_id, view.shares_losses(status))


def _event(name: str, text: str) -> str:
    lines = "".join(f"data: {line}\n" for line in text.splitlines())
    return f"event: {name}\n{lines}\n"


def _file_name(run_id: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in run_id) or "report"


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a small form. Raises HTTPException for anything else."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY_BYTES:
            raise HTTPException(413, "Too long.")
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=8)
    except ValueError as error:
        raise HTTPException(400, "This is no form.") from error
    return {name: values[0] for name, values in fields.items()}
