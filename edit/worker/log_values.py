"""What a log says of a worker's exchange: the same names in the callbacks of frameworks and in trackers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from edit.worker.worker import EditWorker

__all__ = ["log_values"]


class _Bytes(Protocol):
    @property
    def sent(self) -> int: ...

    @property
    def received(self) -> int: ...


@runtime_checkable
class _Counting(Protocol):
    """A carrier that counts its bytes."""

    @property
    def traffic(self) -> _Bytes: ...


def log_values(worker: EditWorker, peer_id: str, carrier: object) -> dict[str, float | str]:
    """Return values by name; without bytes where the carrier counts none, without norms where this peer is in no commit.

    edit/outer_step; edit/wait_s, as of `EditWorker`; edit/verdict on this peer's part of the last commit, or "absent";
    edit/norm of its pseudo-gradient and edit/merged_norm of all peers' mean, before the clip; edit/weight in that mean,
    averaged over the fragments; edit/sent_mb and edit/received_mb of this process, in 10^6 bytes.
    """
    verdict = worker.last_verdict
    values: dict[str, float | str] = {
        "edit/outer_step": worker.outer_step,
        "edit/wait_s": round(worker.wait_s, 3),
        "edit/verdict": verdict.value if verdict is not None else "absent",
    }
    commit = worker.last_commit
    own = [each for fragment in commit.fragments if (each := fragment.verdict_of(peer_id))] if commit is not None else []
    if commit is not None and own:
        if not math.isnan(norm := math.hypot(*(each.norm for each in own))):  # it may be nobody's to see
            values["edit/norm"] = norm
        values["edit/merged_norm"] = math.hypot(*(fragment.merged_norm for fragment in commit.fragments))
        values["edit/weight"] = sum(each.weight for each in own) / len(own)
    if isinstance(carrier, _Counting):
        traffic = carrier.traffic
        values |= {"edit/sent_mb": traffic.sent / 1e6, "edit/received_mb": traffic.received / 1e6}
    return values
