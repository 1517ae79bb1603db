"""One method with one seed, as a row of results."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from edit.config.algorithm import OuterConfig
from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.fragments.schema import Schema
from edit.lab.compare.baselines import DeMo, PrimalAveraging, Traffic, data_parallel
from edit.lab.compare.corpus import Batch, Text, TextOptions, joined, read_text, streams, text_hash
from edit.lab.compare.loop import Counting, Peer, enter, step_together
from edit.lab.compare.method import Length, Method
from edit.local import LocalGossip, LocalRun
from edit.merging.gossip import settle, settling
from edit.merging.outer_state import OuterState
from peers.models.gpt import GPT
from peers.training.data import evaluate
from peers.training.trainer import Trainer, learning_rate, use_threads

__all__ = ["Trial", "load_theta", "run_trial"]

_FINAL_BATCHES, _CURVE_BATCHES = 64, 16  # of 16 windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What determines a row of results, all of it."""

    method: Method
    length: Length
    seed: int
    text: TextOptions = field(default_factory=TextOptions)
    # How many times as long the last peer's inner step takes, on the virtual clock.
    slow: float = 1.0
    # Points of the curve.
    points: int = 12
    # torch's name of the device that everything but the outer step is computed on.
    device: str = "cpu"

    @property
    def key(self) -> str:
        """Names the row: equal for equal trials, another one when a preset or a default has changed.

        Who chose the outer optimizer's settings changes nothing, only what they are; and what takes no outer step has none.
        """
        config = self.method.config(self.seed)
        outer = replace(config.outer, preset="manual", chosen="") if self.method.takes_outer_steps else OuterConfig()
        config = replace(config, outer=outer)
        values = asdict(self) | {"config": config.to_json()}
        del values["method"]["name"], values["method"]["tables"]
        if self.device == "cpu":
            del values["device"]  # rows from before there was a choice
        return blake3(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    def has(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is of this trial: trained on the text that is here. Older rows do not say on which."""
        if row["key"] != self.key:
            return False
        return "text" not in row or row["text"] == text_hash(self.text, self.length.peers, self.seed)

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Trial:
        """Read what `to_json` returned."""
        values = json.loads(text)
        return cls(
            method=Method(**values.pop("method")),
            length=Length(**values.pop("length")),
            text=TextOptions(**values.pop("text")),
            **values,
        )


@dataclass(slots=True)
class _Course:
    """The loss on held-out text in the course of a trial."""

    text: Text
    context: int
    every: int
    points: list[tuple[int, float]] = field(default_factory=list)

    def at(self, step: int, model: Callable[[], nn.Module]) -> None:
        """Evaluate the outer parameters where a point of the curve is due."""
        if step >= (self.points[-1][0] if self.points else 0) // self.every * self.every + self.every:
            self.points.append((step, evaluate(model(), self.text.held_out, self.context, _CURVE_BATCHES)))

    @property
    def spike(self) -> float:
        """By how much a later loss was above the least before it, at most, as a share of that."""
        least, worst = math.inf, 0.0
        for _, loss in self.points:
            worst = max(worst, loss / least - 1) if math.isfinite(loss) else math.inf
            least = min(least, loss)
        return worst


def load_theta(schema: Schema, theta: Sequence[Tensor], model: nn.Module) -> nn.Module:
    """Return the model with these outer parameters in it: one flat tensor for each fragment."""
    state: dict[str, Tensor] = {}
    for fragment, flat in zip(schema.fragments, theta, strict=True):
        parts = torch.split(flat, [tensor.numel for tensor in fragment.tensors])
        state |= {tensor.name: part.view(tensor.shape) for tensor, part in zip(fragment.tensors, parts, strict=True)}
    model.load_state_dict(state, strict=False)
    return model


def run_trial(trial: Trial) -> dict[str, Any]:
    """Train in this process, on one thread; return the row. Raises ConfigError."""
    use_threads(1)
    began, cpu_began = time.monotonic(), time.process_time()
    trained = _Training(trial)
    trained.train()
    length, context = trial.length, trained.config.model.context
    loss = evaluate(trained.model(), trained.text.held_out, context, _FINAL_BATCHES)
    averaged = trained.averaged()
    parameters, traffic = trained.parameters, trained.traffic
    exchanges = trained.exchanges or 1
    return {
        "key": trial.key,
        "method": trial.method.name,
        "seed": trial.seed,
        **asdict(length),
        "inner": trained.config.inner.optimizer,
        "options": {**asdict(trial.text), "slow": trial.slow},
        "text": trained.text.hash,
        "device": torch.cuda.get_device_name(trial.device) if trial.device != "cpu" else "cpu",
        "loss": loss if math.isfinite(loss) else None,
        "loss_averaged": evaluate(averaged, trained.text.held_out, context, _FINAL_BATCHES) if averaged is not None else None,
        "spike": round(trained.course.spike, 5) if math.isfinite(trained.course.spike) else None,
        "curve": [[step, round(value, 5) if math.isfinite(value) else None] for step, value in trained.course.points],
        "parameters": parameters,
        "tokens": trained.tokens,
        "exchanges": round(trained.exchanges, 4),
        "sent": traffic.sent,
        "received": traffic.received,
        "bits_up": round(8 * traffic.sent / parameters / exchanges, 4),
        "bits_down": round(8 * traffic.received / parameters / exchanges, 4),
        "peak": round(traffic.peak / parameters, 5),
        "virtual_s": round(trained.virtual_s, 3),
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(time.process_time() - cpu_began, 1),
    }


class _Training:
    """One trial's training: what its method does with the peers' batches."""

    def __init__(self, trial: Trial) -> None:
        length = trial.length
        self.trial, self.config = trial, trial.method.config(trial.seed)
        self._device = torch.device(trial.device)
        model, inner = self.config.model, self.config.inner
        self.text = read_text(trial.text, length.peers, trial.seed)
        batches = length.steps * inner.accumulation
        self.batches = streams(self.text, trial.text, model.context, inner.batch_size, batches, trial.seed)
        self.course = _Course(self.text, model.context, max(1, length.steps // trial.points))
        self.traffic = Traffic()
        # Of every peer, together.
        self.tokens = 0
        # How often a peer exchanged each parameter: with groups, and with arrivals, less than once for each outer step.
        self.exchanges = 0.0
        self.virtual_s = 0.0
        self._scratch = GPT(model, trial.seed).to(self._device)
        self.parameters = sum(parameter.numel() for parameter in self._scratch.parameters())
        self._model: Callable[[], nn.Module] = lambda: self._scratch
        self._run: LocalRun | LocalGossip | None = None

    def train(self) -> None:
        """Train to the end."""
        match self.trial.method.trains:
            case "data-parallel":
                self._data_parallel(self.trial.length.steps)
            case "gpa":
                self._gpa()
            case "demo":
                self._demo()
            case "one-replica":
                self._exchange([joined(self.batches)])
            case _:
                self._exchange(self.batches)

    def model(self) -> nn.Module:
        """Return the model that is evaluated."""
        return self._model()

    def averaged(self) -> nn.Module | None:
        """Return the average of the outer parameters as a model; None where the section [average] keeps none."""
        if self.config.average.kind == "none" or not isinstance(self._run, LocalRun):
            return None
        return load_theta(self._run.state.schema, self._run.state.averaged, self._scratch)

    @property
    def _step_tokens(self) -> int:
        inner = self.config.inner
        return inner.batch_size * inner.accumulation * self.config.model.context

    def _trainer(self, batches: Iterator[Batch]) -> Trainer:
        model = GPT(self.config.model, self.trial.seed)
        total, device = self.trial.length.steps, self._device
        return Trainer(model, batches, self.config.inner, total_steps=total, device=device, clock=time.perf_counter)

    # -- methods that exchange at every step -------------------------------------------------------------------------------

    def _data_parallel(self, steps: int) -> Trainer:
        trainer = self._trainer(joined(self.batches))
        self._model = lambda: trainer.model
        data_parallel(trainer, steps, self.traffic, lambda step: self.course.at(step, self.model))
        self._every_step(steps)
        return trainer

    def _gpa(self) -> None:
        trainer, harness = self._trainer(joined(self.batches)), self.trial.method.harness
        averaging = PrimalAveraging(trainer, harness["mu_x"], harness["mu_y"])
        self._model = lambda: averaging.averaged(trainer.model, self._scratch)
        data_parallel(trainer, self.trial.length.steps, self.traffic, lambda step: self.course.at(step, self.model))
        self._every_step(self.trial.length.steps)

    def _demo(self) -> None:
        length, harness, inner = self.trial.length, self.trial.method.harness, self.config.inner
        demo = DeMo(
            self._scratch,
            length.peers,
            topk=int(harness["topk"]),
            chunk=int(harness["chunk"]),
            decay=harness["decay"],
            weight_decay=inner.weight_decay,
            clip_norm=inner.clip_norm,
            accumulation=inner.accumulation,
        )
        for step in range(length.steps):
            demo.step(self.batches, learning_rate(inner, step, length.steps), self.traffic)
            self.course.at(step + 1, self.model)
        self._every_step(length.steps)

    def _every_step(self, steps: int) -> None:
        self.exchanges += steps
        self.tokens += steps * self.trial.length.peers * self._step_tokens
        self.virtual_s += steps * self.trial.slow  # everyone waits for the slowest

    # -- methods that exchange pseudo-gradients ----------------------------------------------------------------------------

    def _exchange(self, batches: Sequence[Iterator[Batch]]) -> None:
        length, config = self.trial.length, self.config
        before = self.trial.method.share_of(length.steps, config.sync.every)
        warm = self._data_parallel(before) if before else None
        names = [f"peer-{i}" for i in range(len(batches))]
        trainers = [self._trainer(stream) for stream in batches]
        if warm is not None:
            for trainer in trainers:
                _go_on(trainer, warm)
        tokens = self._step_tokens * length.peers // len(batches)
        # Peers do not take as many inner steps as the other methods' then.
        by_tokens = config.sync.schedule == "time" or config.inner.batch_growth > 1
        if self.trial.slow != 1 and (config.sync.overlap or config.outer.algorithm == "gossip"):
            raise ConfigError(f"--slow: has no meaning for {self.trial.method.name}, whose peers do not wait for each other")
        if by_tokens:
            config = _until_tokens(config, (length.steps - before) * length.peers * self._step_tokens)
        run = LocalGossip(config, names) if config.outer.algorithm == "gossip" else LocalRun(config, names)
        self._run = run
        counted = [Counting(run.collective(name)) for name in names]
        speeds = [1.0] * (len(names) - 1) + [self.trial.slow]
        peers = enter(trainers, counted, config, speeds)
        self._model = lambda: self._outer_model(run)

        def position(peer: Peer) -> int:
            if not by_tokens:
                return before + peer.steps
            done = run.tokens if isinstance(run, LocalRun) else 0
            ahead = peer.worker.round_inner_steps * peer.trainer.batch_factor
            return min(length.steps, before + done // (tokens * len(peers)) + ahead)

        def after(peer: Peer) -> None:
            self.tokens += tokens * peer.trainer.batch_factor
            step = position(peer)
            if peer is peers[-1]:
                self.course.at(step, self.model)

        step_together(
            peers,
            lambda peer: run.finished if by_tokens else peer.steps >= length.steps - before,
            run=run if isinstance(run, LocalRun) and config.sync.overlap == 0 else None,
            tokens=tokens,
            position=position,
            after=after,
        )
        for peer in peers:
            if not run.finished:
                peer.worker.synchronize()
        self.virtual_s += max(peer.now_s for peer in peers)
        self._count(run, counted, config)

    def _outer_model(self, run: LocalRun | LocalGossip) -> nn.Module:
        """Return the model with the outer parameters; with gossip those that the peers would settle on now."""
        if isinstance(run, LocalRun):
            return load_theta(run.state.schema, run.state.theta, self._scratch)
        states = run.states
        schema = next(iter(states.values())).schema
        own = {peer_id: [part.clone() for part in state.theta] for peer_id, state in states.items()}
        common = OuterState(schema, settling(self.config), [part.clone() for part in next(iter(own.values()))])
        common.commit(1, "settled", settle(common, own))
        return load_theta(schema, common.theta, self._scratch)

    def _count(self, run: LocalRun | LocalGossip, counted: Sequence[Counting], config: RunConfig) -> None:
        """Add the bytes of a peer, the mean over them, to those of a data-parallel phase."""
        if isinstance(run, LocalGossip):
            steps = next(iter(run.states.values())).outer_step
            sent = round(statistics.fmean(run.sent.values()))
            received, peak = sent, sent / max(1, steps)
        else:
            steps = run.state.outer_step
            sent = round(statistics.fmean(one.sent for one in counted))
            received = round(statistics.fmean(one.received for one in counted))
            peak = max((size for one in counted for size in one.contributions.values()), default=0)
        self.exchanges += steps / config.sync.groups / (len(counted) if config.rounds.merging == "arrivals" else 1)
        self.traffic.sent += sent
        self.traffic.received += received
        self.traffic.peak = max(self.traffic.peak, peak / max(1, config.sync.overlap))


def _go_on(trainer: Trainer, other: Trainer) -> None:
    """Begin where another training of the same model stands, with its optimizer's state."""
    trainer.model.load_state_dict(other.model.state_dict())
    for mine, theirs in zip(trainer.optimizers, other.optimizers, strict=True):
        mine.load_state_dict(deepcopy(theirs.state_dict()))


def _until_tokens(config: RunConfig, tokens: int) -> RunConfig:
    """Return the configuration of a run that ends by tokens, for peers that do not take equal steps."""
    values: Mapping[str, Any] = json.loads(config.to_json())
    sync = {**values["sync"], "tokens": tokens, "outer_steps": 1 << 30}
    return RunConfig.from_json(json.dumps({**values, "sync": sync}))
