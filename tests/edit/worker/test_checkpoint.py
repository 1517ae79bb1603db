"""A worker saved at any inner step and rebuilt from nothing goes on as if it had never been interrupted, to the bit."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from edit.codecs import decode
from edit.codecs.residuals import Residual
from edit.collective import CompositeCollective
from edit.config.run import CodecConfig, FragmentCodec, OuterConfig, PenaltyConfig, RunConfig, StorageConfig, SyncConfig
from edit.errors import ConfigError, LocalProtocolError, StorageError, TransportError
from edit.fragments.schema import plan_fragments
from edit.local import LocalRun
from edit.records import Committed, Contribution, Outcome, Snapshot
from edit.worker.checkpoint import KINDS
from edit.worker.worker import EditWorker, WorkerConfig
from tests.support.encoded import SPECS, elements, encode
from tests.support.exhaustive import rarely
from tests.support.models import TinyTransformer, small_mlp, token_batches, train_step
from tests.support.sparing import SparingCollective
from tests.support.trainee import config

NAMES, EVERY, STEPS = ("a", "b"), 4, 22

MODES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "forward": {"mode": "forward"},
    "delayed": {"mode": "delayed", "delay": 2},
    "lerp": {"mode": "delayed", "delay": 3, "mix": "lerp"},
    "streaming": {"mode": "delayed", "delay": 1, "groups": 2},
    "eager": {"mode": "eager", "delay": 2},
}


class Life:
    """One peer between two interruptions."""

    def __init__(
        self, run: LocalRun, name: str, worker_config: WorkerConfig, saved: dict[str, Any] | None = None, clip: float = 0.0
    ) -> None:
        self.model = TinyTransformer(seed=3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.batches = token_batches(NAMES.index(name))
        self.taken = 0
        self.carrier = SparingCollective(run.collective(name))
        collective = CompositeCollective([self.carrier], clip)
        self.worker = EditWorker(self.model, self.optimizer, collective, worker_config)
        if saved is not None:
            if "model" in saved:
                self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.worker.load_state_dict(saved["worker"], forward="model" not in saved)
            self.skip(saved["taken"])
        self.worker.__enter__()

    def skip(self, batches: int) -> None:
        for _ in range(batches):
            next(self.batches)
        self.taken += batches

    def step(self) -> float:
        self.taken += 1
        self.worker.count_tokens(24)
        return train_step(self.model, self.optimizer, next(self.batches))

    def save(self) -> dict[str, Any]:
        everything = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "taken": self.taken}
        return copy.deepcopy(everything | {"worker": self.worker.state_dict()})


def run_of(kind: str, up: str | CodecConfig = "int8", **sync: Any) -> RunConfig:
    return config(
        sync=SyncConfig(every=EVERY, **({"strict": True} | MODES[kind] | sync)),
        outer=OuterConfig(lr=0.7, momentum=0.5),
        penalty=PenaltyConfig(),
        codec=CodecConfig(up=up, down="bf16") if isinstance(up, str) else up,
        storage=StorageConfig(keep_updates=8),  # as many as outer steps pass between two checkpoints, or it takes a snapshot
    )


def theta_of(run: LocalRun) -> list[str]:
    return [run.state.digest, str(run.state.outer_step)]


def trained(
    run_config: RunConfig, save_after: int = -1, die_after: int = -1, clip: float = 0.0, **own: Any
) -> tuple[list[float], list[str], list[Tensor]]:
    """Losses of both peers, the run's theta and the local parameters; saved and then killed after so many steps of both.

    The steps between saving and dying are made twice: what the first life contributed in them has been merged. own: what only
    these peers decide.
    """
    run = LocalRun(run_config, NAMES)
    worker_config = dataclasses.replace(WorkerConfig.of(run_config), **own)
    lives = [Life(run, name, worker_config, clip=clip) for name in NAMES]
    losses: dict[tuple[int, int], float] = {}
    saved: list[dict[str, Any]] = []
    step = 0
    while step < STEPS:
        if step == save_after and not saved:
            saved = [life.save() for life in lives]
        if step == die_after:
            for life in lives:
                life.worker.__exit__(KeyboardInterrupt, None, None)
            lives = [Life(run, name, worker_config, one, clip) for name, one in zip(NAMES, saved, strict=True)]
            step, die_after = save_after, -1
        for i, life in enumerate(lives):
            losses[step, i] = life.step()
        step += 1
    with ExitStack() as stack:
        for life in lives:
            stack.callback(life.worker.__exit__, KeyboardInterrupt, None, None)
    local = [parameter.detach().clone() for life in lives for parameter in life.model.parameters()]
    return [losses[key] for key in sorted(losses)], theta_of(run), local


@functools.cache
def once(
    kind: str, up: str, down: str, form: str, save_after: int = -1, die_after: int = -1
) -> tuple[list[float], list[str], list[Tensor]]:
    """`trained`, for all tests that compare with it."""
    return trained(run_of(kind, CodecConfig(up=up, down=down, up_residual=form)), save_after, die_after)


@pytest.mark.sampled(2)
@pytest.mark.covering
@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize(("save_after", "die_after"), [(6, 6), (8, 8), (9, 9), (4, 14), (9, 17), (13, 15)])
def test_an_interrupted_training_gives_the_bits_of_one_that_was_not(kind: str, save_after: int, die_after: int) -> None:
    """Also with a contribution pending, and with contributions that a life which is forgotten had made."""
    whole = once(kind, "int8", "bf16", "fp32")
    broken = trained(run_of(kind), save_after, die_after)
    assert whole[0] == broken[0] and whole[1] == broken[1]
    assert all(torch.equal(a, b) for a, b in zip(whole[2], broken[2], strict=True))


MIXED = CodecConfig(
    up="topk:k=9",
    down="sign",
    up_decay=0.95,
    down_decay=0.9,
    fragments={
        "e*": FragmentCodec(up="int8", down="bf16"),
        "blocks.*": FragmentCodec(up="stat2"),
        "head": FragmentCodec(down="e3m0"),
    },
)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("kind", "up"),
    rarely([("delayed", text) for text in SPECS], kept=[("delayed", "int8"), ("delayed", "topk")])
    + rarely(
        [(kind, MIXED) for kind in MODES if kind != "eager"],
        kept=[("forward", MIXED), ("streaming", MIXED)],
    ),
    ids=str,
)
def test_an_interrupted_training_gives_the_same_bits_with_every_codec(kind: str, up: str | CodecConfig) -> None:
    whole, broken = trained(run_of(kind, up)), trained(run_of(kind, up), 9, 17)
    assert whole[0] == broken[0] and whole[1] == broken[1]
    assert all(torch.equal(a, b) for a, b in zip(whole[2], broken[2], strict=True))


def equal(a: tuple[list[float], list[str], list[Tensor]], b: tuple[list[float], list[str], list[Tensor]]) -> bool:
    return a[:2] == b[:2] and all(torch.equal(x, y) for x, y in zip(a[2], b[2], strict=True))


@pytest.mark.parametrize("kind", rarely(MODES, kept=("forward", "streaming")))
def test_a_contribution_that_was_shortened_is_the_same_after_an_interruption(kind: str) -> None:
    run_config, clip = run_of(kind, CodecConfig(up="int4", down="bf16")), 0.05
    whole = trained(run_config, clip=clip)
    assert equal(whole, trained(run_config, 9, 17, clip=clip)) and equal(whole, trained(run_config, 13, 15, clip=clip))
    assert not equal(whole, once(kind, "int4", "bf16", "fp32")), "the bound counts"


FORMS = [
    (kind, form) for kind in MODES for form in ("bf16", "int8", "local") if form != "local" or kind not in ("lerp", "eager")
]


@pytest.mark.covering
@pytest.mark.parametrize(("kind", "form"), rarely(FORMS, kept=[("forward", "int8"), ("streaming", "local")]))
def test_an_interrupted_training_gives_the_same_bits_with_a_residual_of_another_form(kind: str, form: str) -> None:
    whole = once(kind, "int4", "bf16", form)
    assert equal(whole, once(kind, "int4", "bf16", form, 9, 17))
    assert not equal(whole, once(kind, "int4", "bf16", "fp32")), "the form counts"


@pytest.mark.covering
@pytest.mark.parametrize(
    ("kind", "form"), rarely([*((kind, "fp32") for kind in MODES), *FORMS], kept=[("eager", "fp32"), ("streaming", "int8")])
)
def test_a_residual_that_is_computed_with_the_outcome_has_the_bits_of_one_that_was_kept(kind: str, form: str) -> None:
    run_config = run_of(kind, CodecConfig(up="int4", down="bf16", up_residual=form))
    assert equal(once(kind, "int4", "bf16", form, 9, 17), trained(run_config, 9, 17, only_steps_write=True))


@pytest.mark.covering
@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("saved_as", ["fp32", "bf16", "int8"])
def test_a_residual_is_saved_in_its_form_and_loads_into_another(saved_as: str, form: str) -> None:
    run_config = run_of("blocking", CodecConfig(up="int8", down="bf16", up_residual=saved_as))
    run, saved = a_life_of(run_config, 9)
    kind = "residual_int8" if saved_as == "int8" else "residual"
    tensors = saved["worker"][kind]
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[saved_as]
    assert {tensor.dtype for tensor in tensors.values()} == {expected}
    parameters = sum(p.numel() for p in TinyTransformer().parameters())
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert size == parameters * expected.itemsize if saved_as != "int8" else size < 1.1 * parameters
    worker_config = WorkerConfig.of(run_of("blocking", CodecConfig(up="int8", down="bf16", up_residual=form)))
    life = Life(run, "a", worker_config, saved)
    (share,) = life.worker._exchanges
    before = {i: Residual.of(share_tensor, share.feedback._shards[i].numel, "fp32") for i, share_tensor in residuals_of(saved)}
    for i, residual in share.feedback.residuals().items():
        exact = before[i].tensor
        rounded = exact if form == saved_as else decode(encode(form, exact))
        assert residual.form == form and torch.equal(elements(residual), rounded)
    life.worker.__exit__(KeyboardInterrupt, None, None)


def test_a_parameter_that_changes_after_its_contribution_is_named_where_only_steps_may_write() -> None:
    run_config = run_of("blocking")
    run = LocalRun(run_config, ["a"])
    life = Life(run, "a", dataclasses.replace(WorkerConfig.of(run_config), only_steps_write=True))
    for _ in range(EVERY):
        life.step()
    with life.worker.outer_parameters():
        pass
    life.step()
    assert life.worker.outer_step == 1, "theta that comes and goes is no change"
    for _ in range(EVERY - 1):
        life.step()
    with torch.no_grad():
        life.model.head.weight.mul_(2)
    with pytest.raises(LocalProtocolError, match=r"the parameters of head changed after optimizer\.step"):
        life.step()
    assert life.worker.outer_step == 1
    life.worker.__exit__(KeyboardInterrupt, None, None)


@pytest.mark.parametrize("kind", rarely(MODES, kept=("delayed", "eager")))
def test_t8_saving_after_every_step_changes_nothing(kind: str) -> None:
    def run(save: bool) -> tuple[list[float], list[str]]:
        run_config = run_of(kind)
        local_run = LocalRun(run_config, NAMES)
        lives = [Life(local_run, name, WorkerConfig.of(run_config)) for name in NAMES]
        losses = []
        for _ in range(STEPS):
            for life in lives:
                if save:
                    life.save()
                losses.append(life.step())
                if save:
                    life.save()
        for life in lives:
            life.worker.__exit__(KeyboardInterrupt, None, None)
        return losses, theta_of(local_run)

    assert run(save=True) == run(save=False)


def test_what_the_run_has_already_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stale: list[int] = []
    contribute = LocalRun.contribute

    def watched(run: LocalRun, peer_id: str, contribution: Contribution) -> None:
        stale.extend([contribution.outer_step] if contribution.outer_step < run.state.outer_step else [])
        contribute(run, peer_id, contribution)

    monkeypatch.setattr(LocalRun, "contribute", watched)
    trained(run_of("blocking"), 5, 14)
    trained(run_of("delayed"), 5, 14)
    assert stale == []


def a_saved_one(kind: str = "delayed", steps: int = 5) -> tuple[LocalRun, RunConfig, dict[str, Any]]:
    run_config = run_of(kind)
    run, saved = a_life_of(run_config, steps)
    return run, run_config, saved


def a_life_of(run_config: RunConfig, steps: int) -> tuple[LocalRun, dict[str, Any]]:
    run = LocalRun(run_config, NAMES)
    lives = [Life(run, name, WorkerConfig.of(run_config)) for name in NAMES]
    for _ in range(steps):
        for life in lives:
            life.step()
    saved = lives[0].save()
    for life in lives:
        life.worker.__exit__(KeyboardInterrupt, None, None)
    return run, saved


def residuals_of(saved: dict[str, Any]) -> list[tuple[int, Tensor]]:
    """By fragment, as `Residual.tensor` has it: what the state has of it, by hand."""
    names: dict[int, list[str]] = {}
    for i, fragment in enumerate(plan_fragments(TinyTransformer().named_parameters()).fragments):
        names[i] = [spec.name for spec in fragment.tensors]
        names[i].append(f"{fragment.name}.rank0")
    state = saved["worker"]
    kept = {**state.get("residual", {}), **state.get("residual_int8", {})}
    return [(i, torch.cat([kept[name].flatten() for name in those if name in kept])) for i, those in names.items()]


def test_what_is_saved_is_laid_out_by_parameter() -> None:
    _, _, saved = a_saved_one()
    state = saved["worker"]
    names = {name: parameter.shape for name, parameter in TinyTransformer().named_parameters()}
    assert sorted(state) == ["outer", "scalars", "sent_from"]  # nothing is committed yet, so no residual is owed
    for kind in ("outer", "sent_from"):
        assert {name: tensor.shape for name, tensor in state[kind].items()} == names
        assert all(tensor.dtype == torch.float32 for tensor in state[kind].values())
    assert state["scalars"]["pending"]["outer_step"] == 0
    _, _, later = a_saved_one("eager", 9)
    assert sorted(later["worker"]) == ["last_sent", "last_step", "outer", "residual", "scalars", "sent", "sent_from"]


def test_the_empty_state_has_the_form_of_a_saved_one() -> None:
    run, run_config, saved = a_saved_one()
    model = TinyTransformer()
    worker = EditWorker(model, torch.optim.SGD(model.parameters()), run.collective("a"), WorkerConfig.of(run_config))
    empty = worker.empty_state(["outer", "sent_from"], saved["worker"]["scalars"])
    for kind, tensors in empty.items():
        assert {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in saved["worker"][kind].items()}
    with pytest.raises(ConfigError, match="no tensors of kind 'theta'"):
        worker.empty_state(["theta"], saved["worker"]["scalars"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("kind", "steps"), [("blocking", 3), ("delayed", 5), ("eager", 9)])
def test_torch_distributed_checkpoint_loads_what_is_needed(kind: str, steps: int, tmp_path: Path) -> None:
    """As the docstring of `EditWorker.empty_state` says. Some kinds, and of some only some fragments, were saved."""
    run, run_config, saved = a_saved_one(kind, steps)
    scalars = saved["worker"].pop("scalars")
    dcp.save(saved["worker"], checkpoint_id=tmp_path, no_dist=True)
    model = TinyTransformer()
    worker = EditWorker(model, torch.optim.SGD(model.parameters()), run.collective("a"), WorkerConfig.of(run_config))
    state = worker.empty_state(worker.kinds_needed(scalars, 0), scalars)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    worker.load_state_dict(state | {"scalars": scalars})
    assert state.keys() == saved["worker"].keys()
    for name, tensors in state.items():
        assert tensors.keys() == saved["worker"][name].keys()
        assert all(torch.equal(tensor, saved["worker"][name][key]) for key, tensor in tensors.items())


def damaged(saved: dict[str, Any], how: str) -> dict[str, Any]:
    state = copy.deepcopy(saved["worker"])
    if how == "bits":
        state["outer"]["norm.weight"][0] += 1
    elif how == "missing":
        del state["outer"]["norm.weight"]
    elif how == "shape":
        state["outer"]["norm.weight"] = torch.zeros(9)
    elif how == "dtype":
        state["outer"]["norm.weight"] = state["outer"]["norm.weight"].bfloat16()
    elif how == "scalars":
        del state["scalars"]
    elif how == "counters":
        state["scalars"]["work"] = "much"
    elif how == "fragments":
        state["scalars"]["fragments"]["outer"] = [0]
    elif how == "pending":
        state["scalars"]["pending"]["work"] = ["x", 1]
    return state


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("bits", "the outer parameters do not match their digest"),
        ("missing", "outer of norm.weight is missing"),
        ("shape", r"outer of norm.weight \[9\] torch.float32 does not fit"),
        ("dtype", r"outer of norm.weight \[8\] torch.bfloat16 does not fit"),
        ("scalars", "the worker's scalars are missing"),
        ("fragments", "the worker's scalars are incomplete"),
        ("counters", "the counters of inner steps are damaged"),
        ("pending", "the worker's scalars are damaged"),
    ],
)
def test_a_damaged_state_is_refused_by_name(how: str, message: str) -> None:
    run, run_config, saved = a_saved_one()
    life = damaged(saved, how)
    with pytest.raises(StorageError, match=message):
        Life(run, "a", WorkerConfig.of(run_config), saved | {"worker": life})


def test_a_state_of_another_model_is_refused() -> None:
    run, run_config, saved = a_saved_one()
    model = small_mlp()
    worker = EditWorker(model, torch.optim.SGD(model.parameters()), run.collective("a"), WorkerConfig.of(run_config))
    with pytest.raises(StorageError, match="of another model"):
        worker.load_state_dict(saved["worker"])


def test_a_state_newer_than_the_run_or_of_another_run_is_refused() -> None:
    run, run_config, saved = a_saved_one(steps=10)
    young = LocalRun(run_config, NAMES)
    with pytest.raises(ConfigError, match="the checkpoint is at outer step 2, the run only at 0"):
        Life(young, "a", WorkerConfig.of(run_config), saved)
    other = LocalRun(run_config, ["a"], theta=[2 * part for part in run.state.theta])
    lone = Life(other, "a", WorkerConfig.of(run_config))
    for _ in range(10):
        lone.step()
    lone.worker.__exit__(KeyboardInterrupt, None, None)
    with pytest.raises(ConfigError, match="it is of another run"):
        Life(other, "a", WorkerConfig.of(run_config), saved)


def test_a_contribution_saved_in_another_mode_keeps_the_progress_made_while_it_is_on_its_way() -> None:
    run, _, saved = a_saved_one("blocking", steps=EVERY)
    life = Life(run, "a", WorkerConfig.of(run_of("delayed")), saved)
    for _ in range(2):
        life.step()
    assert life.worker.outer_step == 1 and life.worker.digest == run.state.digest
    theta, local = life.worker.outer_state_dict(), dict(life.model.named_parameters())
    assert not any(torch.equal(theta[name], local[name]) for name in theta)
    life.worker.__exit__(KeyboardInterrupt, None, None)


def test_loading_comes_before_entering() -> None:
    run, run_config, saved = a_saved_one()
    life = Life(run, "a", WorkerConfig.of(run_config))
    with pytest.raises(LocalProtocolError, match="load before"):
        life.worker.load_state_dict(saved["worker"])
    life.worker.__exit__(KeyboardInterrupt, None, None)


@dataclasses.dataclass
class CutOffAtFirst(SparingCollective):
    """Joining fails once."""

    failed: bool = False

    def join(self, *arguments: Any) -> Snapshot:
        if not self.failed:
            self.failed = True
            raise TransportError("cut off")
        return super().join(*arguments)


@pytest.mark.parametrize("kind", ["blocking", "delayed"])
def test_entering_again_after_a_failure_goes_on_from_the_state_that_was_loaded(kind: str) -> None:
    run, run_config, saved = a_saved_one(kind, steps=EVERY + 3)
    theta, model = theta_of(run), TinyTransformer(seed=3)
    carrier = CutOffAtFirst(run.collective("a"))
    worker = EditWorker(model, torch.optim.AdamW(model.parameters()), carrier, WorkerConfig.of(run_config))
    model.load_state_dict(saved["model"])
    worker.load_state_dict(saved["worker"])
    with pytest.raises(TransportError, match="cut off"):
        worker.__enter__()
    with pytest.raises(LocalProtocolError, match="enter the EditWorker first"):
        worker.state_dict()
    with pytest.raises(KeyboardInterrupt), worker:
        assert worker.inner_steps == EVERY + 3 and worker.state_dict()["scalars"] == saved["worker"]["scalars"]
        assert all(torch.equal(tensor, saved["model"][name]) for name, tensor in model.state_dict().items())
        assert theta_of(run) == theta
        raise KeyboardInterrupt


def only(*kinds: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What is left of a saved life where the run is known to be further."""

    def left(saved: dict[str, Any]) -> dict[str, Any]:
        worker = {kind: saved["worker"][kind] for kind in ("scalars", *kinds)}
        return {**{key: saved[key] for key in ("optimizer", "taken")}, "worker": worker}

    return left


