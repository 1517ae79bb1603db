"""A masked round in memory: the coordinator's machine, a machine per peer, and peers that fall silent at any step."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edit.trust.mask_roster import RoundName
from edit.trust.masking import (
    Aborted,
    AskConfirm,
    AskReveal,
    Close,
    Complaint,
    Ended,
    MaskClient,
    Masks,
    MaskServer,
    Opened,
    Opening,
    Reveal,
    SaveRevealed,
    ServerStep,
    ShowInbox,
    ShowRoster,
    StartMasking,
    Tick,
)
from edit.trust.revealed_sets import RevealedSets
from edit.trust.signatures import Signer, key_hash

ROUND = RoundName(run_id="run", config_digest="digest", round_id="r1", outer_step=7, plan=bytes(32))
ADVERT, SHARE, UPLOAD, CONFIRM, REVEAL = range(5)  # a peer that drops at a step does not take it any more
FLOOR_S, ANSWER_S = 10.0, 5.0


@cache
def signer(name: str) -> Signer:
    form = serialization.PrivateFormat.PKCS8
    return Signer(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    )


def names(count: int) -> list[str]:
    return [f"peer-{number:02}" for number in range(count)]


class MaskedRound:
    """One round of these peers. `tamper` gets each message to the coordinator and its sender, and returns what arrives.

    known_quorum: by the peers' configuration; None: the coordinator's own.
    """

    def __init__(
        self,
        peers: Collection[str],
        *,
        drops: Mapping[str, int] | None = None,
        of_round: RoundName = ROUND,
        min_peers: int = 3,
        quorum: int = 2,
        known_quorum: int | None = None,
        revealed: Mapping[str, RevealedSets] | None = None,
        tamper: Callable[[str, Any], Any] = lambda sender, message: message,
        seed: int = 0,
    ) -> None:
        draw = random.Random(seed).randbytes
        self.drops = drops or {}
        self.tamper = tamper
        self.now = 0.0
        self.errors: list[Exception] = []
        self.masks: dict[str, Masks] = {}
        self.saved: dict[str, RevealedSets] = {}
        self.reveals: dict[str, Reveal] = {}
        self.complaints: list[Complaint] = []
        self.ended: dict[str, str] = {}
        self.opening: Opening | None = None
        self.aborted: Aborted | None = None
        keys = {peer: key_hash(signer(peer).public_key) for peer in peers}
        self.server = MaskServer(
            of_round, keys, min_peers=min_peers, quorum=quorum, floor_s=FLOOR_S, answer_s=ANSWER_S, now=self.now
        )
        self.clients = {
            peer: MaskClient(
                peer,
                signer=signer(peer),
                of_round=of_round,
                min_peers=min_peers,
                quorum=quorum if known_quorum is None else known_quorum,
                revealed=(revealed or {}).get(peer, RevealedSets()),
                draw=draw,
                members=keys,
            )
            for peer in peers
        }

    def there(self, peer: str, step: int) -> bool:
        return self.drops.get(peer, REVEAL + 1) > step

    def run(self) -> MaskedRound:
        """Carry the round to its end."""
        for peer, client in self.clients.items():
            if self.there(peer, ADVERT):
                self.send(peer, client.advert)
        self.wait(ServerStep.ADVERTISING)
        for peer in [] if self.server.roster is None else self.server.roster.peers:
            if self.there(peer, SHARE):
                self.tell(peer, ShowRoster(roster=self.server.roster))
        self.wait(ServerStep.SHARING)
        for peer, inbox in list(self.server.inboxes.items()):
            if self.there(peer, SHARE):
                self.tell(peer, inbox)
        complete = frozenset(peer for peer in self.masks if self.there(peer, UPLOAD))
        if self.over():
            return self
        self.take(self.server.handle(Close(complete=complete), self.now))
        for peer in sorted(self.server.survivors):
            if self.there(peer, CONFIRM):
                self.tell(peer, AskConfirm(survivors=self.server.survivors))
        self.wait(ServerStep.CONFIRMING)
        for peer in sorted(self.server.survivors):
            if self.server.asked is not None and self.there(peer, REVEAL):
                self.tell(peer, self.server.asked)
        self.wait(ServerStep.REVEALING)
        return self

    def over(self) -> bool:
        return self.opening is not None or self.aborted is not None

    def wait(self, step: ServerStep) -> None:
        """Let the deadline of this step pass, if somebody is silent in it."""
        if self.server.step is step and self.server.deadline is not None:
            self.now = self.server.deadline
            self.take(self.server.handle(Tick(), self.now))

    def tell(self, peer: str, message: Any) -> None:
        for effect in self.clients[peer].handle(message):
            match effect:
                case StartMasking(masks=masks):
                    self.masks[peer] = masks
                case SaveRevealed(sets=sets):
                    self.saved[peer] = sets
                case Ended(reason=reason):
                    self.ended[peer] = reason
                case _:
                    self.send(peer, effect)

    def send(self, peer: str, message: Any) -> None:
        if isinstance(message, Reveal):
            assert peer in self.saved, "what is revealed for is on disk first"
            self.reveals[peer] = message
        if isinstance(message, Complaint):
            self.complaints.append(message)
        message = self.tamper(peer, message)
        if message is None:
            return
        try:
            self.take(self.server.handle(message, self.now))
        except Exception as error:
            self.errors.append(error)

    def take(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Opened(opening=opening):
                    self.opening = opening
                case Aborted():
                    self.aborted = effect
                case ShowRoster() | ShowInbox() | AskConfirm() | AskReveal():
                    pass
