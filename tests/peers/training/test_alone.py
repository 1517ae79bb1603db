"""The lone baseline: equals a plain loop, writes what it promises, fails with one line."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from edit.config.run import InnerConfig, ModelConfig, RunConfig
from edit.errors import ConfigError
from peers.models.gpt import GPT
from peers.training.alone import AlonePlan, train_alone
from peers.training.data import Batches, Tokens, evaluate
from peers.training.trainer import Trainer

CPU = torch.device("cpu")
MODEL = ModelConfig(layers=1, heads=2, width=16, context=8, vocabulary=16)
CONFIG = RunConfig(model=MODEL, inner=InnerConfig(lr=0.01, batch_size=2, warmup_steps=2))
TOKENS = Tokens(np.arange(500, dtype=np.uint16) % 16, "counting", 16)


def plan(folder: Path, **changes: object) -> AlonePlan:
    values: dict[str, object] = {
        "config": CONFIG,
        "batches": Batches(TOKENS, MODEL.context, CONFIG.inner.batch_size, seed=3),
        "steps": 7,
        "progress": folder / "out" / "alone.jsonl",
        "parameters": folder / "out" / "alone.safetensors",
        "report_every": 3,
    }
    return AlonePlan(**{**values, **changes})  # type: ignore[arg-type]


def run(subject: AlonePlan) -> float | None:
    seconds = count()
    return train_alone(subject, GPT(MODEL, seed=0), device=CPU, clock=lambda: float(next(seconds)))


def lines(subject: AlonePlan) -> list[dict[str, object]]:
    return [json.loads(line) for line in subject.progress.read_text().splitlines()]


def test_it_is_the_plain_loop(tmp_path: Path) -> None:
    subject = plan(tmp_path)
    run(subject)
    batches = Batches(TOKENS, MODEL.context, CONFIG.inner.batch_size, seed=3)
    trainer = Trainer(GPT(MODEL, seed=0), batches, CONFIG.inner, total_steps=7, device=CPU, clock=lambda: 0.0)
    losses = [trainer.step().loss for _ in range(7)]
    saved = load_file(subject.parameters)
    assert saved.keys() == dict(trainer.model.named_parameters()).keys()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(saved[name], parameter), name
    assert [line["step"] for line in lines(subject)] == [3, 6, 7]
    means = [sum(losses[:3]) / 3, sum(losses[3:6]) / 3, losses[6]]
    assert [line["loss"] for line in lines(subject)] == pytest.approx(means)


def test_lines_name_their_kind_and_speed(tmp_path: Path) -> None:
    subject = plan(tmp_path, steps=2, report_every=1)
    run(subject)
    first = lines(subject)[0]
    assert first.keys() == {"kind", "step", "loss", "tokens_per_s", "lr", "t"}
    assert (first["kind"], first["tokens_per_s"]) == ("alone", 16.0)  # 2 x 8 tokens in one tick of the clock


def test_validation_on_the_way_and_at_the_end(tmp_path: Path) -> None:
    subject = plan(tmp_path, validation=TOKENS, validate_every=4)
    final = run(subject)
    found = [(line["step"], line["validation_loss"]) for line in lines(subject) if "validation_loss" in line]
    assert [step for step, _ in found] == [4, 7]
    model = GPT(MODEL, seed=1)
    model.load_state_dict(load_file(subject.parameters))
    assert final == found[-1][1] == pytest.approx(evaluate(model, TOKENS, MODEL.context, 16))


def test_no_validation_no_value(tmp_path: Path) -> None:
    assert run(plan(tmp_path, steps=1)) is None


def test_no_half_file_is_left(tmp_path: Path) -> None:
    subject = plan(tmp_path, steps=1)
    run(subject)
    assert sorted(path.name for path in subject.parameters.parent.iterdir()) == ["alone.jsonl", "alone.safetensors"]


@pytest.mark.parametrize("which", ["progress", "parameters"])
def test_a_place_that_cannot_be_written(tmp_path: Path, which: str) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        run(plan(tmp_path, steps=1, **{which: tmp_path / "taken"}))
    assert "taken" in str(caught.value)


def test_a_failure_of_the_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "final.safetensors.partial").mkdir()  # stands for any error below safetensors
    with pytest.raises(ConfigError, match=r"final\.safetensors: cannot be written"):
        run(plan(tmp_path, steps=1, parameters=tmp_path / "final.safetensors"))


@pytest.mark.parametrize("name", ["steps", "report_every", "validation_batches"])
def test_bounds(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = 0"):
        plan(tmp_path, **{name: 0})
