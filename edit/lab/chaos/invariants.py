"""What must hold in a run whatever is done to it, as pure functions over what was seen of it.

Owns: the rules and the words for a broken one. Must not know: processes, files, the clock (`now` is given).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from edit.lab.chaos.faults import Kind
from edit.lab.chaos.history import Blow, Claim, Commit, History
from edit.lab.processes import COORDINATOR

__all__ = ["Bounds", "Violation", "broken", "broken_at_end", "journal_differs", "may_not_start"]

_FLAT = 1.3  # the last third's largest size to the middle third's
_FEW = 30  # samples of memory below which a third says nothing


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that does not hold, when it was seen, and who is concerned (whose log to read)."""

    rule: str
    t: float
    text: str
    who: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """advance_s: from a repair to the next commit; return_s: from the start of a killed peer to a commit with it."""

    advance_s: float
    return_s: float

    @classmethod
    def of(cls, *, ceiling_s: float, lease_s: float, start_s: float) -> Bounds:
        """Generous: every timeout of the run once, and the start of a process. start_s: on this machine, under load."""
        return cls(advance_s=ceiling_s + 2 * lease_s + start_s, return_s=2 * ceiling_s + 2 * lease_s + start_s)


def broken(history: History, bounds: Bounds, now: float) -> Iterator[Violation]:
    """What is wrong already, with the run going on."""
    yield from _one_line(history)
    yield from _digests(history)
    yield from _backwards(history)
    yield from _stalled(history, bounds, now)
    yield from _absent(history, bounds, now)


def broken_at_end(history: History, bounds: Bounds, now: float) -> Iterator[Violation]:
    """What is wrong when nothing more will come."""
    yield from broken(history, bounds, now)
    yield from _uncommitted(history)
    yield from _memory(history)


def journal_differs(history: History, journalled: Mapping[int, int], t: float) -> Iterator[Violation]:
    """journalled: round_id by outer step, of the segments that are still there. Every commit told is one journalled."""
    told = {commit.outer_step: commit.round_id for commit in history.commits}
    for outer_step, round_id in sorted(journalled.items()):
        if told.get(outer_step, round_id) != round_id:
            text = f"outer step {outer_step} was told as round {told[outer_step]}, but the journal has round {round_id}"
            yield Violation("the journal and metrics.jsonl have the same commits", t, text, (COORDINATOR,))
    last = max(told, default=0)
    if journalled and max(journalled) < last:
        text = f"the journal ends at outer step {max(journalled)}, but {last} was told to be committed"
        yield Violation("no commit is lost", t, text, (COORDINATOR,))


def may_not_start(blows: Sequence[Blow]) -> bool:
    """Whether a coordinator that is started now may end with an error at once: its disk is full."""
    return any(blow.fault.kind is Kind.FULL_DISK and blow.ended is None for blow in blows)


def _one_line(history: History) -> Iterator[Violation]:
    """Outer steps are committed one after the other, each once. A coordinator that dies between the journal and the line in
    metrics.jsonl leaves one step out there; then its folder has that step."""
    for before, after in zip(history.commits, history.commits[1:], strict=False):
        if after.outer_step <= before.outer_step:
            text = f"outer step {after.outer_step} (round {after.round_id}) after {before.outer_step} (round {before.round_id})"
            yield Violation("every outer step is committed once", after.t, text, (COORDINATOR,))
        elif after.outer_step > before.outer_step + 1 and not _explained(history, before, after):
            text = f"outer step {after.outer_step} follows {before.outer_step}, and no death of the coordinator explains it"
            yield Violation("no commit is lost", after.t, text, (COORDINATOR,))
    for death in history.recovered:
        told = max((commit.outer_step for commit in history.commits if commit.t <= death.t), default=0)
        if death.outer_step < told:
            text = f"the coordinator's folder held outer step {death.outer_step} when {told} had been committed"
            yield Violation("no commit is lost", death.t, text, (COORDINATOR,))
        if (told_digest := _committed(history).get(death.outer_step, death.digest)) != death.digest:
            text = f"the folder held digest {death.digest[:12]} at outer step {death.outer_step}, committed {told_digest[:12]}"
            yield Violation("no commit is lost", death.t, text, (COORDINATOR,))


def _explained(history: History, before: Commit, after: Commit) -> bool:
    """A full disk takes lines as well: then the steps between are in nobody's way."""
    deaths = [death.outer_step for death in history.recovered if before.t <= death.t <= after.t]
    missing = range(before.outer_step + 1, after.outer_step)
    full = any(_overlaps(blow, before.t, after.t) for blow in history.blows_of(Kind.FULL_DISK))
    return full or set(missing) <= set(deaths)


