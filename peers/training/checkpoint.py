"""What a peer's checkpoint holds, and how a peer goes on from one: to the bit with the same number of ranks.

Owns: the list of what training depends on, by name: parameters, buffers, the inner optimizer's state, random numbers, the data
position, the EditWorker's own state. Must not know: files, when to save, rounds.

Tensors of the replica (parameters, moments, outer parameters, residuals) are DTensors under their parameter's name, so that any
number of ranks can take them up. Buffers and random states belong to a rank; another number of ranks takes rank 0's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from edit.errors import ConfigError
from edit.replica.ranks import Ranks
from peers.training.checkpoint_files import Checkpoints, Saved
from peers.training.data import Batches
from peers.training.trainer import Trainer

__all__ = ["Autosave", "Resumable", "Stateful"]

SPACING = 10.0
_log = logging.getLogger("peers")


class Stateful(Protocol):
    """An EditWorker, as far as a checkpoint knows it: {"scalars": plain values, SECTION: {parameter name: tensor}}."""

    def state_dict(self) -> dict[str, Any]: ...
    def empty_state(self, kinds: Collection[str]) -> dict[str, dict[str, Tensor]]: ...
    def goes_forward(self, scalars: Mapping[str, Any], run_step: int) -> bool: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Resumable:
    """The parts of a training whose state makes it what it is."""

    trainer: Trainer
    batches: Batches
    worker: Stateful
    ranks: Ranks

    def save(self, checkpoints: Checkpoints) -> None:
        """Begin a checkpoint of the training as it stands. Changes nothing."""
        state = self.worker.state_dict()
        scalars = {"steps": self.trainer.steps, "data": self.batches.state(), "worker": state["scalars"]}
        tensors = {f"worker/{section}/{name}": tensor for section, name, tensor in _sections(state)}
        for name, parameter in self._trained().items():
            tensors[f"model/{name}"] = parameter.detach()
            kept = self.trainer.optimizer.state.get(parameter, {})
            tensors |= {f"optimizer/{name}/{key}": value for key, value in kept.items()}
        own = self._of_this_rank()
        tensors |= {f"rank/{self.ranks.rank}/{name}": tensor for name, tensor in own.items()}
        checkpoints.save(tensors, scalars)

    def load(self, checkpoints: Checkpoints, saved: Saved, run_step: int = 0) -> None:
        """Go on from `saved`; call before the worker is entered. Raises StorageError, ConfigError when it does not fit.

        run_step: an outer step that the run has reached. Where the worker will begin with the run's parameters because of it,
        those that were saved are not read.
        """
        rank = self.ranks.rank
        if saved.ranks != self.ranks.size:
            rank = 0
            _log.info(
                "%s was written by %d ranks and these are %d: random numbers and buffers are its rank 0's",
                saved.path,
                saved.ranks,
                self.ranks.size,
            )
        self.batches.load(saved.scalars["data"])
        parameters = self._trained()
        forward = self.worker.goes_forward(saved.scalars["worker"], run_step)
        own = {f"rank/{rank}/{name}": tensor for name, tensor in self._of_this_rank().items()}
        sections: dict[str, dict[str, Tensor]] = {}

        def target(key: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
            kind, _, name = key.partition("/")
            match kind:
                case "rank":
                    return own.get(key)
                case "model" | "worker" if forward:
                    return None
                case "model":
                    return parameters[name].detach()
                case "worker":
                    section, _, name = name.partition("/")
                    if section not in sections:
                        sections.update(self.worker.empty_state([section]))
                    return sections[section][name]
            return _like(parameters[name.rpartition("/")[0]], size, dtype)

        tensors = checkpoints.load(saved, target)
        self.trainer.steps = saved.scalars["steps"]
        self._put_moments(tensors, parameters)
        self.worker.load_state_dict({**sections, "scalars": saved.scalars["worker"]})
        torch.set_rng_state(own[f"rank/{rank}/random"])
        if (random := own.get(f"rank/{rank}/random.cuda")) is not None:
            torch.cuda.set_rng_state(random)

    def _put_moments(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        state = self.trainer.optimizer.state
        state.clear()
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if kind == "optimizer":
                name, _, part = name.rpartition("/")
                state[parameters[name]][part] = tensor

    def _trained(self) -> dict[str, nn.Parameter]:
        """What training changes; frozen parameters are as the model was built."""
        return {name: parameter for name, parameter in self.trainer.model.named_parameters() if parameter.requires_grad}

    def _of_this_rank(self) -> dict[str, Tensor]:
        """Random states (copies) and persistent buffers (themselves, so that loading fills them)."""
        model = self.trainer.model
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        kept = {f"buffer.{name}": tensor for name, tensor in model.state_dict().items() if name not in parameters}
        kept["random"] = torch.get_rng_state()
        if next(model.parameters()).device.type == "cuda":
            kept["random.cuda"] = torch.cuda.get_rng_state()
        return kept


class Autosave:
    """Takes up the newest checkpoint and makes new ones every so many outer steps. checkpoints: None keeps and takes none.

    One is left out while the one before is still being written, and until SPACING times as long as that took has passed since
    it began: a large model with short rounds would do little else. patient: none is ever left out, and a contribution is made
    only once the last one is whole: so, saving at every outer step, a peer that is killed is at most one outer step behind what
    it has brought the run to. clock: monotonic seconds.
    """

    def __init__(
        self,
        resumable: Resumable,
        checkpoints: Checkpoints | None,
        every: int = 1,
        *,
        patient: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resumable = resumable
        self._checkpoints = checkpoints
        self._every = every
        self._patient = patient
        self._clock, self._began = clock, -math.inf
        self._from: Saved | None = None
        self._outer_step = 0

    def resume(self, run_step: int = 0) -> None:
        """Go on from the newest checkpoint, if there is one. run_step: an outer step that the run has reached.

        Raises ConfigError when it is not this training's.
        """
        self._from = None if self._checkpoints is None else self._checkpoints.newest()
        if self._checkpoints is not None and self._from is not None:
            self._resumable.load(self._checkpoints, self._from, run_step)
            _log.info("going on from %s, inner step %d", self._from.path, self._resumable.trainer.steps)

    def explain(self, error: ConfigError) -> ConfigError:
        """Why the run could not be entered: name the checkpoint that was taken up, if one was."""
        return error if self._from is None else ConfigError(f"{self._from.path}: {error}; --fresh leaves it aside")

    def begin(self, outer_step: int) -> None:
        """The run is entered. Without a checkpoint make one, and wait for it: so this peer can go on exactly from the start."""
        self._outer_step = outer_step
        if self._checkpoints is not None and self._from is None:
            self._save(self._checkpoints)
            self._checkpoints.wait()

    def stepped(self, outer_step: int) -> None:
        """After each inner step: begin a checkpoint when enough outer steps have been taken."""
        if self._checkpoints is None or outer_step - self._outer_step < self._every:
            return
        if self._patient or self._resumable.ranks.all([self._checkpoints.idle and self._rested(self._checkpoints)])[0]:
            self._outer_step = outer_step
            self._save(self._checkpoints)

    def settle(self) -> None:
        """Before an inner step that ends with a contribution."""
        if self._checkpoints is not None and self._patient:
            self._checkpoints.wait()
            self._resumable.ranks.all([True])  # what rank 0 has made whole the others may build on

    def last(self) -> None:
        """The training is asked to stop, between two inner steps: save, and wait until it is written."""
        if self._checkpoints is not None:
            self._save(self._checkpoints)
        self.close()

    def close(self) -> None:
        """Wait for a save that is under way."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def _rested(self, checkpoints: Checkpoints) -> bool:
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


def _like(parameter: nn.Parameter, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """What to load into, laid out over the ranks as `parameter` is if it has its shape; else whole at every rank (a count)."""
    if isinstance(parameter, DTensor) and parameter.shape == size:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    return torch.empty(size, dtype=dtype, device=parameter.device)
