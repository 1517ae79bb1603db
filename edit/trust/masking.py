"""The masked round, at a peer and at the coordinator: who shares keys, whose sum is opened, when it is aborted.

Bonawitz et al. 2017, "Practical Secure Aggregation", the variant against a malicious server: signed keys, a threshold of two
thirds, a set of survivors that a threshold of peers signed. `handle` returns the effects that the shell carries out, in order.
An effect of one machine that is a message is an event of the other. The coordinator's machine takes `now`, in seconds; a peer's
waits end with `Abort`, which its shell says when the round is over for it. Randomness is passed in.

Invariants

I1  A peer gives out, of each other peer, the share of its own mask or that of its pair masks, never both: rules 5 and 6.
I2  One set per round: a peer signs one, and reveals once, for that one: rules 5 and 6.
I3  What a peer reveals for is on its disk before it reveals: rule 6.
I4  Keys live in memory for one round. A machine that ended has none.
I5  Every wait of the coordinator has a deadline; what a peer sends is bounded by the number of peers: rules 1 to 6.

Rules

1. Advertise. A peer draws an X25519 key and signs it for this round. The coordinator shows the roster when all that are
   expected have advertised or left, or after floor_s, and as soon as `most` have; but never before min_peers and the quorum
   (and 2) have. Who was lost is on it only if it is back and has advertised since: the same key, which it has still, or
   another, in the place of the one that it has lost. A peer takes no other advert of itself back.
2. A peer goes on with a roster of this round only: every advert signed, its own unchanged, enough peers, and each as its
   operator pinned them, if they are pinned. h is the roster's hash, t its threshold.
3. Share. A peer draws two secrets: b, its own mask's key, and r, which opens `recovery`, its pair keys under AES-GCM. It deals
   shares of both, one box per peer, and publishes digests of the secrets, of every share and of every pair key. So a share is
   checked when it is dealt and when it is revealed, and the one who lied is named. Pair keys whose digests differ end the round
   and name both peers. The dealer signs each box with the digests of the two shares in it, so that nobody can damage one on
   its way, and publishes a digest of each box's key. Who gets a box that its dealer signed, and that lacks those shares,
   complains with the box's key and takes no further part. With the key as it was published the coordinator opens the box, and
   the dealer is named. Where the key is another one, one of the two lies, and both are named. The key is told only of a box
   that its dealer signed, as an honest one never does, and it opens that box alone: it is derived (HKDF) for this roster,
   dealer and receiver. The X25519 secret that it is derived from is never told: a dealer may have made its mask key from that
   of another peer, so that it would be the secret of two honest ones. Of a box that is not signed only the complaint is told,
   and both are named.
4. Collect. The sharers are known when all peers of the roster have shared or left, or after floor_s, if max(t, quorum,
   min_peers) have. Each then masks its vectors for exactly these sharers. The round machine closes: U, the survivors, are
   sharers whose vectors are complete and sound, at least max(t, quorum, min_peers).
5. Confirm. A survivor signs (h, sharers, U) if it would reveal for U: U is large enough, and earlier sums and this one tell no
   group of peers apart that is too small (`edit.trust.revealed_sets`). It signs one U per round.
6. Reveal. With t signatures on one U a survivor reveals its shares of b of each of U, and of r of the sharers outside U. With
   t such answers the coordinator rebuilds the keys and opens the sum.

coordinator  event                       condition                        effects              next
-----------  --------------------------  -------------------------------  -------------------  -----------
ADVERTISING  Advert                      signed for this round                                 same
ADVERTISING  Advert, Gone, Back, Tick    rule 1                           ShowRoster           SHARING
SHARING      Shares                      of a peer of the roster                               same
SHARING      Shares, Gone, Tick          rule 4: all, or floor_s over     ShowInbox for each   COLLECTING
SHARING      Shares, Gone, Tick          too few, or pair keys differ     Aborted              ABORTED
COLLECTING   Complaint                   it is true, or may be            Aborted              ABORTED
COLLECTING   Close                       enough survivors                 AskConfirm           CONFIRMING
COLLECTING   Close                       too few                          Aborted              ABORTED
CONFIRMING   Confirm                     t signed                         AskReveal            REVEALING
REVEALING    Reveal                      t revealed                       Opened               OPEN
REVEALING    Reveal                      a secret is not as published     Aborted              ABORTED
CON, REV     Tick                        answer_s over                    Aborted              ABORTED
any open     Abort                                                        Aborted              ABORTED

peer         event                       condition                        effects              next
-----------  --------------------------  -------------------------------  -------------------  -----------
ADVERTISED   ShowRoster                  rule 2                           Shares               SHARED
SHARED       ShowInbox                   rules 3 and 4                    StartMasking         MASKING
SHARED       ShowInbox                   a box lacks its shares           Complaint, Ended     ENDED
MASKING      AskConfirm                  rule 5                           Confirm              CONFIRMED
MAS, CON     AskReveal                   rule 6                           SaveRevealed,        REVEALED
                                                                          Reveal
any          the same event again                                         the same answer      same
any          Abort, anything else                                         Ended                ENDED
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import combinations
from typing import TypeAlias

from edit.errors import RemoteProtocolError, StaleError
from edit.trust.mask_roster import KEY_BYTES, Advert, AgreedSet, Roster, RoundName, advertise, confirm_set, is_confirmed
from edit.trust.masks import Words, add_mask, derive, lanes_of, open_box, pair_key, public_key, seal, shared_secret
from edit.trust.revealed_sets import RevealedSets
from edit.trust.shamir import MOST_SHARES, SECRET_BYTES, SHARE_BYTES, rebuild, split
from edit.trust.signatures import SIGNATURE_BYTES, Signer, is_signed, key_hash, statement

__all__ = [
    "Abort",
    "Aborted",
    "AskConfirm",
    "AskReveal",
    "Back",
    "Close",
    "Complaint",
    "Confirm",
    "Ended",
    "Gone",
    "MaskClient",
    "MaskServer",
    "Masks",
    "Opened",
    "Opening",
    "PeerStep",
    "Reveal",
    "SaveRevealed",
    "ServerStep",
    "Shares",
    "ShowInbox",
    "ShowRoster",
    "StartMasking",
    "Tick",
]

_ANY_KEY = bytes([1]) * KEY_BYTES  # a private key: with any of them a public key of small order has no secret
_DIGEST_BYTES = 32
_TAG_BYTES = 16  # of AES-GCM
_BOX_BYTES = 2 * SHARE_BYTES + _TAG_BYTES
_BOX = "edit-mask-box-v1"


class ServerStep(Enum):
    ADVERTISING = auto()
    SHARING = auto()
    COLLECTING = auto()
    CONFIRMING = auto()
    REVEALING = auto()
    OPEN = auto()
    ABORTED = auto()


class PeerStep(Enum):
    ADVERTISED = auto()
    SHARED = auto()
    MASKING = auto()
    CONFIRMED = auto()
    REVEALED = auto()
    ENDED = auto()


# What travels. Sequences have an item per place in the roster.


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowRoster:
    """To each peer of the roster: who takes part."""

    roster: Roster


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """From a peer: what the others need to open its masks, should enough of them want to."""

    peer_id: str
    boxes: tuple[bytes, ...]  # the shares of b and r under the key of dealer and receiver; b"" at its own place
    self_digests: tuple[bytes, ...]  # SHA-256 of each share of b
    recovery_digests: tuple[bytes, ...]  # of each share of r
    pair_digests: tuple[bytes, ...]  # of each pair key; b"" at its own place
    recovery: bytes  # all pair keys under a key that follows from r
    self_hash: bytes  # SHA-256 of b
    recovery_hash: bytes  # of r
    signatures: tuple[bytes, ...] = ()  # of each box and its digests; b"" at its own place; earlier versions sign none
    key_digests: tuple[bytes, ...] = ()  # SHA-256 of each box's key; b"" at its own place; there where signatures are


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowInbox:
    """To one sharer: who shared, and by dealer the box for this peer, the digests of the two shares in it, its signature."""

    peer_id: str
    sharers: frozenset[str]
    boxes: Mapping[str, bytes]
    digests: Mapping[str, tuple[bytes, bytes]]
    signatures: Mapping[str, bytes] = field(default_factory=dict)  # b"" of a dealer that signed none


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """From a peer that goes no further: the box that it got of a dealer lacks the shares whose digests came with it."""

    peer_id: str
    dealer: str
    key: bytes = field(repr=False)  # of the box; b"": the dealer has not signed it


@dataclass(frozen=True, slots=True, kw_only=True)
class AskConfirm:
    """To the survivors: this set is to be opened."""

    survivors: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """From a survivor: its signature under the set."""

    peer_id: str
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AskReveal:
    """To the survivors: signatures of a threshold of them, by peer."""

    survivors: frozenset[str]
    signatures: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reveal:
    """From a survivor: its shares of b of each survivor, and of r of each sharer that is none."""

    peer_id: str
    self_shares: Mapping[str, bytes]
    recovery_shares: Mapping[str, bytes]


# What the shells tell their machine, and what it tells them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The round is over without this protocol: the run was paused, the deadline of the round passed, the peer left."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """To the coordinator's machine: this peer was lost, so nothing more is awaited of it."""

    peer_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Back:
    """To the coordinator's machine: this peer is there, and has been lost before, perhaps."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """To the coordinator's machine: the time is to be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """To the coordinator's machine: these peers' vectors are complete and sound."""

    complete: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The coordinator's round ended without a sum. blamed: the peers that lied; empty when nobody is known to have."""

    reason: str
    blamed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRevealed:
    """A peer is about to reveal: these sets must be on disk before the next effect is carried out."""

    sets: RevealedSets


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A peer takes no further part in this round, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """One peer's masks for one round. A round's vector is masked once: two different vectors under one mask show their
    difference."""

    place: int
    own_key: bytes = field(repr=False)
    pair_keys: Mapping[int, bytes] = field(repr=False)  # by the other sharer's place

    def apply(self, words: Words, fragment_id: int, start: int) -> None:
        """Add all masks to a run of a fragment, or to its lanes (start: numel), in place. See `edit.trust.masks.add_mask`."""
        add_mask(words, self.own_key, fragment_id, start)
        for other, key in self.pair_keys.items():
            add_mask(words, key, fragment_id, start, subtract=other < self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMasking:
    """A peer may mask and upload."""

    masks: Masks


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the coordinator takes from the survivors' sum."""

    survivors: frozenset[str]
    self_keys: Mapping[str, bytes] = field(repr=False)
    left_over: tuple[tuple[bytes, bool], ...] = field(repr=False)  # pair keys of those who dropped out; True: had been added

    def apply(self, words: Words, fragment_id: int, start: int) -> None:
        """Make of the sum of the survivors' masked words the sum of their integers, modulo 2^bits, in place."""
        for key in self.self_keys.values():
            add_mask(words, key, fragment_id, start, subtract=True)
        for key, added in self.left_over:
            add_mask(words, key, fragment_id, start, subtract=added)

    @staticmethod
    def check(words: Words, lanes: Words, fragment_id: int) -> None:
        """Raise RemoteProtocolError unless the lanes of a whole opened fragment are those that the survivors sent."""
        if lanes_of(words).tolist() != lanes.tolist():
            raise RemoteProtocolError(
                f"the sum of fragment {fragment_id} is not what its peers say it is: a masked vector is wrong"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The sum of the survivors can be opened."""

    opening: Opening


PeerEffect: TypeAlias = Advert | Shares | StartMasking | Complaint | Confirm | SaveRevealed | Reveal | Ended
PeerEvent: TypeAlias = ShowRoster | ShowInbox | AskConfirm | AskReveal | Abort
ServerEffect: TypeAlias = ShowRoster | ShowInbox | AskConfirm | AskReveal | Opened | Aborted
ServerEvent: TypeAlias = Advert | Shares | Complaint | Close | Confirm | Reveal | Gone | Back | Tick | Abort


class MaskClient:
    """One peer's side of one masked round.

    Args:
        peer_id: of this peer.
        signer: signs with its certificate's key.
        of_round: the round, as this peer knows it: run, configuration, round, and the peer's own outer step.
        min_peers, quorum: how many a sum has at least, by this peer's configuration; a difference of sums has `min_peers`.
        revealed: what this peer revealed for before, from its file.
        draw: returns that many bytes from a cryptographic source.
        members: `key_hash` of the public keys of the members that the operator pinned, by peer; None: whom the coordinator
            names is believed.
    """

    def __init__(
        self,
        peer_id: str,
        *,
        signer: Signer,
        of_round: RoundName,
        min_peers: int,
        quorum: int,
        revealed: RevealedSets,
        draw: Callable[[int], bytes],
        members: Mapping[str, str] | None = None,
    ) -> None:
        self._peer_id = peer_id
        self._signer = signer
        self._round = of_round
        self._min_peers, self._least = min_peers, max(min_peers, quorum)
        self._revealed = revealed
        self._draw = draw
        self._members = members
        self._private = draw(KEY_BYTES)
        self.advert = advertise(peer_id, public_key(self._private), of_round, signer)
        self.step = PeerStep.ADVERTISED
        self._roster: Roster | None = None
        self._sharers: frozenset[str] = frozenset()
        self._own_key = b""
        self._pair_keys: dict[int, bytes] = {}
        self._secrets: dict[int, bytes] = {}  # X25519 of this peer and the other one
        self._own_shares = (b"", b"")
        self._shares: dict[str, tuple[bytes, bytes]] = {}  # of b and r, by dealer
        self._survivors: frozenset[str] | None = None  # whom this peer signed for
        self._answered: tuple[PeerEvent, list[PeerEffect]] | None = None

    def handle(self, event: PeerEvent) -> list[PeerEffect]:
        """Return what to do. What a coordinator must not say ends the round for this peer: `Ended` says why."""
        if self.step is PeerStep.ENDED:
            return []
        if self._answered is not None and self._answered[0] == event:
            return list(self._answered[1])
        try:
            effects = self._next(event)
        except ValueError as error:
            return self._end(str(error))
        self._answered = None if isinstance(effects[-1], Ended) else (event, effects)
        return list(effects)

    def _next(self, event: PeerEvent) -> list[PeerEffect]:
        match self.step, event:
            case _, Abort(reason=reason):
                return self._end(reason)
            case PeerStep.ADVERTISED, ShowRoster(roster=roster):
                return self._share(roster)
            case PeerStep.SHARED, ShowInbox() as inbox:
                return self._start_masking(inbox)
            case PeerStep.MASKING, AskConfirm(survivors=survivors):
                return self._confirm(survivors)
            case ((PeerStep.MASKING | PeerStep.CONFIRMED), AskReveal()):
                return self._reveal(event)
            case _:
                raise ValueError(f"the coordinator said {type(event).__name__} to a peer that is {self.step.name}")

    def _share(self, roster: Roster) -> list[PeerEffect]:
        roster.check(self._round)
        place = roster.places.get(self._peer_id)
        if place is None or roster.adverts[place] != self.advert:
            raise ValueError("the roster does not have the key that this peer advertised")
        if len(roster.adverts) < self._least:
            raise ValueError(f"{len(roster.adverts)} peers would be in the sum, at least {self._least} are asked for")
        if self._members is not None:
            for advert in roster.adverts:
                if self._members.get(advert.peer_id) != key_hash(advert.public_key):
                    raise ValueError(f"{advert.peer_id} is not a pinned member, or has another key than the pinned one")
        self._roster, count, threshold = roster, len(roster.adverts), roster.threshold
        own_key, secret = self._draw(SECRET_BYTES), self._draw(SECRET_BYTES)
        own_shares, recovery_shares = (split(each, threshold, count, self._draw) for each in (own_key, secret))
        boxes, key_digests = [b""] * count, [b""] * count
        for other, advert in enumerate(roster.adverts):
            if other == place:
                continue
            try:
                shared = shared_secret(self._private, advert.mask_key)
            except ValueError as error:
                raise ValueError(f"{advert.peer_id} advertised a key of small order") from error
            self._secrets[other] = shared
            self._pair_keys[other] = pair_key(shared, roster.hash, place, other)
            key = _box_key(shared, roster.hash, place, other)
            key_digests[other] = _hash_of(b"box key", key)
            boxes[other] = seal(key, own_shares[other] + recovery_shares[other], _box_context(roster.hash, place, other))
        pair_keys = [self._pair_keys.get(other, bytes(KEY_BYTES)) for other in range(count)]
        self._own_key, self._own_shares = own_key, (own_shares[place], recovery_shares[place])
        self_digests = tuple(_digest(b"self share", place, other, share) for other, share in enumerate(own_shares))
        recovery_digests = tuple(_digest(b"recovery share", place, other, share) for other, share in enumerate(recovery_shares))
        digests = zip(self_digests, recovery_digests, strict=True)
        signed = (_box_said(roster.hash, place, other, boxes[other], each) for other, each in enumerate(digests))
        self.step = PeerStep.SHARED
        return [
            Shares(
                peer_id=self._peer_id,
                boxes=tuple(boxes),
                self_digests=self_digests,
                recovery_digests=recovery_digests,
                pair_digests=tuple(_digest_of_pair(key) if other != place else b"" for other, key in enumerate(pair_keys)),
                recovery=_seal_recovery(secret, roster.hash, place, pair_keys),
                self_hash=_hash_of(b"b", own_key),
                recovery_hash=_hash_of(b"r", secret),
                signatures=tuple(self._signer.sign(each) if other != place else b"" for other, each in enumerate(signed)),
                key_digests=tuple(key_digests),
            )
        ]

    def _start_masking(self, inbox: ShowInbox) -> list[PeerEffect]:
        roster, place = self._known_roster()
        sharers = inbox.sharers
        if inbox.peer_id != self._peer_id or self._peer_id not in sharers or not sharers <= set(roster.peers):
            raise ValueError("the inbox is not of this peer and this roster")
        self._check_size(sharers, "shared their keys")
        shares = {self._peer_id: self._own_shares}
        for dealer in sorted(sharers - {self._peer_id}):
            try:
                shares[dealer] = self._opened(inbox, dealer, roster)
            except ValueError as error:
                return [self._complaint(inbox, dealer, roster), *self._end(str(error))]
        self._sharers, self._shares = sharers, shares
        self._pair_keys = {other: key for other, key in self._pair_keys.items() if roster.peers[other] in sharers}
        self._secrets, self._private = {}, b""
        self.step = PeerStep.MASKING
        return [StartMasking(masks=Masks(place=place, own_key=self._own_key, pair_keys=dict(self._pair_keys)))]

    def _opened(self, inbox: ShowInbox, dealer: str, roster: Roster) -> tuple[bytes, bytes]:
        """Return the shares of b and r in a dealer's box. Raises ValueError that names the dealer."""
        places = roster.places[dealer], roster.places[self._peer_id]
        key = _box_key(self._secrets[places[0]], roster.hash, *places)
        shares = _dealt(key, roster.hash, *places, inbox.boxes.get(dealer, b""), inbox.digests.get(dealer))
        if isinstance(shares, str):
            raise ValueError(f"the shares that {dealer} dealt {shares}")
        return shares

    def _complaint(self, inbox: ShowInbox, dealer: str, roster: Roster) -> Complaint:
        """Of a box that lacks its shares. Its key is told only if the dealer signed that box: an honest one never did."""
        places, digests = (roster.places[dealer], roster.places[self._peer_id]), inbox.digests.get(dealer, (b"", b""))
        said = _box_said(roster.hash, *places, inbox.boxes.get(dealer, b""), digests)
        signed = is_signed(roster.adverts[places[0]].public_key, inbox.signatures.get(dealer, b""), said)
        key = _box_key(self._secrets[places[0]], roster.hash, *places) if signed else b""
        return Complaint(peer_id=self._peer_id, dealer=dealer, key=key)

    def _confirm(self, survivors: frozenset[str]) -> list[PeerEffect]:
        roster, _ = self._known_roster()
        self._check_survivors(survivors)
        self._survivors = survivors
        self.step = PeerStep.CONFIRMED
        return [Confirm(peer_id=self._peer_id, signature=confirm_set(roster, self._sharers, survivors, self._signer))]

    def _reveal(self, asked: AskReveal) -> list[PeerEffect]:
        roster, _ = self._known_roster()
        survivors = asked.survivors
        if self._survivors is not None and survivors != self._survivors:
            raise ValueError("the coordinator asks for the sum of one set after this peer signed for another")
        self._check_survivors(survivors)
        signed = [
            peer_id
            for peer_id, signature in asked.signatures.items()
            if is_confirmed(roster, peer_id, signature, self._sharers, survivors)
        ]
        if len(signed) < roster.threshold:
            raise ValueError(f"{len(signed)} peers signed for this set, {roster.threshold} are needed")
        self._revealed = self._revealed.with_set(self._round.outer_step, survivors, self._round.plan)
        reveal = Reveal(
            peer_id=self._peer_id,
            self_shares={dealer: self._shares[dealer][0] for dealer in sorted(survivors)},
            recovery_shares={dealer: self._shares[dealer][1] for dealer in sorted(self._sharers - survivors)},
        )
        self._forget()
        self.step = PeerStep.REVEALED
        return [SaveRevealed(sets=self._revealed), reveal]

    def _check_survivors(self, survivors: frozenset[str]) -> None:
        if self._peer_id not in survivors or not survivors <= self._sharers:
            raise ValueError("the set to open does not have this peer, or has others than those who shared their keys")
        self._check_size(survivors, "are left")
        reason = self._revealed.why_not(self._round.outer_step, survivors, self._min_peers, self._round.plan)
        if reason:
            raise ValueError(reason)

    def _check_size(self, peers: Collection[str], what: str) -> None:
        least = max(self._known_roster()[0].threshold, self._least)
        if len(peers) < least:
            raise ValueError(f"{len(peers)} peers {what}, at least {least} are needed")

    def _known_roster(self) -> tuple[Roster, int]:
        if self._roster is None:
            raise ValueError("the coordinator has shown no roster yet")
        return self._roster, self._roster.places[self._peer_id]

    def _end(self, reason: str) -> list[PeerEffect]:
        self._forget()
        self._answered = None
        self.step = PeerStep.ENDED
        return [Ended(reason=reason)]

    def _forget(self) -> None:
        self._private = self._own_key = b""
        self._own_shares = (b"", b"")
        self._pair_keys, self._secrets, self._shares = {}, {}, {}


class MaskServer:
    """The coordinator's side of one masked round.

    A peer's message that it must not send raises RemoteProtocolError that names the peer, one that comes too late StaleError;
    neither changes anything. The same message again changes nothing either, but that who advertises is not lost (rule 1); the
    shell answers it from `roster`, `inboxes` and so on.

    Args:
        of_round: the round.
        expected: the peers that are waited for. Any other that advertises in time takes part as well; whose key it is that
            signed an advert, the shell knows.
        most: how many may take part.
        min_peers: how many a sum has at least.
        quorum: of the run.
        floor_s: how long steps 1 and 2 wait for peers that are still expected.
        answer_s: how long steps 4 and 5 wait for a threshold.
        now: when the round opened.
    """

    def __init__(
        self,
        of_round: RoundName,
        expected: Collection[str],
        *,
        most: int = MOST_SHARES,
        min_peers: int,
        quorum: int,
        floor_s: float,
        answer_s: float,
        now: float,
    ) -> None:
        self._round = of_round
        self._expected = frozenset(expected)
        self._most = min(most, MOST_SHARES)
        self._min_peers = max(min_peers, 2)
        self._quorum = quorum
        self._floor_s = floor_s
        self._answer_s = answer_s
        self.step = ServerStep.ADVERTISING
        self.deadline: float | None = now + floor_s
        self.roster: Roster | None = None
        self.inboxes: dict[str, ShowInbox] = {}
        self.survivors: frozenset[str] = frozenset()
        self.asked: AskReveal | None = None
        self._gone: set[str] = set()  # the peers that are lost
        self._silent: set[str] = set()  # the peers that have not advertised since they were lost
        self._adverts: dict[str, Advert] = {}
        self._shares: dict[str, Shares] = {}
        self._signatures: dict[str, bytes] = {}
        self._reveals: dict[str, Reveal] = {}

    def handle(self, event: ServerEvent, now: float) -> list[ServerEffect]:
        """Return what to do. now: seconds, of a clock that does not go back."""
        if self.step in (ServerStep.OPEN, ServerStep.ABORTED):
            late = isinstance(event, Reveal) and self.step is ServerStep.OPEN and event.peer_id in self.survivors
            if late or isinstance(event, Tick | Gone | Back | Abort):
                return []
            raise StaleError("this masked round is over")
        match event:
            case Abort(reason=reason):
                return self._abort(reason)
            case Gone(peer_id=peer_id):
                self._gone.add(peer_id)
                self._silent.add(peer_id)
            case Back(peer_id=peer_id):
                self._gone.discard(peer_id)
            case Advert():
                self._take_advert(event)
            case Shares():
                self._take_shares(event)
            case Complaint():
                return self._take_complaint(event)
            case Close(complete=complete):
                return self._close(complete, now)
            case Confirm():
                self._take_confirm(event)
            case Reveal():
                self._take_reveal(event)
            case Tick():
                pass
        return self._advance(now)

    def _advance(self, now: float) -> list[ServerEffect]:
        over = self.deadline is not None and now >= self.deadline
        match self.step:
            case ServerStep.ADVERTISING if self._has_all(over=over):
                return self._show_roster(now)
            case ServerStep.SHARING if over or self._adverts.keys() <= self._shares.keys() | self._away:
                return self._show_inboxes()
            case ServerStep.CONFIRMING if len(self._signatures) >= self._threshold():
                self.asked = AskReveal(survivors=self.survivors, signatures=dict(self._signatures))
                self._go(ServerStep.REVEALING, now + self._answer_s)
                return [self.asked]
            case ServerStep.REVEALING if len(self._reveals) >= self._threshold():
                return self._open()
            case ServerStep.CONFIRMING | ServerStep.REVEALING if over:
                answers = self._signatures if self.step is ServerStep.CONFIRMING else self._reveals
                missing = ", ".join(sorted(self.survivors - answers.keys()))
                verb = "confirm" if self.step is ServerStep.CONFIRMING else "open"
                return self._abort(
                    f"too few helped to {verb} the sum: {len(answers)} of {self._threshold()}; missing: {missing}"
                )
            case _:
                return []

    def _has_all(self, *, over: bool) -> bool:
        """Whether the roster is to be shown (rule 1). over: whether floor_s is."""
        here = self._adverts.keys() - self._away
        if len(here) < max(self._min_peers, self._quorum):
            return False
        return over or len(here) >= self._most or self._expected <= self._adverts.keys() | self._away

    @property
    def _away(self) -> set[str]:
        """The peers of whom nothing is awaited."""
        return self._gone | self._silent

    def is_silent(self, peer_id: str) -> bool:
        """Return whether this peer was lost and has not advertised since, so that it is to do that once more."""
        return peer_id in self._silent

    def _go(self, step: ServerStep, deadline: float | None) -> None:
        self.step, self.deadline = step, deadline

    def _abort(self, reason: str, *blamed: str) -> list[ServerEffect]:
        self._go(ServerStep.ABORTED, None)
        self._shares, self._reveals = {}, {}
        return [Aborted(reason=reason, blamed=blamed)]

    @property
    def least(self) -> int:
        """How many peers the sum has at least. Raises StaleError while the roster is not complete."""
        return max(self._threshold(), self._quorum, self._min_peers)

    def _threshold(self) -> int:
        return self._known_roster().threshold

    def _known_roster(self) -> Roster:
        if self.roster is None:
            raise StaleError("the roster is not complete yet")
        return self.roster

    @property
    def agreed(self) -> AgreedSet | None:
        """Whose sum is opened, with the signatures of those who agreed; None: that is not decided yet."""
        if self.asked is None or self.roster is None:
            return None
        return AgreedSet(
            roster=self.roster,
            sharers=frozenset(self.inboxes),
            survivors=self.asked.survivors,
            signatures=self.asked.signatures,
        )

    # Keys.

    def _take_advert(self, advert: Advert) -> None:
        peer_id = advert.peer_id
        known = self._adverts.get(peer_id)
        if known is not None and known.mask_key == advert.mask_key:
            self._silent.discard(peer_id)
            return
        if known is not None and not (self.step is ServerStep.ADVERTISING and peer_id in self._silent):
            raise StaleError(f"{peer_id} advertised another key in this round; it takes part in the next one")
        if self.step is not ServerStep.ADVERTISING:
            raise StaleError(f"{peer_id} advertised after the roster was shown; it takes part in the next round")
        if not advert.is_valid(self._round):
            raise RemoteProtocolError(f"the advert of {peer_id} is not signed for this round")
        try:
            shared_secret(_ANY_KEY, advert.mask_key)
        except ValueError as error:  # else all others would leave the round over it
            raise RemoteProtocolError(f"{peer_id} advertised a key of small order") from error
        others = [other for other in self._adverts.values() if other.peer_id != peer_id]
        if any(advert.mask_key == other.mask_key or advert.public_key == other.public_key for other in others):
            raise RemoteProtocolError(f"{peer_id} advertised the key of another peer")
        self._adverts[peer_id] = advert
        self._silent.discard(peer_id)

    def _show_roster(self, now: float) -> list[ServerEffect]:
        here = sorted(self._adverts.keys() - self._away)
        self._adverts = {peer_id: self._adverts[peer_id] for peer_id in here}
        self.roster = Roster(self._round, tuple(self._adverts.values()))
        self._go(ServerStep.SHARING, now + self._floor_s)
        return [ShowRoster(roster=self.roster)]

    def _take_shares(self, shares: Shares) -> None:
        roster = self._known_roster()
        peer_id = shares.peer_id
        if peer_id not in roster.places:
            raise RemoteProtocolError(f"{peer_id} is not on the roster of this round")
        known = self._shares.get(peer_id)
        if known is not None:
            if known != shares:
                raise RemoteProtocolError(f"{peer_id} shared twice in one round, and differently")
            return
        if self.step is not ServerStep.SHARING:
            raise StaleError(f"{peer_id} shared its keys too late; it takes part in the next round")
        _check_sizes(shares, roster)
        self._shares[peer_id] = shares

    def _show_inboxes(self) -> list[ServerEffect]:
        roster = self._known_roster()
        sharers = frozenset(self._shares)
        least = max(roster.threshold, self._quorum, self._min_peers)
        if len(sharers) < least:
            return self._abort(f"{len(sharers)} of {len(roster.adverts)} peers shared their keys, at least {least} are needed")
        for one, other in combinations(sorted(sharers), 2):
            digest = self._shares[one].pair_digests[roster.places[other]]
            if digest != self._shares[other].pair_digests[roster.places[one]]:
                return self._abort(f"{one} and {other} do not have the same pair key: one of them lies", one, other)
        for peer_id in sorted(sharers):
            place = roster.places[peer_id]
            others = {dealer: shares for dealer, shares in sorted(self._shares.items()) if dealer != peer_id}
            self.inboxes[peer_id] = ShowInbox(
                peer_id=peer_id,
                sharers=sharers,
                boxes={dealer: shares.boxes[place] for dealer, shares in others.items()},
                digests={dealer: (each.self_digests[place], each.recovery_digests[place]) for dealer, each in others.items()},
                signatures={dealer: each.signatures[place] if each.signatures else b"" for dealer, each in others.items()},
            )
        self._go(ServerStep.COLLECTING, None)
        return [*self.inboxes.values()]

    def _take_complaint(self, complaint: Complaint) -> list[ServerEffect]:
        peer_id, dealer, roster = complaint.peer_id, complaint.dealer, self._known_roster()
        if self.step is not ServerStep.COLLECTING:
            raise StaleError("no shares are to be complained of now")
        if peer_id == dealer or not {peer_id, dealer} <= self._shares.keys():
            raise RemoteProtocolError(f"{peer_id} complains of shares that were not dealt to it")
        inbox, places = self.inboxes[peer_id], (roster.places[dealer], roster.places[peer_id])
        box, digests, signature = inbox.boxes[dealer], inbox.digests[dealer], inbox.signatures[dealer]
        if not signature:
            return self._abort(
                f"{peer_id} cannot use the shares that {dealer} dealt, which are not signed: one of them lies", dealer, peer_id
            )
        if not is_signed(roster.adverts[places[0]].public_key, signature, _box_said(roster.hash, *places, box, digests)):
            return self._abort(f"{dealer} has not signed the shares that it dealt to {peer_id} as they are", dealer)
        if _hash_of(b"box key", complaint.key) != self._shares[dealer].key_digests[places[1]]:
            why = f"{peer_id} and {dealer} do not have the same key of the shares that {dealer} dealt: one of them lies"
            return self._abort(why, dealer, peer_id)
        shares = _dealt(complaint.key, roster.hash, *places, box, digests)
        if not isinstance(shares, str):
            raise RemoteProtocolError(f"{peer_id} complains of the shares that {dealer} dealt, and they are right")
        return self._abort(f"the shares that {dealer} dealt to {peer_id} {shares}", dealer)

    # Survivors.

    def _close(self, complete: frozenset[str], now: float) -> list[ServerEffect]:
        if self.step is not ServerStep.COLLECTING:
            raise StaleError(f"a masked round that is {self.step.name} is not closed")
        self.survivors = complete.intersection(self._shares)
        if len(self.survivors) < self.least:
            return self._abort(f"{len(self.survivors)} masked vectors are complete, at least {self.least} are needed")
        self._go(ServerStep.CONFIRMING, now + self._answer_s)
        return [AskConfirm(survivors=self.survivors)]

    def _take_confirm(self, confirm: Confirm) -> None:
        if self.step is ServerStep.REVEALING and confirm.peer_id in self.survivors:
            return  # the threshold has signed
        if self.step is not ServerStep.CONFIRMING:
            raise StaleError("no set of survivors is to be confirmed now")
        size_fits = len(confirm.signature) == SIGNATURE_BYTES
        sets = frozenset(self._shares), self.survivors
        if not size_fits or not is_confirmed(self._known_roster(), confirm.peer_id, confirm.signature, *sets):
            raise RemoteProtocolError(f"{confirm.peer_id} did not sign the set of survivors of this round")
        self._signatures.setdefault(confirm.peer_id, confirm.signature)

    def _take_reveal(self, reveal: Reveal) -> None:
        if self.step is not ServerStep.REVEALING:
            raise StaleError("no masks are to be opened now")
        roster, peer_id = self._known_roster(), reveal.peer_id
        dropped = self._shares.keys() - self.survivors
        if peer_id not in self.survivors:
            raise RemoteProtocolError(f"{peer_id} is no survivor of this round")
        if reveal.self_shares.keys() != self.survivors or reveal.recovery_shares.keys() != dropped:
            raise RemoteProtocolError(f"{peer_id} revealed for other peers than it was asked for")
        place = roster.places[peer_id]
        for dealer in sorted(self._shares):
            mine = dealer in self.survivors
            share = reveal.self_shares[dealer] if mine else reveal.recovery_shares[dealer]
            digests = self._shares[dealer].self_digests if mine else self._shares[dealer].recovery_digests
            name = b"self share" if mine else b"recovery share"
            if len(share) != SHARE_BYTES or _digest(name, roster.places[dealer], place, share) != digests[place]:
                raise RemoteProtocolError(f"{peer_id} revealed a share that is not the one that {dealer} dealt to it")
        self._reveals.setdefault(peer_id, reveal)

    def _open(self) -> list[ServerEffect]:
        roster = self._known_roster()
        self_keys: dict[str, bytes] = {}
        left_over: list[tuple[bytes, bool]] = []
        for dealer in sorted(self._shares):
            shares, place, survived = self._shares[dealer], roster.places[dealer], dealer in self.survivors
            revealed = {
                roster.places[giver] + 1: (each.self_shares if survived else each.recovery_shares)[dealer]
                for giver, each in self._reveals.items()
            }
            try:
                secret = rebuild(revealed, roster.threshold)
                if _hash_of(b"b" if survived else b"r", secret) != (shares.self_hash if survived else shares.recovery_hash):
                    raise ValueError("not the secret that was published")
                if survived:
                    self_keys[dealer] = secret
                    continue
                keys = _open_recovery(secret, roster.hash, place, shares.recovery)
                for survivor in sorted(self.survivors):
                    other = roster.places[survivor]
                    if _digest_of_pair(keys[other]) != shares.pair_digests[other]:
                        raise ValueError("not the pair keys that were published")
                    left_over.append((keys[other], place > other))
            except ValueError:
                return self._abort(
                    f"{dealer} dealt shares of another key than it published: its masks cannot be opened", dealer
                )
        self._go(ServerStep.OPEN, None)
        opening = Opening(survivors=self.survivors, self_keys=self_keys, left_over=tuple(left_over))
        self._reveals = {}
        return [Opened(opening=opening)]


def _check_sizes(shares: Shares, roster: Roster) -> None:
    """Raise RemoteProtocolError unless each part has the size that it must have."""
    count, place = len(roster.adverts), roster.places[shares.peer_id]
    none_at_own = [0 if other == place else 1 for other in range(count)]
    fits = (
        [len(each) for each in shares.boxes] == [_BOX_BYTES * there for there in none_at_own]
        and [len(each) for each in shares.self_digests] == [_DIGEST_BYTES] * count
        and [len(each) for each in shares.recovery_digests] == [_DIGEST_BYTES] * count
        and [len(each) for each in shares.pair_digests] == [_DIGEST_BYTES * there for there in none_at_own]
        and len(shares.recovery) == KEY_BYTES * count + _TAG_BYTES
        and len(shares.self_hash) == len(shares.recovery_hash) == _DIGEST_BYTES
        and [len(each) for each in shares.signatures] in ([], [SIGNATURE_BYTES * there for there in none_at_own])
        and [len(each) for each in shares.key_digests] == [_DIGEST_BYTES * bool(each) for each in shares.signatures]
    )
    if not fits:
        raise RemoteProtocolError(f"what {shares.peer_id} shared is not of the size that {count} peers need")


def _box_key(secret: bytes, roster_hash: bytes, dealer: int, receiver: int) -> bytes:
    return derive(secret, roster_hash, b"edit mask share" + bytes([dealer, receiver]))


def _box_context(roster_hash: bytes, dealer: int, receiver: int) -> bytes:
    return roster_hash + bytes([dealer, receiver])


def _box_said(roster_hash: bytes, dealer: int, receiver: int, box: bytes, digests: tuple[bytes, bytes]) -> bytes:
    """Return what a dealer signs of a box."""
    return statement(_BOX, (roster_hash, dealer, receiver, box, *digests))


def _dealt(
    key: bytes, roster_hash: bytes, dealer: int, receiver: int, box: bytes, digests: tuple[bytes, bytes] | None
) -> tuple[bytes, bytes] | str:
    """Return the shares of b and r in a box, or what is wrong with them. key: of the box."""
    try:
        plain = open_box(key, box, _box_context(roster_hash, dealer, receiver))
    except ValueError:
        return "cannot be opened"
    shares = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
    names = b"self share", b"recovery share"
    found = tuple(_digest(name, dealer, receiver, share) for name, share in zip(names, shares, strict=True))
    return shares if found == digests else "are not those that it published"


def _seal_recovery(secret: bytes, roster_hash: bytes, place: int, keys: list[bytes]) -> bytes:
    return seal(derive(secret, roster_hash, b"edit mask recovery"), b"".join(keys), roster_hash + bytes([place]))


def _open_recovery(secret: bytes, roster_hash: bytes, place: int, box: bytes) -> list[bytes]:
    plain = open_box(derive(secret, roster_hash, b"edit mask recovery"), box, roster_hash + bytes([place]))
    return [plain[start : start + KEY_BYTES] for start in range(0, len(plain), KEY_BYTES)]


def _hash_of(kind: bytes, secret: bytes) -> bytes:
    return hashlib.sha256(kind + secret).digest()


def _digest(name: bytes, dealer: int, receiver: int, share: bytes) -> bytes:
    return hashlib.sha256(b"edit mask " + name + bytes([dealer, receiver]) + share).digest()


def _digest_of_pair(key: bytes) -> bytes:
    return hashlib.sha256(b"edit mask pair" + key).digest()
