"""Trials of a tiny model, in this process."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edit.errors import ConfigError
from edit.lab.bench import apart
from edit.lab.bench.results import append_lines
from edit.lab.compare import command
from edit.lab.compare.command import Cell, CompareOptions, Outputs, recorded, run_comparison
from edit.lab.compare.command import trials as trials_of
from edit.lab.compare.corpus import Batch, TextOptions, read_text, streams
from edit.lab.compare.method import Length, read_method
from edit.lab.compare.table import comparison_table, curves, gaps, grid_table, loss_against_bytes
from edit.lab.compare.trial import Trial, run_trial

LENGTH = Length(peers=2, steps=6, every=3)
TINY = ["model.layers=1", "model.heads=2", "model.width=8", "model.context=8", "inner.batch_size=2", "inner.warmup_steps=0"]
EXACT = " codec.up=fp32 codec.down=fp32"


@pytest.fixture(autouse=True)
def _little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edit.lab.compare.trial._FINAL_BATCHES", 2)
    monkeypatch.setattr("edit.lab.compare.trial._CURVE_BATCHES", 1)


def trial(text: str, seed: int = 0, slow: float = 1.0, **options: float) -> Trial:
    method = read_method(text, LENGTH, TINY)
    return Trial(method=method, length=LENGTH, seed=seed, text=TextOptions(**options), slow=slow, points=2)  # type: ignore[arg-type]


def test_one_replica_with_plain_outer_steps_is_data_parallel_training() -> None:
    apart, together = run_trial(trial("snoo outer.optimizer=sgd outer.lr=1.0" + EXACT, 1)), run_trial(trial("data-parallel", 1))
    assert apart["loss"] == pytest.approx(together["loss"], rel=1e-5)
    assert apart["tokens"] == together["tokens"] == 6 * 2 * 2 * 8
    assert (together["bits_up"], together["bits_down"], together["exchanges"]) == (32, 32, 6)
    assert (apart["bits_up"], apart["exchanges"]) == (32, 2)


def test_a_whole_run_of_data_parallel_warm_up_is_data_parallel_training() -> None:
    row = run_trial(trial("post-local-sgd compare.warmup=0.5" + EXACT))
    assert row["exchanges"] == 3 + 1 and row["tokens"] == 6 * 2 * 2 * 8
    assert [step for step, _ in row["curve"]] == [3, 6]
    warm = run_trial(trial("data-parallel"))
    assert row["curve"][0][1] == pytest.approx(warm["curve"][0][1], rel=1e-5), "until the peers part they are one"


METHODS = (
    *("diloco", "edit", "streaming sync.every=6 sync.delay=1", "eager", "muloco", "sparseloco", "noloco", "gpa"),
    "demo-optimizer",
)


@pytest.mark.parametrize("text", METHODS)
def test_methods_train_and_the_same_seed_gives_the_same_row(text: str) -> None:
    row, again = run_trial(trial(text)), run_trial(trial(text))
    assert row["loss"] is not None and row["loss"] < 6.0 and row["sent"] > 0
    for volatile in ("wall_s", "cpu_s"):
        del row[volatile], again[volatile]
    assert row == again


def test_the_deadline_of_a_edit_gives_a_slow_peer_fewer_steps() -> None:
    row = run_trial(trial("a-edit", slow=3.0))
    steps = run_trial(trial("edit", slow=3.0))
    assert row["virtual_s"] < steps["virtual_s"] == 18.0
    assert row["tokens"] >= 6 * 2 * 2 * 8
    with pytest.raises(ConfigError, match="--slow: has no meaning for eager"):
        run_trial(trial("eager", slow=2.0))


@pytest.mark.parametrize("settings", ["sync.groups=3", "rounds.merging=arrivals rounds.max_staleness=8"])
def test_bits_are_those_of_an_exchange_of_each_parameter(settings: str) -> None:
    """And all that the peers contribute is merged: with arrivals each takes an outer step."""
    row = run_trial(trial(f"diloco codec.up=fp32 {settings}"))
    assert (row["bits_up"], row["exchanges"]) == (32, 2)
    assert row["sent"] == 2 * 4 * row["parameters"]


@pytest.mark.parametrize("text", ["data-parallel", "diloco", "gpa", "demo-optimizer"])
def test_with_accumulation_a_row_has_all_batches_and_they_are_counted(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, said = [0], list[int]()

    def counted(batches: Iterator[Batch]) -> Iterator[Batch]:
        for tokens, targets in batches:
            taken[0] += tokens.numel()
            yield tokens, targets

    def watched(*arguments: Any) -> list[Iterator[Batch]]:
        said.append(arguments[-2])
        return [counted(each) for each in streams(*arguments)]

    monkeypatch.setattr("edit.lab.compare.trial.streams", watched)
    row = run_trial(trial(f"{text} inner.accumulation=3"))
    assert row["tokens"] == taken[0] == 6 * 3 * 2 * 2 * 8
    assert said == [6 * 3], "a stretch of the run is one of its batches"


def test_theta_can_be_averaged_for_the_evaluation() -> None:
    row = run_trial(trial("diloco average.kind=last"))
    assert row["loss_averaged"] is not None and row["loss_averaged"] != row["loss"]
    assert run_trial(trial("diloco"))["loss_averaged"] is None


def test_a_key_is_of_all_that_decides_a_row() -> None:
    keys = [
        each.key
        for each in (
            trial("diloco"),
            trial("diloco", seed=1),
            trial("diloco outer.lr=0.71"),
            trial("diloco", label_noise=0.1),
            trial("diloco", slow=2.0),
            trial("edit"),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert Trial.from_json(trial("diloco").to_json()).key == keys[0]


def options(*methods: str, seeds: int = 2, every: Sequence[int] = (LENGTH.every,)) -> CompareOptions:
    cells = []
    for h in every:
        length = replace(LENGTH, every=h)
        cells.append(Cell(length=length, methods=tuple(read_method(text, length, TINY) for text in methods)))
    return CompareOptions(cells=tuple(cells), seeds=seeds, base="data-parallel", points=2)


def trials(chosen: CompareOptions) -> list[Trial]:
    return trials_of(chosen, chosen.cells[0])


def line(one: Trial, loss: float | None) -> dict[str, object]:
    return {
        "key": one.key,
        "method": one.method.name,
        "seed": one.seed,
        "loss": loss,
        "spike": 0.01,
        "curve": [[3, 2.0], [6, loss]],
        "parameters": 1000,
        "sent": 4000,
        "received": 4000,
        "bits_up": 32.0,
        "bits_down": 32.0,
        "peak": 4.0,
        "virtual_s": 6.0,
        "wall_s": 1.0,
        "peers": 2,
        "steps": 6,
    }


def test_finished_trials_are_not_made_again_and_half_a_line_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, file = options("data-parallel", "diloco"), tmp_path / "rows.jsonl"
    wanted = trials(chosen)
    assert [(one.method.name, one.seed) for one in wanted] == [
        ("data-parallel", 0), ("diloco", 0), ("data-parallel", 1), ("diloco", 1),
    ]  # fmt: skip
    done = [json.dumps(line(one, 1.0)) for one in wanted[:2]]
    file.write_text("\n".join([*done, '{"key": "unfinis']))
    made: list[str] = []

    def make(missing: list[Trial], results: Path, processes: int, console: Console) -> list[str]:
        made.extend(f"{one.method.name} {one.seed}" for one in missing)
        return ["diloco, seed 1: killed"]

    monkeypatch.setattr(command, "_make", make)
    with pytest.raises(ConfigError, match="1 of 2 trials failed; the first: diloco, seed 1: killed"):
        run_comparison(chosen, Outputs(results=file, as_json=True), 1, Console())
    assert made == ["data-parallel 1", "diloco 1"]
    for one in wanted[2:]:
        append_lines(file, [line(one, 1.0)])
    assert set(recorded(file)) == {one.key for one in wanted}, "nothing of the half line is left"
    file.write_text('{"what": 1}\n{}\n')
    with pytest.raises(ConfigError, match="line 1 is no trial"):
        recorded(file)


def test_a_trial_on_another_text_is_made_again_and_the_row_of_the_other_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each Python has a standard library of its own. Older rows do not say which."""
    chosen, file = options("data-parallel", "diloco", "edit", seeds=1), tmp_path / "rows.jsonl"
    old, same, other = trials(chosen)
    here = run_trial(same)["text"]
    assert here == read_text(TextOptions(), 2, 0).hash != read_text(TextOptions(), 2, 1).hash
    told = {"date": "d", "machine": "m", "load_before": 1.0}
    rows = [line(old, 1.0), {**line(same, 1.1), "text": here}, {**line(other, 1.2), "text": here}, line(other, 9.0)]
    rows[3]["text"] = "0123456789abcdef"
    made: list[str] = []

    def make(missing: list[Trial], results: Path, processes: int, console: Console) -> list[str]:
        made.extend(one.method.name for one in missing)
        return []

    monkeypatch.setattr(command, "_make", make)
    outputs, console = Outputs(results=file, as_json=True), Console()
    append_lines(file, [{**told, **rows[i]} for i in (0, 1, 3)])
    run_comparison(chosen, outputs, 1, console)
    assert made == ["edit"] and "1 of these trials were trained on another text" in capsys.readouterr().out
    append_lines(file, [{**told, **rows[i]} for i in (2, 3)])
    run_comparison(chosen, outputs, 1, console)
    assert made == ["edit"]
    assert [row["loss"] for row in json.loads(capsys.readouterr().out)] == [1.0, 1.1, 1.2]


