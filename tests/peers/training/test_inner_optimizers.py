from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from edit import plugins
from edit.config.run import InnerConfig, ModelConfig, RunConfig
from edit.errors import ConfigError, PluginError
from peers.models.gpt import GPT
from peers.training.inner_optimizers import inner_optimizers, matrices, optimizers_of

CPU = torch.device("cpu")
SMALL = ModelConfig(layers=2, heads=2, width=16, context=8)


def names_in(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    return {owners[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]}


def test_muon_has_the_blocks_matrices_and_adamw_the_rest() -> None:
    model = GPT(SMALL, 0)
    muon, adamw = inner_optimizers(model, InnerConfig(optimizer="muon", momentum=0.9), CPU)
    blocks = {name for name, each in model.named_parameters() if name.startswith("blocks.") and each.ndim == 2}
    assert isinstance(muon, torch.optim.Muon) and names_in(model, muon) == blocks
    assert muon.param_groups[0]["momentum"] == 0.9
    assert isinstance(adamw, torch.optim.AdamW)
    assert names_in(model, adamw) == {name for name, _ in model.named_parameters()} - blocks
    assert set(optimizers_of((muon, adamw), dict(model.named_parameters())).values()) == {muon, adamw}


def test_a_head_of_its_own_is_no_matrix_of_muon() -> None:
    model = nn.ModuleDict(
        {"tokens": nn.Embedding(50, 8), "up": nn.Linear(8, 32), "down": nn.Linear(32, 8), "head": nn.Linear(8, 50)}
    )
    assert {id(each) for each in matrices(model)} == {id(model["up"].weight), id(model["down"].weight)}  # type: ignore[arg-type]
    model["up"].weight.requires_grad_(False)  # type: ignore[operator, union-attr]
    assert len(matrices(model)) == 1


@pytest.mark.parametrize("width", [16, 32, 64])
def test_a_block_as_wide_as_the_vocabulary_or_the_context_is_all_muons(width: int) -> None:
    class Learned(nn.Module):
        """Learned positions and a head of its own, both beside the blocks."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(32, width), nn.Embedding(64, width)
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(2)]
            )
            self.heads = nn.ModuleList([nn.Linear(width, 32)])

    model = Learned()
    assert {id(each) for each in matrices(model)} == {id(each) for each in model.blocks.parameters() if each.ndim == 2}
    small = GPT(ModelConfig(layers=2, heads=2, width=width, context=8, vocabulary=width), 0)
    assert {id(each) for each in matrices(small)} == {id(each) for each in small.blocks.parameters() if each.ndim == 2}


def test_muon_without_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no matrices"):
        inner_optimizers(nn.LayerNorm(4), InnerConfig(optimizer="muon"), CPU)


def test_sgd_and_classes_of_torch() -> None:
    model = GPT(SMALL, 0)
    (sgd,) = inner_optimizers(model, InnerConfig(optimizer="sgd", momentum=0.0), CPU)
    assert isinstance(sgd, torch.optim.SGD) and not sgd.param_groups[0]["nesterov"]
    (adam,) = inner_optimizers(model, InnerConfig(optimizer="torch:NAdam", options={"momentum_decay": 0.1}), CPU)
    assert isinstance(adam, torch.optim.NAdam) and adam.param_groups[0]["momentum_decay"] == 0.1
    assert [group["weight_decay"] for group in adam.param_groups] == [0.1, 0.0]
    with pytest.raises(ConfigError, match=r"inner.options: torch.optim.NAdam says: .*zeal"):
        inner_optimizers(model, InnerConfig(optimizer="torch:NAdam", options={"zeal": 1}), CPU)


@pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
def test_what_torch_cannot_shard_is_refused_before_the_first_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = GPT(SMALL, 0), InnerConfig(optimizer=f"torch:{name}")
    inner_optimizers(model, config, CPU)
    monkeypatch.setattr("peers.training.inner_optimizers.DTensor", nn.Parameter)  # as if all were shards
    inner_optimizers(model, InnerConfig(optimizer="torch:NAdam"), CPU)
    with pytest.raises(ConfigError, match=f"inner.optimizer = 'torch:{name}': a sharded replica has none"):
        inner_optimizers(model, config, CPU)


def test_what_only_gpus_have_is_refused_on_a_cpu() -> None:
    model = GPT(SMALL, 0)
    inner_optimizers(model, InnerConfig(optimizer="torch:Adam", options={"capturable": False}), CPU)
    with pytest.raises(ConfigError, match=r"inner\.options\.capturable: torch has it on GPUs only"):
        inner_optimizers(model, InnerConfig(optimizer="torch:Adam", options={"capturable": True}), CPU)


@pytest.mark.parametrize("name", ["torch:LBFGS", "torch:Optimizer", "torch:__class__", "adam", "entry:a.b", "torch:", "entry:"])
def test_no_other_name_is_looked_up(name: str) -> None:
    with pytest.raises(ConfigError, match=r"inner\.optimizer"):
        InnerConfig(optimizer=name)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"momentum": 0.5}, 'inner.momentum has no effect with inner.optimizer = "adamw"'),
        ({"optimizer": "sgd", "beta1": 0.5}, 'inner.beta1 has no effect with inner.optimizer = "sgd"'),
        ({"optimizer": "torch:Adam", "beta1": 0.5}, "inner.beta1 has no effect"),
        ({"optimizer": "muon", "options": {"a": 1}}, "inner.options has no effect"),
    ],
)
def test_settings_without_effect_are_refused(written: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RunConfig.from_mapping({"inner": written})


def test_a_configuration_without_the_new_settings_is_what_it_was() -> None:
    text = RunConfig().to_json()
    assert '"optimizer": "adamw"' not in text
    assert RunConfig.from_json(text) == RunConfig()
    muon = RunConfig.from_mapping({"inner": {"optimizer": "muon"}})
    assert RunConfig.from_json(muon.to_json()) == muon


def test_a_plugin_is_asked_only_when_it_is_allowed_and_its_optimizer_is_checked() -> None:
    model = GPT(SMALL, 0)
    config = InnerConfig(optimizer="entry:test_lion", options={"weight_decay": 0.5})
    with pytest.raises(ConfigError, match="--allow test_lion"):
        inner_optimizers(model, config, CPU)
    plugins.register("optimizers", "test_lion", lambda groups, options: torch.optim.SGD(groups, **options))
    (made,) = inner_optimizers(model, config, CPU)
    assert made.param_groups[0]["lr"] == 2e-3
    plugins.register("optimizers", "test_lion", lambda groups, options: torch.optim.SGD(groups[:1], **options))
    with pytest.raises(PluginError, match="must train the parameters that it was given"):
        inner_optimizers(model, config, CPU)
    plugins.register("optimizers", "test_lion", lambda groups, options: object())
    with pytest.raises(PluginError, match="gave a object"):
        inner_optimizers(model, config, CPU)
