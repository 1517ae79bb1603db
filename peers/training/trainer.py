"""Inner training of one replica: optimizer, learning-rate schedule, clipping, accumulation, autocast.

An EditWorker hooks `model` and `optimizer` from outside.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from edit.config.run import InnerConfig
from edit.errors import ConfigError
from peers.training import quantized_state
from peers.training.batch_growth import BatchGrowth
from peers.training.inner_optimizers import inner_optimizers
from peers.training.sharding import ONE_RANK, RankLayout, clip_gradients, gradient_norm
from peers.training.torchrun import ALONE, Launch

__all__ = ["StepResult", "Trainer", "choose_device", "learning_rate", "use_threads"]

MOST_THREADS = 4096


@dataclass(frozen=True, slots=True)
class StepResult:
    """One inner step of the whole replica."""

    loss: float  # mean nats per token, before the step
    tokens: int  # targets
    seconds: float  # wall-clock time, device included


def choose_device(name: str | None, launch: Launch = ALONE) -> torch.device:
    """Return the device to train on: `name`, else CUDA if available, else the CPU. Each rank on a machine has its own.

    Raises ConfigError when it is not usable.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: no such kind of device; use cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"--device {name}: is not supported; use cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if launch.size > 1:
        if device.index is not None:
            raise ConfigError(
                f"--device {name}: is one device for {launch.local_size} ranks; say cuda, each rank takes its own"
            )
        if launch.local_size > count:
            raise ConfigError(
                f"{launch.local_size} ranks on a machine with {count} CUDA devices; start {count}, or --device cpu"
            )
        return torch.device("cuda", launch.local_rank)
    if (device.index or 0) >= count:
        raise ConfigError(f"--device {name}: this machine offers torch {count} CUDA devices")
    return device


def use_threads(count: int | None) -> None:
    """Set the number of torch's CPU threads in this process; None keeps torch's choice.

    Raises ConfigError for fewer than 1 or more than MOST_THREADS.
    """
    if count is None:
        return
    if not 1 <= count <= MOST_THREADS:
        raise ConfigError(f"--threads {count}: must be between 1 and {MOST_THREADS}")
    torch.set_num_threads(count)


