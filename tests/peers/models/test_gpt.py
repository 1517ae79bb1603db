"""The built-in GPT: it learns, it cannot see the future, its fragments and initial values are what the run expects."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from edit.config.run import ModelConfig
from edit.errors import ConfigError
from edit.fragments.gpt import gpt_schema
from edit.fragments.schema import plan_fragments
from peers.models.gpt import GPT, rotary_table, rotate

SMALL = ModelConfig(layers=2, heads=2, width=32, context=16, vocabulary=32)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(SMALL.vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_it_learns_one_batch_by_heart() -> None:
    model = GPT(SMALL, seed=0)
    rows = tokens(2, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_an_untrained_model_is_close_to_guessing() -> None:
    rows = tokens(8, 17)
    loss = GPT(SMALL, seed=0)(rows[:, :-1], rows[:, 1:]).item()
    assert abs(loss - math.log(SMALL.vocabulary)) < 0.5


@pytest.mark.parametrize("changed", [1, 7, 15])
def test_a_later_token_does_not_change_earlier_logits(changed: int) -> None:
    model = GPT(SMALL, seed=0)
    before = tokens(1, 16)
    after = before.clone()
    after[0, changed] = (after[0, changed] + 1) % SMALL.vocabulary
    a, b = model(before), model(after)
    assert a.shape == (1, 16, SMALL.vocabulary)
    torch.testing.assert_close(a[:, :changed], b[:, :changed])
    assert not torch.allclose(a[:, changed], b[:, changed])


def test_the_order_of_earlier_tokens_matters() -> None:
    model = GPT(SMALL, seed=0)
    rows = torch.tensor([[3, 9, 20, 5], [9, 3, 20, 5]])
    a, b = model(rows)[:, -1]
    assert not torch.allclose(a, b, atol=1e-4)


def test_rotation_keeps_length_and_depends_on_distance_only() -> None:
    cos, sin = rotary_table(32, 8)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(8, generator=generator), torch.randn(8, generator=generator)
    turned_q = rotate(q.expand(1, 32, 1, 1, 8), cos, sin).view(32, 8)
    turned_k = rotate(k.expand(1, 32, 1, 1, 8), cos, sin).view(32, 8)
    torch.testing.assert_close(turned_q.norm(dim=1), q.norm().expand(32))
    scores = turned_q @ turned_k.T  # (32, 32): entry (i, j) must depend on i - j alone
    torch.testing.assert_close(scores[5, 2], scores[25, 22], rtol=1e-4, atol=1e-5)
    assert not torch.isclose(scores[5, 2], scores[5, 3])


def test_fragments_follow_the_layers() -> None:
    schema = plan_fragments(GPT(SMALL, seed=0).named_parameters())
    assert [fragment.name for fragment in schema.fragments] == ["embedding", "blocks.0", "blocks.1", "norm"]
    assert schema.fragments[1].numel == schema.fragments[2].numel == 12 * 32 * 32 + 2 * 32
    assert schema.numel == 32 * 32 + 2 * (12 * 32 * 32 + 2 * 32) + 32  # the head is the embedding


@pytest.mark.parametrize("sizes", [SMALL, ModelConfig(layers=1, heads=1, width=2, context=4, vocabulary=3), ModelConfig()])
def test_the_coordinator_knows_the_schema_without_the_model(sizes: ModelConfig) -> None:
    schema = gpt_schema(layers=sizes.layers, width=sizes.width, vocabulary=sizes.vocabulary)
    assert schema == plan_fragments(GPT(sizes, seed=None).named_parameters())


def test_the_default_size_is_what_the_documentation_says() -> None:
    assert sum(parameter.numel() for parameter in GPT(ModelConfig(), seed=0).parameters()) == 820_352


def test_initial_values_follow_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = GPT(SMALL, seed=3)
    state = torch.get_rng_state()
    second, other = GPT(SMALL, seed=3), GPT(SMALL, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_without_a_seed_all_that_is_missing_are_the_parameters() -> None:
    state = torch.get_rng_state()
    model, whole = GPT(SMALL, seed=None), GPT(SMALL, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    model.load_state_dict(whole.state_dict())
    rows = tokens(2, 16)
    assert torch.equal(model.logits(rows), whole.logits(rows))


def test_residual_projections_start_smaller() -> None:
    model = GPT(ModelConfig(layers=8, heads=4, width=64, context=8, vocabulary=64), seed=0)
    up, down = model.get_parameter("blocks.0.up.weight"), model.get_parameter("blocks.0.down.weight")
    assert (up.std() / down.std()).item() == pytest.approx(math.sqrt(16), rel=0.05)


def test_the_parameters_alone_are_the_state() -> None:
    model = GPT(SMALL, seed=0)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_an_odd_head_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.width = 15"):
        GPT(ModelConfig(width=15, heads=3), seed=0)


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens"):
        GPT(SMALL, seed=0)(tokens(1, 17))
