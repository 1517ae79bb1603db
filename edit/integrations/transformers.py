"""`EditCallback`: a transformers `Trainer` trains with the other peers of a run. Says what happens at which of its events."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from edit.collective import Collective, CompositeCollective
from edit.errors import ConfigError
from edit.integrations.attachment import ONE_TRAINING, Attachment
from edit.worker.hooks import Hook
from edit.worker.worker import EditWorker, WorkerConfig

try:
    from transformers import DefaultFlowCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(f"edit.integrations.transformers needs transformers ({error}): pip install 'edit-localsgd[hf]'") from None

__all__ = ["EditCallback"]

_log = logging.getLogger(__name__)


class EditCallback(TrainerCallback):
    """Makes `trainer.train()` this peer's part of a run: `Trainer(..., callbacks=[EditCallback(collective, config)])`.

    Training ends with the Trainer's last step or with the run's, whichever comes first; at either, a Trainer that evaluates or
    saves every so many steps does so once more. Each real optimizer step counts once,
    also with gradient accumulation and clipping; an outcome is taken before the first batch of a step, also where the model is
    compiled or `compute_loss` calls parts of it. Tokens are counted from `input_ids` of the model's own forwards with
    gradients, so not of a reference pass; a `compute_loss` that calls only parts calls `callback.worker.count_tokens(n)`, else
    a warning says so once. The model starts from the run's outer parameters, also when the Trainer resumes from a checkpoint of
    its own.

    One training per callback and per `peers.connect`: `hyperparameter_search` cannot run within a run.

    A Trainer does not tell its callbacks of an exception. `with EditCallback(...) as callback:` around the training, or
    `abandon`, takes the hooks off the model after one; without, its next forward would still ask the run.

    A callback that swaps other parameters in for an evaluation or a save (an average, adapters merged) stands behind this one
    in `callbacks`. One that writes to them otherwise (weights clipped in `on_step_end`) calls `callback.worker.synchronize()`
    of this one first.

    Args:
        collective: the run, for example of `peers.connect`.
        config: `WorkerConfig.of(run)`.
        evaluate_outer: evaluations and checkpoints during training hold the outer parameters, which all peers share; otherwise
            this peer's local ones. Not with an optimizer that has an `eval` and a `train` (schedule-free).
        leave: what the model holds after training: "outer" or "local".

    Raises ConfigError when training begins: settings of the Trainer that cannot work with it (`load_best_model_at_end`,
    `auto_find_batch_size`, `enable_jit_checkpoint` with `evaluate_outer`, several GPUs in one process), or an earlier training
    of this callback. The run's own errors (`edit.errors`) come out of `train`.
    """

    def __init__(
        self,
        collective: Collective | CompositeCollective,
        config: WorkerConfig,
        *,
        evaluate_outer: bool = False,
        leave: Literal["outer", "local"] = "outer",
    ) -> None:
        self._collective = collective
        self._config = config
        self._evaluate_outer = evaluate_outer
        self._leave: Literal["outer", "local"] = leave
        self._attached: Attachment | None = None
        self._used = False
        self._counter: RemovableHandle | None = None
        self._tokens = 0
        self._called = False  # whether the model's own forward was, in this step
        self._warned = False

    @property
    def worker(self) -> EditWorker | None:
        """Return the worker, to look at, between the beginning and the end of training; None before and after."""
        return self._attached.worker if self._attached else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Take the hooks away after a training that ended with an exception; no outcome is waited for.

        The model keeps this peer's own parameters. Does nothing after a training that ended by itself.
        """
        if self._counter is not None:
            self._counter.remove()
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.abandon(RuntimeError("the training was abandoned"))

    def lead(self, trainer: Trainer) -> None:
        """Be called before the callbacks of `report_to`, so that TensorBoard, W&B and others have the exchange's values, too.

        A Trainer calls those before the user's own. Call this between making the Trainer and `train`. Raises ConfigError where
        this is not one of its callbacks.
        """
        callbacks = trainer.callback_handler.callbacks
        if self not in callbacks:
            raise ConfigError("EditCallback.lead: give it to this Trainer first: Trainer(..., callbacks=[callback])")
        callbacks.remove(self)  # it goes behind what decides when to log, evaluate and save
        flow = (i for i, each in enumerate(callbacks, start=1) if isinstance(each, DefaultFlowCallback))
        callbacks.insert(next(flow, 0), self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Join the run with the Trainer's real model and optimizer."""
        if self._attached is not None:
            raise ConfigError("EditCallback: its training did not end; abandon() it, and make a new callback for each")
        if self._used:
            raise ConfigError(f"{ONE_TRAINING}; hyperparameter_search cannot run within a run")
        if args.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end = True: would put an old model into a run that has moved on; set it to False "
                "and load the best checkpoint yourself"
            )
        if args.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size = True: would begin the training anew after each error for want of memory, and a run is "
                "joined once; set it to False and choose per_device_train_batch_size yourself"
            )
        if self._evaluate_outer and getattr(args, "enable_jit_checkpoint", False):
            raise ConfigError(
                "enable_jit_checkpoint = True: would save this peer's own parameters at SIGTERM, not the outer ones as "
                "evaluate_outer = True says; set one of them to False"
            )
        if args.n_gpu > 1:
            raise ConfigError(f"{args.n_gpu} GPUs in one process: start a process per GPU with torchrun, or show it only one")
        model = kwargs["model"]
        self._used = True
        self._attached = Attachment(
            model, kwargs["optimizer"], self._collective, self._config, self._leave, evaluate_outer=self._evaluate_outer
        )
        # What is traced into a compiled model would count once, not at each call.
        counter = Hook(torch.compiler.disable(self._count_tokens))  # type: ignore[no-untyped-call]
        self._counter = model.register_forward_pre_hook(counter, with_kwargs=True)
        return control

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put the local parameters back, with which training goes on after an evaluation; take an outcome that is there.

        No forward takes it where `compute_loss` calls parts of the model, or the model is compiled.
        """
        self._present().hide_outer()
        self._present().before_forward()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the tokens behind the step before it is made. Warn once where nobody counts them."""
        worker = self._present().worker
        self._present().count_tokens(self._tokens)
        if not (self._called or self._warned or worker.speed.tokens):
            self._warned = True
            _log.warning(
                "0 tokens are counted: compute_loss calls parts of the model, not the model itself; "
                "call callback.worker.count_tokens(n) there, which weigh contributions where the run says so"
            )
        self._tokens, self._called = 0, False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Stop when the run has finished; prepare what the Trainer does now (see `_prepare`).

        As at `max_steps`, the Trainer evaluates and saves once more where it does so every so many steps. An outcome for which
        the next forward would wait is taken here if it is that of the last outer step: no step follows it.
        """
        attached = self._present()
        if _looks(control) or attached.worker.outer_step + 1 >= self._config.sync.outer_steps:
            attached.take_fresh_outcome()
        if attached.worker.finished:
            _end(args, state, control)
        self._prepare(control)
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Report the loss as often as the Trainer logs it: the mean since the last time. Log how the exchange goes on.

        The Trainer's `log_history`, its progress bar and the callbacks that are called after this one have outer step, wait,
        verdict, norms and bytes as `edit/...`; those of `report_to` are, after `lead`.
        """
        if self._attached is not None and logs and "loss" in logs:
            self._attached.worker.report(loss=logs["loss"])
            said = self._attached.log()
            logs.update(said)  # type: ignore[arg-type]  # the Trainer logs words, too
            if state.log_history:
                state.log_history[-1].update(said)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Prepare what the Trainer does once per pass over the data; stop where that was the run's last step."""
        self._prepare(control)
        if self._present().worker.finished and not control.should_training_stop:
            _end(args, state, control)
            self._prepare(control)
        return control

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Wait for the last outcome and leave the run."""
        if self._counter is not None:
            self._counter.remove()
        attached, self._attached = self._present(), None
        attached.leave()

    def _prepare(self, control: TrainerControl) -> None:
        """Before an evaluation or a save: show the outer parameters, if asked to; else take a fresh outcome, before callbacks
        behind this one swap other parameters in."""
        if not _looks(control):
            return
        if self._evaluate_outer:
            self._present().show_outer()
        else:
            self._present().take_fresh_outcome()

    def _count_tokens(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if model.training and torch.is_grad_enabled():  # without, it is a reference pass (DPO with adapters), not trained on
            self._called = True
            self._tokens += tokens.numel() if isinstance(tokens, Tensor) else 0

    def _present(self) -> Attachment:
        if self._attached is None:
            raise ConfigError("EditCallback: this Trainer does not call on_train_begin; it cannot train with others")
        return self._attached


def _end(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
    """Have the Trainer stop, and before that evaluate and save where it does so every so many steps."""
    control.should_training_stop = True
    if args.eval_strategy == "steps" and args.eval_delay <= state.global_step:
        control.should_evaluate = True
    if args.save_strategy == "steps":
        control.should_save = True


def _looks(control: TrainerControl) -> bool:
    """Return whether the Trainer evaluates or saves now."""
    return bool(control.should_evaluate or control.should_save)
