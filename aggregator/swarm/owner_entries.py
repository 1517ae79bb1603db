"""What the owner of a part writes into the part's audit log: an entry for each commit, signed with its certificate's key.

It stands in the update that the owner offers, under the update's id. So the members agree on it when they agree on the update,
and the logs of all of them are the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from aggregator.storage.part_log import PartLog
from edit.config.in_force import in_force
from edit.config.run import RunConfig
from edit.errors import LocalProtocolError
from edit.merging.injection import Injected
from edit.merging.outer_state import MergeRecord, OuterState, Staged
from edit.merging.trust import Trust
from edit.trust.canonical import parse_canonical
from edit.trust.mask_roster import AgreedSet
from edit.trust.signatures import Signer
from editpb.audit_log import check_length, claimed_privacy, commit_entry, entry_line
from editpb.messages import ContributionHeader, SeenHead
from editpb.owner_signatures import signed_by_owner
from editpb.signed_contributions import config_digest

__all__ = ["OwnerEntries", "computed"]


def computed(
    config: RunConfig,
    part: int,
    grant: int,
    outer: OuterState,
    records: Sequence[MergeRecord],
    staged: Mapping[int, Staged],
    *,
    round_id: int,
    reason: str,
    contributions: Mapping[int, Sequence[ContributionHeader]],
    missing: Sequence[str] = (),
    unmerged: Collection[str] = (),
) -> dict[str, Any]:
    """Return the entry of the commit that these records lead to, without its place in the log, its owner and signature.

    Args:
        outer: the part's state before it.
        records, staged: of each fragment that is due, by fragment.
    """
    entry = commit_entry(
        round_id=round_id,
        outer_step=outer.outer_step + 1,
        reason=reason,
        digests=(outer.digest, outer.digest_after(staged)),
        config=config_digest(config),
        records=records,
        staged=staged,
        contributions=contributions,
        missing=missing,
        unmerged=unmerged,
        privacy=claimed_privacy(config),
        taken_with=asdict(in_force(config, outer.outer_step)),
    )
    return {**entry, "part": part, "grant": grant}


class OwnerEntries:
    """See `aggregator.storage.store.Entries`. Used in the engine's worker thread.

    Args:
        log: of the part, at this member.
        owner: this member; signer: has its certificate's key.
        now: unix seconds, for the entries.
    """

    def __init__(
        self,
        log: PartLog,
        run_id: str,
        part: int,
        grant: int,
        config: RunConfig,
        owner: str,
        signer: Signer,
        now: Callable[[], float],
    ) -> None:
        self._log, self._run_id, self._part, self._grant = log, run_id, part, grant
        self._config, self._owner, self._signer, self._now = config, owner, signer, now

    def commit(
        self,
        outer: OuterState,
        records: Sequence[MergeRecord],
        staged: Mapping[int, Staged],
        contributions: Mapping[int, Sequence[ContributionHeader]],
        *,
        round_id: int,
        outer_step: int,
        reason: str,
        missing: Sequence[str],
        unmerged: Collection[str] = (),
        injected: Injected | None,
        privacy: Mapping[str, object] | None = None,
        agreed: AgreedSet | None = None,
        trained: tuple[int, int] = (0, 0),
        scored: tuple[Sequence[str], Mapping[str, Trust] | None] = ((), None),
    ) -> str:
        """Return the signed entry of a round that is about to be proposed. Raises StorageError, RefusedError.

        trained: not in it: members that look at an entry know what was merged, not what each contribution was trained with.
        """
        if (
            injected is not None
            or privacy is not None
            or agreed is not None
            or scored[1] is not None
            or outer_step != outer.outer_step + 1
        ):
            raise LocalProtocolError("this commit is none of a swarm's part")
        entry = computed(
            self._config,
            self._part,
            self._grant,
            outer,
            records,
            staged,
            round_id=round_id,
            reason=reason,
            contributions=contributions,
            missing=missing,
            unmerged=unmerged,
        )
        placed = parse_canonical(entry_line(self._log.tree, self._now(), {**entry, "owner": self._owner}))
        line = signed_by_owner(self._run_id, placed, self._signer)
        check_length(line, placed)
        return line.decode()

    def misfit(self, seen: SeenHead) -> tuple[str, bool]:
        """Say that nobody can have seen a signed head of this log: there is none."""
        return "a signed head of an audit log, which a swarm has not", False