def _overlaps(blow: Blow, start: float, end: float) -> bool:
    return blow.began <= end and (blow.ended is None or blow.ended >= start)


def _committed(history: History) -> dict[int, str]:
    """Digest by outer step."""
    return {death.outer_step: death.digest for death in history.recovered} | {c.outer_step: c.digest for c in history.commits}


def _digests(history: History) -> Iterator[Violation]:
    """Whoever has outer parameters of an outer step has those that were committed, or, while its line is still on the way, the
    same as everybody."""
    known = _committed(history)
    untold: dict[int, Claim] = {}
    for claim in history.claims:
        digest = known.get(claim.outer_step)
        if digest is not None and claim.digest != digest:
            text = f"{claim.who} has {claim.digest[:12]} at outer step {claim.outer_step}, committed was {digest[:12]}"
            yield Violation("digests are equal", claim.t, text, (claim.who, COORDINATOR))
        first = claim if digest is not None else untold.setdefault(claim.outer_step, claim)
        if first.digest != claim.digest:
            text = f"at outer step {claim.outer_step} {first.who} has {first.digest[:12]}, {claim.who} {claim.digest[:12]}"
            yield Violation("digests are equal", claim.t, text, (first.who, claim.who))


def _uncommitted(history: History) -> Iterator[Violation]:
    """When every line is in, nobody is ahead of the last commit."""
    last = max(_committed(history), default=0)
    for claim in history.claims:
        if claim.outer_step > last:
            text = f"{claim.who} is at outer step {claim.outer_step}, which was never committed"
            yield Violation("digests are equal", claim.t, text, (claim.who, COORDINATOR))
            return


def _backwards(history: History) -> Iterator[Violation]:
    """Within one life nobody goes back; a process started again may begin at its checkpoint."""
    at: dict[tuple[str, int], int] = {}
    for claim in history.claims:
        life = (claim.who, claim.life)
        if claim.own and claim.outer_step < at.get(life, 0):
            text = f"{claim.who} went from outer step {at[life]} back to {claim.outer_step}"
            yield Violation("the outer step never decreases", claim.t, text, (claim.who,))
        if claim.own:
            at[life] = max(at.get(life, 0), claim.outer_step)


def _stalled(history: History, bounds: Bounds, now: float) -> Iterator[Violation]:
    """After a repair the run advances again, unless the coordinator is struck anew meanwhile."""
    strikes = [blow for blow in history.blows if blow.fault.kind.of_coordinator]
    for blow in history.blows:
        if blow.ended is None or ((commit := history.commit_after(blow.ended)) and commit.t <= blow.ended + bounds.advance_s):
            continue
        due = _due(blow.ended, strikes, bounds.advance_s, commit.t if commit else now)
        if due is not None and (commit.t if commit else now) > due:
            text = f"no commit within {bounds.advance_s:.0f} s of the repair of {blow}"
            yield Violation("the run advances after a repair", due, text, (COORDINATOR, *history.peers))


def _due(since: float, strikes: Sequence[Blow], bound_s: float, until: float) -> float | None:
    """When a commit must have come; None while the coordinator is struck."""
    for strike in sorted(strikes, key=lambda strike: strike.began):
        if since < strike.began <= min(since + bound_s, until):
            if strike.ended is None:
                return None
            since = max(since, strike.ended)
    return since + bound_s


def _absent(history: History, bounds: Bounds, now: float) -> Iterator[Violation]:
    """A killed peer that was started again contributes again, unless it, or the coordinator, is struck anew."""
    for blow in history.blows:
        peer = blow.fault.target
        if blow.fault.kind not in (Kind.KILL_PEER, Kind.KILL_RANK) or blow.ended is None:
            continue
        strikes = [other for other in history.blows if other.fault.kind.of_coordinator or other.fault.target == peer]
        commit = history.returned(blow)
        due = _due(blow.ended, strikes, bounds.return_s, commit.t if commit else now)
        if due is not None and (commit.t if commit else now) > due:
            text = f"{peer} is in no commit within {bounds.return_s:.0f} s of its start after {blow}"
            yield Violation("a killed peer contributes again", due, text, (peer, COORDINATOR))


def _memory(history: History) -> Iterator[Violation]:
    third = len(history.memory) // 3
    if third < _FEW:
        return
    middle = max(sample.bytes for sample in history.memory[third : 2 * third])
    last = max(sample.bytes for sample in history.memory[2 * third :])
    if last > _FLAT * middle:
        text = f"the coordinator grew from {middle / 1e6:.0f} MB (middle third) to {last / 1e6:.0f} MB (last third)"
        yield Violation("memory is flat", history.memory[-1].t, text, (COORDINATOR,))
