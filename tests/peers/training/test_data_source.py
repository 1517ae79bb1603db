"""A plug-in's rows are checked as they come, and a training goes on with the row that it was stopped at."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from edit import plugins
from edit.config.overrides import options_of
from edit.config.run import RunConfig
from edit.errors import ConfigError, PluginError
from peers.carriers.run_connection import Interrupted
from peers.training.data import Batches
from peers.training.data_source import STATE_BYTES, DataRequest, DataSource, open_data
from peers.training.metrics import Metrics
from peers.training.options import PeerOptions
from tests.peers.training.test_loop import LocalConnection, LocalRun, training

REQUEST = DataRequest(context=4, vocabulary=100, batch_size=2, seed=7, peer_id="a", options={"start": 3})


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_admitted", {})


class Counting:
    """Rows of consecutive numbers; a test breaks one of its methods."""

    def __init__(self, request: DataRequest) -> None:
        self.request, self.next = request, int(request.options.get("start", 0))

    def batch(self) -> Any:
        shape = self.request.batch_size, self.request.context + 1
        rows = (torch.arange(shape[0] * shape[1]) + self.next) % self.request.vocabulary
        self.next += rows.numel()
        return rows.view(shape)

    def state(self) -> Any:
        return {"next": self.next}

    def load(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


def opened(request: DataRequest = REQUEST, **methods: object) -> DataSource:
    plugins.register("data", "counting", type("Broken", (Counting,), methods))
    return open_data(request, "entry:counting")


def test_rows_become_tokens_and_targets_from_the_beginning() -> None:
    source = opened()
    tokens, targets = next(source)
    assert tokens.tolist() == [[3, 4, 5, 6], [8, 9, 10, 11]] and targets.tolist() == [[4, 5, 6, 7], [9, 10, 11, 12]]
    assert next(source)[0][0, 0] == 13 and iter(source) is source
    assert (
        source.fingerprint
        == opened().fingerprint
        != opened(DataRequest(context=4, vocabulary=100, batch_size=2, seed=7, peer_id="a")).fingerprint
    )


def test_it_goes_on_after_the_batch_that_was_the_last() -> None:
    before = opened()
    next(before)
    state, expected = before.state(), next(before)
    after = opened()
    after.load(state)
    assert torch.equal(next(after)[0], expected[0])


def shared(self: Counting) -> Tensor:
    if not hasattr(self, "kept"):
        self.kept = torch.empty(2, 5, dtype=torch.int64)
    self.kept.copy_(Counting.batch(self))
    return self.kept


def test_a_plugin_may_write_into_the_tensor_that_it_gave() -> None:
    source = opened(batch=shared)
    first = next(source)[0]
    kept = first.clone()
    next(source)
    assert torch.equal(first, kept)


def nested(levels: int) -> list[object]:
    found: list[object] = []
    for _ in range(levels):
        found = [found]
    return found


def ended(_: Counting) -> Tensor:
    raise StopIteration


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        (
            {"batch": lambda self: torch.zeros(2, 4, dtype=torch.int64)},
            r"batch: must be torch.int64 \[2, 5\] on the CPU, not .*4",
        ),
        ({"batch": lambda self: torch.zeros(2, 5)}, "not torch.float32"),
        ({"batch": lambda self: [[1] * 5] * 2}, "not list"),
        ({"batch": lambda self: torch.full((2, 5), 100)}, "token id 100, model.vocabulary is 100"),
        ({"batch": lambda self: torch.full((2, 5), -1)}, "token id -1"),
        ({"batch": ended}, "batch: ended; it must begin its data again"),
        ({"state": lambda self: {"next": torch.ones(1)}}, "state: must be values that JSON can hold"),
        ({"state": lambda self: {"next": float("nan")}}, "state: must be values that JSON can hold"),
        ({"state": lambda self: {"next": nested(100)}}, "state: must be values that JSON can hold .nested too deeply"),
        ({"state": lambda self: {"next": nested(55)}}, "state: must be values that JSON can hold .nested too deeply"),
        ({"state": lambda self: [1]}, "not list"),
        ({"state": lambda self: {"next": self.next, "more": "x" * STATE_BYTES}}, "bytes of JSON"),
        ({"load": lambda self, state: None}, "from the same position other rows come"),
        ({"load": lambda self, state: self.missing}, "AttributeError"),
        ({"load": None}, "gave a Broken without a method load"),
        ({"__init__": lambda self, request: 1 / 0}, r"ZeroDivisionError: division by zero \(test_data_source.py:\d+\)"),
    ],
)
def test_one_that_breaks_its_contract_is_named_in_one_line(methods: dict[str, object], says: str) -> None:
    with pytest.raises(PluginError, match=rf"^entry:counting \(edit.data\): .*{says}") as raised:
        opened(**methods)
    assert "\n" not in str(raised.value)


def test_one_that_breaks_later_is_named_too() -> None:
    source = opened(batch=lambda self: Counting.batch(self) if self.next < 50 else torch.full((2, 5), 1 << 40))
    with pytest.raises(PluginError, match=f"token id {1 << 40}"):
        for _ in range(9):
            next(source)


def test_other_data_than_the_checkpoints_is_refused_or_begun(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be or not to be")
    files = open_data(DataRequest(path=tmp_path / "text", context=4, vocabulary=256, batch_size=2, seed=7, peer_id="a"))
    assert isinstance(files, Batches)
    ours, other = opened(), opened(DataRequest(context=4, vocabulary=100, batch_size=2, seed=7, peer_id="a"))
    next(ours)
    next(files)
    for source, state in ((ours, files.state()), (ours, other.state()), (files, ours.state())):
        before = source.state()
        with pytest.raises(ConfigError, match=r"the data has changed since the checkpoint.*--new-data"):
            source.load(state)
        assert source.state() == before
    fresh = opened()
    fresh.load(files.state(), new_data=True)
    assert next(fresh)[0][0, 0] == 3
    with pytest.raises(ConfigError, match="saved data position is damaged: 7"):
        ours.load({**ours.state(), "position": 7})


def test_options_are_words_and_numbers() -> None:
    assert options_of("--data-option", ["a=1", "b=x y", "c=true", 'd="2"', "a=0.5"]) == {
        "a": 0.5,
        "b": "x y",
        "c": True,
        "d": "2",
    }
    for wrong in ("a", "=1", "a.b=1", "a=[1]", "a={}"):
        with pytest.raises(ConfigError, match=r"^--data-option"):
            options_of("--data-option", [wrong])


def test_what_is_not_allowed_or_has_no_effect_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [EntryPoint("mine", "nowhere:make", group)])
    (rows := tmp_path / "a.jsonl").write_text('{"body": "x", "n": 1}\nno JSON: only the first line is read here\n')
    rows.with_name("a.txt").write_text("text")
    for options, says in (
        ({"data": "entry:mine"}, "an option uses entry:mine .edit.data., code of another package: add `--allow mine`"),
        ({"data": "entry:mine", "allowed": frozenset({"mine"}), "jsonl_field": "text"}, "--field text: has no effect"),
        ({"data": rows}, r"a\.jsonl: line 1 has fields, .* --field \(fields with text: body\)"),
        ({"data": rows, "jsonl_field": "text"}, r"a\.jsonl: line 1 has no text in the field text"),
        ({"data": rows.with_name("a.txt"), "jsonl_field": "text"}, r"a\.txt: --field text is for \.jsonl files"),
        ({"data": tmp_path, "data_options": {"a": 1}}, "--data-option a: has no effect without --data entry:NAME"),
        ({"data": "entry:no-name"}, "--data entry:no-name: does not exist"),
    ):
        with pytest.raises(ConfigError, match=says):
            PeerOptions(home=tmp_path, **options)  # type: ignore[arg-type]
    PeerOptions(home=tmp_path, data=rows, jsonl_field="body")
    assert PeerOptions(home=tmp_path, data="entry:mine", allowed=frozenset({"mine"})).data_plugin == "entry:mine"


def test_a_peer_that_was_stopped_trains_on_the_rows_that_come_next(tmp_path: Path) -> None:
    config = RunConfig.from_mapping(
        {
            "model": {"layers": 1, "heads": 1, "width": 8, "context": 16},
            "inner": {"batch_size": 2, "warmup_steps": 2},
            "sync": {"every": 4, "outer_steps": 3},
        }
    )
    made: list[Counting] = []

    def make(request: DataRequest) -> Counting:
        made.append(Counting(request))
        return made[-1]

    plugins.register("data", "counting", make)
    options = {"data": "entry:counting", "data_options": {"start": 5}}
    run = LocalRun(config, ["a"])
    with Metrics(None) as metrics:
        with pytest.raises(Interrupted):
            training(tmp_path, LocalConnection(run, "a", stop_after=7), config, metrics, **options).run(0)
        stopped = made[0].next
        assert stopped == 5 + 7 * 2 * 17
        training(tmp_path, LocalConnection(run, "a"), config, metrics, **options).run(run.state.outer_step)
    assert run.finished and made[1].next == 5 + made[1].request.batch_size * 17 * 12
