"""The invariants of a run under faults, as pure functions of its history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from edit.lab.chaos.faults import Kind
from edit.lab.chaos.history import Claim, Commit, History, Incident
from edit.lab.processes import COORDINATOR

__all__ = ["Bounds", "Violation", "broken", "broken_at_end", "journal_differs", "may_not_start"]

_FLAT = 1.3  # the largest size in the last third, relative to that in the middle third
_FEW = 30  # with fewer samples in a third, memory is not judged
_ATTACKED_BYTES = 100e6  # what attacks may cost the coordinator while they last
_LOG_RATE = 2000.0  # bytes per second and member
_LOG_S = 60.0  # over so long
_STATE_BYTES = 40e6  # the coordinator's folder; the model of a chaos run is small


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule."""

    rule: str
    t: float  # when it was seen
    text: str
    who: tuple[str, ...] = ()  # whose logs to read

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How long the run may take to recover."""

    advance_s: float  # from a repair to the next commit
    return_s: float  # from the restart of a killed peer to a commit with it

    @classmethod
    def of(cls, *, ceiling_s: float, lease_s: float, start_s: float) -> Bounds:
        """Return generous bounds: every timeout of the run once, and `start_s` for a process to start under load."""
        return cls(advance_s=ceiling_s + 2 * lease_s + start_s, return_s=2 * ceiling_s + 2 * lease_s + start_s)


def broken(history: History, bounds: Bounds, now: float) -> Iterator[Violation]:
    """Yield the rules that are broken while the run goes on."""
    yield from _one_line(history)
    yield from _digests(history)
    yield from _backwards(history)
    yield from _stalled(history, bounds, now)
    yield from _absent(history, bounds, now)
    yield from _uncounted(history, bounds, now)
    yield from _accused(history)
    yield from _silent(history, bounds, now)
    yield from _written(history)


def broken_at_end(history: History, bounds: Bounds, now: float) -> Iterator[Violation]:
    """Yield the rules that are broken at the end, when every line is in."""
    yield from broken(history, bounds, now)
    yield from _uncommitted(history)
    yield from _merged_twice(history, now)
    yield from _memory(history)


def journal_differs(history: History, journalled: Mapping[int, int], t: float) -> Iterator[Violation]:
    """Yield differences between the commits in metrics.jsonl and those in the journal (round_id by outer step)."""
    reported = {commit.outer_step: commit.round_id for commit in history.commits}
    for outer_step, round_id in sorted(journalled.items()):
        if reported.get(outer_step, round_id) != round_id:
            text = f"outer step {outer_step} was reported as round {reported[outer_step]}, but the journal has round {round_id}"
            yield Violation("the journal and metrics.jsonl have the same commits", t, text, (COORDINATOR,))
    last = max(reported, default=0)
    if journalled and max(journalled) < last:
        text = f"the journal ends at outer step {max(journalled)}, but {last} was reported as committed"
        yield Violation("no commit is lost", t, text, (COORDINATOR,))


def may_not_start(incidents: Sequence[Incident], since: float) -> bool:
    """Return whether a coordinator that was started at `since` may have failed to, because its disk was full meanwhile."""
    full = (incident for incident in incidents if incident.fault.kind is Kind.FULL_DISK)
    return any(incident.ended is None or incident.ended >= since for incident in full)


def _one_line(history: History) -> Iterator[Violation]:
    """Outer steps are committed one after the other, each once.

    A coordinator that dies between the journal and the line in metrics.jsonl leaves out one line; its folder has that step.
    """
    for before, after in zip(history.commits, history.commits[1:], strict=False):
        if after.outer_step <= before.outer_step:
            text = f"outer step {after.outer_step} (round {after.round_id}) after {before.outer_step} (round {before.round_id})"
            yield Violation("every outer step is committed once", after.t, text, (COORDINATOR,))
        elif after.outer_step > before.outer_step + 1 and not _explained(history, before, after):
            text = f"outer step {after.outer_step} follows {before.outer_step}, and no restart of the coordinator explains it"
            yield Violation("no commit is lost", after.t, text, (COORDINATOR,))
    for death in history.recovered:
        reported = max((commit.outer_step for commit in history.commits if commit.t <= death.t), default=0)
        if death.outer_step < reported:
            text = f"the coordinator's folder held outer step {death.outer_step} when {reported} had been committed"
            yield Violation("no commit is lost", death.t, text, (COORDINATOR,))
        if not death.finite:
            text = f"not every value of theta at outer step {death.outer_step} is finite"
            yield Violation("theta stays finite", death.t, text, (COORDINATOR,))
        if (known_digest := _committed(history).get(death.outer_step, death.digest)) != death.digest:
            text = f"the folder held digest {death.digest[:12]} at outer step {death.outer_step}, committed {known_digest[:12]}"
            yield Violation("no commit is lost", death.t, text, (COORDINATOR,))


def _explained(history: History, before: Commit, after: Commit) -> bool:
    """Return whether a restart or a full disk, which loses lines, explains the missing steps."""
    deaths = [death.outer_step for death in history.recovered if before.t <= death.t <= after.t]
    missing = range(before.outer_step + 1, after.outer_step)
    full = any(_overlaps(incident, before.t, after.t) for incident in history.incidents_of(Kind.FULL_DISK))
    return full or set(missing) <= set(deaths)


def _overlaps(incident: Incident, start: float, end: float) -> bool:
    return incident.began <= end and (incident.ended is None or incident.ended >= start)


def _committed(history: History) -> dict[int, str]:
    """Return the committed digests by outer step."""
    return {death.outer_step: death.digest for death in history.recovered} | {c.outer_step: c.digest for c in history.commits}


def _digests(history: History) -> Iterator[Violation]:
    """Every reported digest is the committed one, or, while the line of the commit is not in yet, the same for all."""
    known = _committed(history)
    unconfirmed: dict[int, Claim] = {}
    for claim in history.claims:
        digest = known.get(claim.outer_step)
        if digest is not None and claim.digest != digest:
            text = f"{claim.who} has {claim.digest[:12]} at outer step {claim.outer_step}, committed was {digest[:12]}"
            yield Violation("digests are equal", claim.t, text, (claim.who, COORDINATOR))
        first = claim if digest is not None else unconfirmed.setdefault(claim.outer_step, claim)
        if first.digest != claim.digest:
            text = f"at outer step {claim.outer_step} {first.who} has {first.digest[:12]}, {claim.who} {claim.digest[:12]}"
            yield Violation("digests are equal", claim.t, text, (first.who, claim.who))


def _uncommitted(history: History) -> Iterator[Violation]:
    """When every line is in, no peer is ahead of the last commit."""
    last = max(_committed(history), default=0)
    for claim in history.claims:
        if claim.outer_step > last:
            text = f"{claim.who} is at outer step {claim.outer_step}, which was never committed"
            yield Violation("digests are equal", claim.t, text, (claim.who, COORDINATOR))
            return


def _merged_twice(history: History, now: float) -> Iterator[Violation]:
    """When every line is in, no more inner steps are merged than were made. Hostile members write no lines, and lie."""
    if not history.hostile and history.inner_steps_counted > history.inner_steps_at_most:
        text = f"{history.inner_steps_counted} inner steps are merged, and at most {history.inner_steps_at_most} were made"
        yield Violation("no work is merged twice", now, text, (COORDINATOR,))


def _backwards(history: History) -> Iterator[Violation]:
    """A process never goes back to an earlier outer step; a restarted one may begin at its checkpoint."""
    at: dict[tuple[str, int], int] = {}
    for claim in history.claims:
        life = (claim.who, claim.life)
        if claim.own and claim.outer_step < at.get(life, 0):
            text = f"{claim.who} went from outer step {at[life]} back to {claim.outer_step}"
            yield Violation("the outer step never decreases", claim.t, text, (claim.who,))
        if claim.own:
            at[life] = max(at.get(life, 0), claim.outer_step)


def _stalled(history: History, bounds: Bounds, now: float) -> Iterator[Violation]:
    """After a repair the run advances again, unless another fault hits the coordinator meanwhile."""
    incidents = [incident for incident in history.incidents if incident.fault.kind.of_coordinator]
    for incident in history.incidents:
        if incident.ended is None or (
            (commit := history.commit_after(incident.ended)) and commit.t <= incident.ended + bounds.advance_s
        ):
            continue
        due = _due(incident.ended, incidents, bounds.advance_s, commit.t if commit else now)
        if due is not None and (commit.t if commit else now) > due:
            text = f"no commit within {bounds.advance_s:.0f} s of the repair of {incident}"
            yield Violation("the run advances after a repair", due, text, (COORDINATOR, *history.peers))


def _due(since: float, incidents: Sequence[Incident], bound_s: float, until: float) -> float | None:
    """Return when a commit must have come; None while an incident has not ended."""
    for incident in sorted(incidents, key=lambda incident: incident.began):
        if since < incident.began <= min(since + bound_s, until):
            if incident.ended is None:
                return None
            since = max(since, incident.ended)
    return since + bound_s


def _absent(history: History, bounds: Bounds, now: float) -> Iterator[Violation]:
    """A killed peer that was started again contributes again, unless another fault hits it or the coordinator."""
    for incident in history.incidents:
        peer = incident.fault.target
        if incident.fault.kind not in (Kind.KILL_PEER, Kind.KILL_RANK) or incident.ended is None:
            continue
        incidents = [other for other in history.incidents if other.fault.kind.of_coordinator or other.fault.target == peer]
        commit = history.returned(incident)
        due = _due(incident.ended, incidents, bounds.return_s, commit.t if commit else now)
        if due is not None and (commit.t if commit else now) > due:
            text = f"{peer} is in no commit within {bounds.return_s:.0f} s of its restart after {incident}"
            yield Violation("a killed peer contributes again", due, text, (peer, COORDINATOR))


def _uncounted(history: History, bounds: Bounds, now: float) -> Iterator[Violation]:
    """Whoever is honest and undisturbed is in commits with a weight, whatever hostile members do."""
    if not history.hostile:
        return
    began = history.commits[0].t if history.commits else now
    for peer in history.peers:
        incidents = [one for one in history.incidents if one.fault.kind.of_coordinator or one.fault.target == peer]
        counted = [commit.t for commit in history.commits if commit.weights.get(peer, 0.0) > 0]
        for since, until in pairwise([began, *counted, now]):
            due = _due(since, incidents, bounds.return_s, until)
            if due is not None and until > due:
                text = f"{peer} is in no commit with a weight within {until - since:.0f} s"
                yield Violation("honest peers are in the commits", due, text, (peer, COORDINATOR))


def _accused(history: History) -> Iterator[Violation]:
    for one in history.accusations:
        yield Violation("no honest peer is refused or shut out", one.t, f"{one.who}: {one.text}", (one.who, COORDINATOR))


def _silent(history: History, bounds: Bounds, now: float) -> Iterator[Violation]:
    """The operator is told the status, unless a fault hits the coordinator."""
    if history.answered is not None:
        incidents = [incident for incident in history.incidents if incident.fault.kind.of_coordinator]
        due = _due(history.answered, incidents, bounds.advance_s, now)
        if due is not None and now > due:
            text = f"no status within {now - history.answered:.0f} s"
            yield Violation("the operator is answered", due, text, (COORDINATOR,))


def _written(history: History) -> Iterator[Violation]:
    """What the coordinator writes stays bounded: its log by a rate, its folder by a size."""
    most = _LOG_RATE * _LOG_S * (len(history.peers) + len(history.hostile))
    begin = 0
    for sample in history.files:
        while sample.t - history.files[begin].t > _LOG_S:
            begin += 1
        if (grown := sample.log_bytes - history.files[begin].log_bytes) > most:
            text = f"the coordinator's log grew by {grown / 1e3:.0f} kB in {sample.t - history.files[begin].t:.0f} s"
            yield Violation("the log grows slowly", sample.t, text, (COORDINATOR,))
            break
        if sample.state_bytes > _STATE_BYTES:
            text = f"the coordinator's folder has {sample.state_bytes / 1e6:.0f} MB"
            yield Violation("the coordinator's folder stays small", sample.t, text, (COORDINATOR,))
            break


def _memory(history: History) -> Iterator[Violation]:
    third = len(history.memory) // 3
    if third < _FEW:
        return
    middle = max(sample.bytes for sample in history.memory[third : 2 * third])
    last = max(sample.bytes for sample in history.memory[2 * third :])
    if last > _FLAT * middle + (_ATTACKED_BYTES if history.hostile else 0.0):
        text = f"the coordinator grew from {middle / 1e6:.0f} MB (middle third) to {last / 1e6:.0f} MB (last third)"
        yield Violation("memory is flat", history.memory[-1].t, text, (COORDINATOR,))
