"""What happens in a run, as values, the feed that tells every subscriber, and the log as the first of them.

event                published when
-------------------  ---------------------------------------------------------------------------------------------------------
MemberEnrolled       an invitation was redeemed
CertificateRenewed   a member got a new certificate for its key
MachineReplaced      a member has another key: the machine before is shut out
MemberChanged        a member entered another state
RankLost             the stream of a rank other than 0 broke; without it the replica cannot contribute
PeerReported         a heartbeat came; at most one a second per stream
ResyncChanged        a peer's digest began to differ from the run's, or agrees again
Consented            a peer's site consents to the configuration
Approved             an approver approves the configuration that waits for approvals, and the audit log has it
RunFounded           the founder's parameters are on disk
RoundChanged         the phase or the open round is another one
ContributionRefused  a contribution that was taken is dropped, with the reason
PeerFaulted          a peer's bytes broke the protocol
PeerQuarantined      that happened too often: it is kept out of the rounds for a while
FragmentMerged       a fragment of the open round is merged, and in the journal
StepCommitted        a commit is on disk and published
RoundReport          a round closed, committed or aborted
RunEnded             the last outer step or token is merged, or the run was drained; the state is checkpointed
OrderGiven           the operator's order is on disk
Advised              a setting cannot work, a member is too slow for it or speaks another protocol, or a certificate ends soon

Subscribers: metrics.jsonl (`aggregator.metrics`), the log (`EventLog`), what a status shows of the past
(`aggregator.control.history`), and the run itself (`aggregator.control.run`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edit.records import Commit
from editpb.run_status import RoundReport

if TYPE_CHECKING:
    from edit.rounds.deadlines import PeerPhase
    from editpb.messages import Heartbeat

__all__ = [
    "Advised",
    "Approved",
    "CertificateRenewed",
    "Consented",
    "ContributionRefused",
    "EventLines",
    "EventLog",
    "FragmentMerged",
    "MachineReplaced",
    "MemberChanged",
    "MemberEnrolled",
    "OrderGiven",
    "PeerFaulted",
    "PeerQuarantined",
    "PeerReported",
    "RankLost",
    "ResyncChanged",
    "RoundChanged",
    "RoundReport",
    "RunEnded",
    "RunEvent",
    "RunFeed",
    "RunFounded",
    "StepCommitted",
    "Subscriber",
]

_log = logging.getLogger(__name__)
_rounds_log = logging.getLogger(f"{__name__}.rounds")


@dataclass(frozen=True, slots=True)
class MemberEnrolled:
    """A certificate was issued."""

    peer_id: str
    role: str


@dataclass(frozen=True, slots=True)
class CertificateRenewed:
    """A later certificate was issued for the same identity and key."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class MachineReplaced:
    """A member has another key. reason: what the machine with the key before is told."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """A member entered another state. live: whether it can take part in rounds."""

    peer_id: str
    state: str
    reason: str
    live: bool


@dataclass(frozen=True, slots=True)
class RankLost:
    """The replica is lost to the open round; its lease is rank 0's and goes on."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerReported:
    """What a peer says of itself. phase: what it does now, as the coordinator sees it; None: not known."""

    peer_id: str
    heartbeat: Heartbeat
    phase: PeerPhase | None = None


@dataclass(frozen=True, slots=True)
class ResyncChanged:
    """reason: why this peer must take a snapshot; empty: its digest agrees again."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunFounded:
    """The run has parameters. parameters: elements of the model; fragments: how many it is cut into."""

    peer_id: str
    parameters: int
    fragments: int


@dataclass(frozen=True, slots=True)
class RoundChanged:
    """phase: of the round machine; round_id: the open round, or 0."""

    phase: str
    round_id: int


@dataclass(frozen=True, slots=True)
class ContributionRefused:
    """Its bytes are dropped."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerFaulted:
    """The peer is out of the round that its contribution names."""

    peer_id: str
    round_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeerQuarantined:
    """seconds: for how long it is kept out of the rounds; reason: of its last fault."""

    peer_id: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class FragmentMerged:
    """peers: whose contributions were looked at; seconds: from the last of them to the journal."""

    round_id: int
    fragment_id: int
    peers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """The outer step advanced. missing: peers that were expected and are not part of the commit."""

    commit: Commit
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunEnded:
    """tokens: merged in all."""

    outer_step: int
    tokens: int


@dataclass(frozen=True, slots=True)
class OrderGiven:
    """order: paused, resumed, drained or evicted; peer_id, reason: of an eviction."""

    order: str
    peer_id: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Consented:
    """policy: the digest of the site's policy.toml; empty: it has none."""

    peer_id: str
    policy: str


@dataclass(frozen=True, slots=True)
class Approved:
    """standing: which configuration it is, and what is still waited for, in words."""

    approver: str
    standing: str


@dataclass(frozen=True, slots=True)
class Advised:
    """peer_id: the member that is too slow; empty: it concerns the run."""

    peer_id: str
    advice: str


