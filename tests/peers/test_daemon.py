"""The daemon against a scripted coordinator: trains to the end, stops on a signal, damages on request, leaves its metrics."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from edit.config.run import RunConfig
from edit.errors import ConfigError, EvictedError
from edit.fragments.schema import plan_fragments
from edit.records import Verdict
from edit.worker.worker import EditWorker
from editpb.identity import Identity
from editpb.messages import Expel, Heartbeat, PeerState, RunPhase
from peers.carriers.hub.all_aggregators import AllAggregators
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import Interrupted
from peers.daemon import PeerOptions, attend, run_peer, server_of, stopping
from peers.identity.peer_folder import Enrolment
from peers.models.registry import build
from peers.training.fault_injection import Fault, FaultInjector, parse_faults
from peers.training.loop import Training
from peers.training.metrics import Metrics
from peers.training.torchrun import Launch
from tests.support.fake_coordinator import FIRST_ROUND, RUN_ID, FakeCoordinator

H, ROUNDS = 5, 3
CPU = torch.device("cpu")


def config(outer_steps: int = ROUNDS) -> RunConfig:
    return RunConfig.from_mapping(
        {
            "model": {"layers": 1, "heads": 1, "width": 8, "context": 16},
            "inner": {"batch_size": 2, "warmup_steps": 2},
            "sync": {"every": H, "outer_steps": outer_steps},
            "outer": {"optimizer": "sgd", "lr": 1.0},
            "membership": {"heartbeat_s": 0.05, "lease_s": 1.0},
        }
    )


def commit_until_finished(fake: FakeCoordinator) -> None:
    fake.commit()
    if fake.view.outer_step >= fake.config.sync.outer_steps:
        fake.change_view(phase=RunPhase.FINISHED, round_id=0)


@contextmanager
def coordinator(outer_steps: int = ROUNDS) -> Iterator[FakeCoordinator]:
    run = config(outer_steps)
    schema = plan_fragments(build(run.model, run.seed, frozenset()).named_parameters())
    theta = [torch.zeros(fragment.numel).normal_(generator=torch.Generator().manual_seed(1)) for fragment in schema.fragments]
    with FakeCoordinator(run, schema, theta) as fake:
        fake.script = commit_until_finished
        yield fake


def train(fake: FakeCoordinator, folder: Path, **rest: object) -> None:
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 20)
    options = PeerOptions(home=folder, data=text, **rest)  # type: ignore[arg-type]
    attend(options, Channels([f"127.0.0.1:{fake.port}"]), Identity(RUN_ID, "peer", "a"), CPU)


def hear_every_step(fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A throttled peer does not pause by the clock, but until the coordinator has heard of its step, or it of the run's end."""

    def pause(self: AllAggregators, seconds: float) -> None:
        heard, seen = len(fake.heartbeats), self._connections[0]
        fake.await_(lambda f: len(f.heartbeats) >= heard + 2 or f.view.phase is RunPhase.FINISHED)  # the first may be older
        if fake.view.phase is RunPhase.FINISHED:
            self._io.wait(lambda: ((view := seen.last_view) and view.phase is RunPhase.FINISHED) or None, timeout=10)

    monkeypatch.setattr(AllAggregators, "pause", pause)


def test_a_peer_trains_until_the_run_has_finished_and_says_goodbye(tmp_path: Path) -> None:
    with coordinator() as fake:
        train(fake, tmp_path, metrics=tmp_path / "metrics.jsonl")
        assert fake.state is not None and fake.state.outer_step == ROUNDS
        fake.await_(lambda f: f.goodbyes)
        assert fake.goodbyes[-1] == "the run has finished"
        states = {beat.state for beat in fake.heartbeats}
        assert {PeerState.TRAINING, PeerState.EXCHANGING} <= states
        assert {header.inner_steps for header in fake.headers.values()} == {H}
        assert {header.tokens for header in fake.headers.values()} == {H * 2 * 16}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    outer = [line for line in lines if line["kind"] == "outer"]
    assert [line["outer_step"] for line in outer] == [1, 2, 3]
    assert outer[-1]["digest"] == fake.state.digest
    assert [line["step"] for line in lines if line["kind"] == "step"] == [10]


