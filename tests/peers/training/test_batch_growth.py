"""The norm test against its definition, and a batch that grows by it: in a trainer, in the loop, over a stop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from edit.config.run import InnerConfig, ModelConfig, RunConfig
from edit.errors import ConfigError, StorageError
from edit.local import LocalRun
from edit.records import Contribution
from peers.carriers.run_connection import Interrupted
from peers.models.gpt import GPT
from peers.training.batch_growth import BatchGrowth, variance_of_mean
from peers.training.metrics import Metrics
from peers.training.trainer import Trainer
from tests.peers.training.test_loop import LocalConnection, LocalShare, training

MODEL = ModelConfig(layers=1, heads=2, width=16, context=8, vocabulary=16)
GROWING = InnerConfig(batch_size=2, accumulation=2, batch_growth=4, norm_test=0.01, warmup_steps=0)


def batches(rows: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        drawn = torch.randint(16, (rows, 9), generator=generator)
        yield drawn[:, :-1], drawn[:, 1:]


def trainer(config: InnerConfig, rows: int = 2) -> Trainer:
    cpu = torch.device("cpu")
    return Trainer(GPT(MODEL, seed=0), batches(rows), config, total_steps=100, device=cpu, clock=lambda: 0.0)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_on_average_over_which_comes_first_it_is_the_sample_variance_of_the_mean(count: int) -> None:
    gradients = torch.randn(count, 50, generator=torch.Generator().manual_seed(count), dtype=torch.float64) + 0.3
    mean = gradients.mean(0)
    naive = float(((gradients - mean) ** 2).sum() / (count - 1) / count)
    each = [variance_of_mean(float(one.square().sum()), float(mean.square().sum()), count) for one in gradients]
    assert sum(each) / count == pytest.approx(naive, rel=1e-12)


def test_the_trainer_gives_it_the_norms_of_the_first_micro_batch_and_of_all() -> None:
    grown = trainer(replace(GROWING, clip_norm=1e-3))  # they are those before the clip
    grown.growth = growth = BatchGrowth(8, 0.5)
    growth.factor = 2
    seen: list[tuple[float, float, int]] = []
    growth.observe = lambda *norms: seen.append(norms)  # type: ignore[method-assign]
    model, source, gradients = GPT(MODEL, seed=0), batches(2), list[Tensor]()
    for _ in range(4):
        model.zero_grad()
        model(*next(source)).backward()
        gradients.append(
            torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        )
    result = grown.step()
    assert result.tokens == 4 * 2 * 8 and grown.batch == 8
    ((first, mean, count),) = seen
    assert count == 4
    assert first == pytest.approx(float(gradients[0].norm()), rel=1e-5)
    assert mean == pytest.approx(float(torch.stack(gradients).mean(0).norm()), rel=1e-5)


def test_a_grown_batch_trains_as_a_configured_one() -> None:
    grown, configured = trainer(GROWING), trainer(InnerConfig(batch_size=2, accumulation=4, warmup_steps=0))
    assert grown.growth is not None and configured.growth is None
    grown.growth.factor = 2
    for _ in range(3):
        assert grown.step().loss == configured.step().loss
    assert all(map(torch.equal, grown.model.parameters(), configured.model.parameters()))
    assert not configured.exchanged() and configured.batch == grown.batch == 8


def test_it_doubles_where_the_test_fails_and_never_beyond_the_most() -> None:
    growth = BatchGrowth(5, 0.5)
    assert not growth.exchanged() and math.isnan(growth.ratio), "nothing was seen"
    growth.observe(1.2, 1.0, 2)  # a variance of 0.44
    assert growth.ratio == pytest.approx(0.44) and growth.exchanged() and growth.factor == 2
    growth.observe(1.1, 1.0, 2)  # 0.21: it passes
    assert not growth.exchanged() and growth.factor == 2
    growth.observe(math.nan, 1.0, 2)
    growth.observe(math.inf, math.inf, 2)
    growth.observe(1.6, 1.0, 2)  # 1.56, and 0.8 of what was before
    assert growth.ratio == pytest.approx((1.56 + 0.8 * 0.21) / 1.8)
    assert growth.exchanged() and growth.factor == 4
    growth.observe(2.0, 1.0, 2)
    assert not growth.exchanged() and growth.factor == 4, "8 are more than 5"


def test_its_state_is_kept_and_a_damaged_one_refused() -> None:
    growth, again = BatchGrowth(8, 0.5), BatchGrowth(8, 0.5)
    growth.observe(1.6, 1.0, 2)
    growth.exchanged()
    growth.observe(1.1, 1.0, 2)
    again.load(growth.state())
    assert again.state() == growth.state() and again.factor == 2
    lower = BatchGrowth(2, 0.5)
    lower.load([8, 0.0, 0.0])
    assert lower.factor == 2, "the setting is another one now"
    for damaged in (
        [],
        [3, 0.0, 0.0],
        [0, 0.0, 0.0],
        [2, math.nan, 0.0],
        [2, 0.0, -1.0],
        ["2", 0.0, 0.0],
        [True, 0.0, 0.0],
        "224",
    ):
        with pytest.raises(StorageError, match="batch that grows"):
            again.load(damaged)  # type: ignore[arg-type]


class Noting(LocalShare):
    """What a peer says is behind its contributions."""

    def contribute(self, contribution: Contribution) -> None:
        said.append((contribution.outer_step, contribution.inner_steps, contribution.tokens))
        super().contribute(contribution)


said: list[tuple[int, int, int]] = []


def connection(run: LocalRun, stop_after: int = 1 << 30) -> LocalConnection:
    made = LocalConnection(run, "a", stop_after)
    made.shares = (Noting(run, "a"),)
    return made


def run_config() -> RunConfig:
    inner = {"batch_size": 2, "accumulation": 2, "batch_growth": 4, "norm_test": 0.01, "warmup_steps": 2}
    model = {"layers": 1, "heads": 1, "width": 8, "context": 16}
    return RunConfig.from_mapping({"model": model, "inner": inner, "sync": {"every": 5, "outer_steps": 4}})


@pytest.mark.parametrize("stop_after", [None, 7, 12])
def test_a_peer_doubles_its_batch_after_exchanges_counts_what_it_trained_and_resumes_with_it(
    tmp_path: Path, stop_after: int | None
) -> None:
    config, whole = run_config(), LocalRun(run_config(), ["a"])
    said.clear()
    with Metrics(None) as metrics:
        training(tmp_path, connection(whole), config, metrics, home=tmp_path / "whole").run(0)
        step = 2 * 2 * 16
        assert {outer: (steps, tokens) for outer, steps, tokens in said} == {
            0: (5, 5 * step),
            1: (5, 5 * 2 * step),
            2: (5, 5 * 4 * step),
            3: (5, 5 * 4 * step),
        }
        assert whole.tokens == (1 + 2 + 4 + 4) * 5 * step
        if stop_after is None:
            return
        run = LocalRun(config, ["a"])
        with pytest.raises(Interrupted):
            training(tmp_path, connection(run, stop_after), config, metrics, home=tmp_path / "cut").run(0)
        training(tmp_path, connection(run), config, metrics, home=tmp_path / "cut").run(run.state.outer_step)
    assert run.state.digest == whole.state.digest and run.tokens == whole.tokens


@pytest.mark.parametrize(
    ("inner", "more", "words"),
    [
        ({"batch_growth": 2}, {}, r"inner.accumulation = 1: must be at least 2 with inner.batch_growth = 2"),
        ({"norm_test": 0.5}, {}, r"inner.norm_test has no effect with inner.batch_growth = 1"),
        ({"batch_growth": 0}, {}, r"inner.batch_growth"),
        ({"batch_growth": 2, "accumulation": 2, "norm_test": 1.5}, {}, r"inner.norm_test"),
        (
            {"batch_growth": 2, "accumulation": 2},
            {"privacy": {"level": "example", "delta": 1e-6, "epsilon_max": 8.0, "noise_multiplier": 1.0}},
            r"inner.batch_growth = 2: must be 1 with privacy.level = \"example\"",
        ),
    ],
)
def test_settings_that_cannot_be(inner: dict[str, object], more: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig.from_mapping({"inner": inner, **more})


def test_where_the_batch_stays_the_configuration_is_what_it_was() -> None:
    assert "batch_growth" not in RunConfig().to_json() and "norm_test" not in RunConfig().to_json()
    assert RunConfig.from_json(run_config().to_json()).inner.batch_growth == 4
