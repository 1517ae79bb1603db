"""In which minutes of the day a member takes part, over midnight and changes of the clock, and a command that keeps to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from edit.errors import ConfigError
from editpb.hours import Hours, keep_hours
from tests.support.fork_server import REPOSITORY

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-22T{text}")


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("09:00-17:00", ["09:00:00", "16:59:59"], ["08:59:59", "17:00:00", "00:00:00"]),
        ("22:00-06:00", ["22:00:00", "23:59:59", "00:00:00", "05:59:59"], ["06:00:00", "21:59:59", "12:00:00"]),
        ("0:00-24:00", ["00:00:00", "23:59:59"], []),
        ("20:00-24:00", ["23:59:59"], ["00:00:00", "19:59:59"]),
        ("22:00-6:00, 12:30-13:00", ["12:30:00", "12:59:59", "23:00:00"], ["13:00:00", "12:29:59"]),
        ("12:00-18:00,17:00-20:00", ["17:30:00", "19:00:00"], ["20:00:00"]),
    ],
)
def test_which_moments_are_inside(text: str, inside: list[str], outside: list[str]) -> None:
    hours = Hours.parse(text)
    assert all(hours.has(at(moment)) for moment in inside)
    assert not any(hours.has(at(moment)) for moment in outside)


@pytest.mark.parametrize(
    "text",
    ["", "22-6", "22:00", "22:00-22:00", "24:00-06:00", "22:60-06:00", "22:00-25:00", "1:00-2:00,", "-1:00-2:00", "٢:00-3:00"],
)
def test_what_is_no_time_of_the_day_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--hours"):
        Hours.parse(text)


def unix(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo("UTC")).timestamp()


def berlin(moment: float) -> datetime:
    return datetime.fromtimestamp(moment, BERLIN)


@pytest.mark.parametrize(
    ("hours", "from_utc", "start"),
    [
        ("22:00-06:00", "2026-11-22T10:00:30", "2026-11-22T22:00:00+01:00"),
        ("22:00-06:00", "2026-11-22T21:30:00", "2026-11-22T22:30:00+01:00"),  # it is inside
        ("01:00-02:00", "2026-11-22T10:00:00", "2026-11-23T01:00:00+01:00"),
        ("03:00-05:00", "2026-03-29T00:30:00", "2026-03-29T03:00:00+02:00"),  # half an hour later: 02:00 to 03:00 is left out
        ("02:00-02:30", "2026-03-28T20:00:00", "2026-03-30T02:00:00+02:00"),  # that day has none
        ("02:00-02:30", "2026-10-24T20:00:00", "2026-10-25T02:00:00+02:00"),
        ("02:00-02:30", "2026-10-25T00:30:00", "2026-10-25T02:00:00+01:00"),  # that hour comes twice
    ],
)
def test_the_next_start_is_by_the_wall_clock_also_when_that_changes(hours: str, from_utc: str, start: str) -> None:
    found = Hours.parse(hours).next_start(unix(from_utc), berlin)
    assert found is not None and found.timestamp() == datetime.fromisoformat(start).timestamp()


def utc(moment: float) -> datetime:
    return datetime.fromtimestamp(moment, ZoneInfo("UTC"))


def test_at_the_end_of_its_hours_the_work_is_ended_politely_and_begun_anew() -> None:
    """As a peer does: the first SIGTERM ends it politely."""
    done: list[str] = []
    waits = threading.Event()

    def work() -> None:
        came, tell = os.pipe()
        before = signal.signal(signal.SIGTERM, lambda *_: os.write(tell, b"x"))
        try:
            waits.set()
            assert os.read(came, 1) == b"x"
        finally:
            signal.signal(signal.SIGTERM, before)
            os.close(came)
            os.close(tell)
        done.append("left")

    def clock() -> float:
        return unix(f"2026-11-22T{'06:00:00' if waits.is_set() else '05:59:59'}")

    keep_hours(Hours.parse("22:00-06:00"), work, unix=clock, local=utc, restart=lambda: done.append("anew"), look_s=0.001)
    assert done == ["left", "anew"]


def test_hours_that_end_before_the_work_has_begun_are_over_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes while the thread that sends it is begun."""
    done, sent, over = list[str](), threading.Event(), threading.Event()
    before, start, kill = signal.getsignal(signal.SIGTERM), threading.Thread.start, os.kill

    def begin(thread: threading.Thread) -> None:
        over.set()
        start(thread)
        assert sent.wait(10)

    def send(process: int, number: int) -> None:
        kill(process, number)
        sent.set()

    monkeypatch.setattr(os, "kill", send)
    monkeypatch.setattr(threading.Thread, "start", begin)
    keep_hours(
        Hours.parse("22:00-06:00"),
        lambda: done.append("work"),
        unix=lambda: unix(f"2026-11-22T{'06:00:00' if over.is_set() else '05:59:59'}"),
        local=utc,
        restart=lambda: done.append("anew"),
        look_s=0.001,
    )
    assert done == ["anew"] and signal.getsignal(signal.SIGTERM) is before


