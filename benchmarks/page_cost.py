"""What it costs a run that somebody has its page open: the coordinator's CPU seconds per round, and the page's own memory.

    .venv/bin/python benchmarks/page_cost.py                             # Linux; an hour
    .venv/bin/python benchmarks/page_cost.py --minutes 6

A coordinator, 8 real peers with a tiny model, whose exchanges are paced by the clock, and `edit-peer web` with an observer's
certificate, which a browser has open (headless Chromium; where there is none, a client that reads the stream). The page reaches
the coordinator through a link. In phases of equal length, in random order within each pair, the link carries or is cut: then
nobody watches. A phase is measured from a commit to a commit, once the page has heard of the run again, or has lost it. The
same process serves the page all the time; its resident size is looked at every few seconds. Starting, settling and the kills
are part of `--minutes`: another pair of phases is begun only where there is time for it, after at least one. What counts is the
median of the pairs, and between which of them it lies with a probability of 95 % (the order statistics of the sign test): where
others use the machine, too, single phases are far off. `--read LOG` says that again of what another call has printed, for
example one that was ended early.

Chromium draws on the same machine, and whoever shares a core's caches with the coordinator adds to its CPU seconds. With
`--no-browser` only what the coordinator itself does for a watcher is left. `--every 0.2` has no page either: this process
watches with the observer's certificate, and is told how the run stands ten times as often as a page, so that what it costs is
ten times as large beside what others do to the figures. `page_percent` is what a page costs by that.

The coordinator's resident size is looked at as often as the page's; both are given for the first and the last tenth.

At last further processes of the page are killed with SIGKILL at random moments, while rounds go on; the longest pause between
two commits then is printed beside that of the phases without a page. One line of JSON is appended to
benchmarks/results/page_cost.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import math
import os
import random
import re
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aggregator.storage.state_folder import StateFolder
from edit.errors import EditError, TransportError
from edit.lab import procfs
from edit.lab.bench.results import append_lines, circumstances
from edit.lab.joining import enrol, lead_through
from edit.lab.link import Link, LinkShape
from edit.lab.processes import COORDINATOR, Programs, Supervisor, terminated_as_interrupt
from edit.lab.run_toml import Settings, to_toml
from edit.lab.tail import JsonLines
from edit.web.feed import Feed
from edit.web.serve import EVERY_S
from peers.identity.peer_folder import PeerFolder
from peers.watching import statuses

RESULTS = Path(__file__).parent / "results" / "page_cost.jsonl"
PAGE = "page"
WAIT_S = 600.0  # for whatever has to happen next, also on a busy machine
KILL_S = 8.0  # that starting and killing a process of the page takes, at first sight
LEAST_PAIRS = 8  # that the length of a phase is chosen for, where there is none given
HEARD_S = 120.0  # until the page has found the run again
SETTLE_S = 3.0
LOOK_S = 5.0  # between two looks at the page's size
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def settings(pace_s: float, peers: int) -> Settings:
    """Return the run's settings: no end, and an exchange each `pace_s` seconds."""
    return {
        "name": "page-cost",
        "model": {"layers": 1, "width": 32, "heads": 2, "context": 32},
        "sync": {"schedule": "time", "time_s": pace_s, "outer_steps": 10_000_000},
        "rounds": {"start_peers": peers, "quorum": peers, "floor_s": 30.0, "ceiling_s": 60.0},
        "server": {"listen": "127.0.0.1:0", "enrol_listen": "127.0.0.1:0"},
    }


@dataclass
class Commits:
    """The closed rounds that metrics.jsonl has, as they come."""

    lines: JsonLines
    at: list[float] = field(default_factory=list)  # of commits, unix seconds
    aborted: int = 0

    def look(self) -> int:
        """Read on; return how many commits there are."""
        for row in self.lines.read():
            if row.get("kind") == "round":
                if row["committed"]:
                    self.at.append(row["t"])
                else:
                    self.aborted += 1
        return len(self.at)

    def next(self) -> int:
        """Wait for another commit; return how many there are. Raises TransportError."""
        before = self.look()
        until(lambda: self.look() > before, "the next commit", pause_s=0.01)
        return len(self.at)

    def longest_pause_s(self, begin: float, end: float) -> float:
        """Return the longest time between two commits in these seconds."""
        found = [t for t in self.at if begin <= t <= end]
        return max((later - t for t, later in pairwise(found)), default=0.0)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, in nanoseconds: /proc counts hundredths of a second. Raises OSError for none."""
    return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED of a process, as clock_getcpuclockid(3) of Linux makes it


def until(condition: Callable[[], object], what: str, within_s: float = WAIT_S, pause_s: float = 0.1) -> None:
    """Wait until something is so. Raises TransportError."""
    give_up = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > give_up:
            raise TransportError(f"waited {within_s:g} s in vain for {what}")
        time.sleep(pause_s)


@contextmanager
def opened_by_a_browser(chromium: str, address: str) -> Iterator[None]:
    """Have the page open in headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page()
        page.goto(address)
        page.locator("#members").wait_for()
        yield
        browser.close()


