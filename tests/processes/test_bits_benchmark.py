"""benchmarks/bits.py, tiny: that only runs of one shape are compared, and what the table and the picture say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import bits
from edit.errors import ConfigError
from edit.lab.bench.results import circumstances
from peers.training.data import Tokens

SVG = "{http://www.w3.org/2000/svg}"


def line(setting: str, seed: int, loss: float, **others: object) -> str:
    known = {"setting": setting, "peers": 4, "steps": 600, "seed": seed, "loss": loss, "outer_steps": 20, "bits_up": 4.0}
    return json.dumps({**known, "bits_down": 16.0, **others}) + "\n"


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["bits.py", *arguments])
    bits.main()
    return capsys.readouterr().out


def in_this_process(
    jobs: Sequence[tuple[str, int]], command: Callable[..., tuple[Sequence[str], str]], _: int, each: Callable[..., None]
) -> None:
    """Stands for make_apart: trains by the command lines."""
    for job in jobs:
        words, _given = command(job)
        sizes = dict(zip(words[5::2], map(int, words[6::2]), strict=True))
        shape = bits.Shape(sizes["--peers"], sizes["--steps"], sizes["--every"])
        each(job, {**circumstances(), **bits.one(words[3], shape, int(words[4]))})


def test_a_run_records_its_shape_its_commit_and_counted_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = Tokens(np.arange(4096, dtype=np.uint8), "text", 256)
    monkeypatch.setattr(bits, "whole_text", lambda seed: (text, text))
    monkeypatch.setattr(bits, "use_threads", lambda count: None)
    monkeypatch.setattr(bits, "make_apart", in_this_process)
    file = tmp_path / "bits.jsonl"
    sizes = ("--peers", "2", "--steps", "4", "--every", "2", "--seeds", "1", "--processes", "1", "--results", str(file))
    assert "int8" in run(monkeypatch, capsys, *sizes, "--settings", "int8")
    rows = [json.loads(each) for each in file.read_text().splitlines()]
    assert [(row["setting"], row["every"], row["outer_steps"]) for row in rows] == [("fp32", 2, 2), ("int8", 2, 2)]
    assert [row["bits_up"] for row in rows] == [32.0, pytest.approx(8.125, abs=0.01)]
    assert all("commit" in row for row in rows)
    run(monkeypatch, capsys, *sizes, "--settings", "int8")
    assert len(file.read_text().splitlines()) == 2  # nothing is made again
    assert set(bits.recorded(file)) == {bits.Shape(peers=2, steps=4, every=2)}


def test_a_run_that_fails_is_told_and_the_others_are_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And half a line, that an earlier call has left, is made again."""
    file, row = tmp_path / "bits.jsonl", line("int8", 1, 1.0, every=30)
    file.write_text(line("fp32", 0, 1.0) + line("fp32", 1, 1.0) + row[:40])

    def make_apart(jobs: Sequence[object], _: object, processes: int, each: Callable[..., None]) -> None:
        assert jobs == [("int8", 0), ("int8", 1)]
        each(jobs[0], ConfigError("Traceback\nMemoryError: no memory"))
        each(jobs[1], json.loads(row))

    monkeypatch.setattr(bits, "make_apart", make_apart)
    with pytest.raises(SystemExit, match="1 of 2 runs failed"):
        run(monkeypatch, capsys, "--settings", "int8", "--steps", "600", "--seeds", "2", "--results", str(file))
    told = capsys.readouterr()
    assert "int8, seed 0: failed: MemoryError: no memory" in told.err
    assert "int8" in told.out and sorted(bits.recorded(file)[bits.Shape(4, 600, 30)]) == [("fp32", 0), ("fp32", 1), ("int8", 1)]


def test_steps_that_the_interval_does_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["bits.py", "--steps", "600", "--every", "7", "--results", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        bits.main()


def test_gaps_are_to_the_same_outer_optimizer_and_to_the_best_fp32_of_the_same_interval(tmp_path: Path) -> None:
    file = tmp_path / "bits.jsonl"
    lines = [
        *(line("fp32", seed, 2.0 + seed) for seed in range(2)),  # of when H was always 30
        *(line("fp32", seed, 1.0, every=5) for seed in range(3)),
        *(line("fp32, no momentum", seed, 0.5 * (seed + 1), every=5) for seed in range(2)),
        *(line("top-k 64", seed, 0.505 * (seed + 1), every=5) for seed in range(2)),
    ]
    file.write_text("".join(lines))
    found = bits.recorded(file)
    assert set(found) == {bits.Shape(4, 600, 30), bits.Shape(4, 600, 5)}
    results = found[bits.Shape(4, 600, 5)]
    assert bits.best(results) == "fp32, no momentum"  # over the seeds that both have: 0.75 is less than 1
    assert bits.gaps(results, "top-k 64", "fp32, no momentum") == pytest.approx([1.0, 1.0])
    assert bits.gaps(results, "top-k 64", "fp32") == pytest.approx([-49.5, 1.0])
    assert bits.best(found[bits.Shape(4, 600, 30)]) == "fp32"


def test_the_interval_is_students() -> None:
    assert bits.half_width([1.0, 2.0, 3.0]) == pytest.approx(2.4843, abs=1e-4)  # 4.303 / sqrt(3)
    assert bits.half_width([0.0, 1.0] * 20) == pytest.approx(2.120 * 0.50637 / 40**0.5, rel=1e-4)


def test_the_picture_has_a_point_for_each_setting_and_a_colour_for_each_shape(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, drawn = tmp_path / "bits.jsonl", tmp_path / "bits.svg"
    lines = [
        line(name, seed, loss * (1 + seed), every=every)
        for every in (5, 30)
        for name, loss in (("fp32", 1.0), ("int4", 1.001))
        for seed in range(3)
    ]
    file.write_text("".join([*lines, line("int4", 0, 9.0, peers=2)]))
    run(monkeypatch, capsys, "--print", "--steps", "600", "--results", str(file), "--plot", str(drawn))
    picture = ElementTree.fromstring(drawn.read_text())
    points = [(one.get("class"), one.findtext(f"{SVG}title")) for one in picture.iterfind(f"{SVG}circle")]
    assert points == [("s0", "int4: +0.100 +- 0.000 at 4"), ("s1", "int4: +0.100 +- 0.000 at 4")]
    texts = {text.text for text in picture.iterfind(f"{SVG}text")}
    assert {"4 peers, H 5, 120 outer steps", "4 peers, H 30, 20 outer steps", "0.1 %", "0.5 %"} <= texts
