"""What a peer keeps of its own when theta moves: local progress, the inner optimizer's state.

Each formula of the local parameters, by verdict, mode and mix:

- The contribution is merged (OK): what was done after sending is kept, all of it (replay), none (replace), or a share (lerp,
  arXiv 2501.18512: alpha local + (1 - alpha) theta). An outcome later than planned is always replayed. With
  codec.up_residual = "local" what the codec left out of the contribution is kept, too.
- The peer has contributed nothing to this commit: everything since theta is kept.
- The contribution was refused: nothing is kept; the local parameters are theta.
- Buffers are theta's, or stay as they are where the peer has contributed nothing: a running variance moved by the sum of two
  changes may be negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence
from math import isnan

from torch import Tensor
from torch.optim import Optimizer

from edit.config.algorithm import SyncConfig
from edit.records import Verdict
from edit.replica.layout import local_of
from edit.replica.replica import Replica
from edit.worker.contribution import SentTensors
from edit.worker.exchange import Pending

__all__ = ["kept", "scrub", "trains", "unmerged", "unsent"]


def kept(
    sync: SyncConfig,
    replica: Replica,
    i: int,
    verdict: Verdict | None,
    pending: Pending | None,
    sent: SentTensors,
) -> Tensor | float | None:
    """Return what fragment i keeps after a commit with that verdict, see `edit.replica.replica.Progress`."""
    buffers = replica.layout.schema.fragments[i].buffers
    if pending is None or i in pending.applied or verdict is None:
        return 1.0 if buffers else unmerged(replica, i, sent)
    if verdict is not Verdict.OK or i not in sent.sent_from or buffers:
        return None
    if sync.mode != "delayed" or sync.mix == "replay" or pending.outcome_overdue:
        return replica.progress_since(i, sent.sent_from[i])
    return None if sync.mix == "replace" else sync.alpha


def unmerged(replica: Replica, i: int, sent: SentTensors) -> Tensor:
    """Return everything since theta; after an estimate (eager), as if training had gone on from what was sent."""
    if i not in sent.deltas:
        return replica.progress(i)
    return replica.progress_since(i, sent.sent_from[i], sent.deltas[i])


def unsent(replica: Replica, i: int, pending: Pending | None, sent: SentTensors) -> Tensor | float | None:
    """Return what was done since sending fragment i, or since theta where nothing of it is on its way. Buffers stay, or become
    theta's, as in `kept`."""
    buffers = replica.layout.schema.fragments[i].buffers
    if pending is None or i not in pending.missing:
        return 1.0 if buffers else replica.progress(i)
    if buffers:
        return None
    return replica.progress_since(i, sent.sent_from[i]) if i in sent.sent_from else None


def trains(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Return whether one of the parameters is in its groups."""
    ids = set(map(id, parameters))
    return any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])


def scrub(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Set NaN and Inf in the inner optimizer's state of these parameters to 0, or they would come back with the next step.

    So is what the state has beside the parameters, and their groups' values: in tensors, also in lists, tuples and tables of
    them; a number that is NaN. Not what other objects hold, or attributes of the optimizer.
    """
    ids = set(map(id, parameters))
    for key, state in optimizer.state.items():
        if id(key) in ids or not isinstance(key, Tensor):
            _clean(state)
    for group in optimizer.param_groups:
        if any(id(parameter) in ids for parameter in group["params"]):
            for name, value in group.items():
                if name != "params" and (cleaned := _clean(value)) is not value:
                    group[name] = cleaned


def _clean(value: object) -> object:
    """Return a value of the state cleaned, in place where it can be; written is only what changes: settings may be read-only.

    A number that is Inf may be a setting, and stays.
    """
    if isinstance(value, Tensor):
        for part in _plain(local_of(value)):
            if part.dtype.itemsize > 1:
                part.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            else:  # torch does not clean float8 in place
                part.copy_(part.float().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
    elif isinstance(value, MutableMapping):
        for key, inside in value.items():
            if (cleaned := _clean(inside)) is not inside:
                value[key] = cleaned
    elif isinstance(value, MutableSequence):
        for place, inside in enumerate(value):
            if (cleaned := _clean(inside)) is not inside:
                value[place] = cleaned
    elif isinstance(value, tuple):
        for inside in value:
            _clean(inside)
    return 0.0 if isinstance(value, float) and isnan(value) else value


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the floating-point tensors that hold this one's values: of a quantized one, its scales."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    elif tensor.is_floating_point():
        yield tensor
