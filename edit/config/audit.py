"""The section [audit]: a log of what was merged, which cannot be rewritten unseen."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AuditConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """The section [audit]: a log of what was merged, which cannot be rewritten unseen (docs/audit.md)."""

    # Peers sign their contributions with the key of their certificate, and the coordinator keeps a signed log: who contributed
    # what to each commit, what it counted for, and what came out. `edit-coordinator audit verify` checks it. Each
    # update brings its peer a receipt; a peer stops when one does not fit what it has sent, or seen of the log before.
    enabled: bool = False