def test_work_that_takes_no_signal_yet_is_ended_too() -> None:
    """For example while the model is built."""
    done: list[str] = []
    begun, never = threading.Event(), threading.Event()

    def work() -> None:
        try:
            begun.set()
            while True:  # a signal that comes just before a wait without a bound would not end it
                never.wait(0.01)
        finally:
            done.append("cleaned up")

    def clock() -> float:
        return unix(f"2026-11-22T{'06:00:00' if begun.is_set() else '05:59:59'}")

    keep_hours(Hours.parse("22:00-06:00"), work, unix=clock, local=utc, restart=lambda: done.append("anew"), look_s=0.001)
    assert done == ["cleaned up", "anew"]


def test_work_that_ends_by_itself_or_fails_is_not_begun_anew() -> None:
    done: list[str] = []

    def fails() -> None:
        raise ConfigError("no")

    always = Hours.parse("00:00-24:00")
    keep_hours(always, lambda: done.append("done"), restart=lambda: done.append("anew"))
    with pytest.raises(ConfigError):
        keep_hours(always, fails, restart=lambda: done.append("anew"))
    keep_hours(None, lambda: done.append("at once"), restart=lambda: done.append("anew"))
    assert done == ["done", "at once"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_for_its_hours_ends_at_a_signal_without_work(number: int) -> None:
    looks = [0]

    def look() -> float:
        looks[0] += 1
        if looks[0] == 5:
            os.kill(os.getpid(), number)
        return unix("2026-11-22T12:00:00")

    keep_hours(Hours.parse("22:00-06:00"), lambda: pytest.fail("it worked"), unix=look, local=utc, look_s=0.001)


COMMAND = """
import signal, sys, time
from datetime import datetime, timezone
from pathlib import Path
from editpb.hours import Hours, keep_hours

def work():
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    print("work", *sys.argv[2:], flush=True)
    while not came:
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("left", flush=True)

def local(unix):
    try:
        moment = Path(sys.argv[1]).read_text()
    except OSError:
        moment = ""
    if moment == "12":
        print("waits", flush=True)
    return datetime(2026, 11, 22, int(moment or 23))

keep_hours(Hours.parse("22:00-06:00"), work, local=local, look_s=0.01)
"""


def test_the_command_is_the_same_process_in_its_next_hours_and_fresh_only_once(tmp_path: Path) -> None:
    clock, environment = tmp_path / "clock", {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'proto'}"}
    words = [sys.executable, "-c", COMMAND, str(clock), "--fresh", "--home", "a"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "work --fresh --home a\n"
        (tmp_path / "new").write_text("12")
        (tmp_path / "new").rename(clock)
        said = {process.stdout.readline() for _ in range(4)}
        assert {"left\n", "waits\n"} <= said
        (tmp_path / "new").write_text("22")
        (tmp_path / "new").rename(clock)
        while (line := process.stdout.readline()) == "waits\n":
            pass
        assert line == "work --home a\n"
        process.terminate()
        assert process.stdout.readline() == "left\n"
        assert process.wait() == 0
    finally:
        process.kill()
        process.communicate()


def test_what_was_logged_last_is_written_before_the_process_begins_anew() -> None:
    program = """
import logging, sys
from edit.command_line import log_to_stderr
from editpb import hours
log_to_stderr()
for k in range(100):
    logging.info("line %d", k)
sys.orig_argv = [sys.executable, "-c", ""]
hours._restart()
"""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'proto'}"}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, env=environment, timeout=60, check=True)
    assert [line.partition(" I ")[2] for line in done.stderr.splitlines()] == [f"line {k}" for k in range(100)]
