"""Who takes part in a masked round: signed adverts of keys, the roster all peers must agree on, signed survivor sets.

A peer's advert is signed with its certificate's key over run, configuration, round and outer step, so that an advert of another
round is none of this one. The roster's hash h stands in every key, box and signature after it: peers that were shown two
rosters share no keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from edit.trust.shamir import MOST_SHARES
from edit.trust.signatures import MOST_KEY_BYTES, Signer, is_signed, statement

__all__ = [
    "KEY_BYTES",
    "Advert",
    "AgreedSet",
    "Roster",
    "RoundName",
    "advertise",
    "confirm_set",
    "is_confirmed",
    "roster_pin",
    "threshold_of",
]

KEY_BYTES = 32  # of X25519, and of what is derived from it; here, so that who reads a log needs no numpy
_ADVERT = "edit-mask-advert-v1"
_CONFIRM = "edit-mask-confirm-v1"
_ROSTER = "edit-mask-roster-v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundName:
    """Which round of which run, under which configuration, and by which plan (`edit.trust.mask_plan.plan_digest`).

    All of it is in each advert, and so in the roster's hash and in every key of the round.
    """

    run_id: str
    config_digest: str
    round_id: str
    outer_step: int
    plan: bytes

    def fields(self) -> tuple[bytes | str | int, ...]:
        return (self.run_id, self.config_digest, self.round_id, self.outer_step, self.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advert:
    """A peer's X25519 key for one round. public_key: of its certificate, SubjectPublicKeyInfo in DER."""

    peer_id: str
    public_key: bytes
    mask_key: bytes
    signature: bytes

    def is_valid(self, of_round: RoundName) -> bool:
        """Return whether the key's size is right and `public_key` signed this advert for this round."""
        signed = statement(_ADVERT, (*of_round.fields(), self.peer_id, self.mask_key))
        return len(self.mask_key) == KEY_BYTES and is_signed(self.public_key, self.signature, signed)


def advertise(peer_id: str, mask_key: bytes, of_round: RoundName, signer: Signer) -> Advert:
    """Return a signed advert of the public X25519 key `mask_key`."""
    signature = signer.sign(statement(_ADVERT, (*of_round.fields(), peer_id, mask_key)))
    return Advert(peer_id=peer_id, public_key=signer.public_key, mask_key=mask_key, signature=signature)


def threshold_of(peers: int) -> int:
    """Return t = floor(2n/3) + 1, how many shares open a mask: n - t peers may drop out, fewer than n/3 may collude."""
    return 2 * peers // 3 + 1