@pytest.mark.parametrize("option", ["results", "plot", "curves"])
def test_files_that_cannot_be_written_are_told_before_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    made: list[object] = []
    monkeypatch.setattr(command, "_make", lambda *arguments: made.append(arguments) or [])
    files = {"results": tmp_path / "rows.jsonl", option: Path("/dev/null/more/x")}
    with pytest.raises(ConfigError, match="cannot"):
        run_comparison(options("diloco", seeds=1), Outputs(**files), 1, Console())
    assert made == []


def test_a_comparison_is_printed_before_a_picture_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen, file = options("data-parallel", seeds=1), tmp_path / "rows.jsonl"
    append_lines(file, [{**line(trials(chosen)[0], 1.0), "date": "d", "machine": "m", "load_before": 1.0}])

    def fails(path: Path, text: str) -> None:
        raise ConfigError("the disk is full")

    monkeypatch.setattr(command, "write_picture", fails)
    with pytest.raises(ConfigError, match="the disk is full"):
        run_comparison(chosen, Outputs(results=file, plot=tmp_path / "x.svg", as_json=True), 1, Console())
    assert json.loads(capsys.readouterr().out)[0]["loss"] == 1.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_ends_a_comparison_ends_its_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Also while others of them end: each is gone before the next one is killed."""
    both, killed = threading.Barrier(2), list[object]()

    class Endless:
        """A trial's process: the signal comes while both run, to the comparison alone."""

        def __init__(self, *_: object, **__: object) -> None:
            self._killed, self._gone = threading.Event(), threading.Event()

        def communicate(self, _: str) -> tuple[str, str]:
            if both.wait(30.0) == 0:
                os.kill(os.getpid(), number)
            assert self._killed.wait(30.0)
            return "", "killed"

        @property
        def returncode(self) -> int:
            self._gone.set()
            return -9

        def kill(self) -> None:
            killed.append(self)
            self._killed.set()
            assert self._gone.wait(30.0)

    monkeypatch.setattr(apart, "circumstances", dict)
    monkeypatch.setattr(apart.subprocess, "Popen", Endless)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts with & ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_comparison(options("data-parallel", "diloco"), Outputs(results=tmp_path / "rows.jsonl"), 2, Console())
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(killed) == 2 and recorded(tmp_path / "rows.jsonl") == {}