only_counters = only()


def interrupted_while_the_run_went_on(
    run_config: RunConfig, kept: Callable[[dict[str, Any]], dict[str, Any]] = lambda saved: saved
) -> tuple[LocalRun, Life, Life]:
    """Peer a is saved after 2 of 4 steps and comes back when b alone has made a commit."""
    run = LocalRun(run_config, NAMES)
    a, b = (Life(run, name, WorkerConfig.of(run_config)) for name in NAMES)
    for _ in range(2):
        a.step()
        b.step()
    saved = a.save()
    a.worker.__exit__(KeyboardInterrupt, None, None)
    run.leave("a")
    before = run.state.outer_step
    while run.state.outer_step == before:
        b.step()
    return run, Life(run, "a", WorkerConfig.of(run_config), kept(saved)), b


def test_strict_a_run_that_went_on_alone_is_caught_up_with_by_replay() -> None:
    """The others did not wait: there is no contribution of this peer to find, so its progress is put onto what they made."""
    _, back, b = interrupted_while_the_run_went_on(run_of("blocking", up="fp32"))
    assert back.worker.outer_step == 0 and back.worker.round_inner_steps == 2 and back.worker.inner_steps == 2
    for _ in range(2):
        back.step()
    assert back.worker.outer_step == 1 and back.worker.pending
    for life in (back, b):
        life.worker.__exit__(KeyboardInterrupt, None, None)


