"""`edit-lab bench` as a user meets it: tables and pictures from rows, files, one line for what is wrong, a tiny exchange."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console, Group
from typer.testing import CliRunner

from edit.errors import ConfigError
from edit.lab.bench import codecs, command, exchange, links, results
from edit.lab.bench.codecs import CodecOptions, row_of
from edit.lab.bench.results import append_lines, circumstances, figure_note, print_table, read_lines, results_table
from edit.lab.bench.rivals.environments import Environments
from edit.lab.cli import app
from edit.view.charts import Group as Bars
from edit.view.charts import Part, PartedBar, Point, bars_picture, points_picture

SVG = "{http://www.w3.org/2000/svg}"
BEGINS = {"date": "2026-11-22", "label": "", "commit": "0123abc", "machine": "a <machine>", "load_before": 0.25}


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def text_of(table: object) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def exchange_row(codec: str, peers: int, size: int, wall_s: float) -> dict[str, Any]:
    figures = {"round_s": wall_s, "cpu_s": 1.76, "coordinator_cpu_s": 0.72, "peer_cpu_s": 0.26, "best_round_s": 0.9}
    limit = {"best_cpu_s": 1.7, "raw_grpc_s": 0.16, "raw_grpc_cpu_s": 0.3, "raw_grpc_server_cpu_s": 0.1}
    found = {"parameters": 50331648, "codec": codec, "peers": peers, "bytes_up_per_peer": size, "repeat": 5}
    return {**BEGINS, **found, **figures, **limit}


EXCHANGES = [exchange_row("int8", 4, 51118080, 1.02), exchange_row("fp32", 2, 201326592, 0.72)]
SECONDS = {"encode": 0.1, "decode_add": 0.05, "measure": 0.04}
CODECS = [
    row_of(BEGINS, "edit", "int8", 8.125, SECONDS, 0.02, CodecOptions(numel=10**8)),
    row_of(BEGINS, "hivemind", "uniform8", 8.0, {"encode": 2.0, "decode_add": 1.0}, 0.025, CodecOptions(numel=10**8)),
    {**BEGINS, "numel": 10**8, "system": "hivemind", "codec": "blockwise8", "error": "no bitsandbytes"},
]


def test_the_table_of_exchanges_has_every_figure() -> None:
    text = text_of(exchange.table(EXCHANGES))
    assert "One exchange of 50,331,648 parameters" in text and "commit 0123abc" in text
    line = next(line for line in text.splitlines() if line.startswith("int8"))
    assert line.split() == ["int8", "4", "51.1", "0.2", "1.02", "0.90", "1.76", "0.72", "0.26", "0.16", "0.30"]


def test_the_table_of_codecs_says_what_failed() -> None:
    lines = [line.split() for line in text_of(codecs.table(CODECS)).splitlines()]
    assert ["int8", "8.125", "4.00", "(0.20)", "8.00", "(0.40)", "10.00", "(0.50)"] in lines
    assert ["hivemind", "uniform8", "8", "0.20", "(0.01)", "0.40", "(0.03)"] in lines
    assert ["hivemind", "blockwise8", "failed:", "no", "bitsandbytes"] in lines


RATES = {"mbit": 1000.0, "rtt_s": 0.1, "payload_bytes": 10**8, "fragments": 12, "raw_up": [500.0, 900.0], "raw_down": [950.0]}
RATES |= {"contribution": [300.0, 800.0, 820.0], "update": [400.0, 760.0], "snapshot": [350.0, 700.0]}
DELAYS = {"mbit": 10.0, "rtt_s": 0.02, "queue_bytes": 65536, "idle_s": [0.02, 0.03, 0.04], "busy_s": [0.1, 0.2, 0.7]}
DELAYS |= {"up_mbit": 9.4, "down_mbit": 9.1}
LINKS = [{**BEGINS, **RATES}, {**BEGINS, **DELAYS}]


def test_the_tables_of_links_leave_out_the_first_repetition() -> None:
    lines = [line.split() for line in text_of(links.table(LINKS)).splitlines()]
    assert ["100", "900", "950", "300", "810", "90%", "400", "760", "80%", "350", "700", "74%"] in lines
    assert ["20", "64", "0.030", "0.200", "0.700", "9.4", "9.1"] in lines


@pytest.mark.parametrize(
    ("rows", "title", "bars"), [(LINKS, "100 MB over 1000 Mbit/s", 5), (LINKS[1:], "How late heartbeats", 2)]
)
def test_the_picture_of_links_shows_heartbeats_when_there_is_nothing_else(
    rows: list[dict[str, Any]], title: str, bars: int
) -> None:
    picture = ElementTree.fromstring(links.picture(rows))
    assert (picture.findtext(f"{SVG}title") or "").startswith(title)
    assert len(picture.findall(f".//{SVG}rect/{SVG}title")) == bars


def test_the_picture_of_exchanges_is_an_svg_with_a_bar_for_every_part() -> None:
    picture = ElementTree.fromstring(exchange.picture(EXCHANGES))
    assert picture.tag == f"{SVG}svg"
    titles = [title.text for title in picture.iterfind(f".//{SVG}rect/{SVG}title")]
    assert titles.count("this project: coordinator 0.72 CPU s") == 2
    assert titles.count("raw gRPC: 0.30 CPU s") == 2
    texts = [text.text or "" for text in picture.iterfind(f"{SVG}text")]
    assert "fp32, 2 peers" in texts and any("a <machine>" in text for text in texts)


def test_the_picture_of_codecs_shows_the_limit_and_what_failed() -> None:
    picture = ElementTree.fromstring(codecs.picture(CODECS))
    texts = [text.text or "" for text in picture.iterfind(f"{SVG}text")]
    assert {"plain copy", "another system", "failed: no bitsandbytes"} <= set(texts)


def test_rows_go_to_a_pipe_all_of_them_and_nothing_before_them(tmp_path: Path) -> None:
    pipe = tmp_path / "rows"
    os.mkfifo(pipe)
    rows = [{"n": n, "text": "x" * 1000} for n in range(200)]  # more than a pipe holds
    with ThreadPoolExecutor(1) as executor:
        append_lines(pipe, [])
        reader = executor.submit(pipe.read_bytes)
        append_lines(pipe, rows)
        assert [json.loads(line) for line in reader.result().splitlines()] == rows


def test_rows_go_to_stdout_where_that_is_a_pipe() -> None:
    code = (
        "from pathlib import Path; from edit.lab.bench.results import append_lines as to; to(Path('/dev/stdout'), [{'n': 1}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"n": 1}), done.stderr


@pytest.mark.parametrize("content", ['[{"n": 1}, {"n": 2}]', "n,m\n1,2\n3,4", "notes", '{\n  "n": 1\n}', "\n\0\0"])
@pytest.mark.parametrize("rows", [[], [{"n": 1}]])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, content: str, rows: list[dict[str, int]]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"rows.jsonl: its last line is no row of results; take it out, or give another file"):
        append_lines(file, rows)
    assert file.read_text() == content


@pytest.mark.parametrize("log", [False, True])
def test_bars_begin_at_one_line_and_grow_with_their_values(log: bool) -> None:
    bars = [PartedBar(str(value), [Part(value, "s0", "")], "") for value in (0.31, 2.0, 25.0)]
    picture = ElementTree.fromstring(bars_picture("t", [], [Bars("g", bars)], "s", {"s0": "x"}, limit=(0.2, "l"), log=log))
    drawn = [bar for bar in picture.iterfind(f"{SVG}rect[@class='bar s0']") if bar.get("height") == "18"]
    assert len({bar.get("x") for bar in drawn}) == 1
    widths = [float(bar.get("width", "0")) for bar in drawn]
    assert 0 < widths[0] < widths[1] < widths[2] <= 920
    if not log:
        assert widths[1] / widths[2] == pytest.approx(2.0 / 25.0, abs=0.001)


def test_points_are_higher_for_larger_values_on_both_sides_of_0_and_further_right_for_larger_x() -> None:
    values = [(0.25, 20.0), (2.0, 0.5), (4.0, 0.0), (8.0, -0.05), (16.0, -3.0)]
    points = [Point(f"{y:g}", x, y, abs(y) / 2, "s0") for x, y in values]
    limits = {0.5: "a bound"}
    picture = ElementTree.fromstring(points_picture("t", ["note"], points, "bits", "gap", {"s0": "k"}, limits, linear=0.1))
    circles = {one.findtext(f"{SVG}title", "").split(":")[0]: one for one in picture.iterfind(f"{SVG}circle")}
    drawn = [circles[f"{y:g}"] for _, y in values]
    heights = [float(one.get("cy", "0")) for one in drawn]
    assert heights == sorted(heights) and len(set(heights)) == len(heights)
    places = [float(one.get("cx", "0")) for one in drawn]
    assert places == sorted(places)
    assert places[3] - places[2] == pytest.approx(places[4] - places[3], abs=0.2)  # equal factors, equal distances
    bound = next(one for one in picture.iterfind(f"{SVG}line[@class='limit']"))
    assert float(bound.get("y1", "0")) == heights[1]
    for one, interval in zip(heights, sorted(_ends(picture)), strict=True):
        assert interval[0] <= one <= interval[1]


def _ends(picture: ElementTree.Element) -> list[tuple[float, float]]:
    lines = picture.iterfind(f"{SVG}line[@class='interval']")
    return [(float(one.get("y2", "0")), float(one.get("y1", "0"))) for one in lines]


def test_names_of_points_at_one_place_do_not_cover_each_other() -> None:
    points = [Point(name, 4.0, 0.1, 0.05, "s0") for name in ("first", "second", "third")]
    picture = ElementTree.fromstring(points_picture("t", [], points, "x", "y", {}, {}, linear=0.1))
    names = [one for one in picture.iterfind(f"{SVG}text") if one.text in ("first", "second", "third")]
    heights = sorted(float(one.get("y", "0")) for one in names)
    assert heights[1] - heights[0] >= 13.9 and heights[2] - heights[1] >= 13.9
    assert len({one.get("cx") for one in picture.iterfind(f"{SVG}circle")}) == 3


def test_a_picture_of_nothing_is_an_svg_too() -> None:
    nothing = points_picture("nothing", [], [], "x", "y", {}, {}, linear=0.1)
    assert "nothing" in ElementTree.fromstring(nothing).itertext()
    empty = bars_picture("nothing", [], [Bars("g", [PartedBar("b", (), "failed")])], "s", {})
    assert "failed" in ElementTree.fromstring(empty).itertext()


def test_a_note_has_the_range_of_the_load_and_of_several_runs_how_many() -> None:
    assert figure_note([BEGINS]) == "2026-11-22, commit 0123abc. a <machine>; load before each 0.2."
    fast = {**BEGINS, "kernels": "numba 0.62.1"}
    note = figure_note([fast, {**fast, "load_before": 3.0}])
    assert note.endswith("a <machine>, kernels numba 0.62.1; load before each 0.2 to 3.0.")
    later = {**BEGINS, "date": "2026-11-25", "commit": "4567def", "machine": "another"}
    assert figure_note([later, BEGINS]) == "2026-11-22 to 2026-11-25, 2 commits. 2 machines; load before each 0.2."


def test_rows_are_appended_with_their_circumstances(tmp_path: Path) -> None:
    path = tmp_path / "more" / "rows.jsonl"
    append_lines(path, [circumstances("a try")])
    append_lines(path, [{"seconds": 1.0}])
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["label"], second) == ("a try", {"seconds": 1.0})
    assert {"date", "time", "machine", "load_before", "commit"} < set(first)
    assert first["kernels"].split()[0] in ("torch", "numba")


def test_half_a_line_is_taken_away_and_a_whole_one_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"b": "' + "x" * 200_000)
    assert read_lines(path) == [{"a": 1}]
    append_lines(path, [{"c": 3}])
    assert path.read_text() == '{"a": 1}\n{"c": 3}\n'
    for text in ('{"a": 1}', '{"a'):
        path.write_text(text)
        append_lines(path, [{"c": 3}])
        assert path.read_text() == ('{"a": 1}\n{"c": 3}\n' if text.endswith("}") else '{"c": 3}\n')
    path.write_text('{"a": {"b": 2}\n{"c": 3}\n')
    with pytest.raises(ConfigError, match="line 1 is no row of results"):
        read_lines(path)
    assert read_lines(tmp_path / "none") == []


def test_a_full_disk_leaves_a_file_of_results_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, room = tmp_path / "rows.jsonl", os.write, [12]
    append_lines(path, [{"a": 1}])

    def little(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "no space left")
        written = real(descriptor, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patched, pytest.raises(ConfigError, match=r"cannot write .*: no space left"):
        patched.setattr(results.os, "write", little)
        append_lines(path, [{"b": 2}, {"c": 3}])
    assert room == [0] and read_lines(path) == [{"a": 1}]


def test_a_table_beside_a_terminal_is_as_wide_as_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    name, note = "muloco " + "x" * 300, "n" * 150
    print_table(Group(results_table("", ("method", "loss"), [(name, "1.2525")], note)))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [*name.split(), "1.2525"] in lines and [note] in lines


def test_a_commit_is_dirty_when_something_else_than_results_was_changed(tmp_path: Path) -> None:
    """Rows that a measurement has appended say nothing against the code that made them."""
    code, rows = tmp_path / "edit" / "code.py", tmp_path / "benchmarks" / "results" / "rows.jsonl"
    for file in (code, rows):
        file.parent.mkdir(parents=True)
        file.write_text("first\n", encoding="utf-8")
    named = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "."), (*named, "commit", "-q", "-m", "first")):
        subprocess.run(("git", *words), cwd=tmp_path, check=True)
    commit = results._commit(code.parent)
    assert commit and "dirty" not in commit
    append_lines(rows, [{"s": 1.0}])
    assert results._commit(code.parent) == commit
    code.write_text("second\n", encoding="utf-8")
    assert results._commit(code.parent) == f"{commit}-dirty"
    assert results._commit(Path("/")) == ""


def test_codecs_are_measured_and_printed_as_json() -> None:
    (row,) = json.loads(bench("codecs", "--numel", "65536", "--repeat", "1", "--codec", "int4", "--json"))
    assert (row["system"], row["codec"], row["bits_per_element"]) == ("edit", "int4", 4.125)
    assert min(row["encode_gb_s"], row["decode_add_gb_s"], row["measure_gb_s"]) > 0


def hivemind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, python: str) -> list[dict[str, Any]]:
    """Measure codecs and hivemind's compressors; python: what stands for the Python of its environment."""
    stands_in = tmp_path / "python"
    stands_in.write_text(f"#!/bin/sh\n{python}\n")
    stands_in.chmod(0o755)
    monkeypatch.setattr(Environments, "python", lambda *_: stands_in)
    arguments = ["--numel", "4096", "--repeat", "1", "--codec", "fp32", "--rivals", "--folder", str(tmp_path), "--json"]
    return list(json.loads(bench("codecs", *arguments)))