def test_a_run_that_has_used_up_its_privacy_ends_the_peer_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "privacy.epsilon_max = 4: one more outer step would exceed it"

    def end(fake: FakeCoordinator, beat: Heartbeat) -> None:
        if fake.view.phase is not RunPhase.FINISHED:
            fake.change_view(phase=RunPhase.FINISHED, round_id=0, reason=why)

    with coordinator(100) as fake, caplog.at_level(logging.INFO):
        privacy = {"level": "organisation", "delta": 1e-5, "epsilon_max": 4.0, "noise_multiplier": 8.0}
        run = json.loads(fake.config.to_json())
        run["penalty"]["enabled"] = False
        fake.config = RunConfig.from_json(json.dumps({**run, "privacy": privacy}))
        fake.script = FakeCoordinator.commit
        fake.on_heartbeat = end
        hear_every_step(fake, monkeypatch)
        train(fake, tmp_path, throttle=2.0)
    (said,) = [message for message in caplog.messages if message.startswith("the run has finished")]
    assert said.endswith(why)


def test_a_run_that_is_drained_ends_the_peer_at_its_outer_step_and_the_last_state_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a phase, with nothing on its way: it does not train to the end of that phase."""

    def drain(fake: FakeCoordinator, beat: Heartbeat) -> None:
        if beat.inner_steps == H + 2 and fake.view.phase is not RunPhase.FINISHED:
            fake.change_view(phase=RunPhase.FINISHED, round_id=0, draining=True)

    with coordinator(100) as fake, caplog.at_level(logging.INFO):
        fake.script = FakeCoordinator.commit
        fake.on_heartbeat = drain
        hear_every_step(fake, monkeypatch)
        train(fake, tmp_path, throttle=2.0)
        assert fake.goodbyes[-1:] in ([], ["the run has finished"])
        assert "the run has finished at outer step 1" in caplog.text and "its operator drained it" in caplog.text
        fake.on_heartbeat = lambda fake, beat: None
        fake.script = commit_until_finished
        fake.show(phase=RunPhase.COLLECTING, round_id=FIRST_ROUND + 9, draining=False)
        fake.config = config(2)
        train(fake, tmp_path)
        steps = [int(line.split("inner step ")[1]) for line in caplog.text.splitlines() if "resuming from" in line]
        assert len(steps) == 1 and H + 2 <= steps[0] < 2 * H
        assert fake.state is not None and fake.state.outer_step == 2


@pytest.mark.parametrize(
    ("outer_step", "pending", "round_inner_steps", "position"),
    [(1, False, 3, H + 3), (2, False, 9 * H, 2 * H + 3), (1, True, 9 * H, 2 * H + 3), (4, False, 1, 2 * H + 2 * 3 + 1)],
)
def test_the_position_follows_h_where_it_changes(outer_step: int, pending: bool, round_inner_steps: int, position: int) -> None:
    training = object.__new__(Training)
    training._config = RunConfig.from_mapping({"sync": {"every": H, "milestones": [[2, 3]]}})
    share = SimpleNamespace(outer_step=outer_step, pending=pending, round_inner_steps=round_inner_steps)
    worker = cast(EditWorker, SimpleNamespace(shares=[share]))
    assert training._position(worker) == position
    assert training._soonest(worker) == (3 if outer_step + pending >= 2 else H), "an outcome that is awaited may change it"


def test_the_position_in_the_schedule_is_bounded_by_the_outer_step() -> None:
    training = object.__new__(Training)
    training._config = config()
    for outer_step, pending, round_inner_steps, position in (
        (0, False, 3, 3),
        (2, False, 9 * H, 3 * H),
        (2, True, 1, 3 * H + 1),
    ):
        furthest = SimpleNamespace(outer_step=outer_step, pending=pending, round_inner_steps=round_inner_steps)
        behind = SimpleNamespace(outer_step=0, pending=False, round_inner_steps=2)  # its aggregator was away
        for shares in ([furthest], [behind, furthest]):
            assert training._position(cast(EditWorker, SimpleNamespace(shares=shares))) == position


def test_sigterm_ends_the_wait_for_a_round_with_a_goodbye(tmp_path: Path) -> None:
    with coordinator() as fake:
        fake.script = lambda _: os.kill(os.getpid(), signal.SIGTERM)
        before = signal.getsignal(signal.SIGTERM)
        train(fake, tmp_path)
        assert signal.getsignal(signal.SIGTERM) is before
        fake.await_(lambda f: f.goodbyes)
        assert fake.goodbyes[-1] == "the peer was asked to stop"


def test_eviction_has_its_own_exit_code(tmp_path: Path) -> None:
    def evict(fake: FakeCoordinator) -> None:
        fake.expel = Expel(True, "key lost")
        fake.change_view()

    with coordinator() as fake:
        fake.script = evict
        with pytest.raises(EvictedError, match="key lost") as caught:
            train(fake, tmp_path)
        assert caught.value.exit_code == 4


def test_faults_spoil_the_contributions_asked_for_and_the_peer_recovers(tmp_path: Path) -> None:
    with coordinator(4) as fake:
        train(fake, tmp_path, faults=parse_faults("nan@1,huge@2"))
        assert fake.state is not None and fake.state.outer_step == 4
        by_step = {step: [f.verdicts[0] for f in commit.fragments] for step, commit in fake.updates.items()}
        assert [Verdict.NONFINITE in [v.verdict for v in by_step[step]] for step in (1, 2, 3, 4)] == [False, True, False, False]
        largest = {step: max(v.norm for v in verdicts) for step, verdicts in by_step.items() if step != 2}
        assert largest[3] > 1000 * largest[1] and largest[4] < largest[3] / 100


def test_throttle_reports_longer_steps(tmp_path: Path) -> None:
    with coordinator(1) as fake:
        train(fake, tmp_path, throttle=3.0)
        last = fake.heartbeats[-1]
        assert last.step_s * last.tokens_per_s == pytest.approx(2 * 16)


class TestCheckpoints:
    def folders(self, home: Path) -> list[str]:
        return sorted(path.name.rstrip("0123456789") for path in (home / "checkpoints").iterdir())

    def test_the_last_two_outer_steps_are_kept(self, tmp_path: Path) -> None:
        with coordinator() as fake:
            train(fake, tmp_path)
        assert self.folders(tmp_path) == ["checkpoint-", "checkpoint-"]

    def test_none_when_told_so(self, tmp_path: Path) -> None:
        with coordinator(1) as fake:
            train(fake, tmp_path, checkpoint_every=0)
        assert not (tmp_path / "checkpoints").exists()

    def test_a_polite_stop_between_two_steps_saves_and_the_next_life_goes_on_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        looks = iter(range(100))

        def stop_before_the_eighth_step(_: HubCollective) -> None:
            if next(looks) == 7:
                raise Interrupted("asked to stop")

        with coordinator() as fake:
            with monkeypatch.context() as patch:
                patch.setattr(HubCollective, "check", stop_before_the_eighth_step)
                train(fake, tmp_path)
            with caplog.at_level(logging.INFO):
                train(fake, tmp_path)
            assert fake.state is not None and fake.state.outer_step == ROUNDS
        assert "inner step 7" in caplog.text
        assert [header.inner_steps for header in fake.headers.values()] == [H] * len(fake.headers)  # 2 + 3 make H

    def test_one_newer_than_the_run_is_an_error_that_says_what_to_do(self, tmp_path: Path) -> None:
        with coordinator() as fake:
            train(fake, tmp_path)
        with coordinator() as other, pytest.raises(ConfigError, match=r"checkpoint-\d+: .* --fresh"):
            train(other, tmp_path)
        with coordinator() as other:
            train(other, tmp_path, fresh=True)
            assert other.state is not None and other.state.outer_step == ROUNDS
        assert [name.partition("-")[0] for name in self.folders(tmp_path)] == ["checkpoint", "checkpoint", "ignored", "ignored"]


@pytest.mark.parametrize(
    ("text", "faults"),
    [("", ()), ("nan@3", (Fault("nan", 3),)), ("nan@3,huge@5", (Fault("nan", 3), Fault("huge", 5)))],
)
def test_fault_notation(text: str, faults: tuple[Fault, ...]) -> None:
    assert parse_faults(text) == faults


@pytest.mark.parametrize("text", ["nan", "nan@", "nan@x", "zero@1", "nan@-1"])
def test_wrong_fault_notation_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--fault"):
        parse_faults(text)


class Counters:
    """What the injector looks at in a worker."""

    outer_step, round_inner_steps, pending = 1, H - 1, False

    def __init__(self, theta: torch.Tensor) -> None:
        self.theta = theta

    def state_dict(self) -> dict[str, object]:
        return {"outer": {"weight": self.theta}}


def test_nan_strikes_the_part_that_this_rank_holds() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    model[0].weight = torch.nn.Parameter(torch.empty(0, 2))  # as a shard may be
    FaultInjector(model, Counters(torch.zeros(1)), lambda _: H, (Fault("nan", 1),), lambda _: None).damage()
    assert [int(parameter.isnan().sum()) for parameter in model.parameters()] == [0, 1, 0, 0]


def test_huge_scales_the_pseudo_gradient_just_once_and_only_at_an_exchange() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    theta = model.weight.detach().clone() + 0.5
    worker, said = Counters(theta), []
    injector = FaultInjector(model, worker, lambda _: H, (Fault("huge", 1),), said.append)
    worker.round_inner_steps = 0
    injector.damage()
    worker.round_inner_steps, worker.pending = H - 1, True
    injector.damage()
    worker.pending, worker.outer_step = False, 0
    injector.damage()
    assert torch.allclose(theta - model.weight, torch.tensor(0.5))
    worker.outer_step = 1
    injector.damage()
    injector.damage()
    assert torch.allclose(theta - model.weight, torch.tensor(5000.0))
    assert said == ["injected fault: huge at outer step 1"]


def attacked(worker: Counters, model: torch.nn.Linear, fault: str) -> FaultInjector:
    return FaultInjector(model, worker, lambda _: H, parse_faults(fault), lambda _: None)


def exchange(worker: Counters, model: torch.nn.Linear, injector: FaultInjector, drift: torch.Tensor) -> torch.Tensor:
    """Let the peer drift from theta, and return what it contributes (local - outer) after the injector has seen it."""
    with torch.no_grad():
        model.weight.copy_(worker.theta + drift)
    injector.damage()
    return model.weight.detach() - worker.theta


def test_a_flipped_sign_lasts() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    worker, drift = Counters(torch.zeros(1, 2)), torch.tensor([[3.0, 4.0]])
    injector = attacked(worker, model, "flip@1+")
    for _ in range(2):
        assert torch.equal(exchange(worker, model, injector, drift), -drift)
    worker.outer_step = 0
    early = attacked(worker, model, "flip@1+")
    assert torch.equal(exchange(worker, model, early, drift), drift)


@pytest.mark.parametrize(("fault", "sign"), [("reverse@1+", -1.0), ("copy@1+", 1.0)])
def test_the_last_update_is_repeated_or_reversed_as_long_as_an_honest_contribution(fault: str, sign: float) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    worker, drift = Counters(torch.zeros(1, 2)), torch.tensor([[3.0, 4.0]])
    injector = attacked(worker, model, fault)
    assert torch.equal(exchange(worker, model, injector, drift), sign * drift)  # there is no update yet
    worker.theta = torch.tensor([[0.5, 0.0]])
    assert torch.allclose(exchange(worker, model, injector, drift), torch.tensor([[sign * 5.0, 0.0]]))
    worker.theta = torch.tensor([[0.5, -2.0]])
    assert torch.allclose(exchange(worker, model, injector, drift), torch.tensor([[0.0, sign * -5.0]]))


@pytest.mark.parametrize("text", ["nan", "nan@", "nan@+", "nan@1++", "nan@-1", "worse@1", "nan@²"])
def test_a_fault_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be KIND@OUTER_STEP, .* a KIND is nan, huge, flip, reverse, copy"):
        parse_faults(text)


def test_options_name_what_is_wrong(tmp_path: Path) -> None:
    for wrong, word in (
        ({"throttle": 0.5}, "--throttle"),
        ({"threads": 0}, "--threads"),
        ({"data": tmp_path / "x"}, "--data"),
        ({"checkpoint_every": -1}, "--checkpoint-every"),
        ({"keep_checkpoints": 0}, "--keep-checkpoints"),
        ({"serve_snapshots": "7801"}, "--serve-snapshots 7801: must be HOST:PORT"),
        ({"serve_snapshots": "host:70000"}, "--serve-snapshots host:70000: must be HOST:PORT"),
        ({"serve_snapshots": "0.0.0.0:0"}, "others cannot connect to 0.0.0.0; .* --advertise"),
        ({"serve_snapshots": "[::]:7801"}, "--advertise"),
        ({"serve_snapshots": "0.0.0.0:0", "advertise": "host:1"}, "--advertise host:1: .* without a port"),
        ({"advertise": "host"}, "--advertise host: .* --serve-snapshots"),
    ):
        with pytest.raises(ConfigError, match=word):
            PeerOptions(**{"home": tmp_path, "data": tmp_path, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("listen", "advertise", "host"),
    [("127.0.0.1:0", None, "127.0.0.1"), ("[::1]:7801", None, "[::1]"), ("0.0.0.0:10", "peer.example", "peer.example")],
)
def test_where_readers_of_snapshots_connect(tmp_path: Path, listen: str, advertise: str | None, host: str) -> None:
    assert PeerOptions(home=tmp_path, data=tmp_path, serve_snapshots=listen, advertise=advertise).serving_host == host


def test_a_rank_of_several_serves_no_snapshots(tmp_path: Path) -> None:
    options = PeerOptions(home=tmp_path, data=tmp_path, serve_snapshots="127.0.0.1:0")
    with pytest.raises(ConfigError, match="a rank of 2 holds only its part of the parameters; leave it out"):
        server_of(options, cast(Enrolment, None), Launch(rank=1, size=2, local_rank=1, local_size=2))


def test_a_folder_that_is_not_enrolled_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="edit-peer join"):
        run_peer(PeerOptions(home=tmp_path, data=tmp_path))


def test_metrics_are_flushed_line_by_line_and_know_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.jsonl"
    with Metrics(path, clock=lambda: 12.5) as metrics:
        metrics.step(9, 1.0, 2.0, 3)
        metrics.step(10, float("nan"), 2.0, 3)
        line = json.loads(path.read_text())
        metrics.snapshot(3, "abcd", ("b", "the aggregator"))
    taken = json.loads(path.read_text().splitlines()[-1])
    sources = ["b", "the aggregator"]
    assert taken == {"kind": "snapshot", "t": 12.5, "outer_step": 3, "digest": "abcd", "sources": sources}
    assert line == {"kind": "step", "t": 12.5, "step": 10, "loss": None, "tokens_per_s": 2.0, "outer_step": 3}


def test_a_metrics_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--metrics"), Metrics(tmp_path):
        pass


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_of_either_kind_ends_the_process_at_once(first: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with IoThread() as io, stopping(io):
        signal.raise_signal(first)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL is signal.getsignal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            io.wait(lambda: None)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_command_that_catches_no_interruption_ends_as_by_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt), IoThread() as io, stopping(io):
        signal.raise_signal(signal.SIGINT)
        io.wait(lambda: None, timeout=20)
