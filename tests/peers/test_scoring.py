"""What a scorer measures, and in which order it reads, scores and goes on."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch

from edit.config.run import ModelConfig
from edit.errors import ConfigError, GoneError, StaleError
from edit.replica.layout import exchanged
from peers.models.gpt import GPT
from peers.scoring import HeldOut, _Newest, follow
from peers.training.data import Tokens

MODEL = ModelConfig(layers=1, heads=1, width=8, context=8)
TOKENS = Tokens(np.random.default_rng(0).integers(0, 256, 400).astype(np.uint8), "held out", 256)


def test_the_loss_is_of_the_given_parameters_on_windows_that_the_digest_draws() -> None:
    model = GPT(MODEL, 1)
    schema, named = exchanged(model, "local")
    own = [
        torch.cat([named[spec.name].detach().flatten() for spec in fragment.tensors]).clone() for fragment in schema.fragments
    ]
    held_out = HeldOut(GPT(MODEL, 2), schema, TOKENS, MODEL.context, 40)
    held_out.draw("a" * 64)
    first = held_out.loss(own)
    rows = held_out._rows
    assert rows is not None and rows.shape == (40, 9)
    with torch.no_grad():
        assert first == pytest.approx(float(model(rows[:, :-1], rows[:, 1:])), rel=1e-5)
    assert held_out.loss([part * 0 for part in own]) == pytest.approx(math.log(256), rel=1e-4)
    assert held_out.loss(own) == first
    held_out.draw("b" * 64)
    assert held_out.loss(own) != first
    held_out.draw("a" * 64)
    assert held_out.loss(own) == first


def test_parameters_of_another_model_are_refused() -> None:
    schema, _ = exchanged(GPT(ModelConfig(layers=2, heads=1, width=8, context=8), 1), "local")
    with pytest.raises(ConfigError, match="of another model than"):
        HeldOut(GPT(MODEL, 1), schema, TOKENS, MODEL.context, 4)


class Script:
    """A scorer that notes what it is asked, and lets the run go on."""

    def __init__(self, newest: _Newest, steps: list[int], late: int = 0, gone: int = 0) -> None:
        self.newest, self.steps, self.late, self.gone = newest, steps, late, gone
        self.did: list[str] = []
        self.have = 0

    async def take(self) -> int:
        self.did.append("take")
        self.have = self.newest.outer_step
        return self.have

    async def advance(self) -> int:
        if self.have + 1 == self.gone:
            self.gone = 0
            raise GoneError("kept no longer")
        self.have += 1
        self.did.append(f"advance {self.have}")
        return self.have

    async def prepare(self) -> float:
        if self.steps:
            self.newest.outer_step = self.steps.pop(0)
        else:
            self.newest.finished = True
        self.newest.changed.set()
        return 1.0

    async def score(self) -> dict[str, float]:
        self.did.append(f"score {self.have + 1}")
        if self.have + 1 == self.late:
            raise StaleError("late")
        return {}


@pytest.mark.parametrize(
    ("steps", "options", "did"),
    [
        ([6, 7], {}, ["take", "score 6", "advance 6", "score 7", "advance 7"]),
        ([6, 9], {}, ["take", "score 6", "advance 6", "advance 7", "advance 8", "score 9", "advance 9"]),
        ([6, 7], {"late": 6}, ["take", "score 6", "advance 6", "score 7", "advance 7"]),
        ([6, 9], {"gone": 7}, ["take", "score 6", "advance 6", "take"]),
    ],
    ids=["each", "behind", "late", "gone"],
)
def test_it_scores_the_last_outer_step_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, steps: list[int], options: dict[str, Any], did: list[str]
) -> None:
    monkeypatch.setattr("peers.scoring._AGAIN_S", 0.0)

    async def scenario() -> list[str]:
        newest = _Newest()
        newest.outer_step = 5
        script = Script(newest, list(steps), **options)
        await follow(script, newest)  # type: ignore[arg-type]
        return script.did

    assert asyncio.run(scenario()) == did
