"""Who is lost while the peers of a masked round share their keys: whatever the order, nobody waits for it. No time passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aggregator.data.masked_rounds import MaskedRounds
from aggregator.worker_thread import Background
from edit.config.run import RunConfig
from edit.trust.mask_plan import FragmentPlan, plan_digest
from edit.trust.mask_roster import Advert, Roster, RoundName, advertise
from editpb.signed_contributions import config_digest
from tests.edit.trust.masked_round import signer
from tests.support.loops import on_a_loop

CONFIG = RunConfig.from_mapping(
    {"name": "masked", "model": {"name": "entry:mine"}, "secagg": {"enabled": True}, "rounds": {"start_peers": 4, "quorum": 3}}
)
PLANS = (FragmentPlan(fragment_id=0, bits=16, limit=9, exponents=b"\x00", reference=0.0),)
OUTER_STEP = 1


@dataclass
class Opened:
    """The masked rounds of a run; their plans come once `computed` is set."""

    rounds: MaskedRounds
    computed: threading.Event = field(default_factory=threading.Event)

    def open(self, round_id: int, expected: Collection[str]) -> None:
        def plan() -> Sequence[FragmentPlan]:
            assert self.computed.wait(timeout=30.0)
            return PLANS

        self.rounds.open(round_id, OUTER_STEP, expected, plan)

    def ask(self, peer_id: str, round_id: int, key: bytes = b"") -> asyncio.Task[Roster | None]:
        """A peer asks for the plan, and then advertises."""

        async def asked() -> Roster | None:
            await self.rounds.plan_of(round_id, 0)
            answer = await self.rounds.tell(peer_id, round_id, advert(peer_id, round_id, key))
            assert answer is None or isinstance(answer, Roster)
            return answer

        return asyncio.get_running_loop().create_task(asked())


def advert(peer_id: str, round_id: int, key: bytes = b"") -> Advert:
    name = RoundName(
        run_id="run",
        config_digest=config_digest(CONFIG),
        round_id=str(round_id),
        outer_step=OUTER_STEP,
        plan=plan_digest(PLANS),
    )
    return advertise(peer_id, (key or peer_id.encode()).ljust(32), name, signer(peer_id))


@asynccontextmanager
async def opened(expected: Collection[str]) -> AsyncIterator[Opened]:
    """Round 1 is open for these peers; its plan is not computed yet."""
    with ThreadPoolExecutor(1) as worker:
        background = Background(worker)
        at = Opened(MaskedRounds("run", CONFIG, background, lambda: 0.0, *[lambda *told: None] * 3))
        at.open(1, expected)
        try:
            yield at
        finally:
            at.computed.set()
            await background.stop()
        assert background.failure is None


def peers_of(roster: Roster | None) -> tuple[str, ...]:
    assert roster is not None
    return roster.peers


@on_a_loop
async def test_who_is_lost_before_the_plan_is_computed_is_not_waited_for() -> None:
    async with opened("abcd") as at:
        asked = [at.ask(peer_id, 1) for peer_id in "abc"]
        at.rounds.left("d")
        at.computed.set()
        assert [peers_of(await each) for each in asked] == [("a", "b", "c")] * 3


@on_a_loop
async def test_who_is_back_before_the_plan_is_computed_is_waited_for() -> None:
    async with opened("abcd") as at:
        at.rounds.left("d")
        at.rounds.returned("d")
        at.computed.set()
        await at.rounds.plan_of(1, 0)
        asked = [at.ask(peer_id, 1) for peer_id in "abcd"]
        assert [peers_of(await each) for each in asked] == [("a", "b", "c", "d")] * 4


@on_a_loop
async def test_an_advert_that_comes_after_its_peer_was_lost_holds_nobody_up() -> None:
    async with opened("abcd") as at:
        at.computed.set()
        await at.rounds.plan_of(1, 0)
        at.rounds.left("d")
        late = at.ask("d", 1)
        asked = [at.ask(peer_id, 1) for peer_id in "abc"]
        assert [peers_of(await each) for each in asked] == [("a", "b", "c")] * 3
        await asyncio.wait([late])
        assert late.exception() is not None


@on_a_loop
async def test_who_is_lost_while_its_call_waits_is_to_say_again_that_it_is_there() -> None:
    async with opened("abc") as at:
        at.computed.set()
        await at.rounds.plan_of(1, 0)
        waits = at.ask("a", 1)
        await asyncio.sleep(0)  # it has advertised
        at.rounds.left("a")
        assert await waits is None  # not yet: its peer asks again at once, if it lives
        again = at.ask("a", 1)
        asked = [at.ask(peer_id, 1) for peer_id in "bc"]
        await asyncio.sleep(0)
        at.rounds.returned("a")
        assert [peers_of(await each) for each in (again, *asked)] == [("a", "b", "c")] * 3


@on_a_loop
async def test_who_was_lost_in_one_round_is_waited_for_in_the_next_one_that_expects_it() -> None:
    async with opened("abcd") as at:
        at.rounds.left("d")
        at.rounds.end("it came to nothing")
        at.open(2, "abcd")
        at.computed.set()
        await at.rounds.plan_of(2, 0)
        asked = [at.ask(peer_id, 2) for peer_id in "abcd"]
        assert [peers_of(await each) for each in asked] == [("a", "b", "c", "d")] * 4