@dataclass(frozen=True, slots=True)
class Roster:
    """The adverts of a round, by peer_id. A peer's place is its index; its share is the one at x = place + 1.

    Raises ValueError for adverts out of order, a peer_id, mask key or certificate's key that stands twice, a size that no key
    has, and for fewer than 2 or more than 64 adverts. Signatures are checked by `check`.
    """

    round: RoundName
    adverts: tuple[Advert, ...]
    hash: bytes = field(init=False, repr=False)
    places: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        peers = [advert.peer_id for advert in self.adverts]
        if not 2 <= len(peers) <= MOST_SHARES:
            raise ValueError(f"a roster of {len(peers)} peers; 2 to {MOST_SHARES} can mask")
        if peers != sorted(set(peers)):
            raise ValueError("the roster is not in the order of peer_ids")
        for advert in self.adverts:
            if len(advert.mask_key) != KEY_BYTES or not 0 < len(advert.public_key) <= MOST_KEY_BYTES:
                raise ValueError(f"{advert.peer_id} advertised no key")
        for keys in ([advert.mask_key for advert in self.adverts], [advert.public_key for advert in self.adverts]):
            if len(set(keys)) < len(keys):
                twice = next(self.adverts[place].peer_id for place, key in enumerate(keys) if key in keys[:place])
                raise ValueError(f"{twice} advertised the key of another peer")
        fields: list[bytes | str | int] = [*self.round.fields()]
        for advert in self.adverts:
            fields += [advert.peer_id, advert.public_key, advert.mask_key]
        object.__setattr__(self, "hash", hashlib.sha256(statement(_ROSTER, fields)).digest())
        object.__setattr__(self, "places", {peer_id: place for place, peer_id in enumerate(peers)})

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(advert.peer_id for advert in self.adverts)

    @property
    def threshold(self) -> int:
        return threshold_of(len(self.adverts))

    def check(self, of_round: RoundName) -> None:
        """Raise ValueError that names the peer unless this is a roster of that round and every advert is signed for it."""
        if self.round != of_round:
            raise ValueError("the roster is of another round, or of another plan")
        for advert in self.adverts:
            if not advert.is_valid(of_round):
                raise ValueError(f"the advert of {advert.peer_id} is not signed for this round")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedSet:
    """Whose sum was opened in a masked round, and who has signed that it is to be.

    Raises ValueError unless the survivors are sharers, these are on the roster, and as many survivors as the threshold signed.
    `check` checks their signatures; those of the adverts it does not: whoever signs has checked them.
    """

    roster: Roster
    # U1, who has shared keys.
    sharers: frozenset[str]
    # U, whose sum it is.
    survivors: frozenset[str]
    # `confirm_set` of these sets, by peer.
    signatures: Mapping[str, bytes] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.sharers <= self.roster.places.keys():
            raise ValueError(f"{min(self.sharers - self.roster.places.keys())} shared keys, and is not on the roster")
        if not self.survivors <= self.sharers:
            raise ValueError(f"{min(self.survivors - self.sharers)} is in the sum, and has shared no keys")
        if not self.signatures.keys() <= self.survivors:
            raise ValueError(f"{min(self.signatures.keys() - self.survivors)} has confirmed the sum, and is not in it")
        if len(self.signatures) < self.roster.threshold:
            who = ", ".join(sorted(self.signatures)) or "nobody"
            raise ValueError(
                f"the sum of {', '.join(sorted(self.survivors))} is confirmed by {who} only; {self.roster.threshold} of the "
                f"{len(self.roster.adverts)} peers on the roster must have"
            )

    def check(self) -> None:
        """Raise ValueError that names a peer that has not signed these sets."""
        for peer_id, signature in sorted(self.signatures.items()):
            if not is_confirmed(self.roster, peer_id, signature, self.sharers, self.survivors):
                raise ValueError(f"{peer_id} has not signed that the sum of {', '.join(sorted(self.survivors))} is opened")


def confirm_set(roster: Roster, sharers: Collection[str], survivors: Collection[str], signer: Signer) -> bytes:
    """Return the signature by which a survivor agrees that this set is opened, and no other, in this round."""
    return signer.sign(_confirmed(roster, sharers, survivors))


def is_confirmed(roster: Roster, peer_id: str, signature: bytes, sharers: Collection[str], survivors: Collection[str]) -> bool:
    """Return whether this peer signed `confirm_set` of these sets."""
    place = roster.places.get(peer_id)
    if place is None or peer_id not in survivors:
        return False
    return is_signed(roster.adverts[place].public_key, signature, _confirmed(roster, sharers, survivors))


def _confirmed(roster: Roster, sharers: Collection[str], survivors: Collection[str]) -> bytes:
    return statement(_CONFIRM, (roster.hash, len(sharers), *sorted(sharers), *sorted(survivors)))


def roster_pin(members: Iterable[tuple[str, bytes]]) -> str:
    """Return SHA-256 (hex) over the sorted (peer_id, public key) of a run's members: what they compare by telephone and pin.

    The authority is the operator's: it could enrol peers that it invented. Members that pinned the roster notice.
    """
    fields: list[bytes | str | int] = []
    for peer_id, public_key in sorted(members):
        fields += [peer_id, public_key]
    return hashlib.sha256(statement("edit-mask-members-v1", fields)).hexdigest()
