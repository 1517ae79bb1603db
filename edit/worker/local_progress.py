"""What becomes of a fragment's local parameters when theta moves: theta alone, or theta and progress made on the old one.

Owns: the rule per verdict, mode and mix, each formula once. Must not know: carriers, when theta moves, residuals.

- The contribution is merged (OK): what was done after sending is kept, all of it (replay), none (replace), or a share (lerp,
  arXiv 2501.18512: alpha local + (1 - alpha) theta). An outcome later than planned is always replayed.
- The peer has contributed nothing to this commit: everything since theta is kept.
- The contribution was refused: nothing is kept; the local parameters are theta.
"""

from __future__ import annotations

from torch import Tensor

from edit.records import Verdict
from edit.replica.replica import Replica
from edit.worker.config import WorkerConfig
from edit.worker.pending import Pending

__all__ = ["kept", "unmerged", "unsent"]


def kept(
    config: WorkerConfig, replica: Replica, theta: Tensor, i: int, verdict: Verdict | None, pending: Pending | None
) -> Tensor | None:
    """What to add to the new `theta` of fragment i, None for nothing, after a commit with that verdict."""
    if pending is None or i in pending.applied or verdict is None:
        return unmerged(replica, i, pending)
    if verdict is not Verdict.OK or i not in pending.sent_from:
        return None
    if config.sync.mode != "delayed" or config.sync.mix == "replay" or pending.outcome_overdue:
        return replica.progress_since(i, pending.sent_from[i])
    return None if config.sync.mix == "replace" else replica.local_fragment(i).sub_(theta).mul_(config.sync.alpha)


def unmerged(replica: Replica, i: int, pending: Pending | None) -> Tensor:
    """Everything since theta; where training went on from an estimate (eager), as if it had gone on from what was sent."""
    if pending is None or i not in pending.deltas:
        return replica.progress(i)
    return replica.progress_since(i, pending.sent_from[i]).sub_(pending.deltas[i])


def unsent(replica: Replica, i: int, pending: Pending | None) -> Tensor | None:
    """What was done since sending fragment i, or since theta where nothing of it is on its way."""
    if pending is None or i not in pending.missing:
        return replica.progress(i)
    return replica.progress_since(i, pending.sent_from[i]) if i in pending.sent_from else None
