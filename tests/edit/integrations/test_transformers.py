"""A Trainer with the callback: the same training as before, and one contribution at every real boundary."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edit import ConfigError, EvictedError, LocalRun
from tests.support.lone_peer import EVERY, Counting, Spy, parameters, run_of, same, theta
from tests.support.settings import worker_config

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from edit.integrations.transformers import EditCallback  # noqa: E402

CONTEXT, VOCABULARY, STEPS = 6, 13, 12


def network() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
    )
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(config)


def rows(count: int = 72) -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, VOCABULARY, (count, CONTEXT), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in tokens]


CONFIG = worker_config(every=EVERY, codec="fp32")


def trainer_of(folder: Path, callbacks: list[Any], steps: int = STEPS, model: nn.Module | None = None, **settings: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=0.02,
        use_cpu=True,
        disable_tqdm=True,
        seed=11,
        dataloader_pin_memory=False,
        **{"save_strategy": "no", "report_to": [], **settings},
    )
    return transformers.Trainer(
        model=model or network(), args=arguments, train_dataset=rows(), eval_dataset=rows(4), callbacks=callbacks
    )


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    yield


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 3, "max_grad_norm": 0.05}, {"max_grad_norm": 0.0, "activation_checkpointing": True}],
    ids=["plain", "accumulated and clipped", "checkpointed"],
)
def test_a_lone_peer_with_outer_lr_1_trains_as_the_trainer_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain = trainer_of(tmp_path / "plain", [], **settings)
    plain.train()
    run = run_of()
    spy = Spy(run)
    hooked = trainer_of(tmp_path / "hooked", [EditCallback(spy, CONFIG)], **settings)
    hooked.train()
    assert run.state.outer_step == STEPS // EVERY
    for name, parameter in parameters(hooked.model).items():
        torch.testing.assert_close(parameter, parameters(plain.model)[name], rtol=1e-4, atol=1e-5)
    micro = settings.get("gradient_accumulation_steps", 1)
    assert {c.inner_steps for c in spy.contributions} == {EVERY}
    assert {c.tokens for c in spy.contributions} == {EVERY * micro * 2 * CONTEXT}


class Waiting(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Keeps whether an outcome was still to be taken when the batches of a step began."""

    def __init__(self, edit: EditCallback) -> None:
        self.edit = edit
        self.pending: list[bool] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.edit.worker is not None
        self.pending.append(self.edit.worker.pending)


def test_a_compiled_model_counts_its_tokens_and_begins_at_the_merge(tmp_path: Path) -> None:
    spy = Spy(run_of())
    settings = {"torch_compile": True, "torch_compile_backend": "eager", "gradient_accumulation_steps": 2}
    callback = EditCallback(spy, CONFIG)
    waiting = Waiting(callback)
    trainer_of(tmp_path, [callback, waiting], 2 * EVERY, **settings).train()
    assert waiting.pending == [False] * 2 * EVERY
    assert [c.tokens for c in spy.contributions] == [EVERY * 2 * 2 * CONTEXT] * len(spy.contributions)
    assert {c.outer_step for c in spy.contributions} == {0, 1}
    torch.compiler.reset()


