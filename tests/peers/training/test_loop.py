"""The training loop over a carrier that is not the hub: what `RunConnection` declares is all that it needs."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from edit import plugins
from edit.config.run import RunConfig
from edit.fragments.schema import Schema
from edit.local import LocalCollective, LocalRun
from edit.records import Committed, Contribution, EncodedTensor, Outcome, Progress
from edit.replica.ranks import ALONE
from edit.replica.replica import Outer
from edit.trackers import TrackerChoice
from editpb.identity import Identity
from editpb.messages import RunPhase, View
from peers.carriers.run_connection import Interrupted, Origin, RunConnection, Traffic
from peers.training.checkpoint_files import last_scalars
from peers.training.loop import Place, Training
from peers.training.metrics import EVERY, Metrics
from peers.training.options import PeerOptions
from peers.training.sharding import ONE_RANK

H, ROUNDS = 5, 3


class LocalShare(LocalCollective):
    """One peer of a run in this process, as an `AggregatorConnection`."""

    def __init__(self, run: LocalRun, peer_id: str) -> None:
        super().__init__(run, peer_id)
        self.run = run
        self.told: list[Progress] = []
        self.connected, self.cut_off = True, False
        self.origin = Origin(0, "abcd", ("this process",))

    @property
    def last_view(self) -> View:
        phase = RunPhase.FINISHED if self.run.finished else RunPhase.COLLECTING
        return View(sequence=1, phase=phase, outer_step=self.run.state.outer_step)

    def report(self, progress: Progress) -> None:
        self.told.append(progress)


class LocalConnection:
    """A `RunConnection` without a network."""

    def __init__(self, run: LocalRun, peer_id: str, stop_after: int = 1 << 30) -> None:
        self.peer_id = peer_id
        self.shares = (LocalShare(run, peer_id),)
        self.shown: list[tuple[Schema, Outer]] = []
        self.pauses: list[float] = []
        self.reached, self.connected, self.traffic = 0, True, Traffic()
        self._looks, self._stop_after = 0, stop_after

    @property
    def ended(self) -> bool:
        return self.shares[0].run.finished

    def prefetch(self) -> None: ...
    def interrupt(self) -> None: ...
    def close(self, reason: str = "") -> None: ...

    def show(self, outer_of: Callable[[], tuple[Schema, Outer]]) -> None:
        self.shown.append(outer_of())

    def check(self) -> None:
        self._looks += 1
        if self._looks > self._stop_after:
            raise Interrupted("asked to stop")

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


def training(folder: Path, connection: RunConnection, config: RunConfig, metrics: Metrics, **options: object) -> Training:
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 20)
    place = Place(identity=Identity("run-1", "peer", "a"), device=torch.device("cpu"), layout=ONE_RANK, ranks=ALONE)
    tracking, telemetry = options.pop("tracking", None), options.pop("telemetry", None)
    return Training(
        PeerOptions(**{"home": folder, "data": text, **options}), config, place, connection, metrics, tracking, telemetry
    )  # type: ignore[arg-type]


@pytest.fixture
def config() -> RunConfig:
    return RunConfig.from_mapping(
        {
            "model": {"layers": 1, "heads": 1, "width": 8, "context": 16},
            "inner": {"batch_size": 2, "warmup_steps": 2},
            "sync": {"every": H, "outer_steps": ROUNDS},
        }
    )


def test_a_peer_trains_to_the_end_of_a_run_in_this_process(tmp_path: Path, config: RunConfig) -> None:
    run = LocalRun(config, ["a"])
    connection = LocalConnection(run, "a")
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        training(tmp_path, connection, config, metrics).run(0)
    assert run.finished and run.state.outer_step == ROUNDS
    beats = connection.shares[0].told
    assert [beat.outer_step for beat in beats] == [0] * (H + 1) + [1] * (H + 1) + [2] * (H + 1) + [3]
    assert not beats[0].exchanging and beats[0].digest
    assert {beat.device for beat in beats} == {"cpu"} and math.isfinite(beats[-1].loss)
    assert {outer.outer_step for _, outer in connection.shown} == {0, 1, 2} and not connection.pauses
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (kinds.count("snapshot"), kinds.count("outer")) == (1, ROUNDS)  # the last one, too, although no step follows it


class ToldLate(LocalConnection):
    """A peer that is slower than the news of the run's end, as with a coordinator."""

    ended = False  # type: ignore[assignment]


