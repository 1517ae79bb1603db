"""How a peer comes up to date with its run. One pure decision; the first line that holds wins.

With a checkpoint, when the peer joins (`resume`):

checkpoint's outer step      and                                                    decision
---------------------------  -----------------------------------------------------  -----------------------------------
newer than the run's                                                                NotOfThisRun
equal to the run's           its digest is not the run's, though no update of the   NotOfThisRun
                             pending contribution was applied
any                          the run is strict, or contributions outlive rounds     ResumeExactly
older than the run's         the updates from there are kept, and fewer bytes than  ResumeForward, by updates
                             the parameters; no update of the pending contribution
                             was applied
older than the run's                                                                ResumeForward
equal to the run's                                                                  ResumeExactly

Without one, or once training (`catch_up`):

the run                                               decision
----------------------------------------------------  ---------------------------------------------------------------
has asked this peer to take a snapshot                TakeSnapshot
is at an older outer step than this peer              TakeSnapshot (it went back to an older checkpoint)
is further and keeps the update that this peer needs  ApplyUpdates
is further and no longer keeps it                     TakeSnapshot
is at the same outer step                             UpToDate

Resuming EXACTLY: what this peer contributed after saving is computed once more. Where the run has committed it already, it is
not sent again but counted as what it is, this peer's own. A deterministic loop then gives the same bits as one that was never
interrupted. Resuming FORWARD: from the run's outer parameters at once, with the inner optimizer's state, the data position and
the counters that were saved. Work done since theta and residuals are dropped: whether the run has them cannot be known, so they
may be lost, but are never counted twice. BY UPDATES, those outer parameters are the saved ones with the updates that followed:
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "ApplyUpdates",
    "NotOfThisRun",
    "ResumeExactly",
    "ResumeForward",
    "TakeSnapshot",
    "UpToDate",
    "catch_up",
    "resume",
    "updates_suffice",
]


@dataclass(frozen=True, slots=True)
class ApplyUpdates:
    """Apply the updates to the outer steps `first` to `last`, one after the other."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Move onto the run's outer parameters as a whole. reason: why updates do not do."""

    reason: str


@dataclass(frozen=True, slots=True)
class UpToDate:
    """There is nothing to do."""


@dataclass(frozen=True, slots=True)
class ResumeExactly:
    """Go on from the checkpoint, as if nothing had happened."""


@dataclass(frozen=True, slots=True)
class ResumeForward:
    """Go on from the run's outer parameters, with the counters of the checkpoint. by_updates: they are not fetched whole."""

    by_updates: bool = False


@dataclass(frozen=True, slots=True)
class NotOfThisRun:
    """The checkpoint cannot be gone on from. reason: one line that says why and what to do."""

    reason: str


def catch_up(own_step: int, run_step: int, *, oldest_update: int, resync: str = "") -> ApplyUpdates | TakeSnapshot | UpToDate:
    """Return how a peer at outer step `own_step` reaches the run's.

    oldest_update: the outer step TO which the oldest kept update leads; resync: why the run asks for a snapshot, if it does.
    """
    if resync:
        return TakeSnapshot(resync)
    if run_step == own_step:
        return UpToDate()
    if run_step < own_step:
        return TakeSnapshot(f"the run is at outer step {run_step}, this peer at {own_step}")
    if own_step + 1 < oldest_update:
        return TakeSnapshot(f"update {own_step + 1} is no longer kept; the oldest is {oldest_update}")
    return ApplyUpdates(own_step + 1, run_step)


def resume(
    saved_step: int,
    run_step: int,
    *,
    strict: bool,
    max_staleness: int,
    same_digest: bool = True,
    updates_do: bool = False,
) -> ResumeExactly | ResumeForward | NotOfThisRun:
    """Return how a peer goes on from a checkpoint at outer step `saved_step`.

    strict, max_staleness: of the run; with max_staleness > 0 rounds need not wait for this peer, because contributions outlive
    them. same_digest: False where the outer parameters saved are not the run's although both are at the same outer step.
    updates_do: whether `updates_suffice`.
    """
    if saved_step > run_step:
        return NotOfThisRun(
            f"the checkpoint is at outer step {saved_step}, the run only at {run_step}: it is newer than the run, "
            "or of another one; remove it to start from the run's parameters"
        )
    if saved_step == run_step and not same_digest:
        return NotOfThisRun(
            f"the checkpoint's outer parameters at outer step {saved_step} are not the run's: it is of another run; "
            "remove it to start from the run's parameters"
        )
    if strict or max_staleness > 0 or saved_step == run_step:
        return ResumeExactly()
    return ResumeForward(by_updates=updates_do)


def updates_suffice(
    saved_step: int, run_step: int, *, kept_updates: int, update_bytes: Callable[[int], int], all_bytes: int
) -> bool:
    """Return whether the updates that lead from a saved theta to the run's are kept, and fewer bytes than the parameters.

    kept_updates: how many the run keeps; update_bytes: of the update FROM an outer step; all_bytes: of the parameters in fp32.
    """
    if not 0 < run_step - saved_step <= kept_updates:
        return False
    return sum(map(update_bytes, range(saved_step, run_step))) < all_bytes
