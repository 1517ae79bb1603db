"""Councils with one rule broken on purpose. A scripted scenario or a simulated seed must notice each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edit.council import events as ev
from edit.council.machine import Council, Role
from edit.council.parts import Parts
from edit.council.record import Part, PartState, Record, Update

# -- elections -------------------------------------------------------------------------------------------------------------


class VotesTwice(Council):
    """Gives its vote to everybody who asks in a term, unless it stands itself."""

    def _grants(self, sender: str, ask: ev.Ask) -> bool:
        again = self.role is Role.FOLLOWER and ask.term == self.term and self._may_follow(ask.stamp)
        return again or super()._grants(sender, ask)


class VotesForAnybody(Council):
    """Gives its vote to a candidate that lacks what it has accepted."""

    def _may_follow(self, stamp: object) -> bool:
        return True


class ForgetsVotes(Council):
    """Never writes a vote, or a term, to disk."""

    def _save(self, **changes: Any) -> None:
        super()._save(**changes)
        if "record" not in changes:
            self._effects.pop()


class SaysFirst(Council):
    """Writes to disk after it has said that it did."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        return sorted(super().handle(event, now), key=lambda effect: not isinstance(effect, ev.Send))


class NoTrial(Council):
    """Takes the next term without asking whether it could win it."""

    def _stand(self) -> None:
        self._elect()


class VotesBlank(Council):
    """Votes although it has no record: its disk was lost, and with it what it voted for and accepted."""

    def _receive(self, sender: str, message: ev.Message, key: str = "") -> None:
        if self.record is None and isinstance(message, ev.Ask):
            vote = ev.Vote(message.term, True, message.trial, message.sent)
            self._effects.append(ev.Send(sender.partition("#")[0], vote))
        else:
            super()._receive(sender, message, key)


class HastyVotesTwice(NoTrial, VotesTwice):
    """Both: without the trial vote, elections meet more often."""


class HastyForgetsVotes(NoTrial, ForgetsVotes):
    """Both."""


class FreshLease(Council):
    """Waits a lease for the leader that it replaces."""

    def _replaced(self) -> str:
        return ""


class FollowsOldTerms(Council):
    """Follows leaders of earlier terms."""

    def _is_current(self, term: int) -> bool:
        return True


class FollowsAnyTerm(Council):
    """Follows a term however far ahead."""

    def _is_near(self, term: int) -> bool:
        return True


class KeepsShortLease(Council):
    """Does not let the lease follow the round trips."""

    def _measure(self, sender: str, echo: float) -> None:
        pass


class LeadsAlone(Council):
    """Goes on leading when it hears nobody."""

    def _agreed(self, names: set[str]) -> bool:
        return self.role is Role.LEADER or super()._agreed(names)


# -- versions and voters ---------------------------------------------------------------------------------------------------


class ForgetsRecords(Council):
    """Does not write the records that a leader sends."""

    def _append(self, sender: str, append: ev.Append) -> None:
        start = len(self._effects)
        super()._append(sender, append)
        self._effects[start:] = [each for each in self._effects[start:] if not isinstance(each, ev.Save)]


class TakesOlderRecords(Council):
    """Takes an older record for a newer one."""

    def _is_newer(self, record: Record) -> bool:
        return True


class CommitsOldTerms(Council):
    """Leads with the record as it is, and commits it by counting who has it: figure 8 of the Raft paper."""

    def _publish(self, record: Record) -> None:
        if record is self.record:
            self._accepted, self._former = {self._me}, frozenset()
            self._broadcast()
        else:
            super()._publish(record)


class CommitsAlone(Council):
    """Takes its own version for committed before anybody has it."""

    def _publish(self, record: Record) -> None:
        super()._publish(record)
        if self.record is not None:
            self._commit(self.record)


class OneList(Council):
    """Changes the voters in one version."""

    def _with_voters(self, record: Record) -> Record:
        return replace(super()._with_voters(record), before=())


class VotersWithoutState(Council):
    """Lets members vote that have nothing."""

    def _has_all(self, name: str, record: Record) -> bool:
        return True


class TrustsStrangers(Council):
    """Listens to everybody."""

    def _knows(self, sender: str) -> bool:
        return True