@pytest.mark.parametrize(
    "sync", [{}, {"mode": "forward"}, {"mode": "delayed", "delay": 2}, {"mode": "eager", "delay": 2}], ids=str
)
def test_no_step_follows_the_last_outer_step(tmp_path: Path, config: RunConfig, sync: dict[str, object]) -> None:
    config = dataclasses.replace(config, sync=dataclasses.replace(config.sync, **sync))
    run = LocalRun(config, ["a"])
    with Metrics(None) as metrics:
        training(tmp_path, ToldLate(run, "a"), config, metrics).run(0)
    saved = last_scalars(tmp_path / "checkpoints")
    assert run.finished and saved is not None
    assert (saved["steps"], saved["worker"]["outer_step"]) == (ROUNDS * H, ROUNDS), "also where it trains while it waits"


@pytest.mark.parametrize("connection", [LocalConnection, ToldLate])
@pytest.mark.parametrize(
    ("sync", "after"),
    [({}, 0), ({"mode": "forward"}, 1), ({"mode": "delayed", "delay": 2}, 2), ({"mode": "eager", "delay": 2}, 2)],
)
def test_the_steps_of_a_strict_peer_do_not_depend_on_when_it_hears_that_all_tokens_are_merged(
    tmp_path: Path, config: RunConfig, connection: type[LocalConnection], sync: dict[str, object], after: int
) -> None:
    tokens = ROUNDS * H * config.inner.batch_size * config.model.context
    sync |= {"strict": True, "tokens": tokens, "outer_steps": 2 * ROUNDS}
    config = dataclasses.replace(config, sync=dataclasses.replace(config.sync, **sync))
    run = LocalRun(config, ["a"])
    with Metrics(None) as metrics:
        training(tmp_path, connection(run, "a"), config, metrics).run(0)
    saved = last_scalars(tmp_path / "checkpoints")
    assert run.finished and saved is not None
    assert (saved["steps"], saved["worker"]["outer_step"]) == (ROUNDS * H + after, ROUNDS)


class Gone(LocalShare):
    """Its run has ended, as the last view said, and its coordinator is away since the second contribution."""

    contributed: tuple[int, ...] = ()
    asked = 0

    def contribute(self, contribution: Contribution) -> None:
        self.contributed = (*{*self.contributed, contribution.outer_step},)
        self.cut_off = len(self.contributed) > 1
        if not self.cut_off:
            super().contribute(contribution)

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        if not self.cut_off:
            return super().outcome(outer_step, block=block)
        self.asked += 1
        assert self.asked < 100, "it asks for ever"
        return None


class CutOff(LocalConnection):
    def __init__(self, run: LocalRun, peer_id: str) -> None:
        super().__init__(run, peer_id)
        self.shares = (Gone(run, peer_id),)

    @property
    def ended(self) -> bool:
        return self.shares[0].cut_off


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "sync", [{}, {"mode": "forward"}, {"mode": "delayed", "delay": 2}, {"mode": "eager", "delay": 2}], ids=str
)
def test_a_peer_that_is_cut_off_from_a_run_that_has_ended_ends_and_saves_its_contribution(
    tmp_path: Path, config: RunConfig, sync: dict[str, object], strict: bool
) -> None:
    config = dataclasses.replace(config, sync=dataclasses.replace(config.sync, strict=strict, **sync))
    with Metrics(None) as metrics:
        training(tmp_path, CutOff(LocalRun(config, ["a"]), "a"), config, metrics).run(0)
    saved = last_scalars(tmp_path / "checkpoints")
    assert saved is not None and saved["worker"]["outer_step"] == 1 and saved["worker"]["pending"] is not None


