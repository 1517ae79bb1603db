"""What a regional aggregator brings down from the run above: a change of the outer parameters, applied with a commit below.

The run below takes each outer step of the run above once, in order, and only when the change was computed for what is in the
outer parameters (`check_order`). The change enters through `OuterState.commit`, beside the outer optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edit.config.run import RunConfig
from edit.errors import RefusedError, RemoteProtocolError, StaleError
from edit.fragments.schema import Schema

__all__ = ["Injected", "Injection", "check_content", "check_order", "check_run"]


@dataclass(frozen=True, slots=True)
class Injected:
    """What of the run above is in the outer parameters of the run below."""

    # The run above.
    run_id: str
    # Its outer parameters of this outer step.
    upper_step: int
    # What the run below did up to this outer step of its own is part of that, or was given up.
    lower_step: int

    def to_json(self) -> list[str | int]:
        """Return the values for a checkpoint or a journal."""
        return [self.run_id, self.upper_step, self.lower_step]

    @staticmethod
    def from_json(value: Sequence[Any] | None) -> Injected | None:
        """Read what `to_json` returned; None stays None. Raises TypeError or ValueError for anything else."""
        if value is None:
            return None
        run_id, upper_step, lower_step = value
        return Injected(str(run_id), int(upper_step), int(lower_step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A change of the outer parameters that comes in with the next commit."""

    # What is in afterwards.
    brings: Injected
    # What was in when it was computed; None: nothing.
    base: Injected | None
    # `fragments` are not added to the outer parameters: they are what these become. Then every fragment is there.
    replaces: bool
    # Flat fp32 by fragment_id; the other fragments stay as they are.
    fragments: Mapping[int, Tensor]


def check_order(brings: Injected, base: Injected | None, replaces: bool, injected: Injected | None, outer_step: int) -> None:
    """Check that the run below, at `outer_step` with `injected` in, may take an injection of `brings` computed for `base`.

    Raises RefusedError when it follows another run, StaleError when it was computed for something else than what is in,
    RemoteProtocolError when it cannot follow what is in.
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
    """Check that an injection fits the model and is finite. Raises RemoteProtocolError."""
    sizes = {fragment.fragment_id: fragment.numel for fragment in schema.fragments}
    if injection.replaces and injection.fragments.keys() != sizes.keys():
        raise RemoteProtocolError("what replaces the outer parameters must be all of them")
    for i, vector in injection.fragments.items():
        if vector.shape != (sizes.get(i),) or vector.dtype != torch.float32:
            raise RemoteProtocolError(f"fragment {i} of an injection does not fit the model")
        if not bool(vector.isfinite().all()):
            raise RemoteProtocolError(f"fragment {i} of an injection is not finite")


def check_run(config: RunConfig) -> None:
    """Check that a run with this configuration may have a run above it. Raises RefusedError."""
    sync = config.sync
    if sync.groups != 1:
        raise RefusedError(f"sync.groups = {sync.groups}: a run below a regional aggregator exchanges all at once; set it to 1")
    if sync.mode == "eager":
        raise RefusedError('sync.mode = "eager": peers cannot estimate what comes from the run above; choose another mode')


def _said(injected: Injected | None) -> str:
    return "nothing" if injected is None else f"outer step {injected.upper_step} of {injected.run_id}"