class LetsEvictedIn(Council):
    """Makes everybody a member who says hello."""

    def _hello(self, sender: str, hello: ev.Hello, key: str = "") -> None:
        record = self._saved.record
        if record is not None and record.evicted:
            self._draft = replace(record, members={**record.members, sender.partition("#")[0]: hello.member}, evicted={})
        else:
            super()._hello(sender, hello, key)


class TakesOldLives(Council):
    """Takes a smaller incarnation for a newer life."""

    def _hello(self, sender: str, hello: ev.Hello, key: str = "") -> None:
        record, peer_id = self._saved.record, sender.partition("#")[0]
        if record is not None and self.role is Role.LEADER and record.members.get(peer_id) != hello.member:
            self._draft = replace(record, members={**record.members, peer_id: hello.member})


# -- parts -----------------------------------------------------------------------------------------------------------------


class AnyHolders(Council):
    """Takes an update for the outer step that one member holds."""

    def _is_held(self, names: set[str], part: Part, record: Record) -> bool:
        return bool(names)


class NoVerifiers(Council):
    """Takes an update for the outer step that a quorum holds, without its verifiers."""

    def _is_held(self, names: set[str], part: Part, record: Record) -> bool:
        return record.agreed(names)


class AdoptsEarly(Council):
    """Moves its parts on a record that is not committed yet."""

    def _append(self, sender: str, append: ev.Append) -> None:
        super()._append(sender, append)
        if self.record is not None and self.record.stamp == append.stamp:
            self._commit(self.record)


class _OtherParts(Council):
    parts: type[Parts]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._parts.__class__ = self.parts


class KeepsGrants(_OtherParts):
    """Goes on with its grant after a restart."""

    class parts(Parts):
        def commit(self, record: Record) -> None:
            before = self._record
            self._record = record if before is None else before
            super().commit(record)


class HoldsOldGrants(_OtherParts):
    """Holds what an owner offers whose grant is over."""

    class parts(Parts):
        def why_refused(self, sender: str, update: Update, record: Record | None) -> str:
            if record is not None and update.grant < record.parts[update.part].grant:
                part = replace(record.parts[update.part], owner=sender.partition("#")[0], grant=update.grant)
                record = record.with_part(update.part, part)
            return super().why_refused(sender, update, record)


class HoldsAnother(_OtherParts):
    """Lets go of the update that it holds for another of the same grant."""

    class parts(Parts):
        def why_refused(self, sender: str, update: Update, record: Record | None) -> str:
            mine = self._parts[update.part] if update.part < len(self._parts) else None
            if mine is not None and mine.state.held is not None:
                mine.state = PartState(mine.state.outer_step, mine.state.digest)
            return super().why_refused(sender, update, record)


class HoldsAnyBase(_OtherParts):
    """Holds an update whatever state it continues."""

    class parts(Parts):
        def why_refused(self, sender: str, update: Update, record: Record | None) -> str:
            reason = super().why_refused(sender, update, record)
            return "" if "differs" in reason else reason


class FetchesOnce(_OtherParts):
    """Does not try again when a fetch came to nothing."""

    class parts(Parts):
        def _again(self, i: int) -> None:
            pass


# -- owners that stall -----------------------------------------------------------------------------------------------------


class CountsAll(Council):
    """Counts who holds any update to the next outer step as holders of one."""

    def _holders(self, record: Record, i: int) -> dict[Update, set[str]]:
        found = super()._holders(record, i)
        return {next(iter(found)): set().union(*found.values())} if found else {}


class NeverComplains(Council):
    """Does not mind an owner that makes nothing."""

    def _want(self, wanted: ev.Wanted) -> None:
        pass


class Hasty(Council):
    """Complains of an owner as soon as its peer waits."""

    def _stands_still(self, i: int, since: float = 0.0) -> bool:
        return self.record is not None and self.record.parts[i].owner != self._peer_id


class BelievesOne(Council):
    """Takes one member's word that an owner stalls."""

    def _are_enough(self, said: Any, record: Record) -> bool:
        return bool(said.waiting)


class FollowsTheDeaf(Council):
    """Stays with a leader that does nothing about an owner that stalls."""

    def _shun(self) -> None:
        pass
