"""`EditCallback`: a Lightning `Trainer` trains with the other peers of a run. Says what happens at which of its events."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

from torch import Tensor

from edit.collective import Collective, CompositeCollective
from edit.errors import ConfigError
from edit.integrations.attachment import ONE_TRAINING, Attachment
from edit.worker.worker import EditWorker, WorkerConfig

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.trainer.states import TrainerStatus
except ImportError as error:
    raise ImportError(
        f"edit.integrations.lightning needs lightning ({error}): pip install 'edit-localsgd[lightning]'"
    ) from None

__all__ = ["EditCallback"]


class EditCallback(Callback):
    """Makes `trainer.fit()` this peer's part of a run: `Trainer(..., callbacks=[EditCallback(collective, config)])`.

    Training ends with Lightning's last step or with the run's, whichever comes first. Each real optimizer step counts once,
    also with accumulate_grad_batches, clipping and manual optimization. The module starts from the run's outer parameters, also
    when `fit` resumes from a checkpoint. One training per callback and per `peers.connect`.

    Args:
        collective: the run, for example of `peers.connect`, connected in each process: start them with torchrun, not by
            ddp_fork or ddp_spawn.
        config: `WorkerConfig.of(run)`.
        evaluate_outer: validation and checkpoints saved during training hold the outer parameters, which all peers share;
            otherwise this peer's local ones. So do those that Lightning saves after an exception in it
            (`ModelCheckpoint(save_on_exception=True)`, `OnExceptionCheckpoint`): they wait for no outcome, and where the
            exception came while an outer step was applied, what they hold is of two outer steps. Not with an optimizer that has
            an `eval` and a `train` (schedule-free).
        leave: what the module holds after training: "outer" or "local".
        tokens: returns how many tokens a batch has. None: the size of its `input_ids`, or 0.

    With several optimizers the last one's step ends an inner step.

    A callback that writes to the parameters calls `callback.worker.synchronize()` of this one first. One that swaps an average
    in for validations, or puts it into the module at the end of an epoch or of training (`EMAWeightAveraging`,
    `StochasticWeightAveraging`), need not: validations are then of that average, also with `evaluate_outer`. After training the
    module holds what the last of the callbacks put there: `leave` holds only where this one stands behind it.

    Raises ConfigError when a second training with this callback begins. The run's own errors (`edit.errors`) come out of
    `fit`.
    """

    def __init__(
        self,
        collective: Collective | CompositeCollective,
        config: WorkerConfig,
        *,
        evaluate_outer: bool = False,
        leave: Literal["outer", "local"] = "outer",
        tokens: Callable[[Any], int] | None = None,
    ) -> None:
        self._collective = collective
        self._config = config
        self._evaluate_outer = evaluate_outer
        self._leave: Literal["outer", "local"] = leave
        self._tokens = tokens or _input_ids
        self._attached: Attachment | None = None
        self._used = False
        self._raised: BaseException | None = None  # out of training, until `_restored` is closed
        self._restored = ExitStack()  # when training has ended: what saves the module's own parameters

    @property
    def worker(self) -> EditWorker | None:
        """Return the worker, to look at, between the beginning and the end of training; None before and after."""
        return self._attached.worker if self._attached else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run with the module and its real optimizer."""
        if self._used:
            raise ConfigError(ONE_TRAINING)
        self._used = True
        self._attached = Attachment(
            pl_module, trainer.optimizers, self._collective, self._config, self._leave, evaluate_outer=self._evaluate_outer
        )
        if self._evaluate_outer:
            self._save_outer(self._attached, trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Take an outcome that is there, because a training_step calls parts of the module and never the module itself."""
        if self._attached is not None:
            self._attached.before_forward()
            self._attached.count_tokens(self._tokens(batch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the loss; log how the exchange goes on (verdict 1: ok, 0: any other, absent); stop with the run."""
        if self._attached is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None  # Lightning has divided it
        self._attached.worker.report(loss=None if loss is None else loss * trainer.accumulate_grad_batches)
        said = {name: float(value == "ok" if isinstance(value, str) else value) for name, value in self._attached.log().items()}
        pl_module.log_dict(said, on_step=True, on_epoch=False, batch_size=1)
        if self._attached.worker.finished:
            trainer.should_stop = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate the outer parameters, if asked to; else take a fresh outcome, before an average is swapped in."""
        if self._attached is not None:
            if self._evaluate_outer:
                self._attached.show_outer()
            else:
                self._attached.take_fresh_outcome()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the local parameters back, with which training goes on."""
        if self._attached is not None:
            self._attached.hide_outer()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take a fresh outcome, before an average is put into the module: at the next epoch's start, or when training ends."""
        if self._attached is not None:
            self._attached.take_fresh_outcome()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the last outcome and leave the run."""
        if self._attached is not None:
            self._attached.leave()
            self._attached = None
            self._restored.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the hooks away; no outcome is waited for. Lightning calls this before it saves a checkpoint of the exception."""
        if self._attached is not None:
            attached, self._attached = self._attached, None
            self._raised = exception
            attached.abandon(exception)

    def _save_outer(self, attached: Attachment, trainer: Trainer) -> None:
        """Have checkpoints hold the outer parameters; those of weights only reach no hook of a callback.

        After an exception until the strategy's `teardown`: Lightning then calls that of no callback. Where a callback's
        `on_exception` raises it does not call the strategy's, either: then while that exception is handled.
        """
        strategy = trainer.strategy
        optimizers = strategy.optimizers
        local: Callable[[], dict[str, Any]] = strategy.lightning_module_state_dict
        teardown: Callable[[], None] = strategy.teardown

        def outer() -> dict[str, Any]:
            if attached.showing or (self._attached is None and not interrupted()):
                return local()
            attached.show_outer()
            try:
                state = local()
                return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}
            finally:
                attached.hide_outer()

        def interrupted() -> bool:
            """Whether the exception that ended this training is being handled, perhaps with another one in its handler.

            A later `fit` has optimizers of its own.
            """
            handled = sys.exc_info()[1]
            while handled is not None and handled is not self._raised:
                handled = handled.__context__
            ours = handled is not None and strategy.optimizers is optimizers
            return ours and trainer.state.status is TrainerStatus.INTERRUPTED

        def restore_and_teardown() -> None:
            self._raised = None
            self._restored.close()
            teardown()

        self._replace(strategy, "lightning_module_state_dict", outer)
        self._replace(strategy, "teardown", restore_and_teardown)

    def _replace(self, strategy: Strategy, name: str, by: Callable[[], Any]) -> None:
        """Replace a method until `_restored` is closed: then it is as before, unless somebody else has replaced it since."""
        before = strategy.__dict__.get(name)

        def restore() -> None:
            if strategy.__dict__.get(name) is by:
                del strategy.__dict__[name]
                if before is not None:
                    setattr(strategy, name, before)

        setattr(strategy, name, by)
        self._restored.callback(restore)


def _input_ids(batch: Any) -> int:
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return tokens.numel() if isinstance(tokens, Tensor) else 0