class Compared(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Calls the model once more, as it was before its adapters, which is not trained on: as TRL's DPO with PEFT."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            model(**inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_pass_without_gradients_counts_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reentrant: bool) -> None:
    monkeypatch.setattr(transformers, "Trainer", Compared)
    spy = Spy(run_of())
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": reentrant}}
    trainer_of(tmp_path, [EditCallback(spy, CONFIG)], EVERY, **settings).train()
    assert {c.tokens for c in spy.contributions} == {EVERY * 2 * CONTEXT}


class Parts(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Calls the model's parts, never the model, as fused losses do."""

    count: Any = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Tensor:
        if self.count is not None:
            self.count(inputs["input_ids"].numel())
        hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state
        return nn.functional.cross_entropy(model.lm_head(hidden)[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


@pytest.mark.parametrize("counts", [True, False])
def test_a_loss_of_the_models_parts_begins_at_the_merge(
    tmp_path: Path, counts: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for kind in (transformers.Trainer, Parts):
        run = run_of(lr=0.5)
        spy = Spy(run)
        callback = EditCallback(spy, CONFIG)
        with monkeypatch.context() as patch:
            patch.setattr(transformers, "Trainer", kind)
            trainer = trainer_of(tmp_path, [callback])
        if counts:
            trainer.count = lambda tokens, callback=callback: callback.worker.count_tokens(tokens)
        trainer.train()
        found.append(theta(run))
        assert {c.tokens for c in spy.contributions} == {EVERY * 2 * CONTEXT if kind is not Parts or counts else 0}
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)
    assert caplog.text.count("call callback.worker.count_tokens(n)") == (0 if counts else 1)


def test_every_hook_is_gone_afterwards(tmp_path: Path) -> None:
    run = run_of()
    callback = EditCallback(run.collective("me"), CONFIG)
    trainer = trainer_of(tmp_path, [callback])
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert callback.worker is None
    assert not trainer.model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


class Looker(transformers.TrainerCallback):
    """Keeps the parameters seen at an evaluation, and theta and the local ones as they were then."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run
        self.seen: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        self.local: list[dict[str, Tensor]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((parameters(kwargs["model"]), theta(self.run)))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.local.append(parameters(kwargs["model"]))


@pytest.mark.parametrize("outer", [True, False])
def test_evaluations_and_checkpoints_see_the_outer_parameters_if_asked_to(tmp_path: Path, outer: bool) -> None:
    from safetensors.torch import load_file

    run = run_of(lr=0.5)
    looker = Looker(run)
    callback = EditCallback(run.collective("me"), CONFIG, evaluate_outer=outer)
    trainer = trainer_of(
        tmp_path, [callback, looker], 14, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=6
    )
    trainer.train()
    seen = [same(model, common) for model, common in looker.seen[:4]]  # the last is that of the last step
    assert seen == [outer, outer, outer, True]  # after step 12, a boundary, the local ones are the outer ones
    saved = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    assert same(saved, looker.seen[1][1]) == outer
    assert same(parameters(trainer.model), theta(run)), "whatever was looked at, training ends with them"
    assert not same(looker.local[3], looker.seen[0][1])  # after the evaluation training went on locally


def test_training_can_end_with_the_peers_own_parameters(tmp_path: Path) -> None:
    run = run_of(lr=0.5)
    trainer = trainer_of(tmp_path, [EditCallback(run.collective("me"), CONFIG, leave="local")], 14)
    trainer.train()
    assert not same(parameters(trainer.model), theta(run))


def test_the_run_hears_of_loss_and_speed(tmp_path: Path) -> None:
    collective = run_of().collective("me")
    trainer_of(tmp_path, [EditCallback(collective, CONFIG)], logging_steps=2).train()
    told = collective.reported
    assert told is not None and 0 < told.loss < 10 and told.step_s > 0 and told.tokens_per_s > 0


def test_the_trainers_own_log_says_how_the_exchange_goes_on(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class After(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            seen.append(dict(logs or {}))

    trainer = trainer_of(tmp_path, [EditCallback(Counting(run_of()), CONFIG), After()], logging_steps=2)
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["edit/outer_step"] for line in logged] == [0, 0, 1, 1, 2, 2]
    assert [line["edit/verdict"] for line in logged] == ["absent", "absent", "ok", "ok", "ok", "ok"]
    assert {(line["edit/sent_mb"], line["edit/received_mb"]) for line in logged} == {(3.0, 1.5)}
    assert all(line["edit/wait_s"] >= 0 for line in logged)
    assert [line["edit/outer_step"] for line in seen if "loss" in line] == [0, 0, 1, 1, 2, 2]
    silent = trainer_of(tmp_path, [EditCallback(run_of().collective("me"), CONFIG)], logging_steps=2, steps=2)
    silent.train()
    assert "edit/sent_mb" not in silent.state.log_history[0], "this carrier counts no bytes"


@pytest.mark.parametrize("leads", [True, False])
def test_report_to_has_them_where_the_callback_leads(tmp_path: Path, leads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TensorBoard's own reader finds them."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    run = run_of(lr=0.5)
    callback, looker = EditCallback(Counting(run), CONFIG, evaluate_outer=True), Looker(run)
    settings: dict[str, Any] = {"report_to": ["tensorboard"], "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    trainer = trainer_of(tmp_path, [callback, looker], **settings)
    if leads:
        callback.lead(trainer)
        callback.lead(trainer)  # again: no harm
    trainer.train()
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert "train/loss" in board.Tags()["scalars"]
    steps = [event.value for event in board.Scalars("train/edit/outer_step")] if leads else []
    expected = [0, 0, 1, 1, 2, 3]  # at step 12 the evaluation takes the outcome first
    assert steps == (expected if leads else [])
    assert [same(model, common) for model, common in looker.seen[:2]] == [True, True], "the outer ones are shown as before"
    assert ("train/edit/sent_mb" in board.Tags()["scalars"]) == leads
    assert [line["edit/outer_step"] for line in trainer.state.log_history if "loss" in line] == expected


def test_only_a_trainers_own_callback_can_lead_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give it to this Trainer first"):
        EditCallback(run_of().collective("me"), CONFIG).lead(trainer_of(tmp_path, []))


def test_looking_at_the_outer_parameters_never_changes_training(tmp_path: Path) -> None:
    """T8: evaluating and saving leave the run as it is without them."""
    digests = []
    for outer, settings in ((False, {}), (True, {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "epoch"})):
        run = run_of(lr=0.5)
        trainer_of(tmp_path, [EditCallback(run.collective("me"), CONFIG, evaluate_outer=outer)], **settings).train()
        digests.append(run.state.digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("eval_steps", [None, EVERY, 50], ids=["no evaluation", "at the last step", "only at the end"])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("outer_steps", [2, 1000], ids=["the last step known", "unknown"])
@pytest.mark.parametrize("mode", ["blocking", "forward", "delayed", "eager"])
def test_training_stops_when_the_run_has_finished(
    tmp_path: Path, mode: str, outer_steps: int, outer: bool, eval_steps: int | None
) -> None:
    run = run_of(outer_steps=2)
    config = worker_config(every=EVERY, codec="fp32", mode=mode, outer_steps=outer_steps)
    settings = {} if eval_steps is None else {"eval_strategy": "steps", "eval_steps": eval_steps}
    trainer = trainer_of(tmp_path, [EditCallback(run.collective("me"), config, evaluate_outer=outer)], steps=100, **settings)
    trainer.train()
    assert run.finished
    overlaps = mode in ("delayed", "eager")
    waited = not overlaps and (outer_steps == 2 or eval_steps == EVERY)  # else the next step is the first to ask
    last = 2 * EVERY if waited else 2 * EVERY + 1
    expected = {None: [], EVERY: [EVERY, 2 * EVERY, *([last] if overlaps else [])], 50: [last]}[eval_steps]
    assert trainer.state.global_step == last
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == expected


@pytest.mark.parametrize("mode", ["blocking", "forward"])
def test_training_stops_at_the_end_of_the_epoch_in_which_the_run_has_finished(tmp_path: Path, mode: str) -> None:
    """Where a drain or sync.tokens ends it, so that the last step is not known before."""
    run = run_of(outer_steps=2)
    config = worker_config(every=EVERY, codec="fp32", mode=mode, outer_steps=1000)
    settings = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    trainer = trainer_of(tmp_path, [EditCallback(run.collective("me"), config)], steps=100, **settings)
    trainer.train_dataset = rows(2 * EVERY)  # two in a batch
    trainer.train()
    assert run.finished and trainer.state.global_step == 2 * EVERY
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [EVERY, 2 * EVERY]


@pytest.mark.parametrize("evaluate_outer", [True, False])
@pytest.mark.parametrize(("evaluates", "saves"), [("epoch", "steps"), ("steps", "epoch"), ("no", "steps"), ("steps", "no")])
def test_the_end_of_an_epoch_with_the_run_evaluates_and_saves_what_is_due_every_so_many_steps(
    tmp_path: Path, evaluates: str, saves: str, evaluate_outer: bool
) -> None:
    run = run_of(outer_steps=2)
    config = worker_config(every=EVERY, codec="fp32", mode="blocking", outer_steps=1000)
    settings = {"eval_strategy": evaluates, "eval_steps": 50, "save_strategy": saves, "save_steps": 50}
    callback = EditCallback(run.collective("me"), config, evaluate_outer=evaluate_outer)
    trainer = trainer_of(tmp_path, [callback], steps=100, **settings)
    trainer.train_dataset = rows(2 * EVERY)  # two in a batch
    trainer.train()
    last = trainer.state.global_step
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert run.finished and [*dict.fromkeys(evaluated)] == evaluated
    assert (evaluated[-1:] == [last]) == (evaluates != "no")
    assert (tmp_path / f"checkpoint-{last}").is_dir() == (saves != "no")


@pytest.mark.parametrize("ends", ["the run", "the Trainer"])
def test_the_trainer_evaluates_and_saves_at_the_end_whichever_ends_first(tmp_path: Path, ends: str) -> None:
    run = run_of(outer_steps=2 if ends == "the run" else 100)
    steps = 100 if ends == "the run" else 7
    every: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 50, "save_strategy": "steps", "save_steps": 50}
    trainer = trainer_of(tmp_path, [EditCallback(run.collective("me"), CONFIG)], steps, **every)
    trainer.train()
    last = trainer.state.global_step
    assert last < 50 and run.finished == (ends == "the run")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{last}"]
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [last]


def test_an_eviction_comes_out_of_train(tmp_path: Path) -> None:
    class Evictor(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                run.evict("me", "for the test")

    run = run_of()
    with pytest.raises(EvictedError, match="for the test"):
        trainer_of(tmp_path, [EditCallback(run.collective("me"), CONFIG), Evictor()]).train()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # asked by peft
def test_only_the_adapters_of_a_peft_model_are_exchanged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(network(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    run = run_of(lr=0.5)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer_of(tmp_path, [EditCallback(run.collective("me"), CONFIG, evaluate_outer=True)], model=model).train()
    assert run.state.outer_step == 3
    names = [tensor.name for fragment in run.state.schema.fragments for tensor in fragment.tensors]
    assert len(names) == 4
    assert all("lora_" in name for name in names)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    assert same(after, theta(run))


@pytest.mark.parametrize("setting", ["load_best_model_at_end", "auto_find_batch_size"])
def test_a_setting_that_cannot_work_is_refused(tmp_path: Path, setting: str) -> None:
    run = run_of()
    settings = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    with pytest.raises(ConfigError, match=f"^{setting} = True"):
        callbacks = [EditCallback(run.collective("me"), CONFIG)]
        trainer_of(tmp_path, callbacks, **{setting: True}, **settings).train()


@pytest.fixture
def _sigterm() -> Iterator[None]:
    """A Trainer with enable_jit_checkpoint takes SIGTERM when it is made, and gives it back at the end of a training."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_sigterm")
@pytest.mark.parametrize("outer", [True, False])
def test_a_checkpoint_at_sigterm_is_refused_where_it_would_not_hold_the_outer_parameters(tmp_path: Path, outer: bool) -> None:
    callback = EditCallback(run_of().collective("me"), CONFIG, evaluate_outer=outer)
    trainer = trainer_of(tmp_path, [callback], 1, enable_jit_checkpoint=True)
    if outer:
        with pytest.raises(ConfigError, match=r"^enable_jit_checkpoint = True: .* set one of them to False"):
            trainer.train()
        assert callback.worker is None
    else:
        trainer.train()
        assert trainer.state.global_step == 1


def test_after_an_exception_the_model_is_a_plain_one_again(tmp_path: Path) -> None:
    class Stumble(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == EVERY:  # a contribution waits for its outcome
                raise KeyboardInterrupt

    run = run_of(lr=0.5)
    with pytest.raises(KeyboardInterrupt), EditCallback(run.collective("me"), CONFIG) as callback:
        trainer = trainer_of(tmp_path, [callback, Stumble()])
        trainer.train()
    assert callback.worker is None and not trainer.model._forward_pre_hooks
    before = parameters(trainer.model)
    trainer.model(input_ids=rows(1)[0]["input_ids"][None])
    assert same(parameters(trainer.model), before), "no outcome is taken"
    again = trainer_of(tmp_path, [EditCallback(run.collective("me"), CONFIG)], model=trainer.model)
    again.train()
    assert run.state.outer_step == 1 + STEPS // EVERY


def test_a_callback_is_for_one_training(tmp_path: Path) -> None:
    class Stumble(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise RuntimeError("stumbled")

    callback = EditCallback(run_of().collective("me"), CONFIG)
    trainer = trainer_of(tmp_path, [callback, Stumble()])
    with pytest.raises(RuntimeError, match="stumbled"):
        trainer.train()
    with pytest.raises(ConfigError, match=r"abandon\(\) it, and make a new callback"):
        trainer.train()


def test_a_second_training_is_one_line(tmp_path: Path) -> None:
    callback = EditCallback(run_of().collective("me"), CONFIG)
    trainer = trainer_of(tmp_path, [callback], 1)
    trainer.train()
    with pytest.raises(ConfigError, match=r"one training per callback and per peers\.connect.*hyperparameter_search cannot"):
        trainer.train()


class Swap(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """As callbacks that average: other parameters for an evaluation."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if control.should_evaluate:
            self.kept = parameters(model)
            self._put(model, {name: each * 0.5 for name, each in self.kept.items()})

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._put(model, self.kept)

    def _put(self, model: Any, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])


@pytest.mark.parametrize("mode", ["blocking", "forward", "delayed"])
def test_an_average_swapped_in_for_evaluations_does_not_change_training(tmp_path: Path, mode: str) -> None:
    found = []
    for behind, settings in (([], {}), ([Swap()], {"eval_strategy": "steps", "eval_steps": EVERY})):
        run = run_of(lr=0.5)
        callback = EditCallback(run.collective("me"), worker_config(every=EVERY, codec="fp32", mode=mode))
        trainer_of(tmp_path, [callback, *behind], **settings).train()  # type: ignore[arg-type]
        found.append(theta(run))
    assert same(found[0], found[1])


def test_one_that_swaps_before_the_callback_is_told_so(tmp_path: Path) -> None:
    with EditCallback(run_of(lr=0.5).collective("me"), CONFIG) as callback:
        trainer = trainer_of(tmp_path, [Swap(), callback], eval_strategy="steps", eval_steps=EVERY)
        with pytest.raises(ConfigError, match=r"were written .* stands before callbacks that swap in other parameters"):
            trainer.train()


class Clip(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def __init__(self, edit: EditCallback) -> None:
        self.edit = edit

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        assert self.edit.worker is not None
        self.edit.worker.synchronize()
        with torch.no_grad():
            model.lm_head.weight.fill_(3.0)


def test_a_callback_can_write_to_the_parameters_after_the_outcome(tmp_path: Path) -> None:
    callback = EditCallback(run_of().collective("me"), CONFIG, leave="local")
    trainer = trainer_of(tmp_path, [callback, Clip(callback)])
    trainer.train()
    assert bool((trainer.model.lm_head.weight == 3.0).all())
