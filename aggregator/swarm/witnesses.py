"""What other members say that the whole state of a part comes to, while this one fetches it.

An update is checked by its id, which the record names. Of a state the record names the outer step, and nothing of what is in
it: so no source is believed alone.

 1. Whoever fetches a state asks all voters what theirs comes to (`PartSnapshot.digest`), before the source makes its copy. They
    answer at once, and again after each outer step, until they are told that it is enough, MOST_TOLD outer steps at most. Only
    then, and only at those who are asked, anything is computed for it.
 2. The state that came counts when a committed record has named its outer step, by its name, and when more than half of the
    voters came to it by computing, the source's own word included. This member does not count; nor does a voter that says that
    it has no state, or that has not been connected for AWAY_S.
 3. When more than half came to another state, the source is not believed, and named; no state is taken from it while others
    have one. When as many say one thing as the other, nothing is taken.

Where the source is the only voter that is left to ask, its word counts: nobody else can tell.
"""

from __future__ import annotations

from collections.abc import Set

from aggregator.swarm.replication import Claimed
from edit.errors import GoneError, RemoteProtocolError
from editpb.council_messages import MOST_TOLD, StateDigest

__all__ = ["AWAY_S", "Witnesses"]

AWAY_S = 10.0


class Witnesses:
    """Of one fetch.

    Args:
        part: its number.
        source: who is asked for the state.
    """

    def __init__(self, part: int, source: str) -> None:
        self.part, self.source = part, source
        self._said: dict[str, dict[int, Claimed]] = {}  # by voter and outer step
        self._without = set[str]()  # who has no state

    def take(self, peer_id: str, said: StateDigest) -> None:
        """Take an answer."""
        if not said.digest:
            self._without.add(peer_id)
            return
        self._without.discard(peer_id)
        of_peer = self._said.setdefault(peer_id, {})
        of_peer[said.outer_step] = Claimed(said.outer_step, said.name, said.digest)
        while len(of_peer) > MOST_TOLD + 1:
            del of_peer[next(iter(of_peer))]

    def missing(self, voters: Set[str]) -> set[str]:
        """Return who of these has said nothing yet."""
        return {*voters} - self._said.keys() - self._without - {self.source}

    def why_not(self, claimed: Claimed, voters: Set[str]) -> str:
        """Return '' when this is what the state is, else who does not say so yet.

        Args:
            voters: who counts; without this member.

        Raises RemoteProtocolError when it is another state, GoneError when nobody can tell.
        """
        counted = {*voters} - self._without
        found = {peer_id: self._said.get(peer_id, {}).get(claimed.outer_step) for peer_id in counted - {self.source}}
        same = {peer_id for peer_id, said in found.items() if said == claimed} | (counted & {self.source})
        other = {peer_id for peer_id, said in found.items() if said not in (None, claimed)}
        if not found or 2 * len(same) > len(counted):
            return ""
        what = f"the state of part {self.part} at outer step {claimed.outer_step}"
        if 2 * len(other) > len(counted):
            raise RemoteProtocolError(f"{self.source} is not believed: {what} is another at {_names(other)}")
        if same | other == counted:
            raise GoneError(f"{what} is one at {_names(same | {self.source})}, and another at {_names(other)}")
        return f"{what}, from {self.source}, is not confirmed by {_names(counted - same - other)}"


def _names(peer_ids: Set[str]) -> str:
    return " and ".join(sorted(peer_ids))
