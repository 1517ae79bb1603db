"""What the owner of a part writes into the part's audit log: an entry for each commit, signed with its certificate's key.

It stands in the update that the owner offers, under the update's id. So the members agree on it when they agree on the update,
and the logs of all of them are the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from aggregator.storage.part_log import PartLog
from edit.config.in_force import in_force
from edit.config.run import RunConfig
from edit.errors import LocalProtocolError
from edit.merging.outer_state import MergeRecord, OuterState, Staged
from edit.trust.canonical import parse_canonical
from edit.trust.signatures import Signer, key_hash
from editpb.audit_log import RoundFacts, check_length, claimed_privacy, commit_entry, consent_entry, entry_line
from editpb.messages import Consent, ContributionHeader, SeenHead
from editpb.owner_signatures import signed_by_owner
from editpb.part_entries import CONSENTS, MOST_CONSENTS, consent_name
from editpb.signed_contributions import config_digest

__all__ = ["OwnerEntries", "computed"]


def computed(
    config: RunConfig,
    part: int,
    grant: int,
    outer: OuterState,
    records: Sequence[MergeRecord],
    staged: Mapping[int, Staged],
    facts: RoundFacts,
    contributions: Mapping[int, Sequence[ContributionHeader]],
) -> dict[str, Any]:
    """Return the entry of the commit that these records lead to, without its place in the log, its owner and signature.

    Args:
        outer: the part's state before it.
        records, staged: of each fragment that is due, by fragment.
    """
    entry = commit_entry(
        replace(facts, privacy=claimed_privacy(config)),
        digests=(outer.digest, outer.digest_after(staged)),
        config=config_digest(config),
        records=records,
        staged=staged,
        contributions=contributions,
        taken_with=asdict(in_force(config, outer.outer_step)),
    )
    return {**entry, "part": part, "grant": grant}


class OwnerEntries:
    """See `aggregator.storage.store.Entries`. Used in the engine's worker thread.

    Args:
        log: of the part, at this member.
        owner: this member; signer: has its certificate's key.
        now: unix seconds, for the entries.
        key_of: returns the key (SHA-256) that counts for a member now; '': none does.
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
        key_of: Callable[[str], str],
    ) -> None:
        self._log, self._run_id, self._part, self._grant = log, run_id, part, grant
        self._config, self._owner, self._signer, self._now, self._key_of = config, owner, signer, now, key_of
        self._said: dict[str, Consent] = {}  # by peer: its site's, as it said it last

    @property
    def of_results(self) -> bool:
        """See `Entries`: the owner signs what the commit leads to."""
        return True

    def commit(
        self,
        outer: OuterState,
        records: Sequence[MergeRecord],
        staged: Mapping[int, Staged] | None,
        contributions: Mapping[int, Sequence[ContributionHeader]],
        facts: RoundFacts,
    ) -> str:
        """Return the signed entry of a round that is about to be proposed. Raises StorageError, RefusedError.

        facts.trained is not in it: members that look at an entry know what was merged, and not with how many inner steps.
        """
        none = RoundFacts(round_id=facts.round_id, outer_step=outer.outer_step + 1, reason=facts.reason)
        if facts != replace(none, missing=facts.missing, unmerged=facts.unmerged, partly=facts.partly, trained=facts.trained):
            raise LocalProtocolError("this commit is none of a swarm's part")
        if staged is None:
            raise LocalProtocolError("the owner of a part signs what its commits lead to, which is not staged")
        entry = computed(
            self._config, self._part, self._grant, outer, records, staged, replace(facts, trained=(0, 0)), contributions
        )
        if consents := self._unlogged():
            entry[CONSENTS] = consents
        placed = parse_canonical(entry_line(self._log.tree, self._now(), {**entry, "owner": self._owner}))
        line = signed_by_owner(self._run_id, placed, self._signer)
        check_length(line, placed)
        return line.decode()

    def consent(self, peer_id: str, consent: Consent) -> None:
        """Take a site's consent to the run's configuration, for the next entry, unless the log has it."""
        self._said[peer_id] = consent

    def _unlogged(self) -> list[dict[str, Any]]:
        """Return the entries of the consents that the log lacks, by peer: as many as one entry of a commit may have.

        One that is signed with another key than the member has now would make the entry none.
        """
        counts = [(one, said) for one, said in sorted(self._said.items()) if key_hash(said.public_key) == self._key_of(one)]
        said = {peer_id: consent_entry(peer_id, consent) for peer_id, consent in counts}
        known = self._log.consents
        return [each for peer_id, each in said.items() if known.get(peer_id) != consent_name(each)][:MOST_CONSENTS]

    def misfit(self, seen: SeenHead) -> tuple[str, bool]:
        """Say that nobody can have seen a signed head of this log: there is none."""
        return "a signed head of an audit log, which a swarm has not", False
