"""Processes that exchange when they are told to: what is timed, and how it ends when one of them fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edit.errors import RemoteProtocolError
from edit.lab.bench.turns import Timing, Turns, best, median
from edit.lab.processes import ChildDied, Supervisor

HEAD = """
import json, socket, subprocess, sys, time
lines = socket.create_connection(("127.0.0.1", int(sys.argv[-1]))).makefile("rw")
def say(*texts):
    lines.write("".join(text + "\\n" for text in texts))
    lines.flush()
def ended(began, **more):
    return json.dumps({"began": began, "ended": time.monotonic(), **more})
say("ready")
"""


@contextmanager
def turns(tmp_path: Path, *bodies: str, limit_s: float = 30.0) -> Iterator[Turns]:
    """Processes that run `bodies` once they have said that they are ready."""
    with Supervisor(tmp_path / "logs", patience_s=0.0) as supervisor, Turns(supervisor, limit_s) as made:
        for place, body in enumerate(bodies):
            made.start(f"process-{place}", (sys.executable, "-c", HEAD + body))
        yield made


def test_the_wall_time_is_from_the_first_to_begin_to_the_last_to_end(tmp_path: Path) -> None:
    fixed = "while lines.readline(): say(json.dumps({{'began': {}, 'ended': {}}}), 'ready')"  # two lines in one piece
    with turns(tmp_path, fixed.format(10.0, 12.5), fixed.format(9.0, 11.0)) as two:
        timings = two.measure(3)
    assert [timing.wall_s for timing in timings] == [3.5, 3.5, 3.5]
    assert all(set(timing.cpu_s) == {"process-0", "process-1"} for timing in timings)


def test_the_cpu_time_of_children_counts_also_when_they_have_ended(tmp_path: Path) -> None:
    burn = "import time\\nwhile time.process_time() < 0.3: pass"
    body = f"""
while lines.readline():
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "{burn}"], check=True)
    say(ended(began), "ready")
"""
    with turns(tmp_path, body) as one:
        (timing,) = one.measure(1)
    assert timing.total_cpu_s >= 0.28  # counted in ticks of 10 ms


def test_different_results_are_an_error(tmp_path: Path) -> None:
    body = "lines.readline(); say(ended(0, result='{}'), 'ready'); lines.readline()"
    with (
        turns(tmp_path, body.format("a"), body.format("b")) as two,
        pytest.raises(RemoteProtocolError, match="'process-1': 'b'"),
    ):
        two.measure(1)


@pytest.mark.parametrize(
    "body",
    [
        "sys.exit('out of luck')",
        "lines.readline(); sys.exit('out of luck')",
        "lines.readline(); say(ended(0), 'ready'); lines.readline(); say(ended(0)); sys.exit('out of luck')",
    ],
    ids=["before", "while", "after the last exchange"],
)
def test_a_process_that_fails_ends_the_measurement_with_its_last_words(tmp_path: Path, body: str) -> None:
    with turns(tmp_path, body) as one, pytest.raises(ChildDied, match="out of luck"):
        one.measure(1)


def test_a_process_that_hangs_ends_the_measurement(tmp_path: Path) -> None:
    hangs = "lines.readline(); say(ended(0), 'ready'); lines.readline(); time.sleep(600)"
    with (
        turns(tmp_path, hangs, limit_s=2.0) as one,
        pytest.raises(ChildDied, match=r"process-0 has not exchanged after 2 s$"),
    ):
        one.measure(1)


def test_a_process_that_never_connects_ends_the_measurement(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "logs", patience_s=0.0) as supervisor, Turns(supervisor, 0.5) as one:
        one.start("mute", (sys.executable, "-c", "import time; time.sleep(600)"))
        with pytest.raises(ChildDied, match=r"mute has not connected after 0\.5 s$"):
            one.measure(1)


def test_median_and_best_are_of_each_figure() -> None:
    timings = [Timing(wall, {"a": a, "b": b}) for wall, a, b in ((3.0, 1.0, 5.0), (1.0, 2.0, 6.0), (2.0, 3.0, 1.0))]
    assert median(timings) == Timing(2.0, {"a": 2.0, "b": 5.0})
    assert best(timings) == (1.0, 4.0)
