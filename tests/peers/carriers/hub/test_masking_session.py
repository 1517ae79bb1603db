"""A peer's part in masked rounds, against a coordinator in memory: the masks of a round are taken once, and only those."""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from pathlib import Path

from edit.trust.mask_plan import FragmentPlan, plan_digest
from edit.trust.mask_roster import Advert, RoundName
from edit.trust.masking import MaskClient, MaskServer, Shares, ShowRoster
from edit.trust.revealed_sets import RevealedSets
from editpb import masking_pb2
from editpb.mask_messages import PeerMessage, reply_to_pb
from peers.carriers.hub.masking import MaskingSession, ReadyRound
from peers.carriers.io_thread import IoThread
from tests.edit.trust.masked_round import signer

PLAN = FragmentPlan(fragment_id=0, bits=16, limit=9, exponents=b"\x00", reference=0.0)
OUTER_STEP = 3


class Rounds:
    """Rounds of the peers a and b that come as far as masks; b answers at once."""

    def __init__(self) -> None:
        self._servers: dict[int, MaskServer] = {}
        self._others: dict[int, MaskClient] = {}

    async def plan(self, round_id: int, fragment_id: int) -> FragmentPlan:
        name = RoundName(
            run_id="run", config_digest="digest", round_id=str(round_id), outer_step=OUTER_STEP, plan=plan_digest((PLAN,))
        )
        self._servers[round_id] = MaskServer(name, "ab", min_peers=2, quorum=2, floor_s=9.0, answer_s=9.0, now=0.0)
        self._others[round_id] = MaskClient(
            "b", signer=signer("b"), of_round=name, min_peers=2, quorum=2, revealed=RevealedSets(), draw=secrets.token_bytes
        )
        return PLAN

    async def tell(self, round_id: int, said: PeerMessage) -> masking_pb2.MaskReply:
        server, other = self._servers[round_id], self._others[round_id]
        match said:
            case Advert():
                server.handle(said, 0.0)
                server.handle(other.advert, 0.0)
                return reply_to_pb(server.roster)
            case Shares():
                assert server.roster is not None
                (shares,) = other.handle(ShowRoster(roster=server.roster))
                server.handle(said, 0.0)
                server.handle(shares, 0.0)  # type: ignore[arg-type]
                return reply_to_pb(server.inboxes["a"])
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


def ready(io: IoThread, session: MaskingSession, round_id: int) -> ReadyRound:
    """Follow the round until there are masks for it."""
    io.change(lambda: session.follow(round_id, OUTER_STEP, (0,)))
    found = io.wait(lambda: session.ready(OUTER_STEP), timeout=30.0)
    assert found is not None and found.round_id == round_id
    return found


def test_the_masks_of_a_newer_round_that_came_while_those_of_another_were_taken_are_still_there(tmp_path: Path) -> None:
    with IoThread() as io:
        session = MaskingSession(
            io,
            Rounds(),
            "a",
            signer=signer("a"),
            run_id="run",
            config_digest="digest",
            min_peers=2,
            quorum=2,
            file=tmp_path / "revealed.json",
        )
        first, second = (ready(io, session, round_id) for round_id in (1, 2))
        io.change(partial(session.taken, first))
        assert io.read(lambda: session.ready(OUTER_STEP)) is second
        io.change(partial(session.taken, second))
        assert io.read(lambda: session.ready(OUTER_STEP)) is None and not session.trouble