def test_hiveminds_compressors_stand_beside_the_codecs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = {"codec": "float16", "bits": 16.0, "encode": 4e-6, "decode_add": 8e-6, "copy": 2e-6}
    bad = {"codec": "blockwise8", "error": "ImportError: no bitsandbytes"}
    own, good_row, bad_row = hivemind(
        monkeypatch, tmp_path, f"echo 'a warning'\ncat <<END\n{json.dumps(good)}\n{json.dumps(bad)}\nEND"
    )
    assert (own["system"], good_row["system"], good_row["codec"]) == ("edit", "hivemind", "float16")
    assert (good_row["encode_gb_s"], good_row["encode_of_copy"], good_row["decode_add_of_copy"]) == (4.096, 0.5, 0.25)
    assert (bad_row["codec"], bad_row["error"]) == ("blockwise8", "ImportError: no bitsandbytes")


def test_our_codecs_are_measured_also_when_hivemind_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, failed = hivemind(monkeypatch, tmp_path, "echo \"ModuleNotFoundError: No module named 'hivemind'\" >&2; exit 1")
    assert own["encode_gb_s"] > 0
    assert failed["error"] == "ModuleNotFoundError: No module named 'hivemind'"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["codecs", "--codec", "int9"], "unknown codec 'int9'"),
        (["exchange", "--codec", "int9"], "unknown codec 'int9'"),
        (["exchange", "--plot", "exchange.png"], "its name must end in .svg"),
        (["links", "--part", "latency"], "--part latency: known are throughput, heartbeats"),
        (["codecs", "--numel", "4096", "--repeat", "1", "--codec", "fp32", "--results", "/dev/null/rows"], "cannot write"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        bench(*arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("option", ["--plot", "--results"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, option: str, tmp_path: Path
) -> None:
    measured: list[CodecOptions] = []
    monkeypatch.setattr(codecs, "measure_codecs", lambda options: measured.append(options) or CODECS)
    with pytest.raises(ConfigError, match="cannot write"):
        bench("codecs", "--json", option, "/dev/null/more/x.svg")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        bench("codecs", "--json", option, str(tmp_path / "folder.svg"))
    assert measured == []


@pytest.mark.parametrize("step", ["write_picture", "append_lines"])
def test_what_was_measured_is_printed_before_a_file_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str) -> None:
    def fails(path: Path, rows: Any) -> None:
        if rows:
            raise ConfigError("the disk is full")

    monkeypatch.setattr(codecs, "measure_codecs", lambda _: CODECS)
    monkeypatch.setattr(command, step, fails)
    files = ["--plot", str(tmp_path / "x.svg"), "--results", str(tmp_path / "x.jsonl")]
    result = CliRunner().invoke(app, ["bench", "codecs", "--json", *files])
    assert str(result.exception) == "the disk is full" and json.loads(result.stdout) == CODECS


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.timeout(300)  # eight processes, half of which import torch
def test_a_tiny_exchange(tmp_path: Path) -> None:
    results, plot = tmp_path / "exchange.jsonl", tmp_path / "exchange.svg"
    arguments = ["--parameters", "100000", "--codec", "int8", "--peers", "2", "--repeat", "1"]
    table = bench("exchange", *arguments, "--results", str(results), "--plot", str(plot))
    row = json.loads(results.read_text())
    assert (row["codec"], row["peers"], row["parameters"], row["repeat"]) == ("int8", 2, 99996, 1)
    assert row["bytes_up_per_peer"] == 101580
    assert row["round_s"] > 0 and row["raw_grpc_s"] > 0
    assert "99,996 parameters" in table
    assert ElementTree.fromstring(plot.read_text()).tag == f"{SVG}svg"


@pytest.mark.parametrize(
    "arguments",
    [
        ("codecs", "--numel", "99999999999999"),
        ("exchange", "--parameters", "999999999999999999", "--peers", "1"),
        ("links", "--part", "throughput", "--megabytes", "1e6"),
        ("rivals", "--parameters", "999999999999999999"),
    ],
)
def test_what_no_memory_can_hold_is_refused_before_it_is_made(arguments: tuple[str, ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"^--(numel|parameters|megabytes) .*: needs at least .* GB of memory, and .* are here"
    ):
        bench(*arguments)