RunEvent = (
    MemberEnrolled
    | CertificateRenewed
    | MachineReplaced
    | MemberChanged
    | RankLost
    | PeerReported
    | ResyncChanged
    | RunFounded
    | RoundChanged
    | ContributionRefused
    | PeerFaulted
    | PeerQuarantined
    | FragmentMerged
    | StepCommitted
    | RoundReport
    | RunEnded
    | OrderGiven
    | Consented
    | Approved
    | Advised
)
Subscriber = Callable[[RunEvent, float], None]  # the event, and when it was published (unix seconds)


class RunFeed:
    """Tells every subscriber of every event, at once and in the order of subscription. Used on the event loop only.

    A subscriber may publish while it handles an event; those who subscribed after it see the newer event first.

    Args:
        unix: the clock, in seconds since 1970.
    """

    def __init__(self, unix: Callable[[], float]) -> None:
        self._unix = unix
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tell `subscriber` of everything from now on."""
        self._subscribers.append(subscriber)

    def publish(self, event: RunEvent) -> None:
        """Tell everybody."""
        now = self._unix()
        for subscriber in self._subscribers:
            subscriber(event, now)


_LINE_S = 1.0  # between two log lines of one kind and source


@dataclass(slots=True)
class _Source:
    """The log lines of one kind and source."""

    last: float  # when the last one was written, unix seconds
    left_out: int = 0  # since then


class EventLines:
    """Says each event that an operator wants to read in one line.

    What one member can cause again and again has one line a second, kind and member, which counts those left out.
    """

    def __init__(self) -> None:
        self._sources: dict[tuple[object, ...], _Source] = {}

    def line(self, event: RunEvent, unix: float) -> tuple[int, str] | None:
        """Return level and text; None: the event has no line, or it is too soon for it."""
        if (line := _line(event)) is None:
            return None
        if (key := _limited(event)) is None:
            return line
        known, (level, text) = self._sources.get(key), line
        if known is not None and 0 <= unix - known.last < _LINE_S:
            known.left_out += 1
            return None
        self._sources[key] = _Source(unix)
        return level, text + (f" ({known.left_out} more like this before)" if known is not None and known.left_out else "")


class EventLog:
    """Logs the lines of `EventLines`."""

    def __init__(self) -> None:
        self._lines = EventLines()

    def on_event(self, event: RunEvent, unix: float) -> None:
        """Log the line of an event, if it has one and it is not too soon for it."""
        if (line := self._lines.line(event, unix)) is not None:
            log = _rounds_log if isinstance(event, RoundReport) else _log
            log.log(line[0], "%s", line[1])


def _limited(event: RunEvent) -> tuple[object, ...] | None:
    """Return the kind and source of an event that one member can cause again and again; None for the others."""
    match event:
        case MemberChanged(peer_id, state):
            return MemberChanged, peer_id, state
        case ResyncChanged(peer_id, reason):
            return ResyncChanged, peer_id, bool(reason)
        case Consented(peer_id) | RankLost(peer_id) | ContributionRefused(peer_id) | PeerFaulted(peer_id):
            return type(event), peer_id
        case RoundReport(committed=False):
            return (RoundReport,)
    return None


def _line(event: RunEvent) -> tuple[int, str] | None:
    """Return (level, text) of the log line of an event, or None."""
    match event:
        case MemberEnrolled(peer_id, role):
            return logging.INFO, f"{peer_id} enrolled as {role}"
        case CertificateRenewed(peer_id):
            return logging.INFO, f"{peer_id}: its certificate is renewed"
        case MachineReplaced(peer_id):
            return logging.INFO, f"{peer_id}: enrolled for another key; the machine before is shut out"
        case MemberChanged(peer_id, state, reason, live=False):
            return logging.INFO, f"{peer_id}: {state} ({reason})"
        case Consented(peer_id, policy):
            by = f" under a policy of its own, sha256:{policy}" if policy else ""
            return logging.INFO, f"{peer_id}: its site consents to the configuration{by}"
        case Approved(approver, standing):
            return logging.INFO, f"{approver} approves the changed configuration: {standing}"
        case RankLost(peer_id, reason):
            return logging.INFO, f"{peer_id}: lost to the round ({reason})"
        case ResyncChanged(peer_id, reason):
            return logging.WARNING, f"{peer_id}: {reason or 'resynced'}"
        case RunFounded(peer_id, parameters, fragments):
            return logging.INFO, f"{peer_id} founded the run: {parameters} parameters in {fragments} fragments"
        case ContributionRefused(peer_id, reason):
            return logging.INFO, f"{peer_id}: its contribution is refused: {reason}"
        case PeerFaulted(peer_id, _, reason):
            return logging.WARNING, f"{peer_id}: {reason}"
        case PeerQuarantined(peer_id, seconds, reason):
            return logging.WARNING, f"{peer_id}: quarantined for {seconds:.0f} s, its bytes were bad too often: {reason}"
        case RoundReport():
            result = "committed" if event.committed else "aborted"
            return logging.INFO, f"round {event.number} {result}: {event.reason} ({event.seconds:.2f} s)"
        case RunEnded(outer_step, tokens):
            return logging.INFO, f"finished at outer step {outer_step}, {tokens} tokens"
        case OrderGiven(order, "", _):
            return logging.INFO, f"the operator {order} the run"
        case Advised(peer_id, advice):
            return logging.WARNING, f"{peer_id}: {advice}" if peer_id else advice
    return None
