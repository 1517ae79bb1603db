"""Ask an ASGI application without a socket, as a browser would."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

HOST = "127.0.0.1:8000"


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def cookie(self) -> str:
        """The `name=value` that a browser sends back."""
        return self.headers["set-cookie"].split(";")[0]


async def ask(
    app: ASGIApp, path: str, method: str = "GET", *, body: str = "", headers: Mapping[str, str] | None = None, **scope: Any
) -> Answer:
    """Return the whole answer. A header whose value is empty is not sent."""
    path, _, query = path.partition("?")
    sent = {"host": HOST, **(headers or {})}
    answer, over = Answer(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not over.is_set():
            over.set()
            return {"type": "http.request", "body": body.encode(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    values = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in sent.items() if value],
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 50_000),
        "root_path": "",
    }
    await app({**values, **scope}, receive, send)  # type: ignore[arg-type]
    return answer
