"""Text generation: follows the model, is fixed by the seed, stays within bytes and within the context."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from edit.config.run import ModelConfig
from edit.errors import ConfigError
from peers.models.gpt import GPT
from peers.training.sample import generate

MODEL = GPT(ModelConfig(layers=1, heads=2, width=16, context=8, vocabulary=256), seed=0)


class NextByte(nn.Module):
    """Always surest of (last token + 1), less sure of + 2, and loves ids that are no bytes. Notes the windows it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.windows: list[list[int]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.windows.append(tokens[0].tolist())
        logits = torch.zeros(1, tokens.shape[1], 300)
        logits[0, -1, (tokens[0, -1] + 1) % 256] = 3.0
        logits[0, -1, (tokens[0, -1] + 2) % 256] = 2.0
        logits[0, -1, 256:] = 100.0
        return logits


def test_greedy_follows_the_likeliest_byte() -> None:
    assert generate(NextByte(), b"a", 4, context=8, temperature=0) == b"bcde"


def test_ids_above_a_byte_are_never_drawn() -> None:
    assert len(generate(NextByte(), b"a", 50, context=8, temperature=2.0, top_k=0)) == 50


def test_top_k_keeps_to_the_likeliest() -> None:
    text = b"\0" + generate(NextByte(), b"\0", 60, context=8, temperature=5.0, top_k=2)
    jumps = {(b - a) % 256 for a, b in pairwise(text)}
    assert jumps == {1, 2}


def test_the_window_grows_then_slides() -> None:
    model = NextByte()
    generate(model, b"\x01\x02", 3, context=3, temperature=0)
    assert model.windows == [[1, 2], [1, 2, 3], [2, 3, 4]]


def test_an_empty_prompt_starts_a_file_and_is_not_part_of_it() -> None:
    model = NextByte()
    assert generate(model, b"", 2, context=4, temperature=0) == b"\x01\x02"
    assert model.windows[0] == [0]


def test_the_seed_fixes_the_text() -> None:
    first, same, other = (generate(MODEL, b"def ", 40, context=8, seed=seed) for seed in (1, 1, 2))
    assert first == same != other


def test_length_zero_and_a_prompt_longer_than_the_context() -> None:
    assert generate(MODEL, b"abc", 0, context=8) == b""
    assert len(generate(MODEL, bytes(range(100)), 5, context=8)) == 5


def test_the_training_flag_stays() -> None:
    MODEL.train()
    generate(MODEL, b"a", 1, context=8)
    assert MODEL.training


@pytest.mark.parametrize("setting", ["length", "temperature", "top_k"])
def test_negative_settings(setting: str) -> None:
    values: dict[str, int] = {"length": 1, "temperature": 1, "top_k": 1, setting: -1}
    with pytest.raises(ConfigError, match=f"{setting} = -1"):
        generate(MODEL, b"a", values["length"], context=8, temperature=values["temperature"], top_k=values["top_k"])
