"""What a regional aggregator hands down from the run above: a change of the outer parameters below, beside the rounds there.

Owns: the values, and the rule by which the run below takes them: each outer step of the run above once, in order, and only when
it was computed for what is in. Must not know: carriers, disks, how a change is merged into a commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from edit.config.run import RunConfig
from edit.errors import RefusedError, RemoteProtocolError, StaleError
from edit.fragments.schema import Schema
from edit.merging.merge import Merged

__all__ = ["Injected", "Injection", "check_content", "check_order", "check_run"]


@dataclass(frozen=True, slots=True)
class Injected:
    """What of the run above is in the outer parameters of the run below: run `run_id` as of its outer step `upper_step`.

    lower_step: what the run below did up to this outer step is part of that, or was given up.
    """

    run_id: str
    upper_step: int
    lower_step: int

    def to_json(self) -> list[str | int]:
        """For a checkpoint or a journal."""
        return [self.run_id, self.upper_step, self.lower_step]

    @staticmethod
    def from_json(value: Sequence[Any] | None) -> Injected | None:
        """What `to_json` gave, or None for None. Raises TypeError or ValueError for anything else."""
        if value is None:
            return None
        run_id, upper_step, lower_step = value
        return Injected(str(run_id), int(upper_step), int(lower_step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """By fragment, flat fp32, what is added to the outer parameters; where it `replaces`, what they become, every fragment.

    brings: what is in afterwards; base: what was in when it was computed, None for nothing.
    """

    brings: Injected
    base: Injected | None
    replaces: bool
    fragments: Mapping[int, Tensor]

    def into(self, merged: Merged) -> Merged:
        """What the round makes of a fragment, with this."""
        return replace(merged, injection=self.fragments.get(merged.fragment_id), replaces=self.replaces)


def check_order(brings: Injected, base: Injected | None, replaces: bool, injected: Injected | None, outer_step: int) -> None:
    """Whether the run below, at `outer_step` with `injected` in, may take it.

    Raises RefusedError (it follows another run), StaleError (it was computed for something else), RemoteProtocolError.
    """
    if injected is not None and injected.run_id != brings.run_id:
        raise RefusedError(f"this run is below run {injected.run_id}, not {brings.run_id}; begin a new one below that")
    if base != injected:
        raise StaleError(f"computed for {_said(base)}, but {_said(injected)} is in")
    if base is not None and (replaces or brings.upper_step <= base.upper_step):
        raise RemoteProtocolError(f"{_said(brings)} cannot follow {_said(base)}")
    if brings.lower_step > outer_step:
        raise RemoteProtocolError(f"it tells of outer step {brings.lower_step}, this run is at {outer_step}")


def check_content(injection: Injection, schema: Schema) -> None:
    """Whether it fits the model. Raises RemoteProtocolError."""
    sizes = {fragment.fragment_id: fragment.numel for fragment in schema.fragments}
    if injection.replaces and injection.fragments.keys() != sizes.keys():
        raise RemoteProtocolError("what replaces the outer parameters must be all of them")
    for i, part in injection.fragments.items():
        if part.shape != (sizes.get(i),) or part.dtype != torch.float32:
            raise RemoteProtocolError(f"fragment {i} of an injection does not fit the model")
        if not bool(part.isfinite().all()):
            raise RemoteProtocolError(f"fragment {i} of an injection is not finite")


def check_run(config: RunConfig) -> None:
    """Whether a run with this configuration may have a run above it. Raises RefusedError."""
    sync = config.sync
    if sync.groups != 1:
        raise RefusedError(f"sync.groups = {sync.groups}: a run below a regional aggregator exchanges all at once; set it to 1")
    if sync.mode == "eager":
        raise RefusedError('sync.mode = "eager": peers cannot estimate what comes from the run above; choose another mode')


def _said(injected: Injected | None) -> str:
    return "nothing" if injected is None else f"outer step {injected.upper_step} of {injected.run_id}"
