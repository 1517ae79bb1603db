"""A peer that trains with example-level differential privacy, to the end of a run in this process."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path

import pytest

from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.local import LocalRun
from peers.training import metrics as metrics_file
from peers.training.metrics import Metrics
from peers.training.private import LEDGER
from tests.peers.training.test_loop import LocalConnection, training

H, ROUNDS = 4, 3


def configuration(**privacy: object) -> RunConfig:
    return RunConfig.from_mapping(
        {
            "model": {"layers": 1, "heads": 1, "width": 8, "context": 16},
            "inner": {"batch_size": 2, "accumulation": 2, "warmup_steps": 2},
            "sync": {"every": H, "outer_steps": ROUNDS},
            "privacy": {"level": "example", "delta": 1e-3, "epsilon_max": 50, "noise_multiplier": 1.0, **privacy},
        }
    )


def counted(folder: Path) -> int:
    return sum(json.loads(line).get("count", 0) for line in (folder / LEDGER).read_text().splitlines())


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_it_trains_to_the_end_and_says_epsilon_and_no_loss(
    tmp_path: Path, sampling: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(metrics_file, "EVERY", 1)  # one of 55 batches is empty by chance, and has no loss
    config = configuration(sampling=sampling)
    run = LocalRun(config, ["a"])
    connection = LocalConnection(run, "a")
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        training(tmp_path, connection, config, metrics).run(0)
    assert run.finished and run.state.outer_step == ROUNDS
    beats = connection.shares[0].told
    assert all(math.isnan(beat.loss) for beat in beats)
    assert 0 < beats[3].metrics["epsilon"] <= beats[-1].metrics["epsilon"] < 50
    assert counted(tmp_path) == (H * ROUNDS if sampling == "poisson" else 1)  # 49 examples, 4 in a step
    assert "example-level, unit sequence, eps " in caplog.text
    own = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in own if line["kind"] == "step"]
    drawn = [loss for loss in losses if loss is not None]
    assert len(losses) == H * ROUNDS and drawn and all(loss > 0 for loss in drawn)


def test_it_stops_before_the_budget_is_exceeded_and_does_not_begin_again(tmp_path: Path) -> None:
    config = configuration(epsilon_max=1.3)
    run = LocalRun(config, ["a"])
    why = (
        r"^privacy\.epsilon_max = 1\.3: one more step would exceed it: .* eps 1\.[0-9]+ at delta 0\.001 .*; 10 steps counted\)$"
    )
    for run_step in (0, 2):
        with Metrics(None) as metrics, pytest.raises(ConfigError, match=why):
            training(tmp_path, LocalConnection(run, "a"), config, metrics).run(run_step)
    assert not run.finished and counted(tmp_path) == 10


def test_a_restart_counts_its_steps_again_and_a_lost_ledger_is_refused(tmp_path: Path) -> None:
    from peers.carriers.run_connection import Interrupted

    config = configuration()
    run = LocalRun(config, ["a"])
    with Metrics(None) as metrics:
        with pytest.raises(Interrupted):
            training(tmp_path, LocalConnection(run, "a", stop_after=5), config, metrics).run(0)
        assert counted(tmp_path) == 2 * H
        kept = (tmp_path / LEDGER).read_bytes()
        (tmp_path / LEDGER).unlink()
        with pytest.raises(ConfigError, match="counts 0 inner steps, and the checkpoint has 5: restore the file of then"):
            training(tmp_path, LocalConnection(run, "a"), config, metrics).run(run.state.outer_step)
        (tmp_path / LEDGER).write_bytes(kept)
        training(tmp_path, LocalConnection(run, "a"), config, metrics).run(run.state.outer_step)
    assert run.finished and counted(tmp_path) == 2 * H + 2 * H  # 7 steps were left


@pytest.mark.parametrize(
    ("privacy", "why"),
    [
        ({"delta": 0.05}, r"privacy\.delta = 0\.05: must be below 1 / 49"),
        ({"unit": "document"}, r"privacy\.unit = 'document': must be sequence with edit-peer run"),
        ({"epsilon_max": 1e-3}, r"privacy\.epsilon_max = 0\.001: one more step would exceed it"),
    ],
)
def test_what_does_not_go_with_the_data_is_refused_by_name(tmp_path: Path, privacy: dict[str, object], why: str) -> None:
    config = configuration(**privacy)
    with Metrics(None) as metrics, pytest.raises(ConfigError, match=why):
        training(tmp_path, LocalConnection(LocalRun(config, ["a"]), "a"), config, metrics).run(0)


def test_a_peers_own_bound_counts_whatever_the_run_allows(tmp_path: Path) -> None:
    config = configuration()
    run = LocalRun(config, ["a"])
    with Metrics(None) as metrics:
        with pytest.raises(ConfigError, match=r"^--max-epsilon = 1\.3: one more step would exceed it: .*; 10 steps counted"):
            training(tmp_path, LocalConnection(run, "a"), config, metrics, max_epsilon=1.3).run(0)
        plain = RunConfig.from_mapping({"model": {"layers": 1, "heads": 1, "width": 8, "context": 16}})
        other = LocalRun(plain, ["a"])
        connection = LocalConnection(other, "a")
        with pytest.raises(ConfigError, match=r'^--max-epsilon 1\.3: the run has no differential privacy .*"none"'):
            training(tmp_path, connection, plain, metrics, max_epsilon=1.3).run(0)
        assert not connection.shares[0].told and not connection.shown
        for wrong in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(ConfigError, match=r"--max-epsilon .*: must be a finite number above 0"):
                training(tmp_path, connection, plain, metrics, max_epsilon=wrong)


def test_a_ledger_of_shorter_examples_is_refused_also_by_a_peer_that_begins_anew(tmp_path: Path) -> None:
    """An operator that raises model.context would have one example of now be several of then, each of them counted once."""
    config = configuration()
    run = LocalRun(config, ["a"])
    with Metrics(None) as metrics:
        training(tmp_path, LocalConnection(run, "a"), config, metrics).run(0)
        longer = dataclasses.replace(config, model=dataclasses.replace(config.model, context=24))
        why = r"its steps count for each sequence of 16 tokens, and now they would for each sequence of 24 tokens: they do not"
        with pytest.raises(ConfigError, match=why):
            training(tmp_path, LocalConnection(LocalRun(longer, ["a"]), "a"), longer, metrics, fresh=True).run(0)
    assert counted(tmp_path) == H * ROUNDS
