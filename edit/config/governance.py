"""The section [governance]: whose approval a change of the configuration needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from edit.config.validation import Between, check_bounds, require

__all__ = ["MOST_APPROVERS", "GovernanceConfig"]

MOST_APPROVERS = 32
_APPROVER = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64})(?: sha256:(?P<hash>[0-9a-f]{64}))?")
_OPERATOR = "operator"  # the name of the coordinator's own operator, whose changes these are


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernanceConfig:
    """The section [governance]: whose approval a change of the configuration needs (docs/site-policy.md)."""

    # Names of members that approve changes; empty: a change needs nobody's approval. With the hash behind the name, as
    # `edit-peer fingerprint` prints both, only approvals by that key count.
    approvers: tuple[str, ...] = ()
    # How many of them a changed configuration needs before it counts.
    needed: Annotated[int, Between(0, MOST_APPROVERS)] = 0

    def __post_init__(self) -> None:
        check_bounds("governance.", self)
        rule = "must be the name of a member, or its line of `edit-peer fingerprint`: NAME sha256:HASH"
        for each in self.approvers:
            require(_APPROVER.fullmatch(each) is not None, "governance.approvers", each, rule)
        names, most = self.names, len(self.approvers)
        twice = next((name for name in names if names.count(name) > 1), None)
        require(twice is None, "governance.approvers", twice, "must not be named twice: each approver counts once")
        rule = "must be another member: changes are the operator's, and others approve them"
        require(_OPERATOR not in names, "governance.approvers", _OPERATOR, rule)
        rule = f"must be at most {MOST_APPROVERS} names"
        require(most <= MOST_APPROVERS, "governance.approvers (their number)", most, rule)
        if not most:
            rule = "must be 0, or absent, without governance.approvers: nobody could approve a change"
            require(self.needed == 0, "governance.needed", self.needed, rule)
            return
        rule = f"must be between 1 and {most}, the number of governance.approvers"
        require(1 <= self.needed <= most, "governance.needed", self.needed, rule)

    @property
    def enabled(self) -> bool:
        """Whether a change needs approvals."""
        return bool(self.approvers)

    @property
    def names(self) -> tuple[str, ...]:
        """The approvers, without the hashes of their keys."""
        return tuple(each.partition(" ")[0] for each in self.approvers)

    @property
    def keys(self) -> Mapping[str, str]:
        """The hashes (SHA-256, hex) of the approvers' public keys, by name, as far as they are given."""
        each = (approver.partition(" sha256:") for approver in self.approvers)
        return {name: key for name, _, key in each if key}
