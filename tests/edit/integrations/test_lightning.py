"""A Lightning Trainer with the callback: the same training as before, and one contribution at every real boundary."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from edit import ConfigError, EvictedError
from tests.support.lone_peer import EVERY, Counting, Spy, parameters, run_of, same, theta
from tests.support.settings import worker_config

lightning = pytest.importorskip("lightning.pytorch")

from edit.integrations.lightning import EditCallback  # noqa: E402

STEPS, BATCH = 12, 2
CONFIG = worker_config(every=EVERY, codec="fp32")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*was called without a model"),  # both of any fit with an OnExceptionCheckpoint
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
]


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """As users write it: training_step calls a part of the module, never the module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.validated: list[dict[str, Tensor]] = []
        self.started: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.started.append(parameters(self))
        return nn.functional.mse_loss(self.network(batch["inputs"]), batch["targets"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated.append(parameters(self))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def data(count: int = 96) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    rows = [
        {
            "inputs": torch.randn(4, generator=generator),
            "targets": torch.randn(3, generator=generator),
            "input_ids": torch.zeros(7, dtype=torch.long),
        }
        for _ in range(count)
    ]
    return DataLoader(rows, batch_size=BATCH)  # type: ignore[arg-type]


def fit(folder: Path, module: Module, callbacks: list[Any], **settings: Any) -> Any:
    trainer = lightning.Trainer(
        **{
            "max_steps": STEPS,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "default_root_dir": folder,
            "callbacks": callbacks,
            **settings,
        }
    )
    trainer.fit(module, data(), data(4))
    return trainer


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(Module, {}), (Module, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}), (Manual, {})],
    ids=["plain", "accumulated and clipped", "manual"],
)
def test_a_lone_peer_with_outer_lr_1_trains_as_lightning_alone(
    tmp_path: Path, kind: type[Module], settings: dict[str, Any]
) -> None:
    plain, hooked, run = kind(), kind(), run_of()
    spy = Spy(run)
    fit(tmp_path, plain, [], **settings)
    fit(tmp_path, hooked, [EditCallback(spy, CONFIG)], **settings)
    assert run.state.outer_step == STEPS // EVERY
    for name, parameter in parameters(hooked).items():
        torch.testing.assert_close(parameter, parameters(plain)[name], rtol=1e-4, atol=1e-5)
    micro = settings.get("accumulate_grad_batches", 1)
    assert {c.inner_steps for c in spy.contributions} == {EVERY}
    assert {c.tokens for c in spy.contributions} == {EVERY * micro * BATCH * 7}


def test_no_micro_batch_sees_parameters_from_before_the_outcome(tmp_path: Path) -> None:
    """With accumulation the step comes two forwards after the contribution: they must not run on what is about to move."""
    module, run = Module(), run_of(lr=0.5)
    fit(tmp_path, module, [EditCallback(run.collective("me"), CONFIG)], accumulate_grad_batches=3)
    after_boundary = module.started[EVERY * 3 : EVERY * 3 + 3]
    assert same(after_boundary[0], after_boundary[2])
    assert same(after_boundary[0], after_boundary[1])


