"""DP-SGD's gradients by Opacus: what they are, what they tell, what is counted before them, and what is refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from edit.config.privacy import PrivacyConfig
from edit.config.run import ModelConfig, RunConfig
from edit.errors import ConfigError, StorageError
from edit.integrations.opacus import BudgetSpent, PrivateGradients
from edit.local import LocalCollective, LocalRun
from edit.worker.worker import EditWorker, WorkerConfig
from peers.models.gpt import GPT

N = 64


def entropy(seed: int = 0) -> Callable[[int], bytes]:
    generator = torch.Generator().manual_seed(seed)
    return lambda size: bytes(torch.randint(0, 256, (size,), generator=generator).tolist())


def privacy(**settings: object) -> PrivacyConfig:
    return PrivacyConfig(
        **{"level": "example", "delta": 1e-3, "epsilon_max": 100.0, "noise_multiplier": 1.0, **settings}  # type: ignore[arg-type]
    )


class Regression:
    """Rows of a linear task, and a model for it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(N, 6, generator=generator), torch.randn(N, 1, generator=generator)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.LayerNorm(5, bias=False), nn.Linear(5, 1))
        self.reference = copy.deepcopy(self.model)  # without hooks
        self.drawn: list[list[int]] = []

    def fetch(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.drawn.append(list(numbers))
        return self.x[list(numbers)], self.y[list(numbers)]

    @staticmethod
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    def gradients(self, folder: Path, settings: PrivacyConfig | None = None, **arguments: object) -> PrivateGradients:
        given = {"batch_size": 8, "at_once": 3, "planned": 50, "block": 10, "entropy": entropy(), **arguments}
        made = PrivateGradients(
            self.model, N, self.fetch, self.loss, settings or privacy(), ledger=folder / "ledger.jsonl", **given
        )
        self.drawn.clear()
        return made

    def clipped(self, numbers: Sequence[int], clip: float) -> list[Tensor]:
        """The sum of these examples' clipped gradients, one by one, by autograd alone."""
        parameters = list(self.reference.parameters())
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for number in numbers:
            each = torch.autograd.grad(self.loss(self.reference, (self.x[[number]], self.y[[number]])), parameters)
            norm = torch.sqrt(sum((gradient**2).sum() for gradient in each))
            for sum_, gradient in zip(total, each, strict=True):
                sum_ += gradient * min(1.0, clip / (float(norm) + 1e-6))
        return total


@pytest.mark.covering
@pytest.mark.parametrize("clip", [0.05, 1e3])
@pytest.mark.parametrize("at_once", [3, 64])
def test_gradients_are_the_mean_of_clipped_ones_and_noise(tmp_path: Path, clip: float, at_once: int) -> None:
    task = Regression()
    with task.gradients(tmp_path, privacy(clip=clip, noise_multiplier=0.3), at_once=at_once) as private:
        private._noised._noise.normal = np.zeros  # type: ignore[method-assign]
        for _ in range(4):
            task.drawn.clear()
            private.backward()
            got = [parameter.grad.clone() for parameter in task.model.parameters()]
            expected = task.clipped([number for part in task.drawn for number in part], clip)
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(one, other / 8, rtol=1e-4, atol=1e-6)


class Rows:
    """Examples whose gradients are their rows: the loss is the mean of a linear layer's sums."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.model = rows, nn.Linear(rows.shape[1], 1, bias=False)

    def gradients(self, folder: Path, **arguments: object) -> PrivateGradients[Tensor]:
        count = len(self.rows)
        given = {"batch_size": count, "at_once": count, "planned": 1, "block": 1, "entropy": entropy(), **arguments}
        settings = privacy(sampling="shuffle", clip=1.0)
        return PrivateGradients(
            self.model,
            count,
            lambda numbers: self.rows[list(numbers)],
            lambda model, batch: model(batch).sum() / len(batch),
            settings,
            ledger=folder / "ledger.jsonl",
            **given,  # type: ignore[arg-type]
        )

    def summed(self, private: PrivateGradients[Tensor]) -> Tensor:
        private.backward()
        assert self.model.weight.grad is not None
        return self.model.weight.grad[0] * len(self.rows)


def test_nothing_is_rounded_before_the_noise_is_added(tmp_path: Path) -> None:
    """Or the last bits of one step tell two sets of examples apart."""
    below = 0.4 * torch.finfo(torch.float32).eps  # of 1 it is lost in fp32, twice of it is not
    task = Rows(torch.tensor([[below] * 4, [0.0] * 4]))
    with task.gradients(tmp_path) as private:
        private._noised._noise.normal = lambda count: np.full(count, 1 + below)  # type: ignore[method-assign]
        assert torch.equal(task.summed(private), torch.full((4,), 1 + torch.finfo(torch.float32).eps))


def test_under_autocast_gradients_are_clipped_and_summed_in_the_precision_of_the_parameters(tmp_path: Path) -> None:
    """257 examples of length 1: in bf16 they would be 256."""
    task = Rows(torch.full((257, 64), 2.0**-3))
    with task.gradients(tmp_path, at_once=256) as private, torch.autocast("cpu", dtype=torch.bfloat16):
        private._noised._noise.normal = np.zeros  # type: ignore[method-assign]
        torch.testing.assert_close(task.summed(private), torch.full((64,), 257 * 2.0**-3), rtol=1e-5, atol=0)


@pytest.mark.covering
@pytest.mark.parametrize("place", ["fetch", "forward", "clip", "clip of the last part"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_step_that_fails_leaves_nothing_to_those_after_it(tmp_path: Path, place: str, error: type[BaseException]) -> None:
    """Each has its own examples alone, clipped, and its noise."""
    task = Rows(torch.ones(4, 4))  # of length 2, clipped to 1
    with task.gradients(tmp_path, at_once=2, planned=10) as private:
        private._noised._noise.normal = lambda count: np.full(count, 100.0)  # type: ignore[method-assign]
        fetch, loss, clip = private._fetch, private._loss, private._noised.clip_and_accumulate
        calls = 0

        def fails(where: str, number: int) -> None:
            nonlocal calls
            if place == where:
                calls += 1
                if calls == number:
                    raise error

        def fetched(numbers: Sequence[int]) -> Tensor:
            fails("fetch", 2)
            return fetch(numbers)

        def forward(model: nn.Module, batch: Tensor) -> Tensor:
            found = loss(model, batch)
            fails("forward", 1)
            return found

        def clipped() -> None:
            fails("clip", 1)
            fails("clip of the last part", 2)
            clip()

        private._fetch, private._loss, private._noised.clip_and_accumulate = fetched, forward, clipped  # type: ignore[method-assign]
        with pytest.raises(error):
            private.backward()
        assert task.model.weight.grad is None
        for _ in range(3):
            torch.testing.assert_close(task.summed(private), torch.full((4,), 100.0 + 4 * 0.5), rtol=1e-5, atol=0)


class Named(nn.Module):
    """A model with attributes of its own that Opacus gives the layers that it hooks."""

    max_batch_len = 32

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.activations = nn.Linear(4, 1, bias=False), nn.ModuleList([nn.Tanh()])

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.activations[0](self.layer(rows[: self.max_batch_len]))
        return found


def test_attributes_of_the_users_model_stay(tmp_path: Path) -> None:
    rows, model = torch.ones(8, 4), Named().train()
    privacy = PrivacyConfig(level="example", noise_multiplier=1.0, clip=1.0, epsilon_max=1000.0, delta=1e-5)
    with PrivateGradients(
        model,
        8,
        lambda numbers: rows[list(numbers)],
        lambda model, batch: model(batch).mean(),
        privacy,
        ledger=tmp_path / "ledger.jsonl",
        batch_size=4,
        at_once=4,
        planned=10,
        block=1,
    ) as private:
        for _ in range(3):
            private.backward()
    assert isinstance(model.activations, nn.ModuleList) and model.max_batch_len == 32


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_an_example_without_a_finite_gradient_counts_as_zero_and_the_noise_stays(
    tmp_path: Path, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for name, value in (("without", 0.0), ("with", bad)):
        task, folder = Rows(rows.clone()), tmp_path / name
        folder.mkdir()
        task.rows[7] = 0.0
        task.rows[7, 3] = value
        with task.gradients(folder, at_once=3) as private:
            found.append(task.summed(private))
    assert torch.equal(found[0], found[1]) and found[0].all()
    assert [line.message for line in caplog.records] == [
        "an example has a gradient that is not finite: such examples count as zero"
    ]


def test_the_noise_is_as_large_as_it_is_said_to_be_and_never_the_same(tmp_path: Path) -> None:
    task = Regression()
    with task.gradients(tmp_path, privacy(clip=1e-6, noise_multiplier=3.0), planned=400) as private:
        seen = []
        for _ in range(400):
            private.backward()
            seen.append(torch.cat([parameter.grad.flatten() for parameter in task.model.parameters()]))
    values = torch.stack(seen) * 8 / (1e-6 * 3.0)  # next to nothing is left of the examples
    assert float(values.std()) == pytest.approx(1, abs=0.02)  # of 22,400 values
    assert len({tuple(row.tolist()) for row in seen}) == 400


@pytest.mark.exhaustive
def test_examples_are_drawn_independently_and_sometimes_there_is_none(tmp_path: Path) -> None:
    task = Regression()
    with task.gradients(tmp_path, privacy(epsilon_max=1e3), batch_size=2, planned=2000, block=500, at_once=64) as private:
        sizes = []
        for _ in range(1000):
            task.drawn.clear()
            loss = private.backward()
            size = 0 if math.isnan(loss) else len(task.drawn[0])
            assert all(parameter.grad is not None for parameter in task.model.parameters())
            sizes.append(size)
    mean = sum(sizes) / 1000
    assert mean == pytest.approx(2, abs=0.18)  # 4 standard errors
    assert sum((size - mean) ** 2 for size in sizes) / 1000 == pytest.approx(2 * (1 - 2 / N), rel=0.2)
    assert sizes.count(0) == pytest.approx(1000 * (1 - 2 / N) ** N, rel=0.4)


def test_a_pass_takes_each_example_once_and_counts_once(tmp_path: Path) -> None:
    task = Regression()
    with task.gradients(tmp_path, privacy(sampling="shuffle"), batch_size=10, planned=14, at_once=64) as private:
        for _ in range(2):
            for _ in range(7):
                private.backward()
            assert sorted(number for part in task.drawn for number in part) == list(range(N))
            task.drawn.clear()
        assert "2 passes counted" in private.statement()


def test_one_example_more_changes_one_step_of_a_pass(tmp_path: Path) -> None:
    """Or the noise would not count once per pass: cut out of an order, it would move another example to a later step."""
    passes = []
    for size in (N - 1, N):
        private = object.__new__(PrivateGradients)
        private._examples, private._steps_of_pass, private._entropy = size, 7, lambda count: bytes(count)
        passes.append([set(step) for step in private._shuffled()])
    assert [len(steps) for steps in passes] == [7, 7]
    more = [after - before for before, after in zip(*passes, strict=True)]
    assert sorted(map(len, more)) == [0, 0, 0, 0, 0, 0, 1] and set().union(*more) == {N - 1}
    assert all(before <= after for before, after in zip(*passes, strict=True))
    sizes = {len(step) for step in passes[1]}
    assert len(sizes) > 1 and sum(map(len, passes[1])) == N


def test_the_same_seed_for_torch_does_not_give_the_same_noise(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        task = Regression()
        torch.manual_seed(7)
        made = PrivateGradients(
            task.model,
            N,
            task.fetch,
            task.loss,
            privacy(),
            ledger=tmp_path / name / "l",
            batch_size=8,
            at_once=8,
            planned=9,
            block=3,
        )
        with made as private:
            private.backward()
            found.append(task.model[0].weight.grad.clone())
    assert not torch.equal(found[0], found[1])


def test_steps_are_counted_before_they_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Regression()
    private = task.gradients(tmp_path, block=3)

    def count() -> int:
        return sum(json.loads(line).get("count", 0) for line in (tmp_path / "ledger.jsonl").read_text().splitlines())

    counted = []
    fetch = private._fetch
    monkeypatch.setattr(private, "_fetch", lambda numbers: (counted.append(count()), fetch(numbers))[1])
    for taken in range(1, 8):
        private.backward()
        assert counted[-1] >= taken and count() == -(-taken // 3) * 3

    def full(_: object) -> None:
        raise StorageError("full")

    monkeypatch.setattr(private._ledger, "reserve", full)
    for _ in range(2):
        private.backward()  # counted already
    with pytest.raises(StorageError):
        private.backward()
    assert all(parameter.grad is None for parameter in task.model.parameters())
    private.close()


@pytest.mark.exhaustive
def test_it_stops_before_the_budget_and_what_it_says_is_never_too_little(tmp_path: Path) -> None:
    task = Regression()
    private = task.gradients(tmp_path, privacy(epsilon_max=3.0), block=7)
    taken = 0
    with pytest.raises(BudgetSpent, match=r"privacy\.epsilon_max = 3: one more step would exceed it: example-level"):
        while True:
            private.backward()
            taken += 1
            assert private._of(0) <= private.epsilon <= 3.0
    assert not private.ready() and all(parameter.grad is None for parameter in task.model.parameters())
    assert private._of(0) <= 3.0 < private._of(1) and private._ledger.count == taken
    private.close()
    with pytest.raises(BudgetSpent):
        task.gradients(tmp_path, privacy(epsilon_max=3.0))
    task.gradients(tmp_path, privacy(epsilon_max=4.0)).close()


def test_more_steps_than_were_planned_may_be_taken_within_the_budget(tmp_path: Path) -> None:
    with Regression().gradients(tmp_path, planned=4, block=10) as private:
        for _ in range(13):
            private.backward()
        assert private._ledger.count == 16


@pytest.mark.exhaustive
def test_a_run_of_more_steps_than_can_be_computed_is_begun_all_the_same(tmp_path: Path) -> None:
    with Regression().gradients(tmp_path, planned=1 << 70, block=10) as private:
        private.backward()
        assert 10 < private._left <= 1 << 17


def test_the_builtin_models_tied_head_is_caught_and_mended(tmp_path: Path) -> None:
    config = ModelConfig(layers=1, heads=1, width=16, context=8)
    rows = torch.randint(0, 256, (N, 9), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows[:, :-1], rows[:, 1:])
    model = GPT(config, 0)
    run = RunConfig.from_mapping(
        {
            "model": {"layers": 1, "heads": 1, "width": 16, "context": 8},
            "sync": {"every": 2, "outer_steps": 2},
            "privacy": {"level": "example", "delta": 1e-3, "epsilon_max": 50, "noise_multiplier": 1.0},
        }
    )

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        value: Tensor = model(*batch)
        return value

    with pytest.raises(ConfigError, match=r"^embedding\.weight: Opacus does not see all of its gradient"):
        PrivateGradients.of(model, data, loss, run, tmp_path / "ledger.jsonl")
    before = model(rows[:, :-1], rows[:, 1:])
    names = [name for name, _ in model.named_parameters()]
    model.make_head_a_layer()
    assert torch.equal(model(rows[:, :-1], rows[:, 1:]), before) and [name for name, _ in model.named_parameters()] == names

    collective = LocalCollective(LocalRun(run, ["a"]), "a")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    taken = 0
    with (
        PrivateGradients.of(model, data, loss, run, tmp_path / "ledger.jsonl") as private,
        EditWorker(model, optimizer, collective, WorkerConfig.of(run)) as worker,
    ):
        while not worker.finished:
            private.backward()
            worker.count_tokens(private.tokens)
            optimizer.step()
            taken += 1
        assert private.tokens == 4 * 8
    assert taken == 5 and not hasattr(model.embedding.weight, "grad_sample")


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x - x.mean(0))
        return out


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.never = nn.Linear(6, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), r"^model: BatchNorm"),
        (Mixing(), r"^layer\.weight: the gradient of one example is another one beside other examples"),
        (Unused(), r"^never\.weight: does not change the loss"),
        (nn.Sequential(nn.Linear(6, 1).requires_grad_(False)), r"^model: has no parameter"),
        (nn.Linear(6, 1).eval(), r"^model: .*training mode"),
        (nn.Linear(6, 1).bfloat16(), r"^weight: is torch\.bfloat16, .* train in torch\.float32, under autocast"),
        (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1).half()), r"^1\.weight: is torch\.float16"),
    ],
)
def test_models_whose_examples_cannot_be_told_apart_are_refused(tmp_path: Path, model: nn.Module, why: str) -> None:
    task = Regression()
    task.model = model  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=why) as caught:
        task.gradients(tmp_path)
    assert "\n" not in str(caught.value) and not (tmp_path / "ledger.jsonl").exists()
    assert not any(hasattr(parameter, "grad_sample") for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "arguments", "why"),
    [
        ({"delta": 0.02}, {}, r"privacy\.delta = 0\.02: must be below 1 / 64"),
        ({}, {"batch_size": 65}, r"= 65: must not exceed the number of examples \(64\)"),
        ({"epsilon_max": 1e-4}, {}, r"privacy\.epsilon_max = 0\.0001: one more step would exceed it"),
    ],
)
def test_settings_without_a_bound_are_refused(
    tmp_path: Path, settings: dict[str, object], arguments: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        Regression().gradients(tmp_path, privacy(**settings), **arguments)


def test_a_model_in_evaluation_mode_or_with_gradients_missing_takes_no_step(tmp_path: Path) -> None:
    task = Regression()
    with task.gradients(tmp_path) as private:
        task.model.eval()
        with pytest.raises(ConfigError, match=r"^model\.0: .* model\.train\(\)"):
            private.backward()
        task.model.train()
        task.model[0].eval()
        with pytest.raises(ConfigError, match=r"^model\.0: must be in training mode"):
            private.backward()
        assert all(parameter.grad is None for parameter in task.model.parameters())


def test_a_parameter_that_is_trained_only_since_then_is_refused_by_name_and_one_may_be_frozen(tmp_path: Path) -> None:
    task = Regression()
    weight = task.model[0].weight.requires_grad_(False)
    with task.gradients(tmp_path) as private:
        private.backward()
        weight.requires_grad_(True)
        with pytest.raises(
            ConfigError, match=r"^0\.weight: was unfrozen or replaced after PrivateGradients was made; close it"
        ):
            private.backward()
        assert weight.grad is None
    with task.gradients(tmp_path) as private:
        private.backward()
        assert weight.grad is not None
        task.model[4].weight.requires_grad_(False)
        private.backward()
        assert task.model[4].weight.grad is None
        task.model.half()
        with pytest.raises(ConfigError, match=r"^0\.weight: is torch\.float16, in which a sum of gradients is rounded"):
            private.backward()
