"""The gate before model code: only what this peer's own operator allowed is ever loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
import torch
from torch import nn

from edit.config.run import ModelConfig
from edit.errors import ConfigError
from peers.models.gpt import GPT
from peers.models.registry import build

GROUP = "edit.models"
NOBODY: frozenset[str] = frozenset()
ALLOWED = frozenset({"mine"})
CONFIG = ModelConfig(name="entry:mine", context=8, vocabulary=16, options={"hidden": 3})


class Mine(nn.Module):
    def __init__(self, options: Mapping[str, str | int | float | bool]) -> None:
        super().__init__()
        self.options = dict(options)
        self.layer = nn.Linear(int(options["hidden"]), 1)


@pytest.fixture
def offer() -> Iterator[str]:
    """A module that some other package brings, importable for the test only."""
    module = ModuleType("a_package_of_the_operator")
    module.Mine = Mine  # type: ignore[attr-defined]
    module.number = lambda options: 7  # type: ignore[attr-defined]
    module.constant = 7  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module.__name__
    del sys.modules[module.__name__]


def test_the_builtin_needs_no_permission() -> None:
    assert isinstance(build(ModelConfig(layers=1, width=8, heads=1), 0, NOBODY), GPT)


def test_an_entry_point_that_was_not_allowed_is_never_loaded() -> None:
    booby_trap = EntryPoint("mine", "no.such.module_at_all:make", GROUP)  # loading it would be a different error
    with pytest.raises(ConfigError, match="--allow mine"):
        build(CONFIG, 0, frozenset({"other"}), [booby_trap])


def test_an_allowed_entry_point_gets_one_mapping(offer: str) -> None:
    model = build(CONFIG, 0, ALLOWED, [EntryPoint("mine", f"{offer}:Mine", GROUP)])
    assert isinstance(model, Mine)
    assert model.options == {"hidden": 3, "context": 8, "vocabulary": 16}


def test_its_initial_values_follow_from_the_seed(offer: str) -> None:
    installed = [EntryPoint("mine", f"{offer}:Mine", GROUP)]
    state = torch.get_rng_state()
    a, b, c = (build(CONFIG, seed, ALLOWED, installed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(next(a.parameters()), next(b.parameters()))
    assert not torch.equal(next(a.parameters()), next(c.parameters()))


def test_the_environment_is_searched_by_default() -> None:
    with pytest.raises(ConfigError, match="no installed package"):
        build(ModelConfig(name="entry:surely_not_installed"), 0, frozenset({"surely_not_installed"}))


def test_another_group_does_not_count(offer: str) -> None:
    with pytest.raises(ConfigError, match=r"edit\.models"):
        build(CONFIG, 0, ALLOWED, [EntryPoint("mine", f"{offer}:Mine", "console_scripts")])


def test_two_packages_with_one_name_are_ambiguous(offer: str) -> None:
    both = [EntryPoint("mine", f"{offer}:{attribute}", GROUP) for attribute in ("Mine", "number")]
    with pytest.raises(ConfigError, match="more than once"):
        build(CONFIG, 0, ALLOWED, both)


def test_the_same_offer_seen_twice_is_not(offer: str) -> None:
    assert isinstance(build(CONFIG, 0, ALLOWED, [EntryPoint("mine", f"{offer}:Mine", GROUP)] * 2), Mine)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [("absent", "cannot be loaded"), ("constant", "is not callable"), ("number", "gave a int, not an nn.Module")],
)
def test_a_broken_offer_is_named(offer: str, attribute: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(CONFIG, 0, ALLOWED, [EntryPoint("mine", f"{offer}:{attribute}", GROUP)])


def test_an_offer_of_a_missing_module_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build(CONFIG, 0, ALLOWED, [EntryPoint("mine", "no.such.module_at_all:make", GROUP)])


def test_an_option_that_the_run_already_sets_is_an_error(offer: str) -> None:
    config = ModelConfig(name="entry:mine", options={"context": 4})
    with pytest.raises(ConfigError, match=r"model\.options\.context"):
        build(config, 0, ALLOWED, [EntryPoint("mine", f"{offer}:Mine", GROUP)])
