"""The page in a real browser: it follows a run, shows a round, filters, gives an order, and runs nothing that others wrote.

Skipped where there is no Chromium, which `.ci/run` installs if it may. Waits are for conditions, never for times.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from edit.web.page import render_page
from edit.web.serve import PageServer
from editpb.identity import Identity
from editpb.run_status import RunStatus
from tests.support.statuses import busy_run, finished_run, hostile_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed; on Debian: apt-get install chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 30_000
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


class LivePage:
    """A page of a run that a test tells what to say, in a thread with a loop of its own."""

    def __init__(self, status: RunStatus) -> None:
        self.links: list[str] = []
        self.orders: list[tuple[str, str]] = []
        self._first = status
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(30)

    async def _serve(self) -> None:
        self._loop, self._says = asyncio.get_running_loop(), asyncio.Queue[RunStatus]()
        self._says.put_nowait(self._first)
        self._server = PageServer(
            self._statuses,
            Identity("ocean-5f3a91c2", "operator", "operator"),
            listen="127.0.0.1:0",
            give_order=self._give,
            say=self.links.append,
        )
        self._ready.set()
        await self._server.run()

    async def _statuses(self) -> AsyncGenerator[RunStatus, None]:
        while True:
            yield await self._says.get()

    async def _give(self, order: str, peer_id: str) -> None:
        self.orders.append((order, peer_id))

    def say(self, status: RunStatus) -> None:
        self._loop.call_soon_threadsafe(self._says.put_nowait, status)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.stop)
        self._thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


class Tab:
    """A page in the browser that notes what went wrong in it, and where it asked."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(accept_downloads=True, **{"viewport": DESKTOP, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.questions: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda said: self.faults.append(said.text) if said.type in ("error", "warning") else None)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("dialog", self._answer)

    def _answer(self, dialog: Any) -> None:
        self.questions.append(dialog.message)
        dialog.accept()

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.fixture
def live() -> Iterator[LivePage]:
    page = LivePage(busy_run(6))
    yield page
    page.close()


def test_the_page_follows_the_run_shows_rounds_filters_and_gives_orders(browser: Any, live: LivePage, tmp_path: Path) -> None:
    with Tab(browser) as tab:
        page = tab.page
        page.goto(live.links[-1])
        page.wait_for_url("**/")  # the link's token is gone from the address
        page.locator("[data-chart=loss] .u-legend .u-series").nth(5).wait_for()  # all lines have their colour key
        page.locator(".progress", has_text="10 %").wait_for()

        later = replace(busy_run(7), waiting_for="the operator: resume", phase="paused")
        live.say(later)
        page.locator("h1", has_text="Paused").wait_for()
        page.locator("#grid button[data-round='7']").first.wait_for()
        assert page.locator("#grid thead th").count() == 1 + 7

        page.locator("#grid button[data-round='7'][data-peer='basel']").click()
        details = page.locator("dialog[open]")
        details.locator("h2", has_text="Round 7").wait_for()
        assert details.locator("tr.chosen").inner_text().startswith("basel")
        details.locator("button.close").click()

        page.locator("#filter").fill("espoo")
        page.locator("#matches", has_text="1 shown").wait_for()
        with page.expect_download() as download:
            page.locator("#csv").click()
        download.value.save_as(tmp_path / "events.csv")
        lines = (tmp_path / "events.csv").read_text(encoding="utf-8").splitlines()
        assert lines[0] == '"utc","kind","member","tone","text"' and len(lines) == 2 and '"espoo"' in lines[1]

        page.locator(".members button", has_text="Evict").nth(1).click()
        page.locator("#said", has_text="basel is evicted.").wait_for()
        assert live.orders == [("evict", "basel")] and tab.questions == ["Evict basel for good?"]
        assert tab.faults == []  # nothing that the policy refused, either
        origin = live.links[-1].split("/?")[0]
        assert all(url.startswith((origin, f"blob:{origin}")) for url in tab.asked)


def test_nothing_that_others_wrote_is_run(browser: Any, live: LivePage, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_text(render_page(hostile_run()), encoding="utf-8")
    live.say(hostile_run())
    for address in (live.links[-1], report.as_uri()):
        with Tab(browser) as tab:
            tab.page.goto(address)
            tab.page.locator("#members td.who", has_text="<img src=x onerror").first.wait_for()
            tab.page.locator("[data-chart=loss] .u-legend", has_text="<img src=x").wait_for()
            tab.page.locator("#grid button.carried").first.click()
            tab.page.locator("dialog[open] td", has_text="<script>").first.wait_for()
            assert tab.page.locator("main img, dialog img, main script, dialog script").count() == 0
            assert tab.questions == [] and tab.faults == []


@pytest.mark.parametrize(("run", "title"), [(busy_run(), "Collecting"), (finished_run(), "Finished")])
def test_a_file_needs_nothing_else_and_fits_a_phone_in_light_and_dark(
    browser: Any, tmp_path: Path, run: RunStatus, title: str
) -> None:
    """A run with a straggler, a rejected and a lost peer, and a finished one. The pictures stay in the test's folder."""
    report = tmp_path / "report.html"
    report.write_text(render_page(run), encoding="utf-8")
    colours = set()
    for device, viewport in (("desktop", DESKTOP), ("phone", PHONE)):
        for scheme in ("light", "dark"):
            with Tab(browser, viewport=viewport, color_scheme=scheme, is_mobile=viewport is PHONE) as tab:
                tab.page.goto(report.as_uri())
                tab.page.locator("[data-chart=bytes] canvas").wait_for()
                tab.page.locator("h1", has_text=title).wait_for()
                wide = tab.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                assert wide <= 0, f"{viewport['width']} pixels, {scheme}: {wide} too wide"
                begins = tab.page.evaluate("[...document.querySelectorAll('.leaving td')].map(each => each.offsetLeft)")
                assert len(set(begins)) == 1, "what is sent is one column"
                colours.add(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))
                tab.page.screenshot(path=tmp_path / f"{device}-{scheme}.png", full_page=True)
                assert tab.asked == [report.as_uri()] and tab.faults == []
    assert len(colours) == 2