@contextmanager
def opened_by_a_client(address: str) -> Iterator[None]:
    """Read the page's stream, and do nothing with it."""
    where = urlsplit(address)
    entry = http.client.HTTPConnection(where.netloc, timeout=WAIT_S)
    entry.request("GET", f"{where.path}?{where.query}")
    cookie = (entry.getresponse().getheader("set-cookie") or "").partition(";")[0]
    entry.close()
    connection = http.client.HTTPConnection(where.netloc)
    connection.request("GET", "/stream", headers={"Cookie": cookie})
    answer = connection.getresponse()
    if answer.status != 200:
        raise TransportError(f"the page's stream answers {answer.status}")

    def read() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            while answer.read1(1 << 16):
                pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    yield
    with contextlib.suppress(OSError):
        connection.sock.shutdown(2) if connection.sock is not None else None
    reader.join(5.0)


@contextmanager
def watched_from_here(home: Path, every_s: float) -> Iterator[None]:
    """Watch in a thread of this process."""
    feed, turn = Feed(lambda: statuses(PeerFolder(home), turn, every_s), lambda _: asyncio.sleep(0.5)), itertools.count()

    async def follow() -> None:
        following, seen = asyncio.ensure_future(feed.follow()), 0
        while not feed.closed:
            seen = await feed.newer(seen)
        following.cancel()

    watcher = threading.Thread(target=lambda: asyncio.run(follow()), daemon=True)
    watcher.start()
    yield
    feed.closed = True
    watcher.join(5.0)


