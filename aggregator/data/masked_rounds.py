"""The masked round that is open: the shell of `edit.trust.masking.MaskServer` on the event loop.

    a round opens       open        the plan is computed in the worker thread; peers that asked meanwhile wait
    a peer is lost      left        nothing is awaited of it until it is back; also before the plan is there
    a peer's message    tell        handed to the machine; answered with what follows, or with None: not yet, ask again
    the last inbox      sharers     the round machine hears who can contribute
    the round closes    close_with  the survivors confirm and reveal; returned is what opens their sum
    the round is over   end         whoever waits is told so

What a member does wrong is refused to it, and the round goes on if it can. Keys and shares are in memory only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from aggregator.worker_thread import Background
from edit.codecs import Codec, codec
from edit.config.run import RunConfig
from edit.errors import LocalProtocolError, RefusedError, StaleError
from edit.records import round_number
from edit.trust.mask_plan import FragmentPlan, plan_digest
from edit.trust.mask_roster import Advert, AgreedSet, Roster, RoundName
from edit.trust.masking import (
    Aborted,
    AskConfirm,
    AskReveal,
    Back,
    Close,
    Complaint,
    Confirm,
    Gone,
    MaskServer,
    Opened,
    Opening,
    Reveal,
    ServerEvent,
    ServerStep,
    Shares,
    ShowInbox,
    Tick,
)
from editpb.mask_messages import Closed, Done, PeerMessage
from editpb.signed_contributions import config_digest

__all__ = ["MaskStatus", "MaskedRounds", "SumNotOpened"]

_ANSWER_S = 20.0  # after which a call that waits is answered with "not yet"
_STEPS = {
    ServerStep.ADVERTISING: "waiting for keys",
    ServerStep.SHARING: "sharing keys",
    ServerStep.COLLECTING: "collecting masked vectors",
    ServerStep.CONFIRMING: "agreeing on the sum",
    ServerStep.REVEALING: "opening the sum",
    ServerStep.OPEN: "open",
    ServerStep.ABORTED: "aborted",
}
_T = TypeVar("_T")


class SumNotOpened(RefusedError):
    """Too few helped to open the sum of the peers that were complete, or somebody lied. blamed: who is known to have."""

    def __init__(self, reason: str, blamed: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.blamed = tuple(blamed)


@dataclass(frozen=True, slots=True)
class MaskStatus:
    """How far the masked round is."""

    # In words.
    step: str
    # On the roster; nobody before it is shown.
    peers: tuple[str, ...] = ()
    # How many of them must help to open the sum; 0: not known yet.
    threshold: int = 0
    # Whose sum is opened, once that is decided.
    survivors: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """`collecting masked vectors: 4 peers share keys, any 3 of them open the sum`."""
        if not self.peers:
            return self.step
        return f"{self.step}: {len(self.peers)} peers share keys, any {self.threshold} of them open the sum"


@dataclass(slots=True, eq=False)
class _Round:
    round_id: int
    plans: dict[int, FragmentPlan] = field(default_factory=dict)  # by fragment, once they are computed
    server: MaskServer | None = None  # likewise
    gone: set[str] = field(default_factory=set)  # the peers that were lost since it opened, and are not back
    sharers: frozenset[str] | None = None
    able: frozenset[str] | None = None  # the sharers without those that have lost their keys since
    opening: Opening | None = None
    closing: bool = False  # somebody waits in `close_with`, and hears of its end
    aborted: Aborted | None = None  # since then


class MaskedRounds:
    """The masked rounds of a run, one at a time.

    Args:
        run_id: the run's.
        config: of the run.
        background: computes plans.
        now: monotonic seconds.
        shared: called with the round's id and the peers that can contribute to it, when that is known or has changed.
        failed: called when a round comes to nothing before its sum is to be opened: its id, the reason, and who is known to
            have lied.
        late: called with the round's id, a peer that came after the keys were shared, and the peers that can contribute.
    """

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        background: Background,
        now: Callable[[], float],
        shared: Callable[[int, frozenset[str]], None],
        failed: Callable[[int, str, Sequence[str]], None],
        late: Callable[[int, str, frozenset[str]], None],
    ) -> None:
        self._run_id, self._config_digest = run_id, config_digest(config)
        self._secagg, self._quorum, self._floor_s = config.secagg, config.rounds.quorum, config.rounds.floor_s
        self._background, self._now = background, now
        self._shared, self._failed, self._late = shared, failed, late
        self._round: _Round | None = None
        self._last = "no round is open"  # why there is none, or no more
        self._news = asyncio.Event()  # set, and replaced, at each change

    # ---- what the rounds say -------------------------------------------------------------------------------------------

    def open(
        self, round_id: int, outer_step: int, expected: Collection[str], plan: Callable[[], Sequence[FragmentPlan]]
    ) -> None:
        """A round opened. plan: returns the plans of its fragments; called in the worker thread."""
        self._round = _Round(round_id)
        self._wake()
        self._background.spawn(self._begin(self._round, outer_step, expected, plan))

    async def _begin(
        self, current: _Round, outer_step: int, expected: Collection[str], plan: Callable[[], Sequence[FragmentPlan]]
    ) -> None:
        plans = await self._background.in_worker(plan)
        if self._round is not current:
            return
        name = RoundName(
            run_id=self._run_id,
            config_digest=self._config_digest,
            round_id=str(current.round_id),
            outer_step=outer_step,
            plan=plan_digest(plans),
        )
        current.plans = {one.fragment_id: one for one in plans}
        current.server = MaskServer(
            name,
            expected,
            most=self._secagg.max_peers,
            min_peers=self._secagg.min_peers,
            quorum=self._quorum,
            floor_s=self._floor_s,
            answer_s=self._floor_s,
            now=self._now(),
        )
        for peer_id in current.gone:
            self._handle(current, Gone(peer_id=peer_id))
        self._wake()

    def end(self, reason: str) -> None:
        """The round is over."""
        self._round, self._last = None, reason
        self._wake()

    def left(self, peer_id: str) -> None:
        """This peer is lost: nothing more is awaited of it."""
        if self._round is not None:
            self._round.gone.add(peer_id)
            self._feed(Gone(peer_id=peer_id))
            self._wake()

    def returned(self, peer_id: str) -> None:
        """This peer is there."""
        if self._round is not None and peer_id in self._round.gone:
            self._round.gone.remove(peer_id)
            self._feed(Back(peer_id=peer_id))

    def tick(self) -> None:
        """Time has passed."""
        self._feed(Tick())

    def refusal(self, peer_id: str) -> str:
        """Return why a contribution of this peer to the open round is not taken, or ''."""
        current = self._round
        if current is None or current.sharers is None:
            return "the peers of this round have not shared their keys yet"
        if peer_id not in current.sharers:
            return f"{peer_id} has not shared keys in this round; it takes part in the next one"
        return ""

    def codec(self, fragment_id: int) -> Codec:
        """Return the codec of contributions to a fragment in the open round. Raises StaleError where there is none."""
        if self._round is None or fragment_id not in self._round.plans:
            raise StaleError(self._last)
        return codec(f"masked{self._round.plans[fragment_id].bits}")

    def plan(self, fragment_id: int) -> FragmentPlan:
        """Return the plan of a fragment in the open round. Raises StaleError."""
        if self._round is None or fragment_id not in self._round.plans:
            raise StaleError(self._last)
        return self._round.plans[fragment_id]

    @property
    def least(self) -> int:
        """How many peers the sum of the open round has at least. Raises StaleError when the round is over."""
        if self._round is None or self._round.server is None:
            raise StaleError(self._last)
        return self._round.server.least

    async def close_with(self, complete: Collection[str]) -> Opening:
        """Return what opens the sum of these peers' vectors, once enough of them have helped.

        Raises SumNotOpened, StaleError when the round is over.
        """
        current = self._round
        if current is None or current.server is None:
            raise StaleError(self._last)
        self._feed(Close(complete=frozenset(complete)))
        current.closing = True
        while current.opening is None:
            if current.aborted is not None:
                raise SumNotOpened(current.aborted.reason, current.aborted.blamed)
            if self._round is not current or current.server.step is ServerStep.ABORTED:
                raise StaleError(self._last)
            await self._news.wait()
        return current.opening

    @property
    def agreed(self) -> AgreedSet | None:
        """Whose sum was opened in the open round, and who has signed that; None: none was."""
        current = self._round
        if current is None or current.server is None or current.opening is None:
            return None
        return current.server.agreed

    @property
    def status(self) -> MaskStatus | None:
        """How far the open round is; None: none is open."""
        current = self._round
        if current is None:
            return None
        if current.server is None:
            return MaskStatus("computing the grid")
        roster = current.server.roster
        return MaskStatus(
            _STEPS[current.server.step],
            roster.peers if roster is not None else (),
            roster.threshold if roster is not None else 0,
            tuple(sorted(current.server.survivors)),
        )

    # ---- what peers say ------------------------------------------------------------------------------------------------

    async def plan_of(self, round_id: int, fragment_id: int) -> FragmentPlan:
        """Return the plan of a fragment in this round. Raises StaleError when it is not open, or does not exchange it."""
        current = self._open_round(round_id)
        while current.server is None:
            await self._news.wait()
            self._open_round(round_id)
        if fragment_id not in current.plans:
            raise StaleError(f"round {round_number(round_id)} does not exchange fragment {fragment_id}")
        return current.plans[fragment_id]

    async def tell(
        self, peer_id: str, round_id: int, said: PeerMessage
    ) -> Roster | ShowInbox | AskConfirm | AskReveal | Done | None:
        """Hand over what a peer says; return what follows for it, or None: not within a while.

        Raises StaleError when the round is over or goes on without this peer, RemoteProtocolError for what it must not say.
        """
        current = self._open_round(round_id)
        if current.server is None:
            raise LocalProtocolError("a peer's message before the plan, which it must have")
        server = current.server
        match said:
            case Advert():
                self._take_advert(current, said)
                return await self._answer(
                    current, lambda: self._roster_for(server, peer_id), asks_again=lambda: server.is_silent(peer_id)
                )
            case Shares():
                self._handle(current, said)
                return await self._answer(current, lambda: self._inbox_of(current, server, peer_id))
            case Closed():
                return await self._answer(current, lambda: self._survivors_for(server, peer_id))
            case Confirm():
                self._handle(current, said)
                return await self._answer(current, lambda: server.asked)
            case Reveal() | Complaint():
                self._handle(current, said)
                return Done()

    def _take_advert(self, current: _Round, advert: Advert) -> None:
        """Raises StaleError where it comes too late. Who has shared other keys before was started anew, and has them no more:
        nobody need wait for it."""
        try:
            self._handle(current, advert)
        except StaleError:
            if current.sharers is not None:
                able = current.sharers if current.able is None else current.able
                if advert.peer_id in able:
                    able = current.able = able - {advert.peer_id}
                    self._shared(current.round_id, able)
                self._late(current.round_id, advert.peer_id, able)
            raise

    @staticmethod
    def _roster_for(server: MaskServer, peer_id: str) -> Roster | None:
        if server.roster is not None and peer_id not in server.roster.places:
            raise StaleError(f"{peer_id} is not on the roster of this round; it takes part in the next one")
        return server.roster

    @staticmethod
    def _inbox_of(current: _Round, server: MaskServer, peer_id: str) -> ShowInbox | None:
        if current.sharers is not None and peer_id not in current.sharers:
            raise StaleError(f"{peer_id} shared its keys too late; it takes part in the next round")
        return server.inboxes.get(peer_id)

    @staticmethod
    def _survivors_for(server: MaskServer, peer_id: str) -> AskConfirm | None:
        if server.step not in (ServerStep.CONFIRMING, ServerStep.REVEALING, ServerStep.OPEN):
            return None
        if peer_id not in server.survivors:
            raise StaleError(f"{peer_id} is no part of the sum of this round")
        return AskConfirm(survivors=server.survivors)

    # --------------------------------------------------------------------------------------------------------------------

    def _open_round(self, round_id: int) -> _Round:
        current = self._round
        if current is None or current.round_id != round_id:
            raise StaleError(f"round {round_number(round_id)} is over: {self._last}")
        if current.server is not None and current.server.step is ServerStep.ABORTED:
            raise StaleError(self._last)
        return current

    async def _answer(
        self, current: _Round, look: Callable[[], _T | None], asks_again: Callable[[], bool] = lambda: False
    ) -> _T | None:
        """Return what `look` gives, as soon as it does. Raises StaleError when the round is over.

        None, after a while, or when the peer is to ask again at once: what it says once more shows that it is there.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _ANSWER_S
        while (found := look()) is None and not asks_again():
            try:
                async with asyncio.timeout_at(until):
                    await self._news.wait()
            except TimeoutError:
                return None
            self._open_round(current.round_id)
        return found

    def _feed(self, event: ServerEvent) -> None:
        current = self._round
        if current is not None and current.server is not None and current.server.step is not ServerStep.ABORTED:
            self._handle(current, event)

    def _handle(self, current: _Round, event: ServerEvent) -> None:
        assert current.server is not None
        effects = current.server.handle(event, self._now())
        for effect in effects:
            match effect:
                case ShowInbox(sharers=sharers) if current.sharers is None:
                    current.sharers = sharers
                    self._shared(current.round_id, sharers)
                case Opened(opening=opening):
                    current.opening = opening
                case Aborted(reason=reason) if current.closing:
                    self._last, current.aborted = reason, effect
                case Aborted(reason=reason, blamed=blamed):
                    self._last = reason
                    self._failed(current.round_id, reason, blamed)
        if effects:
            self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