def test_every_hook_is_gone_afterwards(tmp_path: Path) -> None:
    module, callback = Module(), EditCallback(run_of().collective("me"), CONFIG)
    trainer = fit(tmp_path, module, [callback])
    assert callback.worker is None
    assert not module._forward_pre_hooks
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("outer", [True, False])
def test_validation_and_checkpoints_see_the_outer_parameters_if_asked_to(
    tmp_path: Path, outer: bool, weights_only: bool
) -> None:
    module, run = Module(), run_of(lr=0.5)
    seen: list[dict[str, Tensor]] = []

    class Looker(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                seen.append(theta(run))

    saving = lightning.callbacks.ModelCheckpoint(
        tmp_path / "kept", every_n_train_steps=6, save_top_k=-1, filename="{step}", save_weights_only=weights_only
    )
    trainer = fit(
        tmp_path,
        module,
        [EditCallback(run.collective("me"), CONFIG, evaluate_outer=outer), Looker(), saving],
        val_check_interval=3,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        max_steps=14,  # no boundary: there the local parameters are the outer ones
    )
    validated = [same(model, common) for model, common in zip(module.validated, seen, strict=True)]
    assert validated == [outer, outer, outer, True]  # after step 12, a boundary, the local ones are the outer ones
    saved = torch.load(tmp_path / "kept" / "step=6.ckpt", weights_only=True)["state_dict"]
    assert same(saved, seen[1]) == outer
    assert same(parameters(module), theta(run)), "whatever was looked at, training ends with them"
    assert "lightning_module_state_dict" not in vars(trainer.strategy)


def test_training_can_end_with_the_peers_own_parameters(tmp_path: Path) -> None:
    run, module = run_of(lr=0.5), Module()
    fit(tmp_path, module, [EditCallback(run.collective("me"), CONFIG, leave="local")], max_steps=14)
    assert not same(parameters(module), theta(run))


def test_the_run_hears_of_loss_and_speed(tmp_path: Path) -> None:
    collective = run_of().collective("me")
    fit(tmp_path, Module(), [EditCallback(collective, CONFIG)])
    told = collective.reported
    assert told is not None and 0 < told.loss < 10 and told.step_s > 0 and told.tokens_per_s > 0


def test_lightnings_own_log_says_how_the_exchange_goes_on(tmp_path: Path) -> None:
    trainer = fit(tmp_path, Module(), [EditCallback(Counting(run_of()), CONFIG)])
    logged = {name: float(value) for name, value in trainer.logged_metrics.items() if name.startswith("edit/")}
    assert logged.pop("edit/wait_s") >= 0
    assert 0 < logged.pop("edit/norm") == logged.pop("edit/merged_norm") and logged.pop("edit/weight") == 1.0
    assert logged == {"edit/outer_step": 2.0, "edit/verdict": 1.0, "edit/sent_mb": 3.0, "edit/received_mb": 1.5}


def test_looking_at_the_outer_parameters_never_changes_training(tmp_path: Path) -> None:
    """T8: validating and saving leave the run as it is without them."""
    digests = []
    for outer, settings in ((False, {}), (True, {"val_check_interval": 1, "enable_checkpointing": True})):
        run = run_of(lr=0.5)
        fit(tmp_path, Module(), [EditCallback(run.collective("me"), CONFIG, evaluate_outer=outer)], **settings)
        digests.append(run.state.digest)
    assert digests[0] == digests[1]


def test_training_stops_when_the_run_has_finished(tmp_path: Path) -> None:
    run = run_of(outer_steps=2)
    trainer = fit(tmp_path, Module(), [EditCallback(run.collective("me"), CONFIG)], max_steps=100)
    assert run.finished
    assert 2 * EVERY <= trainer.global_step <= 2 * EVERY + 2


def test_an_eviction_comes_out_of_fit_and_leaves_no_hooks(tmp_path: Path) -> None:
    run, module = run_of(), Module()

    class Evictor(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                run.evict("me", "for the test")

    callback = EditCallback(run.collective("me"), CONFIG)
    with pytest.raises(EvictedError, match="for the test"):
        fit(tmp_path, module, [callback, Evictor()])
    assert callback.worker is None
    assert not module._forward_pre_hooks


class Silent(Spy):
    """A collective that must not be asked once `over`."""

    over = False

    def outcome(self, outer_step: int, *, block: bool) -> Any:
        assert not self.over
        return self._inner.outcome(outer_step, block=block)


class Stumble(lightning.Callback):  # type: ignore[misc, name-defined]
    """Raises after a step, or in the validation behind it; keeps what the peer has then."""

    def __init__(self, edit: EditCallback, spy: Silent, error: BaseException, step: int, *, validating: bool) -> None:
        self.edit, self.spy, self.error, self.step, self.validating = edit, spy, error, step, validating

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            assert self.edit.worker is not None
            self.local, self.outer = parameters(pl_module), self.edit.worker.outer_state_dict()
            if not self.validating:
                self._raise()

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self._raise()

    def _raise(self) -> None:
        self.spy.over = True
        raise self.error


def fit_with_exception(folder: Path, saving: Any, *callbacks: Any, **settings: Any) -> tuple[Module, Any, dict[str, Tensor]]:
    """Train until an exception; return the module, the Trainer, and what was saved then."""
    module, trainers = Module(), list[Any]()

    class Keep(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainers.append(trainer)

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((ValueError, EvictedError, SystemExit)):
            fit(folder, module, [Keep(), *callbacks, saving], enable_checkpointing=True, num_sanity_val_steps=0, **settings)
    finally:
        signal.signal(signal.SIGINT, before)  # after a KeyboardInterrupt Lightning has it ignored
    (saved,) = (folder / "kept").glob("*.ckpt")
    return module, trainers[0], torch.load(saved, weights_only=True)["state_dict"]


def saver(name: str, folder: Path) -> Any:
    if name == "OnExceptionCheckpoint":
        return lightning.callbacks.OnExceptionCheckpoint(folder / "kept")
    return lightning.callbacks.ModelCheckpoint(folder / "kept", save_on_exception=True, every_n_train_steps=100)


@pytest.mark.parametrize("saving", ["OnExceptionCheckpoint", "ModelCheckpoint"])
@pytest.mark.parametrize("error", [ValueError("stumbled"), KeyboardInterrupt()], ids=["an error", "Ctrl-C"])
@pytest.mark.parametrize(
    ("step", "validating"), [(6, False), (EVERY, False), (6, True)], ids=["training", "a pending contribution", "validation"]
)
@pytest.mark.parametrize("outer", [True, False])
def test_what_is_saved_after_an_exception_holds_the_outer_parameters_if_asked_to(
    tmp_path: Path, outer: bool, step: int, validating: bool, error: BaseException, saving: str
) -> None:
    spy = Silent(run_of(lr=0.5))
    callback = EditCallback(spy, CONFIG, evaluate_outer=outer)
    stumble = Stumble(callback, spy, error, step, validating=validating)
    module, trainer, saved = fit_with_exception(
        tmp_path, saver(saving, tmp_path), callback, stumble, val_check_interval=3, limit_val_batches=1 if validating else 0
    )
    assert same(saved, stumble.outer if outer else stumble.local)
    assert not same(stumble.outer, stumble.local)
    assert same(parameters(module), stumble.local) and not module._forward_pre_hooks and callback.worker is None
    assert not {"lightning_module_state_dict", "teardown"} & set(vars(trainer.strategy)), "a later fit is a plain one"


@pytest.fixture
def handlers() -> Iterator[None]:
    """Where Lightning tears down nothing, its handlers of signals stay."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


class Full(lightning.Callback):  # type: ignore[misc, name-defined]
    def on_exception(self, *_: Any) -> None:
        raise OSError(28, "No space left on device")


def trainer_on_a_full_disk(folder: Path, *callbacks: Any) -> Any:
    """A Trainer whose last callback fails at an exception: then Lightning tears down nothing."""
    return lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[*callbacks, Full()],
        limit_val_batches=0,
    )


@pytest.mark.usefixtures("handlers")
def test_a_fit_after_one_whose_exception_could_not_be_saved_saves_the_module(tmp_path: Path) -> None:
    """Then Lightning tears down nothing."""
    spy, seen = Silent(run_of(lr=0.5)), list[bool]()
    callback = EditCallback(spy, CONFIG, evaluate_outer=True)
    stumble = Stumble(callback, spy, ValueError("stumbled"), 6, validating=False)

    class Saver(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(same(trainer.strategy.lightning_module_state_dict(), parameters(pl_module)))

    trainer = trainer_on_a_full_disk(tmp_path, callback, stumble)
    module = Module()
    with pytest.raises(OSError, match="No space left"):
        trainer.fit(module, data(), data(4))
    trainer.callbacks = [Saver()]
    trainer.fit(module, data(), data(4))
    assert seen and all(seen)
    assert not {"lightning_module_state_dict", "teardown"} & set(vars(trainer.strategy))


@pytest.mark.usefixtures("handlers")
def test_what_is_saved_in_place_of_what_could_not_be_saved_holds_the_outer_parameters(tmp_path: Path) -> None:
    class Fallback(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            try:
                raise OSError(28, "No space left on device")
            except OSError:
                trainer.save_checkpoint(tmp_path / "kept" / "model.ckpt")

    spy = Silent(run_of(lr=0.5))
    callback = EditCallback(spy, CONFIG, evaluate_outer=True)
    stumble = Stumble(callback, spy, ValueError("stumbled"), 6, validating=False)
    _, _, saved = fit_with_exception(tmp_path, Fallback(), callback, stumble, limit_val_batches=0)
    assert same(saved, stumble.outer) and not same(stumble.outer, stumble.local)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("again", ["within the handler", "after it"])
def test_the_exception_of_a_later_fit_saves_the_module(tmp_path: Path, again: str) -> None:
    """Where a callback's `on_exception` raised, so that Lightning tore down nothing."""
    spy = Silent(run_of(lr=0.5))
    callback = EditCallback(spy, CONFIG, evaluate_outer=True)
    stumble = Stumble(callback, spy, ValueError("stumbled"), 6, validating=False)
    local = dict[str, Tensor]()

    class Raise(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step >= 9:
                local.update(parameters(pl_module))
                raise ValueError("again")

    trainer = trainer_on_a_full_disk(tmp_path, callback, stumble)
    module = Module()

    def fit_again() -> None:
        trainer.callbacks = [Raise(), lightning.callbacks.OnExceptionCheckpoint(tmp_path / "kept")]
        with pytest.raises(ValueError, match="again"):
            trainer.fit(module, data(), data(4))

    try:
        trainer.fit(module, data(), data(4))
    except OSError:
        if again == "within the handler":
            fit_again()
    if again == "after it":
        fit_again()
    (saved,) = (tmp_path / "kept").glob("*.ckpt")
    assert local and same(torch.load(saved, weights_only=True)["state_dict"], local)


def test_a_teardown_that_somebody_else_has_put_on_the_strategy_is_called(tmp_path: Path) -> None:
    called = list[str]()

    class Theirs(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            before = trainer.strategy.teardown

            def teardown() -> None:
                called.append("theirs")
                before()

            trainer.strategy.teardown = teardown

    callback = EditCallback(run_of().collective("me"), CONFIG, evaluate_outer=True)
    fit(tmp_path, Module(), [Theirs(), callback])
    assert called == ["theirs"]


def test_what_is_saved_when_the_last_outcome_fails_holds_the_outer_parameters(tmp_path: Path) -> None:
    run, outer = run_of(lr=0.5), dict[str, Tensor]()
    config = worker_config(every=EVERY, codec="fp32", mode="delayed")
    callback = EditCallback(run.collective("me"), config, evaluate_outer=True)

    class Evictor(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_end(self, *_: Any) -> None:
            assert callback.worker is not None and callback.worker.pending
            outer.update(callback.worker.outer_state_dict())
            run.evict("me", "for the test")

    saving = saver("OnExceptionCheckpoint", tmp_path)
    module, _, saved = fit_with_exception(tmp_path, saving, Evictor(), callback, limit_val_batches=0)
    assert outer and same(saved, outer) and not same(parameters(module), outer)
    assert callback.worker is None and not module._forward_pre_hooks


def test_a_second_training_is_one_line(tmp_path: Path) -> None:
    callback = EditCallback(run_of().collective("me"), CONFIG)
    fit(tmp_path, Module(), [callback], max_steps=1)
    with pytest.raises(ConfigError, match=r"one training per callback and per peers\.connect"):
        fit(tmp_path, Module(), [callback], max_steps=1)


def test_the_last_of_several_optimizers_ends_an_inner_step(tmp_path: Path) -> None:
    class Two(Manual):
        def configure_optimizers(self) -> Any:
            first, *others = self.parameters()
            return [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)]

        def training_step(self, batch: Any, index: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.network(batch["inputs"]), batch["targets"]))
            for optimizer in self.optimizers():
                optimizer.step()

    run, module = run_of(lr=0.5), Two()
    callback, counted = EditCallback(run.collective("me"), CONFIG), list[int]()

    class Looker(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, *_: Any) -> None:
            assert callback.worker is not None
            counted.append(callback.worker.inner_steps)

    fit(tmp_path, module, [callback, Looker()], max_steps=12)  # Lightning counts the steps of both
    assert counted == [1, 2, 3, 4, 5, 6]
    assert run.state.outer_step > 0 and same(parameters(module), theta(run))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_run_hears_of_the_loss_whatever_is_accumulated(tmp_path: Path, micro_batches: int) -> None:
    class Constant(Module):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return 8 + 0 * super().training_step(batch, batch_idx)

    collective = run_of().collective("me")
    fit(tmp_path, Constant(), [EditCallback(collective, CONFIG)], accumulate_grad_batches=micro_batches)
    assert collective.reported is not None and collective.reported.loss == 8


class Swap(lightning.Callback):  # type: ignore[misc, name-defined]
    """As Lightning's WeightAveraging: other parameters for a validation, which goes through the module, and for the module at
    the end of training."""

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = parameters(pl_module)
        self._put(pl_module, {name: torch.full_like(each, 0.5) for name, each in self.kept.items()})

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._put(pl_module, self.kept)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._put(pl_module, {name: torch.full_like(each, 0.5) for name, each in parameters(pl_module).items()})

    def _put(self, pl_module: Any, values: dict[str, Tensor]) -> None:
        for name, parameter in pl_module.named_parameters():
            parameter.data.copy_(values[name])


class Whole(Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)  # type: ignore[no-any-return]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self(batch["inputs"])


@pytest.mark.parametrize("first", [True, False], ids=["before the average", "behind it"])
@pytest.mark.parametrize("mode", ["blocking", "forward", "delayed"])
def test_an_average_swapped_in_for_validations_does_not_change_training(tmp_path: Path, mode: str, first: bool) -> None:
    found = []
    for every, swaps in ((0, []), (EVERY, [Swap()])):
        run, module = run_of(lr=0.5), Whole()
        callback = EditCallback(run.collective("me"), worker_config(every=EVERY, codec="fp32", mode=mode), leave="local")
        callbacks = [callback, *swaps] if first else [*swaps, callback]
        settings = {"val_check_interval": every, "num_sanity_val_steps": 0} if every else {"limit_val_batches": 0}
        fit(tmp_path, module, callbacks, **settings)
        found.append(theta(run))
        assert len(module.validated) == (2 * STEPS // EVERY if every else 0)
    assert bool((module.validated[0]["network.0.bias"] == 0.5).all()) and same(found[0], found[1])
    if mode != "delayed":  # where the last outcome is still to come
        assert all(bool((each == 0.5).all()) for each in parameters(module).values())
