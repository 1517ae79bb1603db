"""What a peer's checkpoint holds, how training resumes from one, and when one is written.

A checkpoint holds everything that training depends on: parameters, buffers, the inner optimizer's state, random numbers, the
data position, and the EditWorker's own state. With the same number of ranks training resumes to the bit.

Tensors of the replica (parameters, moments, outer parameters, residuals) are DTensors under their parameter's name, so that any
number of ranks can load them. Buffers and random states belong to a rank; another number of ranks loads rank 0's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from edit.config.run import RunConfig
from edit.errors import ConfigError, StorageError
from edit.fragments.schema import FragmentSpec, TensorSpec
from edit.replica.ranks import Ranks
from edit.worker.checkpoint import KINDS, OF_RANKS, kinds_needed
from edit.worker.config import WorkerConfig
from peers.training.checkpoint_files import Checkpoints, Saved, last_scalars
from peers.training.data_source import DataSource
from peers.training.inner_optimizers import (
    Groups,
    group_values,
    is_state,
    load_groups,
    loaded_state,
    optimizers_of,
    saved_groups,
    saved_state,
    state_names,
)
from peers.training.trainer import Trainer

__all__ = ["PeriodicCheckpoints", "Resumable", "Stateful", "needs_no_snapshot"]

SPACING = 10.0  # a save of w seconds is followed by the next after SPACING * w seconds at the earliest
_log = logging.getLogger("peers")


class Stateful(Protocol):
    """The part of an EditWorker that a checkpoint uses. State: {"scalars": plain values, SECTION: {parameter name: tensor}}."""

    def state_dict(self) -> dict[str, Any]: ...
    def empty_state(self, kinds: Collection[str], scalars: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]: ...
    def kinds_needed(self, scalars: Mapping[str, Any], run_step: int) -> frozenset[str]: ...
    def load_state_dict(self, state: Mapping[str, Any], *, forward: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class Resumable:
    """The parts of a training whose state is saved. Made before the first step."""

    trainer: Trainer
    batches: DataSource
    worker: Stateful
    ranks: Ranks
    new_data: bool = False  # other data than the checkpoint's is begun at its start
    _made: list[Groups] = field(init=False, repr=False)  # by optimizer; what its groups hold else is state

    def __post_init__(self) -> None:
        object.__setattr__(self, "_made", [group_values(optimizer) for optimizer in self.trainer.optimizers])

    def save(self, checkpoints: Checkpoints) -> None:
        """Begin a checkpoint of the present state. Changes nothing."""
        state = self.worker.state_dict()
        scalars = {"steps": self.trainer.steps, "data": self.batches.state(), "worker": state["scalars"]}
        if self.trainer.growth is not None:
            scalars["batch"] = self.trainer.growth.state()
        groups = [saved_groups(one, made) for one, made in zip(self.trainer.optimizers, self._made, strict=True)]
        if any(any(kept) for kept in groups):
            scalars["groups"] = groups
        tensors = {f"worker/{section}/{name}": tensor for section, name, tensor in _sections(state)}
        owners = optimizers_of(self.trainer.optimizers, self._trained())
        for name, parameter in self._trained().items():
            tensors[f"model/{name}"] = parameter.detach()
            kept = saved_state(owners[name], parameter)
            tensors |= {f"optimizer/{name}/{key}": value for key, value in kept.items()}
        own = self._of_this_rank()
        tensors |= {f"rank/{self.ranks.rank}/{name}": tensor for name, tensor in own.items()}
        theta = {key for key in tensors if key.startswith("worker/outer/")}  # what was kept of it stays as it is
        checkpoints.save(tensors, scalars, constant=theta)

    def load(self, checkpoints: Checkpoints, saved: Saved, run_step: int = 0) -> None:
        """Load `saved`; call it before the worker is entered. Raises StorageError, ConfigError when it does not fit.

        run_step: an outer step that the run has reached. Where the worker will begin with the run's parameters because of it,
        what does not lead to them is not read.
        """
        _check_scalars(saved)
        rank = self.ranks.rank
        if saved.ranks != self.ranks.size:
            rank = 0
            _log.info(
                "%s was written by %d ranks and these are %d: random numbers and buffers are its rank 0's",
                saved.path,
                saved.ranks,
                self.ranks.size,
            )
        self.batches.load(saved.scalars["data"], new_data=self.new_data)
        parameters = self._trained()
        kinds = optimizers_of(self.trainer.optimizers, parameters)
        needed = self.worker.kinds_needed(saved.scalars["worker"], run_step)
        forward = needed != frozenset(KINDS)
        own = {f"rank/{rank}/{name}": tensor for name, tensor in self._of_this_rank().items()}
        sections: dict[str, dict[str, Tensor]] = {}
        unknown: list[str] = []

        def target(key: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
            kind, _, name = key.partition("/")
            match kind:
                case "rank":
                    return own.get(key)
                case "model" if forward:
                    return None
                case "model" if name in parameters:
                    return parameters[name].detach()
                case "worker":
                    section, _, name = name.partition("/")
                    if forward and section not in needed:
                        return None
                    if section in KINDS and section not in sections:
                        sections.update(self.worker.empty_state([section], saved.scalars["worker"]))
                    if name in sections.get(section, {}):
                        return sections[section][name]
                    if section in OF_RANKS:
                        return None  # another rank's
                case "optimizer":
                    name, _, part = name.rpartition("/")
                    if name in parameters and is_state(kinds[name], part, size, parameters[name]):
                        return _like(parameters[name], size, dtype)
            unknown.append(key)
            return None

        tensors = checkpoints.load(saved, target)
        missing = [key for key in own if not key.endswith("/random.cuda") and key not in tensors]
        if not forward:
            missing += [f"model/{name}" for name in parameters if f"model/{name}" not in tensors]
        for name in parameters:
            keys = [f"optimizer/{name}/{part}" for part in state_names(kinds[name], parameters[name])]
            if any(key in tensors for key in keys):
                missing += [key for key in keys if key not in tensors]
        if unknown or missing:
            what = f"tensor {unknown[0]} is not this training's" if unknown else f"tensor {missing[0]} is missing"
            raise StorageError(f"{saved.path}: damaged ({what})")
        self.trainer.steps = saved.scalars["steps"]
        if self.trainer.growth is not None and "batch" in saved.scalars:
            try:
                self.trainer.growth.load(saved.scalars["batch"])
            except StorageError as error:
                raise StorageError(f"{saved.path}: {error}") from error
        self._put_moments(tensors, parameters)
        self._put_groups(saved)
        self.worker.load_state_dict({**sections, "scalars": saved.scalars["worker"]}, forward=forward)
        try:
            torch.set_rng_state(own[f"rank/{rank}/random"])
            if (random := own.get(f"rank/{rank}/random.cuda")) is not None:
                torch.cuda.set_rng_state(random)
        except RuntimeError as error:
            raise StorageError(f"{saved.path}: damaged (no state of random numbers)") from error

    def _put_moments(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        owners = optimizers_of(self.trainer.optimizers, parameters)
        for optimizer in self.trainer.optimizers:
            optimizer.state.clear()
        saved: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if kind == "optimizer":
                name, _, part = name.rpartition("/")
                saved.setdefault(name, {})[part] = tensor
        for name, state in saved.items():
            owners[name].state[parameters[name]] = loaded_state(owners[name], parameters[name], state)

    def _put_groups(self, saved: Saved) -> None:
        optimizers = self.trainer.optimizers
        if (groups := saved.scalars.get("groups")) is None:
            return
        if not isinstance(groups, list) or len(groups) != len(optimizers):
            raise StorageError(f"{saved.path}: damaged (scalars.groups is not of {len(optimizers)} optimizers)")
        try:
            for optimizer, kept in zip(optimizers, groups, strict=True):
                load_groups(optimizer, kept)
        except StorageError as error:
            raise StorageError(f"{saved.path}: {error}") from error

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name; frozen ones are as the model was built."""
        return {name: parameter for name, parameter in self.trainer.model.named_parameters() if parameter.requires_grad}

    def _of_this_rank(self) -> dict[str, Tensor]:
        """Return random states (copies) and persistent buffers (the tensors themselves, so that loading fills them)."""
        model = self.trainer.model
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        kept = {f"buffer.{name}": tensor for name, tensor in model.state_dict().items() if name not in parameters}
        kept["random"] = torch.get_rng_state()
        if next(model.parameters()).device.type == "cuda":
            kept["random.cuda"] = torch.cuda.get_rng_state()
        return kept