def learning_rate(config: InnerConfig, position: int, total_steps: int) -> float:
    """Return the learning rate of the step after `position` steps: linear warm-up to lr, then cosine to lr * final_lr_ratio."""
    if position < config.warmup_steps:
        return config.lr * (position + 1) / config.warmup_steps
    progress = min(1.0, (position - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    share = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * share)


class PrivateGradients(Protocol):
    """Sets the gradients of examples that it draws itself, with noise (`peers.training.private`)."""

    tokens: int  # of a mean draw

    def ready(self) -> bool:
        """Return whether the budget allows one more step."""
        ...

    def backward(self) -> float:
        """Set every parameter's `.grad`; return the loss. Raises ConfigError where the budget is spent."""
        ...

    @property
    def epsilon(self) -> float:
        """At most so much is spent."""
        ...

    def statement(self) -> str:
        """Return what is spent, in words."""
        ...

    def spent(self) -> ConfigError:
        """Return what says that the budget is spent."""
        ...

    def refuse_uncounted(self, steps: int, checkpoint: object) -> None:
        """Raise ConfigError where a checkpoint holds more steps than were counted."""
        ...

    def close(self) -> None:
        """Take what was added to the model off it."""
        ...


class Trainer:
    """Take inner steps, one at a time.

    batches: yields (tokens, targets) without end, both (B, T) int64 on the CPU, the same at every rank; total_steps: length of
    the schedule; clock: monotonic seconds; layout: of the replica, whose ranks share each batch; allowed: names of plug-ins
    that this peer's operator trusts; private: makes what computes the gradients in place of `batches`. Raises as
    `inner_optimizers`.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[tuple[Tensor, Tensor]],
        config: InnerConfig,
        *,
        total_steps: int,
        device: torch.device,
        clock: Callable[[], float],
        layout: RankLayout = ONE_RANK,
        allowed: Collection[str] = (),
        private: Callable[[nn.Module], PrivateGradients] | None = None,
    ) -> None:
        self.model = model.to(device)
        # The last one's step ends an inner step.
        self.optimizers = inner_optimizers(self.model, config, device, allowed)
        self.optimizers[-1].register_step_post_hook(self._count_step)  # before what others hook to it, which may wait
        self.steps = 0
        self._batches: Iterator[tuple[Tensor, Tensor]] = iter(batches)
        self._config = config
        self._total_steps = total_steps
        self._device = device
        self._clock = clock
        self._layout = layout
        self.private = None if private is None else private(self.model)
        # None: the batch stays as it is configured.
        self.growth = BatchGrowth(config.batch_growth, config.norm_test) if config.batch_growth > 1 else None

    @property
    def optimizer(self) -> Optimizer:
        """The one whose step ends an inner step."""
        return self.optimizers[-1]

    @property
    def batch_factor(self) -> int:
        """How many times the configured batch an inner step trains on now."""
        return 1 if self.growth is None else self.growth.factor

    @property
    def batch(self) -> int:
        """Sequences in an inner step of the replica now."""
        return self._config.batch_size * self._config.accumulation * self.batch_factor

    def exchanged(self) -> bool:
        """A contribution has gone out, between two inner steps: return whether the batch has grown because of it."""
        return self.growth is not None and self.growth.exchanged()

    def step(self, position: Callable[[], int] | None = None) -> StepResult:
        """Take one optimizer step on the mean gradient of `accumulation` micro-batches, or more where the batch has grown.

        The loss is read from the device once, after everything else is queued: one wait per step, none per micro-batch.

        position: returns the run's global inner step, so that a peer that joins late has the run's learning rate; asked after
        the backward, since an outcome may come in before the forward. None: the steps taken here.
        """
        started = self._clock()
        self.model.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss, tokens = self._accumulate() if self.private is None else self._noised(self.private)
        if self._config.clip_norm > 0:
            clip_gradients(self.model.parameters(), self._layout, self._config.clip_norm)
        self._set_rate(self.steps if position is None else position())
        for optimizer in self.optimizers:
            quantized_state.step(optimizer)
        value = self._layout.mean(loss).item()
        return StepResult(value, tokens, self._clock() - started)

    def _count_step(self, *_: object) -> None:
        self.steps += 1

    def _accumulate(self) -> tuple[Tensor, int]:
        """Run backward over this rank's rows of the micro-batches; return the weighted loss and the replica's targets."""
        total, first = torch.zeros((), device=self._device), None
        tokens, count = 0, self._config.accumulation * self.batch_factor
        for _ in range(count):
            batch = next(self._batches)
            inputs, targets = (_moved(self._layout.rows(part), self._device) for part in batch)
            with self._autocast():
                loss = self.model(inputs, targets)
            loss = loss * (self._layout.weight(len(inputs), len(batch[0])) / count)
            loss.backward()
            total += loss.detach()
            tokens += batch[1].numel()
            if self.growth is not None and first is None:
                first = gradient_norm(self.model.parameters(), self._layout) * count
        if self.growth is not None and first is not None:
            norms = torch.stack([first, gradient_norm(self.model.parameters(), self._layout)]).tolist()
            self.growth.observe(norms[0], norms[1], count)
        return total, tokens

    def _noised(self, private: PrivateGradients) -> tuple[Tensor, int]:
        """Have noised gradients computed, of examples that are drawn; return their loss, and the tokens of a mean draw."""
        with self._autocast():
            loss = private.backward()
        return torch.tensor(loss, device=self._device), private.tokens

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._config.autocast and self._device.type == "cuda" and torch.cuda.is_bf16_supported():
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _set_rate(self, position: int) -> None:
        rate = learning_rate(self._config, position, self._total_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):  # torchao's, which compiles its step
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate


def _moved(batch: Tensor, device: torch.device) -> Tensor:
    """Copy a batch to the device. To a GPU from pinned memory: else the host may wait for what the GPU still computes."""
    return (batch.pin_memory() if device.type == "cuda" else batch).to(device, non_blocking=True)
