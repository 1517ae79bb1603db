"""`PrivateGradients`: the gradients of DP-SGD in place of `loss.backward()`, by Opacus, each step counted before it is taken.

Opacus computes the gradient of each example. What must not go wrong around it is here: which examples are drawn, by chance
that nobody can compute again; the clip and the sum; the noise; a ledger on disk; and a check that the gradients are those of
the model.

Source: Abadi et al. 2016 (arXiv 1607.00133); for Local SGD, what leaves is computed from these gradients alone.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from edit.config.privacy import PrivacyConfig
from edit.config.run import RunConfig
from edit.config.validation import require
from edit.errors import ConfigError
from edit.trust.noise import SecretNoise
from edit.trust.privacy import Accountant, Spent, most_steps
from edit.trust.privacy_ledger import PrivacyLedger

try:
    from opacus.grad_sample import GradSampleHooks
    from opacus.optimizers import DPOptimizer
    from opacus.validators import ModuleValidator
except ImportError as error:
    raise ImportError(f"edit.integrations.opacus needs opacus ({error}): pip install 'edit-localsgd[dp]'") from None

__all__ = ["BudgetSpent", "PrivateGradients", "lengths"]

Batch = TypeVar("Batch")
_log = logging.getLogger(__name__)
_TOLERANCE = 1e-4  # of the largest entry of a parameter's gradient
_EXACT = (torch.float32, torch.float64)  # in which clipped gradients may be summed
_CHECKED = 3  # examples at the start
_PLANNED = 1 << 17  # steps that the budget is asked for at a time: of billions, epsilon cannot be computed
_SPARE = 1.05  # epsilon is computed for so many times the steps, and said until they are taken


class BudgetSpent(ConfigError):
    """One more step would exceed privacy.epsilon_max. The message says what was spent, and of what."""


class _Dataset(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class PrivateGradients(Generic[Batch]):
    """Leaves in the model's parameters, as `.grad`, the noised mean of clipped gradients; hooks the model until `close`.

    Every parameter that can be trained has one. Steps of any optimizer on these gradients, and what is sent of the parameters
    then, tell no more of an example than the budget allows. So nothing else may: report no loss, and train on no other data.

    Args:
        model: in training mode, on its device, in this process as a whole.
        examples: their number, N.
        fetch: returns the examples of these numbers, each below N, as a batch on the model's device.
        loss: the mean over a batch of what each example costs, a scalar. No example may depend on another one.
        privacy: the section [privacy]; level = "example".
        ledger: the file of this data's steps; it goes on when it is there. Its folder exists.
        batch_size: the mean number of examples in a step, B.
        at_once: examples whose gradients are in memory together.
        planned: steps that will probably be taken; more may be.
        block: steps that are counted together, before the first of them.
        tokens_of_example: for `tokens`, and for the ledger, which takes no steps on examples of another length; 0: not known.
        bound: what messages call privacy.epsilon_max.
        entropy: random bytes, which must be secret.

    Raises ConfigError for a delta that is not below 1 / N, a model that mixes examples (BatchNorm), a parameter that is neither
    fp32 nor fp64 or whose gradients Opacus does not see, a ledger of other examples, and a budget that is spent already
    (`BudgetSpent`). Raises StorageError of the ledger.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: int,
        fetch: Callable[[Sequence[int]], Batch],
        loss: Callable[[nn.Module, Batch], Tensor],
        privacy: PrivacyConfig,
        *,
        ledger: Path,
        batch_size: int,
        at_once: int,
        planned: int,
        block: int,
        tokens_of_example: int = 0,
        bound: str = "privacy.epsilon_max",
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._model, self._examples, self._fetch, self._loss = model, examples, fetch, loss
        self._privacy, self._batch_size, self._at_once, self._entropy = privacy, batch_size, at_once, entropy
        require(privacy.of_examples, "privacy.level", privacy.level, 'must be "example" to train with private gradients')
        rule = f"must be below 1 / {examples}, the number of examples: else the bound allows that one of them is published"
        require(privacy.delta * examples < 1, "privacy.delta", privacy.delta, rule)
        rule = f"must not exceed the number of examples ({examples})"
        require(batch_size <= examples, "inner.batch_size * inner.accumulation", batch_size, rule)
        self._bound = bound
        self._passes = privacy.sampling == "shuffle"
        self._steps_of_pass = -(-examples // batch_size) if self._passes else 1
        planned = min(-(-planned // self._steps_of_pass), _PLANNED)
        self._planned, self._block = planned, 1 if self._passes else block
        self._accountant = Accountant(privacy.delta)
        self.tokens = batch_size * tokens_of_example
        """The tokens of a mean draw: what may be said of a step."""
        self._hooks, self._noised = _attach(model, privacy, batch_size, SecretNoise(entropy))
        self._order: Iterator[Sequence[int]] = iter(())
        self._reserved = 0  # steps that are counted and not yet taken
        self._left = 0  # steps, or passes, that the budget allows beyond those counted
        self._final = False  # whether no more will be allowed
        self._said: tuple[int, float] = (-1, 0.0)
        try:
            self._check()
            self._ledger = PrivacyLedger(ledger, privacy.unit, tokens_of_example)
        except BaseException:
            self._hooks.cleanup()
            raise
        try:
            if not self.ready():
                raise self.spent()
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(
        cls,
        model: nn.Module,
        dataset: _Dataset,
        loss: Callable[[nn.Module, Any], Tensor],
        run: RunConfig,
        ledger: Path,
    ) -> PrivateGradients[Any]:
        """Return those of a loop of your own: rows of `dataset` are the examples, put together as a DataLoader does.

        run: says privacy, batch size and length. The other arguments are the constructor's.
        """
        device = next(model.parameters()).device

        def fetch(numbers: Sequence[int]) -> Any:
            return _moved(torch.utils.data.default_collate([dataset[number] for number in numbers]), device)

        tokens = run.model.context
        return PrivateGradients(
            model, len(dataset), fetch, loss, run.privacy, ledger=ledger, tokens_of_example=tokens, **lengths(run)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks off the model and close the ledger."""
        self._hooks.cleanup()
        for parameter in self._noised.params:
            parameter.summed_grad = None
        self._ledger.close()

    def backward(self) -> float:
        """Draw examples and set every `.grad` to the noised mean of their clipped gradients, in place of a loop's own backward.

        Returns the loss of what was drawn, NaN of no example. It is not private: keep it at this site.

        Raises BudgetSpent, and leaves no gradients, where this step would exceed privacy.epsilon_max; ConfigError where the
        model is not in training mode, or has parameters to be trained that this was not made with.
        """
        if (still := next((name for name, module in self._model.named_modules() if not _hooked(module)), None)) is not None:
            name = f"model.{still}" if still else "model"
            raise ConfigError(f"{name}: must be in training mode, model.train(), or no example's gradient is known")
        self._refuse_changed()
        self._forget()
        try:
            self._reserve()
            return self._gradients(next(self._order) if self._passes else self._drawn())
        except BaseException:
            self._forget()  # what is in there has no noise
            raise

    @property
    def epsilon(self) -> float:
        """At most so much is spent, with the steps that are counted already: within 5 % of the steps."""
        count = self._ledger.count
        if count > self._said[0]:
            beyond = min(int(count * _SPARE) + 1 - count, self._left) if count else 0
            self._said = (count + beyond, self._of(beyond))
        return self._said[1]

    def statement(self) -> str:
        """Return what was spent, in words: 'example-level, unit sequence, eps 1.44 at delta 3.2e-06 (...)'."""
        return (
            f"example-level, unit {self._privacy.unit}, eps {self._of(0):.4g} at delta {self._privacy.delta:g} "
            f"(PLD, dp-accounting; {self._ledger.count} {'passes' if self._passes else 'steps'} counted)"
        )

    def spent(self) -> BudgetSpent:
        """Return what says that the budget is spent."""
        most = self._privacy.epsilon_max
        return BudgetSpent(f"{self._bound} = {most:g}: one more step would exceed it: {self.statement()}")

    def ready(self) -> bool:
        """Return whether `backward` may be called once more."""
        if self._reserved == 0 and self._left == 0 and not self._final:
            self._find_more()
        return self._reserved > 0 or self._left > 0

    def refuse_uncounted(self, steps: int, checkpoint: object) -> None:
        """Raise ConfigError where a checkpoint holds more steps than the ledger: some were taken without it."""
        each = {True: -(-self._examples // self._batch_size), False: 1}
        counted = sum(spent.count * each[spent.sampling == "shuffle"] for spent in self._ledger.spent)
        if steps > counted:
            raise ConfigError(
                f"{self._ledger.path}: counts {counted} inner steps, and {checkpoint} has {steps}: restore the file of then, "
                "or begin without the checkpoint"
            )

    def _of(self, beyond: int) -> float:
        """Return epsilon of what is counted and so many steps or passes more."""
        return self._accountant.epsilon((*self._ledger.spent, self._kind(beyond)))

    def _kind(self, count: int) -> Spent:
        rate = 1.0 if self._passes else self._batch_size / self._examples
        return Spent(sampling=self._privacy.sampling, rate=rate, noise_multiplier=self._privacy.noise_multiplier, count=count)

    def _find_more(self) -> None:
        """Find out how many more steps or passes the budget allows: as many as are planned, or fewer."""
        self._left = most_steps(self._of, self._privacy.epsilon_max, self._planned)
        self._final = self._left < self._planned

    def _reserve(self) -> None:
        """Have a step counted, on disk, before it is taken."""
        if self._reserved == 0:
            if not self.ready():
                raise self.spent()
            count = min(self._block, self._left)
            self._ledger.reserve(self._kind(count))
            self._left -= count
            self._reserved = count * self._steps_of_pass
            if self._passes:
                self._order = self._shuffled()
        self._reserved -= 1

    def _random(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64DXSM(int.from_bytes(self._entropy(32), "little")))

    def _drawn(self) -> Sequence[int]:
        """Return each example with probability B / N, independently of all others."""
        random = self._random()
        count = random.binomial(self._examples, self._batch_size / self._examples)
        return [int(each) for each in random.choice(self._examples, count, replace=False, shuffle=False)]

    def _shuffled(self) -> Iterator[Sequence[int]]:
        """Yield the examples of each step of a pass: each example is in one step, drawn for it alone.

        So one example more or less changes one step, by at most the clip, and all others have the same examples. Cut out of an
        order it would move others: a step would change by twice the clip. Source: balls and bins, Chua et al. 2024
        (arXiv 2412.16802).
        """
        step = self._random().integers(self._steps_of_pass, size=self._examples)
        order, ends = np.argsort(step, kind="stable"), np.bincount(step, minlength=self._steps_of_pass).cumsum()
        for numbers in np.split(order, ends[:-1]):
            yield [int(each) for each in numbers]

    def _forget(self) -> None:
        """Forget gradients, and what a step that did not come to its end has left: no other may count it, or go on from it."""
        self._noised.forget()
        self._hooks.forget()

    def _gradients(self, numbers: Sequence[int]) -> float:
        total = 0.0
        parts = [numbers[start : start + self._at_once] for start in range(0, len(numbers), self._at_once)]
        if not parts:  # an exchange waits for a forward; of this one nothing is kept
            with torch.no_grad():
                self._loss(self._model, self._fetch([0]))
            for parameter in self._noised.params:
                parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))
            self._noised.pre_step()
        for number, part in enumerate(parts, start=1):
            loss = self._loss(self._model, self._fetch(part))
            with _without_hint():
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * len(part)
            self._refuse_short(len(part))
            self._noised.signal_skip_step(number < len(parts))
            self._noised.pre_step()
            if number < len(parts):
                self._noised.zero_grad(set_to_none=True)  # keeps the sum of what is clipped
        for parameter in self._noised.params:
            parameter.grad_sample = None
        return total / len(numbers) if numbers else math.nan

    def _refuse_changed(self) -> None:
        """Raise ConfigError for a parameter that is trained only since the hooks and the noise were made; one may be frozen."""
        known = {id(parameter) for group in self._noised.param_groups for parameter in group["params"]}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(
                    f"{name}: was unfrozen or replaced after PrivateGradients was made; close it and make another one, with "
                    "the same ledger"
                )
        _refuse_inexact(self._model)

    def _refuse_short(self, count: int) -> None:
        """Raise ConfigError unless each parameter has one gradient of each example, or the clip is of something else."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                found = getattr(parameter, "grad_sample", None)
                if not isinstance(found, Tensor) or len(found) != count:
                    raise ConfigError(f"{name}: {_said(found)} for {count} examples; freeze it, or use it once in each forward")

    def _check(self) -> None:
        """Raise ConfigError where Opacus' gradients are not autograd's, or one example's depend on the others."""
        numbers = list(range(min(_CHECKED, self._examples)))
        whole, certain = self._tried(numbers), self._value(numbers) == self._value(numbers)
        if not certain or len(numbers) == 1:
            return  # a model that draws random numbers computes something else each time
        alone = self._tried(numbers[:1])
        for name, found in whole.items():
            if not _close(found[0], alone[name][0]):
                raise ConfigError(
                    f"{name}: the gradient of one example is another one beside other examples: the model or its loss mixes "
                    "them, so no noise could hide one"
                )

    def _value(self, numbers: Sequence[int]) -> float:
        with torch.no_grad():
            return float(self._loss(self._model, self._fetch(numbers)))

    def _tried(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return each parameter's gradients of each example, when their mean is autograd's. Leaves no gradients."""
        self._noised.zero_grad(set_to_none=True)
        found: dict[str, Tensor] = {}
        try:
            try:
                loss = self._loss(self._model, self._fetch(numbers))
                if not math.isfinite(float(loss.detach())):
                    raise ConfigError(f"model: its loss is {float(loss.detach())} before the first step")
                with _without_hint():
                    loss.backward()  # type: ignore[no-untyped-call]
            except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
                said = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise ConfigError(f"model: the gradient of each example cannot be computed (Opacus: {said[:200]})") from error
            for name, parameter in self._model.named_parameters():
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    raise ConfigError(f"{name}: does not change the loss; freeze it: requires_grad_(False)")
                each = getattr(parameter, "grad_sample", None)
                if isinstance(each, Tensor) and len(each) == len(numbers) and _close(each.mean(0), parameter.grad):
                    found[name] = each
                    continue
                raise ConfigError(
                    f"{name}: Opacus does not see all of its gradient; use it only as the weight of a layer "
                    "(nn.Linear, nn.Embedding ...) that is called, not in a function; a tied head is a layer with that weight"
                )
        finally:
            self._noised.zero_grad(set_to_none=True)
        return found


class _Noised(DPOptimizer):
    """Clips, sums and adds noise in the precision of the parameters, also under autocast. It never steps: whoever has the
    gradients does.

    An example whose gradient is not finite, or too long for a norm, counts as zero: no factor would shorten it. The noise, of
    a secret stream, and the sum are added in fp64: what is rounded before the noise is added would show in the last bits.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, noise: SecretNoise, privacy: PrivacyConfig, batch_size: int) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=privacy.noise_multiplier,
            max_grad_norm=privacy.clip,
            expected_batch_size=batch_size,
            loss_reduction="mean",
        )
        self._noise = noise
        self._warned = False

    def forget(self) -> None:
        """Forget gradients and sums, and which parts of a draw are to be summed without noise."""
        self._step_skip_queue.clear()
        self._is_last_step_skipped = False
        self.zero_grad(set_to_none=True)

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool | None:
        with torch.autocast(self.params[0].device.type, enabled=False):
            done: bool | None = super().pre_step(closure)
        return done

    def clip_and_accumulate(self) -> None:
        samples: list[Tensor] = self.grad_samples
        count, device = len(samples[0]), samples[0].device
        each = [
            torch.linalg.vector_norm(sample.reshape(count, parameter.numel()), dim=1, dtype=parameter.dtype).to(device)
            for parameter, sample in zip(self.params, samples, strict=True)
        ]
        norms = torch.stack(each, dim=1).norm(dim=1)
        bad = ~norms.isfinite()
        if bool(bad.any()):
            for sample in samples:
                sample[bad.to(sample.device)] = 0
            if not self._warned:
                _log.warning("an example has a gradient that is not finite: such examples count as zero")
                self._warned = True
        factors = (self.max_grad_norm / (norms + 1e-6)).clamp(max=1.0).masked_fill(bad, 0.0)
        for parameter, sample in zip(self.params, samples, strict=True):
            clipped = torch.einsum("i,i...", factors.to(parameter), sample.to(parameter.dtype))
            before = parameter.summed_grad
            parameter.summed_grad = clipped if before is None else before.add_(clipped)

    def add_noise(self) -> None:
        std = self.noise_multiplier * self.max_grad_norm
        for parameter in self.params:
            noise = torch.from_numpy(self._noise.normal(parameter.numel()) * std).view(parameter.shape)
            total = noise.add_(parameter.summed_grad.view_as(parameter).cpu())
            parameter.grad = total.to(device=parameter.device, dtype=parameter.dtype)


def _layer_norm(layer: nn.LayerNorm, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """Gradients of each example of a LayerNorm, with or without a bias; Opacus 1.6 knows only those with one."""
    kept = tuple(range(1, backprops.ndim - len(layer.normalized_shape)))
    found = {}
    if layer.weight.requires_grad:
        normal = functional.layer_norm(activations[0], layer.normalized_shape, eps=layer.eps)
        found[layer.weight] = (normal * backprops).sum(kept) if kept else normal * backprops
    if layer.bias is not None and layer.bias.requires_grad:
        found[layer.bias] = backprops.sum(kept) if kept else backprops
    return found


class _Hooks(GradSampleHooks):
    GRAD_SAMPLERS: ClassVar[dict[type, Any]] = {**GradSampleHooks.GRAD_SAMPLERS, nn.LayerNorm: _layer_norm}

    def forget(self) -> None:
        """Forget forwards without a whole backward after them: the next one would take them for its own."""
        for module in self.iterate_submodules(self._module):  # those with hooks: another one's attributes are the user's
            for name in ("activations", "max_batch_len"):
                module.__dict__.pop(name, None)
        for parameter in self._module.parameters():
            if hasattr(parameter, "_forward_counter"):
                parameter._forward_counter = 0
            if hasattr(parameter, "_current_grad_sample"):
                del parameter._current_grad_sample


def _attach(model: nn.Module, privacy: PrivacyConfig, batch_size: int, noise: SecretNoise) -> tuple[_Hooks, _Noised]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError("model: has no parameter that can be trained")
    _refuse_inexact(model)
    if errors := ModuleValidator.validate(model):
        raise ConfigError(f"model: {str(errors[0]).splitlines()[0][:300]}")
    try:
        hooks = _Hooks(model)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(f"model: {str(error).splitlines()[0][:300]}") from error
    return hooks, _Noised(torch.optim.SGD(parameters, lr=0.0), noise, privacy, batch_size)


def _refuse_inexact(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in _EXACT:
            raise ConfigError(
                f"{name}: is {parameter.dtype}, in which a sum of gradients is rounded by more than privacy.clip; train in "
                "torch.float32, under autocast if it is to be fast"
            )


@contextmanager
def _without_hint() -> Iterator[None]:
    """Leave out torch's warning of each embedding, whose input, the tokens, has no gradient."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield


def _close(found: Tensor, expected: Tensor) -> bool:
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) <= _TOLERANCE * scale + 1e-12


def _hooked(module: nn.Module) -> bool:
    """Return whether Opacus sees what a module does; it need not where nothing is trained."""
    return module.training or not any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _said(found: object) -> str:
    if isinstance(found, Tensor):
        return f"has gradients of {len(found)} examples"
    return "has no gradients" if found is None else "has several gradients of each example"


class Lengths(TypedDict):
    """What `PrivateGradients` takes of a run."""

    batch_size: int
    at_once: int
    planned: int
    block: int


def lengths(run: RunConfig) -> Lengths:
    """Return the batch size and lengths of a run, as the constructor of `PrivateGradients` takes them."""
    return {
        "batch_size": run.inner.batch_size * run.inner.accumulation,
        "at_once": run.inner.batch_size,
        "planned": run.sync.inner_steps_before(run.sync.outer_steps),
        "block": min(run.sync.interval, 1 << 20),
    }


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {name: _moved(value, device) for name, value in batch.items()}
    return [_moved(value, device) for value in batch] if isinstance(batch, (list, tuple)) else batch