def needs_no_snapshot(folder: Path, config: RunConfig, run_step: int) -> bool:
    """Whether the newest checkpoint in a folder would be gone on from exactly, or by updates, in a run that has reached this
    outer step.

    Then the run's outer parameters need not be fetched. It is not verified here, the run may go further meanwhile, and the
    codecs of single fragments are not looked at.
    """
    kept = last_scalars(folder)
    worker = kept.get("worker") if kept is not None else None
    shares = worker.get("shares", [worker]) if isinstance(worker, dict) else []
    if not isinstance(shares, list) or not shares:
        return False
    alike = [
        FragmentSpec(fragment_id=i, name="", tensors=(TensorSpec(name="", shape=(1 << 20,)),))
        for i in range(config.sync.groups)
    ]
    try:
        return all(kinds_needed(WorkerConfig.of(config), share, run_step, alike) for share in shares)
    except StorageError:
        return False


class PeriodicCheckpoints:
    """Resume from the newest checkpoint, and write a new one every `every` outer steps.

    checkpoints: None neither reads nor writes any. A checkpoint is skipped while the one before is still being written, and
    until SPACING times the duration of that save has passed since it began, because a large model with short rounds would do
    little else. strict: none is skipped, and a contribution waits until the last one is complete, so that, with every = 1, a
    killed peer is at most one outer step behind what it has contributed. clock: monotonic seconds.
    """

    def __init__(
        self,
        resumable: Resumable,
        checkpoints: Checkpoints | None,
        every: int = 1,
        *,
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resumable = resumable
        self._checkpoints = checkpoints
        self._every = every
        self._strict = strict
        self._clock, self._began = clock, -math.inf
        self._from: Saved | None = None
        self._outer_step = 0

    def resume(self, run_step: int = 0) -> None:
        """Resume from the newest checkpoint, if there is one. run_step: an outer step that the run has reached.

        Raises ConfigError when it is not this training's.
        """
        self._from = None if self._checkpoints is None else self._checkpoints.newest()
        if self._checkpoints is not None and self._from is not None:
            self._resumable.load(self._checkpoints, self._from, run_step)
            _log.info("resuming from %s, inner step %d", self._from.path, self._resumable.trainer.steps)

    def explain(self, error: ConfigError) -> ConfigError:
        """Return the error with the name of the checkpoint that was loaded, if one was."""
        return error if self._from is None else ConfigError(f"{self._from.path}: {error}; --fresh moves it aside")

    def begin(self, outer_step: int) -> None:
        """Note that the run is joined. If no checkpoint was loaded, write one and wait, so that a resume is always exact."""
        self._outer_step = outer_step
        if self._checkpoints is not None and self._from is None:
            self._save(self._checkpoints)
            self._checkpoints.wait()

    def after_step(self, outer_step: int) -> None:
        """Begin a checkpoint after enough outer steps, or where the run was taken back. Call it after each inner step."""
        if self._checkpoints is None or 0 <= outer_step - self._outer_step < self._every:
            return
        if self._strict or self._resumable.ranks.all([self._checkpoints.idle and self._spaced(self._checkpoints)])[0]:
            self._outer_step = outer_step
            self._save(self._checkpoints)

    def before_contribution(self) -> None:
        """Wait for the last checkpoint, if strict. Call it before an inner step that ends with a contribution."""
        if self._checkpoints is not None and self._strict:
            self._checkpoints.wait()
            self._resumable.ranks.all([True])  # the other ranks wait until rank 0 has completed it

    def save_last(self) -> None:
        """Save and wait until it is written. Call it between two inner steps, when training stops."""
        if self._checkpoints is not None:
            self._save(self._checkpoints)
        self.close()

    def close(self) -> None:
        """Wait for a save that is in progress."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def _spaced(self, checkpoints: Checkpoints) -> bool:
        return self._clock() - self._began >= SPACING * checkpoints.seconds

    def _save(self, checkpoints: Checkpoints) -> None:
        checkpoints.wait()
        self._began = self._clock()
        self._resumable.save(checkpoints)


def _sections(state: Mapping[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    for section, tensors in state.items():
        if section != "scalars":
            for name, tensor in tensors.items():
                yield section, name, tensor


def _check_scalars(saved: Saved) -> None:
    """Raise StorageError unless the scalars are of the kinds that `Resumable.save` wrote."""
    steps, data = saved.scalars.get("steps"), saved.scalars.get("data")
    if type(steps) is not int or not 0 <= steps < 1 << 60:
        raise StorageError(f"{saved.path}: damaged (scalars.steps is no number of steps)")
    of_plugin = isinstance(data, dict) and isinstance(data.get("plugin"), str)  # which checks its own
    if not isinstance(data, dict) or not (of_plugin or all(type(value) is int for value in data.values())):
        raise StorageError(f"{saved.path}: damaged (scalars.data is no data position)")
    if not isinstance(saved.scalars.get("worker"), dict):
        raise StorageError(f"{saved.path}: damaged (scalars.worker is no worker's state)")


def _like(parameter: nn.Parameter, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor to load into: sharded as `parameter` if it has its shape, else whole at every rank (a count)."""
    if isinstance(parameter, DTensor) and parameter.shape == size:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    return torch.empty(size, dtype=dtype, device=parameter.device)