def test_gaps_are_paired_by_seed_and_what_diverged_says_so() -> None:
    losses = {("data-parallel", 0): 1.0, ("data-parallel", 1): 2.0, ("diloco", 0): 1.1, ("diloco", 1): 2.3, ("edit", 0): None}
    rows = [
        {**line(trial(method, seed), loss), "date": "d", "machine": "m", "load_before": 1.0}
        for (method, seed), loss in losses.items()
    ]
    assert gaps(rows, "diloco", "data-parallel") == pytest.approx([0.1, 0.3])
    names = ["data-parallel", "diloco", "edit"]
    table = comparison_table(rows, names, "data-parallel")
    cells = [list(column.cells) for column in table.columns]
    assert cells[2] == ["1.5000", "1.7000", "diverged"]
    assert cells[3] == ["", "+0.2000 +- 1.2706", ""]
    for picture in (loss_against_bytes([(LENGTH, rows)], names, "data-parallel"), curves(rows, names)):
        assert picture.startswith("<svg") and "diloco" in picture


def test_averaged_parameters_have_a_line_of_their_own() -> None:
    rows = [
        {**line(trial(method, seed), loss), "loss_averaged": averaged, "date": "d", "machine": "m", "load_before": 1.0}
        for method, seed, loss, averaged in [("data-parallel", 0, 1.0, None), ("edit average.kind=last", 0, 1.2, 1.1)]
    ]
    table = comparison_table(rows, ["data-parallel", "edit average.kind=last"], "data-parallel")
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["data-parallel", "edit average.kind=last", "edit average.kind=last, averaged"]
    assert cells[2] == ["1.0000", "1.2000", "1.1000"] and cells[3] == ["", "+0.2000", "+0.1000"]
    assert cells[-1] == ["6", "6", ""]