@dataclass
class Bench:
    """One run with its peers and its page."""

    folder: Path
    processes: Supervisor
    commits: Commits
    link: Link
    sizes: dict[str, list[int]]  # resident bytes, by process

    def sleep(self, seconds: float) -> None:
        """Let time pass, and look at sizes meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left))
            for name, sizes in self.sizes.items():
                if (size := procfs.resident_bytes(self.processes.pid(name))) is not None:
                    sizes.append(size)

    def phase(self, *, open_: bool, seconds: float) -> dict[str, Any]:
        """Measure one phase."""
        if open_:
            heard = self.link.carried_bytes[1]
            self.link.repair()
            until(lambda: self.link.carried_bytes[1] > heard + 10_000, "the page to hear of the run", HEARD_S)
        else:
            self.link.cut()
        self.sleep(SETTLE_S)
        pid, page = self.processes.pid(COORDINATOR), self.processes.pid(PAGE) if PAGE in self.sizes else os.getpid()
        first, begin, unix = self.commits.next(), cpu_s(pid), time.time()
        page_s, since = cpu_s(page), time.monotonic()
        self.sleep(seconds)
        last, end = self.commits.next(), cpu_s(pid)
        return {
            "open": open_,
            "rounds": last - first,
            "cpu_ms_per_round": 1e3 * (end - begin) / (last - first),
            "page_cpu_percent": 100 * (cpu_s(page) - page_s) / (time.monotonic() - since),
            "longest_pause_s": self.commits.longest_pause_s(unix, time.time()),
        }


def start(folder: Path, peers: int, pace_s: float, throttle: float, opened: ExitStack) -> Bench:
    """Start the coordinator, the peers and the page."""
    programs, processes = Programs(), opened.enter_context(Supervisor(folder / "logs"))
    state, coordinator = folder / "state", programs.coordinator
    (folder / "run.toml").write_text(to_toml(settings(pace_s, peers)))
    (folder / "text.txt").write_bytes(Path(json.__file__).read_bytes())
    processes.call({"init": (*coordinator, "init", "--state", str(state), "--config", str(folder / "run.toml"))})
    processes.start(COORDINATOR, (*coordinator, "serve", "--state", str(state)))
    run = StateFolder(state)
    until(run.bound, "the coordinator")
    for i in range(peers):
        home = folder / f"p{i}"
        enrol(state, f"p{i}", home)
        data = ("--data", str(folder / "text.txt"), "--throttle", str(throttle), "--threads", "1")
        processes.start(f"p{i}", (*programs.peer, "run", "--home", str(home), *data))
    enrol(state, "observer", folder / "observer")
    port = int(run.bound()["listen"].rpartition(":")[2])
    link = opened.enter_context(Link(("127.0.0.1", port), LinkShape()))
    lead_through(folder / "observer", link.port)
    return Bench(folder, processes, Commits(JsonLines(state / "metrics.jsonl")), link, {COORDINATOR: []})


def open_page(bench: Bench, name: str, home: Path) -> str:
    """Start a process of the page; return the link that it prints."""
    log = bench.folder / "logs" / f"{name}.log"
    before = log.stat().st_size if log.exists() else 0
    bench.processes.start(name, (*Programs().peer, "web", "--home", str(home)))

    def printed() -> list[str]:
        text = log.read_bytes()[before:].decode() if log.exists() else ""
        return [line for line in text.splitlines(keepends=True) if "?token=" in line and line.endswith("\n")]

    until(printed, f"{name} to print its link")
    return printed()[0].strip()


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="that all of it takes")
    parser.add_argument("--phase", type=float, help="seconds that a phase is measured for; default: 10 to 60, as there is time")
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--pace", type=float, default=1.0, help="seconds between two exchanges of a peer")
    parser.add_argument("--throttle", type=float, default=50.0, help="as `edit-peer run --throttle`: peers are mostly idle")
    parser.add_argument(
        "--kills", type=int, help="further processes of the page that are killed, after the phases; default: 3 to 10"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of phases and the moments of the kills")
    parser.add_argument("--no-browser", action="store_true", help="a client that reads the stream, also where Chromium is")
    parser.add_argument("--every", type=float, help="no page: watch from here, and be told so often, in seconds; 0.2 at least")
    parser.add_argument("--label", default="", help="is written beside the figures")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--read", type=Path, help="measure nothing: the figures of the phases in this text")
    asked = parser.parse_args()
    if asked.read is not None:
        phases = [found for line in asked.read.read_text().splitlines() if (found := phase_of(line)) is not None]
        sizes = {name: [each["sizes"][name] for each in phases] for name in phases[0]["sizes"]}
        row = {**circumstances(asked.label), "read": True, **compared(phases), **all_megabytes(sizes)}
        append_lines(asked.out, [row])
        print(json.dumps(row, indent=2))
        return
    begins, chance, end = circumstances(asked.label), random.Random(asked.seed), time.monotonic() + 60 * asked.minutes
    if asked.every is not None:
        asked.kills = 0
    asked.kills = min(10, max(3, round(asked.minutes / 3))) if asked.kills is None else asked.kills
    asked.phase = min(60.0, max(10.0, 60 * asked.minutes / (3 * LEAST_PAIRS))) if asked.phase is None else asked.phase
    chromium = None if asked.no_browser else shutil.which("chromium") or shutil.which("google-chrome")
    phases = []
    with terminated_as_interrupt(), tempfile.TemporaryDirectory(prefix="page-cost-") as scratch, ExitStack() as opened:
        bench = start(Path(scratch), asked.peers, asked.pace, asked.throttle, opened)
        until(lambda: bench.commits.look() >= 10, "the first ten commits")
        if asked.every is None:
            address = open_page(bench, PAGE, bench.folder / "observer")
            opened.enter_context(opened_by_a_browser(chromium, address) if chromium else opened_by_a_client(address))
            bench.sizes[PAGE] = []
        else:
            opened.enter_context(watched_from_here(bench.folder / "observer", asked.every))
        bench.commits.aborted, longest = 0, 0.0
        while not phases or time.monotonic() + longest + KILL_S * asked.kills <= end:
            pair = time.monotonic()
            for open_ in chance.sample((False, True), 2):
                phases.append(bench.phase(open_=open_, seconds=asked.phase))
                looked = ", ".join(f"{name} {of[-1] / 1e6:.1f} MB" for name, of in bench.sizes.items())
                print(f"pair {(len(phases) + 1) // 2}: {one_line(phases[-1])}, {looked}", flush=True)
            longest = max(longest, time.monotonic() - pair)
        bench.link.repair()
        enrol(bench.folder / "state", "another", bench.folder / "another")
        killing = time.time()
        for _ in range(asked.kills):
            open_page(bench, "killed", bench.folder / "another")
            time.sleep(chance.uniform(0.0, 5.0))
            bench.processes.kill("killed")
        bench.commits.next()
        killed_pause_s = bench.commits.longest_pause_s(killing, time.time()) if asked.kills else 0.0
        row = {**begins, **summary(phases, bench, asked), "longest_pause_with_kills_s": round(killed_pause_s, 3)}
        failed = [str(end) for end in bench.processes.ended() if not end.expected and end.name not in ("init",)]
    if failed:
        raise EditError("; ".join(failed))
    append_lines(asked.out, [row])
    print(json.dumps(row, indent=2))


def one_line(phase: dict[str, Any]) -> str:
    """Return what one phase measured, in words."""
    what = "open  " if phase["open"] else "closed"
    return f"{what} {phase['cpu_ms_per_round']:.2f} ms of the coordinator's CPU per round, {phase['rounds']} rounds"


def all_megabytes(sizes: Mapping[str, list[int]]) -> dict[str, float]:
    """Return what `megabytes` says of each process."""
    return {key: value for name, of in sizes.items() for key, value in megabytes(name, of).items()}


def megabytes(name: str, sizes: list[int]) -> dict[str, float]:
    """Return the mean of the first and the last tenth of a process's sizes, and the largest."""
    part = max(1, len(sizes) // 10)
    of = {"first_tenth": statistics.fmean(sizes[:part]), "last_tenth": statistics.fmean(sizes[-part:]), "peak": max(sizes)}
    return {f"{name}_mb_{key}": round(size / 1e6, 1) for key, size in of.items()}


PHASE = re.compile(r"pair \d+: (open  |closed) ([0-9.]+) ms of the coordinator's CPU per round, (\d+) rounds, (.*)")


def phase_of(line: str) -> dict[str, Any] | None:
    """Return the phase of which this line was printed; None: it says something else."""
    found = PHASE.match(line)
    if found is None:
        return None
    sizes = {name: round(1e6 * float(size)) for name, size, _ in (words.split() for words in found[4].split(", "))}
    return {"open": found[1] != "closed", "cpu_ms_per_round": float(found[2]), "rounds": int(found[3]), "sizes": sizes}


def compared(phases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the pairs of phases say of the coordinator's CPU. A phase without its other one does not count."""
    costs = {open_: [each["cpu_ms_per_round"] for each in phases if each["open"] is open_] for open_ in (True, False)}
    percents = sorted(100 * (a / b - 1) for a, b in zip(costs[True], costs[False], strict=False))
    pairs = len(percents)
    below, left = 0.5**pairs, 0  # the probability that at most `left` pairs are below the median
    while below + math.comb(pairs, left + 1) * 0.5**pairs <= 0.025:
        left += 1
        below += math.comb(pairs, left) * 0.5**pairs
    return {
        "pairs": pairs,
        "open_ms_per_round": round(statistics.median(costs[True]), 3),
        "closed_ms_per_round": round(statistics.median(costs[False]), 3),
        "open_more_percent_median": round(statistics.median(percents), 2),
        "open_more_percent_95": [round(percents[left], 2), round(percents[-1 - left], 2)] if pairs > 5 else None,
        "open_more_percent_mean": round(statistics.fmean(percents), 2),
        "open_more_percent_stderr": round(statistics.stdev(percents) / pairs**0.5, 2) if pairs > 1 else None,
        "closed_spread_percent": round(100 * (max(costs[False]) / min(costs[False]) - 1), 1),
        "rounds": sum(each["rounds"] for each in phases),
    }


def summary(phases: list[dict[str, Any]], bench: Bench, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all phases."""
    found = compared(phases)
    chromium = shutil.which("chromium") is not None and not asked.no_browser
    viewer = f"Watch each {asked.every:g} s" if asked.every else "Chromium" if chromium else "a client of the stream"
    return {
        "peers": asked.peers,
        "pace_s": asked.pace,
        "phase_s": asked.phase,
        **found,
        "viewer": viewer,
        **({"page_percent": round(asked.every / EVERY_S * found["open_more_percent_median"], 2)} if asked.every else {}),
        "page_cpu_percent": round(statistics.fmean(each["page_cpu_percent"] for each in phases if each["open"]), 1),
        **all_megabytes(bench.sizes),
        "aborted": bench.commits.aborted,
        "kills": asked.kills,
        "longest_pause_closed_s": round(max(each["longest_pause_s"] for each in phases if not each["open"]), 3),
        "longest_pause_open_s": round(max(each["longest_pause_s"] for each in phases if each["open"]), 3),
    }


if __name__ == "__main__":
    main()