def test_a_peer_that_hides_its_loss_says_it_to_nobody_and_trains_on_the_same(
    tmp_path: Path, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = LocalRun(config, ["a"])
    connection = LocalConnection(run, "a")
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        training(tmp_path, connection, config, metrics, hide_loss=True).run(0)
    assert run.finished
    beats = connection.shares[0].told
    assert all(math.isnan(beat.loss) for beat in beats) and beats[-1].tokens_per_s > 0
    own = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(line["loss"] > 0 for line in own if line["kind"] == "step")
    assert "loss nan" not in caplog.text


def test_a_tracker_is_told_of_the_steps_and_of_each_outer_step(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_admitted", {})

    class Recorder:
        def __init__(self) -> None:
            self.said: list[tuple[int, dict[str, object]]] = []

        def log(self, step: int, values: dict[str, object]) -> None:
            self.said.append((step, values))

        def close(self) -> None: ...

    recorder = Recorder()
    plugins.register("trackers", "recorder", lambda run: recorder)
    choice = TrackerChoice.of(["entry:recorder"], [], frozenset())
    run = LocalRun(config, ["a"])
    with Metrics(None) as metrics, choice.open("run-1", "run", "a", tmp_path, {}) as trackers:
        training(tmp_path, LocalConnection(run, "a"), config, metrics, trackers=choice, tracking=trackers).run(0)
    outer = [(step, values) for step, values in recorder.said if "edit/outer_step" in values]
    assert [(step, values["edit/outer_step"], values["edit/verdict"]) for step, values in outer] == [
        (H + 1, 1, "ok"),
        (2 * H + 1, 2, "ok"),
        (3 * H, 3, "ok"),
    ]
    assert all(values["edit/norm"] > 0 and values["edit/weight"] == 1.0 for _, values in outer)
    steps = [step for step, values in recorder.said if "loss" in values]
    assert steps == list(range(EVERY, ROUNDS * H + 1, EVERY))


def test_told_to_stop_it_saves_and_goes_on_from_there(
    tmp_path: Path, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = LocalRun(config, ["a"])
    with Metrics(None) as metrics:
        with pytest.raises(Interrupted):
            training(tmp_path, LocalConnection(run, "a", stop_after=7), config, metrics, throttle=2.0).run(0)
        training(tmp_path, LocalConnection(run, "a"), config, metrics).run(run.state.outer_step)
    assert run.finished and "inner step 7" in caplog.text


class StoppedInAWait(LocalConnection):
    """Asked to stop while the outcome of the contribution of an outer step is waited for, or a part of its update."""

    def __init__(self, run: LocalRun, peer_id: str, outer_step: int, *, in_the_update: bool = False) -> None:
        super().__init__(run, peer_id)
        share = self.shares[0]
        ask = share.outcome

        class Late:
            def __init__(self, payload: EncodedTensor, fragment_id: int) -> None:
                self.payload, self.fragment_id = payload, fragment_id

            def wait(self) -> EncodedTensor:
                if self.fragment_id > 0:
                    raise Interrupted("asked to stop")
                return self.payload

        def outcome(at: int, *, block: bool) -> Outcome | None:
            if not block or at < outer_step:
                return ask(at, block=block)
            if not in_the_update:
                raise Interrupted("asked to stop")
            known = ask(at, block=block)
            assert isinstance(known, Committed)
            parts = [(part.payload, part.fragment_id) for part in known.commit.fragments]
            return dataclasses.replace(known, updates=tuple(Late(*part) for part in parts if part[0] is not None))

        share.outcome = outcome  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("sync", "in_the_update"),
    [
        ({}, False),
        ({"mode": "forward"}, False),
        ({"mode": "forward"}, True),
        ({"mode": "delayed", "delay": 2}, False),
        ({"mode": "eager", "delay": 2}, False),
    ],
)
def test_told_to_stop_while_it_waits_it_saves_what_it_has_trained(
    tmp_path: Path, config: RunConfig, sync: dict[str, object], in_the_update: bool
) -> None:
    config = dataclasses.replace(config, sync=dataclasses.replace(config.sync, **sync))
    run = LocalRun(config, ["a"])
    with Metrics(None) as metrics:
        connection = StoppedInAWait(run, "a", 1, in_the_update=in_the_update)
        with pytest.raises(Interrupted):
            training(tmp_path, connection, config, metrics, checkpoint_every=30).run(0)
        saved = last_scalars(tmp_path / "checkpoints")
        taken = connection.shares[0].told[-1].inner_steps + (0 if config.sync.overlap == 0 else 1)  # of the last, none was told
        assert saved is not None and saved["worker"]["outer_step"] == 1 and taken >= 2 * H
        assert saved["steps"] == saved["worker"]["inner_steps"] == taken
        assert saved["worker"]["work"][0][1] == 2 * 16 * (taken - H)
        drawn = 2 * (taken + in_the_update)  # a batch whose forward was broken off counts for nothing, and is left out
        assert saved["data"]["pass"] * 52 + saved["data"]["index"] == drawn
        training(tmp_path, LocalConnection(run, "a"), config, metrics).run(run.state.outer_step)
    assert run.finished


@pytest.mark.parametrize(
    ("sync", "in_the_update"),
    [({"mode": "forward"}, True), ({"mode": "delayed", "delay": 2}, False), ({"mode": "eager", "delay": 2}, False)],
)
def test_a_strict_peer_that_is_stopped_within_a_step_saves_nothing_that_does_not_resume_to_the_bit(
    tmp_path: Path, config: RunConfig, sync: dict[str, object], in_the_update: bool
) -> None:
    config = dataclasses.replace(config, sync=dataclasses.replace(config.sync, strict=True, **sync))
    run = LocalRun(config, ["a"])
    with Metrics(None) as metrics:
        connection = StoppedInAWait(run, "a", 1, in_the_update=in_the_update)
        with pytest.raises(Interrupted):
            training(tmp_path, connection, config, metrics, checkpoint_every=30).run(0)
    saved = last_scalars(tmp_path / "checkpoints")
    assert saved is not None and saved["steps"] % H == 0 and saved["steps"] < 2 * H