def test_one_trial_of_a_method_that_takes_no_outer_steps_serves_every_h(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen, file = options("data-parallel", "diloco", seeds=2, every=(2, 3)), tmp_path / "rows.jsonl"
    made: list[tuple[str, int, int]] = []

    def make(missing: list[Trial], results: Path, processes: int, console: Console) -> list[str]:
        made.extend((one.method.name, one.length.every, one.seed) for one in missing)
        lines = [{**line(one, 1.0 + one.length.every / 10), "date": "d", "machine": "m", "load_before": 1.0} for one in missing]
        file.write_text("".join(json.dumps(each) + "\n" for each in lines))
        return []

    monkeypatch.setattr(command, "_make", make)
    run_comparison(chosen, Outputs(results=file, as_json=True), 1, Console())
    assert made == [
        ("data-parallel", 30, 0), ("diloco", 2, 0), ("diloco", 3, 0),
        ("data-parallel", 30, 1), ("diloco", 2, 1), ("diloco", 3, 1),
    ]  # fmt: skip
    assert len(json.loads(capsys.readouterr().out)) == len(made), "each trial once"
    with pytest.raises(ConfigError, match=r"--curves .*: shows one --peers and one --every"):
        run_comparison(chosen, Outputs(results=file, curves=tmp_path / "c.svg"), 1, Console())


def test_a_method_with_an_h_of_its_own_is_one_trial_and_its_row_has_that_h() -> None:
    own, changing = "diloco sync.every=2", "diloco sync.every=1 sync.milestones=[[2,2]]"
    chosen = options(own, changing, seeds=1, every=(2, 3))
    (one, _), (again, grows) = (trials_of(chosen, cell) for cell in chosen.cells)
    assert one.key == again.key and one.length.every == again.length.every == run_trial(again)["every"] == 2
    assert grows.length.every == 3, "where H changes it is the one that was asked for"
    rows = [{**line(one, 1.0), "every": 2, "date": "d", "machine": "m", "load_before": 1.0}]
    picture = loss_against_bytes([(cell.length, rows) for cell in chosen.cells], [own], "")
    assert picture.count(">2 x H 2<") == 1 and "H 3" not in picture


def test_what_diverged_has_no_gap_and_no_point_and_is_named() -> None:
    losses = {("data-parallel", 0): 1.0, ("data-parallel", 1): 2.0, ("diloco", 0): 1.1, ("diloco", 1): None}
    rows = [
        {**line(trial(method, seed), loss), "date": "d", "machine": "m", "load_before": 1.0}
        for (method, seed), loss in losses.items()
    ]
    names = ["data-parallel", "diloco"]
    cells = [list(column.cells) for column in comparison_table(rows, names, "data-parallel").columns]
    assert (cells[2][1], cells[3][1], cells[4][1]) == ("diverged", "", "")
    picture = loss_against_bytes([(LENGTH, rows)], names, "data-parallel")
    assert "Diverged, so without a point: diloco (1 of 2 seeds)." in picture and ">diloco<" not in picture
    drawn = curves(rows, names)
    assert ">diloco (diverged)<" in drawn and "(diverged)" not in curves(rows[:2], names)
    rows[3]["curve"] = [[3, None], [6, None]]
    assert "Without a point: diloco (diverged)." in curves(rows, names)


def test_a_grid_has_gaps_by_peers_and_h_and_says_where_seeds_are_missing() -> None:
    def rows(peers: int, *losses: tuple[str, int, float | None]) -> tuple[Length, list[dict[str, object]]]:
        length = Length(peers=peers, steps=6, every=3)
        told = {"date": "d", "machine": "m", "load_before": 1.0}
        return length, [{**line(trial(method, seed), loss), **told} for method, seed, loss in losses]

    few = rows(2, ("data-parallel", 0, 1.0), ("diloco", 0, 1.1))
    full = rows(4, ("data-parallel", 0, 1.0), ("data-parallel", 1, 2.0), ("diloco", 0, 1.1), ("diloco", 1, 2.3))
    wild = rows(8, ("data-parallel", 0, 1.0), ("diloco", 0, None))
    wild[1][1]["loss_averaged"] = None  # which does not mean that it keeps an average
    table = grid_table([few, full, wild], ["data-parallel", "diloco", "edit"], "data-parallel", 2)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["data-parallel"] * 3 + ["diloco"] * 3 and cells[1] == ["2", "4", "8"] * 2
    assert cells[2] == ["1.0000 (1)", "1.5000 +- 6.3530", "1.0000 (1)", "+0.1000 (1)", "+0.2000 +- 1.2706", "diverged"]
    picture = loss_against_bytes([few, full], ["data-parallel", "diloco"], "data-parallel")
    assert ">2 x H 3<" in picture and ">4 x H 3<" in picture and ">diloco<" in picture
    many = ["data-parallel", *"abcde", "diloco"]
    assert ">diloco, 2 x H 3<" in loss_against_bytes([few, full], many, "data-parallel")


GROWS = " inner.batch_size=1 inner.accumulation=2 inner.batch_growth=4 inner.norm_test=0.01"


@pytest.mark.parametrize("text", ["muloco", "snoo", "diloco compare.warmup=0.5"])
def test_a_batch_that_grows_leaves_as_many_tokens_in_fewer_steps(text: str) -> None:
    row, plain = run_trial(trial(text + GROWS)), run_trial(trial(text))
    assert plain["tokens"] <= row["tokens"] < 2 * plain["tokens"]
    assert row["exchanges"] <= plain["exchanges"] and row["loss"] is not None
    assert row["curve"][-1][0] == LENGTH.steps, "steps are counted in tokens"


@pytest.mark.parametrize("text", ["data-parallel", "noloco", "gpa"])
def test_a_batch_grows_only_where_the_harness_can_count_it(text: str) -> None:
    with pytest.raises(ConfigError, match=r"inner.batch_growth = 4 must be 1"):
        trial(text + GROWS)


def test_a_trial_on_another_device_is_another_trial_and_the_cpu_s_are_named_as_before() -> None:
    chosen = options("diloco", seeds=1)
    (here,), (there,) = trials(chosen), trials(replace(chosen, device="cuda"))
    assert here.key != there.key and Trial.from_json(there.to_json()) == there
    file = Path(__file__).parents[4] / "benchmarks" / "results" / "compare.jsonl"
    length = Length(peers=4, steps=1200, every=30)
    assert Trial(method=read_method("data-parallel", length), length=length, seed=0).key in recorded(file)


def test_results_of_a_device_that_is_not_there_can_be_shown_and_not_made(tmp_path: Path) -> None:
    chosen, file = replace(options("diloco", seeds=1), device="nothing"), tmp_path / "rows.jsonl"
    outputs = Outputs(results=file, as_json=True)
    with pytest.raises(ConfigError, match="--device nothing: no such kind of device"):
        run_comparison(chosen, outputs, 1, Console())
    file.write_text(json.dumps(line(trials(chosen)[0], 1.0)) + "\n")
    run_comparison(chosen, outputs, 1, Console())
