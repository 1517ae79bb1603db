"""The section [audit]: a log of what was merged, which cannot be rewritten unseen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from edit.config.validation import Between, check_bounds

__all__ = ["AuditConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """The section [audit]: a log of what was merged, which cannot be rewritten unseen (docs/audit.md)."""

    # Peers sign their contributions with the key of their certificate, and the coordinator keeps a signed log: who contributed
    # what to each commit, what it counted for, and what came out. `edit-coordinator audit verify` checks it. Each
    # update brings its peer a receipt; a peer stops when one does not fit what it has sent, or seen of the log before. In a
    # swarm every member keeps the log, the owners of parts sign its entries, and `edit-peer swarm audit verify` checks it.
    enabled: bool = False
    # The coordinator keeps the contributions to this many of the last outer steps, as they were sent. `edit-coordinator audit
    # replay` merges them once more and compares the result with the log. In a swarm the owner of each part does, and
    # `edit-peer swarm audit replay` merges them.
    keep_contributions: Annotated[int, Between(0, 10_000)] = 0
    # Peers sign the head of each receipt that they accept with the key of their certificate, and send it with their reports.
    # `edit-coordinator audit verify` says how many members vouch for which head.
    cosign: bool = True

    def __post_init__(self) -> None:
        check_bounds("audit.", self)