@pytest.mark.parametrize("older", [False, True])
def test_a_slow_peer_goes_on_with_the_number_of_inner_steps_that_it_was_told(older: bool) -> None:
    """DyLU; a checkpoint of before does not say it."""
    run_config = run_of("blocking", strict=False, dylu=True)
    run = LocalRun(run_config, NAMES[:1])
    first = Life(run, "a", WorkerConfig.of(run_config))
    ask = first.carrier.outcome

    def told(outer_step: int, *, block: bool) -> Outcome | None:
        outcome = ask(outer_step, block=block)
        return dataclasses.replace(outcome, inner_steps=2) if isinstance(outcome, Committed) else outcome

    first.carrier.outcome = told  # type: ignore[method-assign]
    for _ in range(EVERY + 1):
        first.step()
    saved = first.save()
    if older:
        del saved["worker"]["scalars"]["every"]
    back = Life(run, "a", WorkerConfig.of(run_config), saved)
    back.step()
    assert back.worker.pending != older


@pytest.mark.covering
@pytest.mark.parametrize("kept", [dict, only("outer"), only_counters], ids=["everything saved", "theta", "counters"])
@pytest.mark.parametrize("kind", MODES)
def test_a_run_that_is_further_is_joined_where_it_is(kind: str, kept: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Nobody waits for a peer that does again what the run has: it trains from theta, with its optimizer and its counters.

    Theta is what was saved and the update that followed, where it was saved.
    """
    run, back, b = interrupted_while_the_run_went_on(run_of(kind, strict=False), kept)
    fetched = list(range(len(run.state.theta))) if kept is only_counters else []
    assert (back.carrier.fetched, back.carrier.begins_at) == (fetched, None if fetched else 0)
    assert back.carrier.snapshots == 0
    assert (back.worker.outer_step, back.worker.digest) == (run.state.outer_step, run.state.digest)
    assert (back.worker.inner_steps, back.worker.round_inner_steps, back.worker.pending) == (2, 0, False)
    local = torch.cat([parameter.detach().flatten() for parameter in back.model.parameters()])
    assert torch.equal(local, torch.cat([part.flatten() for part in run.state.theta]))
    assert all(int(state["step"]) == 2 for state in back.optimizer.state.values())
    while not back.worker.pending:
        back.step()
    while run.state.outer_step == back.worker.outer_step:
        b.step()
    b.worker.synchronize()
    commit = b.worker.last_commit
    assert commit is not None
    assert {verdict.peer_id for verdict in commit.fragments[0].verdicts} == {"a", "b"}
    for life in (back, b):
        life.worker.__exit__(KeyboardInterrupt, None, None)


def shared(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever joins from now on gets the snapshot of now, whatever the run has reached: others still read it."""
    join, past = LocalRun.join, run.snapshot()
    past = dataclasses.replace(past, fragments=tuple(fragment.clone() for fragment in past.fragments))

    def joined(self: LocalRun, *arguments: Any) -> Snapshot:
        now = join(self, *arguments)
        return dataclasses.replace(past, run_outer_step=now.outer_step) if self is run else now

    monkeypatch.setattr(LocalRun, "join", joined)


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_newer_than_a_shared_snapshot_is_gone_on_from(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run_config = run_of("blocking", strict=strict)
    run = LocalRun(run_config, NAMES)
    lives = [Life(run, name, WorkerConfig.of(run_config)) for name in NAMES]
    shared(run, monkeypatch)
    for _ in range(2 * EVERY + 1):
        for life in lives:
            life.step()
    saved = lives[0].save()
    lives[0].worker.__exit__(KeyboardInterrupt, None, None)
    with ExitStack() as stack:
        stack.callback(lives[1].worker.__exit__, KeyboardInterrupt, None, None)
        back = Life(run, "a", WorkerConfig.of(run_config), saved)
        stack.callback(back.worker.__exit__, KeyboardInterrupt, None, None)
        assert (back.worker.outer_step, back.worker.digest) == (run.state.outer_step, run.state.digest)
        assert back.worker.outer_step == 2 and back.worker.round_inner_steps == 1


def test_a_run_that_is_further_than_a_shared_snapshot_is_joined_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    run_config = run_of("blocking", strict=False)
    run = LocalRun(run_config, NAMES)
    a, b = (Life(run, name, WorkerConfig.of(run_config)) for name in NAMES)
    shared(run, monkeypatch)
    for _ in range(EVERY + 1):
        a.step()
        b.step()
    saved = a.save()
    a.worker.__exit__(KeyboardInterrupt, None, None)
    run.leave("a")
    while run.state.outer_step == 1:
        b.step()
    back = Life(run, "a", WorkerConfig.of(run_config), only_counters(saved))
    assert (back.worker.outer_step, back.worker.digest) == (run.state.outer_step, run.state.digest)
    assert (back.worker.inner_steps, back.worker.round_inner_steps) == (EVERY + 1, 0)
    for life in (back, b):
        life.worker.__exit__(KeyboardInterrupt, None, None)


def test_counters_or_theta_suffice_only_where_the_run_is_further() -> None:
    run, _, saved = a_saved_one("blocking")
    scalars, step = saved["worker"]["scalars"], run.state.outer_step
    strict, free = (WorkerConfig.of(run_of("blocking", strict=strict)) for strict in (True, False))

    def worker(settings: WorkerConfig) -> EditWorker:
        model = TinyTransformer(seed=3)
        return EditWorker(model, torch.optim.AdamW(model.parameters()), run.collective("a"), settings)

    # Eight updates are kept; of two bytes per parameter each, one is less than the parameters, two are not.
    needed = [worker(free).kinds_needed(scalars, at) for at in (step, step + 1, step + 2, step + 9)]
    assert needed == [frozenset(KINDS), {"outer"}, set(), set()]
    assert worker(strict).kinds_needed(scalars, step + 1) == frozenset(KINDS)
    with pytest.raises(StorageError, match="scalars are damaged"):
        worker(free).kinds_needed({}, step)
    for kept in (only_counters, only("outer")):
        with pytest.raises(StorageError, match=f"without its tensors it cannot be gone on from at outer step {step}"):
            Life(run, "a", free, kept(saved))


def test_theta_is_not_all_though_there_is_nothing_else_to_save() -> None:
    """Without residuals, and with nothing pending: the local parameters are still missing."""
    run_config = run_of("blocking", up="fp32", strict=False)
    run = LocalRun(run_config, NAMES[:1])
    life = Life(run, "a", WorkerConfig.of(run_config))
    life.step()
    saved = life.save()
    assert saved["worker"].keys() == {"scalars", "outer"}
    life.worker.__exit__(KeyboardInterrupt, None, None)
    with pytest.raises(StorageError, match="without its tensors it cannot be gone on from at outer step 0"):
        Life(run, "a", WorkerConfig.of(run_config), only("outer")(saved))
    whole = Life(run, "a", WorkerConfig.of(run_config), saved)
    assert whole.worker.round_inner_steps == 1
    whole.worker.__exit__(KeyboardInterrupt, None, None)


@pytest.mark.parametrize("save_after", [4, 6, 9])
def test_without_strict_what_was_merged_is_never_merged_again(save_after: int) -> None:
    """The first life's contributions after saving are in theta: the second one's first weighs no more than its own steps."""
    run_config = run_of("blocking", strict=False)
    run, worker_config = LocalRun(run_config, NAMES), WorkerConfig.of(run_config)
    lives = [Life(run, name, worker_config) for name in NAMES]
    saved = lives[0].save()
    for step in range(14):
        if step == save_after:
            saved = lives[0].save()
        for life in lives:
            life.step()
    lives[0].worker.__exit__(KeyboardInterrupt, None, None)
    back = Life(run, "a", worker_config, saved)
    assert back.worker.outer_step == run.state.outer_step == 3
    work: list[int] = []
    contribute = run.contribute

    def recording(peer_id: str, contribution: Contribution) -> bool:
        if peer_id == "a":
            work.append(contribution.inner_steps)
        return contribute(peer_id, contribution)

    run.contribute = recording  # type: ignore[method-assign]
    for _ in range(EVERY):
        back.step()
    assert set(work) == {EVERY}
    for life in (back, lives[1]):
        life.worker.__exit__(KeyboardInterrupt, None, None)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_killed_in_the_middle_of_a_forward_it_applies_the_rest_and_nothing_twice(clip: float) -> None:
    run_config = run_of("forward")
    whole = trained(run_config, clip=clip)
    run, worker_config = LocalRun(run_config, NAMES), WorkerConfig.of(run_config)
    lives = [Life(run, name, worker_config, clip=clip) for name in NAMES]
    losses = [life.step() for _ in range(EVERY) for life in lives]
    saved: list[dict[str, Any]] = []

    def die(*_: object) -> None:
        saved.append(lives[0].save())
        raise KeyboardInterrupt

    lives[0].model.blocks[1].register_forward_pre_hook(die, prepend=True)
    with pytest.raises(KeyboardInterrupt):
        lives[0].step()
    lives[0].worker.__exit__(KeyboardInterrupt, None, None)
    assert saved[0]["worker"]["scalars"]["pending"]["applied"] == [0, 1]
    lives[0] = Life(run, "a", worker_config, saved[0] | {"taken": saved[0]["taken"] - 1}, clip)
    assert lives[0].worker.outer_step == 0 and lives[0].worker.pending
    losses += [life.step() for _ in range(STEPS - EVERY) for life in lives]
    assert (losses, theta_of(run)) == whole[:2]
    for life in lives:
        life.worker.__exit__(KeyboardInterrupt, None, None)
