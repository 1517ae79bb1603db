"""Inner steps: the schedule's values, clipping, accumulation, and what a hook from outside can rely on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from edit.config.run import InnerConfig, ModelConfig
from edit.errors import ConfigError
from peers.models.gpt import GPT
from peers.training.torchrun import Launch
from peers.training.trainer import Trainer, choose_device, learning_rate, use_threads

CPU = torch.device("cpu")
MODEL = ModelConfig(layers=1, heads=2, width=16, context=8, vocabulary=16)
PLAIN = InnerConfig(lr=0.01, warmup_steps=0, weight_decay=0.0, clip_norm=0.0)


class Ticks:
    """A clock that moves one second per look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def pairs(sizes: Sequence[int], seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of the given sizes cut from ONE stream of rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(16, (sum(sizes), 9), generator=generator)
    for part in rows.split(list(sizes)):
        yield part[:, :-1], part[:, 1:]


def trainer(config: InnerConfig, sizes: Sequence[int], model: nn.Module | None = None, total_steps: int = 100) -> Trainer:
    return Trainer(model or GPT(MODEL, seed=0), pairs(sizes), config, total_steps=total_steps, device=CPU, clock=Ticks())


class Line(nn.Module):
    """loss = factor * sum(weight * direction): its gradient is known. `weight` is a matrix, `bias` is not."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 2))
        self.bias = nn.Parameter(torch.ones(2))
        self.factor = factor

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.factor * (self.weight * torch.tensor([3.0, 4.0])).sum() + 0 * self.bias.sum()


class TestSchedule:
    CONFIG = InnerConfig(lr=1.0, warmup_steps=10, final_lr_ratio=0.1)

    @pytest.mark.parametrize(
        ("position", "rate"),
        [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (60, 0.55), (110, 0.1), (5000, 0.1)],
    )
    def test_values(self, position: int, rate: float) -> None:
        assert learning_rate(self.CONFIG, position, 110) == pytest.approx(rate)

    def test_a_quarter_of_the_cosine(self) -> None:
        assert learning_rate(self.CONFIG, 35, 110) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)

    def test_no_warm_up(self) -> None:
        assert learning_rate(PLAIN, 0, 100) == pytest.approx(PLAIN.lr)

    def test_a_warm_up_longer_than_the_run(self) -> None:
        config = InnerConfig(lr=1.0, warmup_steps=10)
        assert [learning_rate(config, position, 5) for position in (0, 4)] == pytest.approx([0.1, 0.5])

    def test_the_trainer_counts_its_own_steps(self) -> None:
        config = InnerConfig(lr=1.0, warmup_steps=4)
        subject = trainer(config, [1, 1, 1])
        rates = []
        for _ in range(3):
            subject.step()
            rates.append(subject.optimizer.param_groups[0]["lr"])
        assert rates == pytest.approx([0.25, 0.5, 0.75])
        assert subject.steps == 3

    def test_a_peer_that_joins_late_has_the_rate_of_the_run(self) -> None:
        config = InnerConfig(lr=1.0, warmup_steps=4)
        subject = trainer(config, [1], total_steps=100)
        outer_step, sync_every = 3, 20
        subject.step(lambda: outer_step * sync_every + subject.steps)
        assert {group["lr"] for group in subject.optimizer.param_groups} == {learning_rate(config, 60, 100)}


class TestStep:
    def test_loss_tokens_and_seconds(self) -> None:
        model = GPT(MODEL, seed=0)
        inputs, targets = next(pairs([4]))
        expected = model(inputs, targets).item()
        result = trainer(PLAIN, [4], model).step()
        assert result.loss == pytest.approx(expected)
        assert (result.tokens, result.seconds) == (32, 1.0)

    def test_steps_are_those_of_a_loop_written_by_hand(self) -> None:
        config = InnerConfig(lr=0.01, warmup_steps=2, weight_decay=0.1, clip_norm=0.5)
        subject, model = trainer(config, [2] * 4, total_steps=4), GPT(MODEL, seed=0)
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        by_hand = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), fused=True)
        for position, (inputs, targets) in enumerate(pairs([2] * 4)):
            for group in by_hand.param_groups:
                group["lr"] = learning_rate(config, position, 4)
            by_hand.zero_grad()
            model(inputs, targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            by_hand.step()
            subject.step()
        for (name, p), q in zip(subject.model.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q), name

    def test_accumulation_equals_the_large_batch(self) -> None:
        large, parts = trainer(PLAIN, [6, 6]), trainer(replace(PLAIN, accumulation=3), [2] * 6)
        for _ in range(2):
            a, b = large.step(), parts.step()
            assert a.loss == pytest.approx(b.loss, rel=1e-6)
            assert a.tokens == b.tokens == 48
        for (name, p), q in zip(large.model.named_parameters(), parts.model.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-7, msg=name)

    def test_training_lowers_the_loss(self) -> None:
        rows = next(pairs([2]))
        subject = Trainer(GPT(MODEL, seed=0), [rows] * 40, PLAIN, total_steps=40, device=CPU, clock=Ticks())
        first, *_, last = [subject.step().loss for _ in range(40)]
        assert last < 0.5 * first

    def test_the_optimizer_takes_one_step_whatever_the_accumulation(self) -> None:
        subject = trainer(replace(PLAIN, accumulation=3), [1] * 6)
        calls: list[int] = []
        subject.optimizer.register_step_post_hook(lambda *_: calls.append(subject.steps))
        subject.step()
        subject.step()
        assert calls == [1, 2]  # a hook that waits, and is broken off there, finds the step counted

    def test_evaluation_mode_does_not_leak_into_training(self) -> None:
        subject = trainer(PLAIN, [1])
        subject.model.eval()
        subject.step()
        assert subject.model.training

    def test_a_loss_that_is_not_finite_is_reported_not_hidden(self) -> None:
        assert math.isnan(trainer(PLAIN, [1], Line(math.nan)).step().loss)


class TestClip:
    def gradient(self, clip_norm: float, factor: float) -> Tensor:
        subject = trainer(replace(PLAIN, clip_norm=clip_norm), [1], Line(factor))
        subject.step()
        gradient = subject.model.get_parameter("weight").grad
        assert gradient is not None
        return gradient

    @pytest.mark.parametrize(("clip_norm", "factor", "norm"), [(1.0, 2.0, 1.0), (1.0, 0.1, 0.5), (0.0, 2.0, 10.0)])
    def test_norm(self, clip_norm: float, factor: float, norm: float) -> None:
        gradient = self.gradient(clip_norm, factor)
        assert gradient.norm().item() == pytest.approx(norm, rel=1e-4)
        torch.testing.assert_close(gradient / gradient.norm(), torch.tensor([[0.6, 0.8]]))


class TestOptimizer:
    def test_only_matrices_decay(self) -> None:
        subject = trainer(InnerConfig(lr=0.1, warmup_steps=0, weight_decay=0.5, clip_norm=0.0), [1], Line(0.0))
        subject.step()
        assert subject.model.get_parameter("weight").tolist() == [pytest.approx([0.95, 0.95])]
        assert subject.model.get_parameter("bias").tolist() == [1.0, 1.0]

    def test_every_trainable_parameter_is_in_it_once(self) -> None:
        model = GPT(MODEL, seed=0)
        model.norm.weight.requires_grad_(False)
        held = [id(p) for group in trainer(PLAIN, [1], model).optimizer.param_groups for p in group["params"]]
        assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)

    def test_a_model_of_vectors_alone(self) -> None:
        model = GPT(MODEL, seed=0)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim < 2)
        assert math.isfinite(trainer(PLAIN, [1], model).step().loss)

    def test_nothing_to_train(self) -> None:
        model = GPT(MODEL, seed=0).requires_grad_(False)
        with pytest.raises(ConfigError, match="no trainable parameter"):
            trainer(PLAIN, [1], model)


class TestDevice:
    def test_by_itself(self) -> None:
        assert choose_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")

    def test_as_told(self) -> None:
        assert choose_device("cpu") == CPU

    @pytest.mark.parametrize("name", ["quantum", "cuda:99", "cpu:x", "meta", "mps"])
    def test_wrong(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"--device {name}"):
            choose_device(name)

    def test_each_rank_takes_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        second = Launch(rank=3, size=4, local_rank=1, local_size=2)
        assert choose_device("cuda", second) == torch.device("cuda", 1)
        assert choose_device("cpu", second) == CPU
        with pytest.raises(ConfigError, match="--device cuda:0: is one device for 2 ranks"):
            choose_device("cuda:0", second)
        with pytest.raises(ConfigError, match="3 ranks on a machine with 2 CUDA devices"):
            choose_device("cuda", Launch(rank=0, size=3, local_rank=0, local_size=3))

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_cuda_with_autocast_learns_like_the_cpu(self) -> None:
        rows = next(pairs([2]))
        losses = {}
        for device in (CPU, torch.device("cuda")):
            subject = Trainer(GPT(MODEL, seed=0), [rows] * 20, PLAIN, total_steps=20, device=device, clock=Ticks())
            losses[device.type] = [subject.step().loss for _ in range(20)]
        assert losses["cuda"][0] == pytest.approx(losses["cpu"][0], rel=0.02)
        assert losses["cuda"][-1] == pytest.approx(losses["cpu"][-1], rel=0.1)


def test_threads() -> None:
    before = torch.get_num_threads()
    try:
        use_threads(before + 1)
        assert torch.get_num_threads() == before + 1
        use_threads(None)
        assert torch.get_num_threads() == before + 1
        for count in (0, 4097, 10**11):
            with pytest.raises(ConfigError, match=f"--threads {count}: must be between 1 and 4096"):
                use_threads(count)
    finally:
        torch.set_num_threads(before)
