"""How a run stands, as one plain record: what `status`, `watch`, `report`, the page, /metrics and JSON show.

`editpb.status_messages` maps these records to and from the wire; `as_json` and `from_json` to and from the values of
`status --json`. No module here imports torch, so that commands which only ask a coordinator answer at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from edit.records import FragmentCommit, PeerVerdict, Verdict, round_number

__all__ = [
    "DAMAGE",
    "KEPT_EVENTS",
    "KEPT_ROUNDS",
    "SHARES",
    "WORST",
    "CouncilMember",
    "CouncilPart",
    "CouncilStatus",
    "Curve",
    "Event",
    "MemberStatus",
    "PeerRound",
    "RoundReport",
    "RunStatus",
    "Setting",
]

KEPT_ROUNDS, KEPT_EVENTS = 200, 500  # that a status shows
SHARES = ("computing", "exchanging", "waiting")  # of a peer's time, in a `MemberStatus` and as kinds of curves
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)  # what from_json may raise
_KEPT_POINTS = 1024  # of a curve, whatever an aggregator says
WORST = (  # verdicts, the worst one first; REJECTED often follows from that on another fragment
    Verdict.NONFINITE,
    Verdict.ANOMALOUS,
    Verdict.HARMFUL,
    Verdict.COPIED,
    Verdict.OUTLIER,
    Verdict.UNPAIRED,
    Verdict.IDLE,
    Verdict.REJECTED,
    Verdict.OK,
)


_SOUND = (Verdict.OK, Verdict.REJECTED)
_NAMED = 4  # of the peers because of which others are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRound:
    """One peer in one round, over all fragments."""

    peer_id: str
    verdict: str  # the worst of all fragments (ok, nonfinite, anomalous, idle, ...); absent or carried: it is not part of it
    reason: str  # of the verdict, in words
    norm: float = 0.0  # of its whole pseudo-gradient; NaN or infinite as it was sent
    weight: float = 0.0  # in the mean, 0 to 1; the mean over the fragments
    staleness: int = 0  # outer steps between its base and the step that was advanced
    rejected: int = 0  # fragments in which it has no weight for a bad verdict
    fragments: int = 0

    def as_json(self) -> dict[str, object]:
        """Return the values of one entry of a round's `peers`."""
        return _plain(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One closed round, without tensors."""

    round_id: int  # ascending, also over restarts
    outer_step: int  # the step that the round advanced to, or tried to
    committed: bool  # whether it became an outer step; else it was aborted
    reason: str  # why it closed
    seconds: float  # from open to close
    bytes_in: int  # payloads received while it was open
    bytes_out: int  # what one peer downloads of its commit
    missing: tuple[str, ...]  # peers that were expected and are not part of the commit
    digest: str  # of the outer parameters after the commit; empty when it was aborted
    fragments: tuple[FragmentCommit, ...]  # verdicts without payloads; empty when it was aborted
    carried: tuple[str, ...] = ()  # peers whose contributions went on into the next round
    every: int = 0  # H of this outer step: inner steps between two exchanges of a fragment; 0: not known
    batch: int = 0  # sequences in an inner step of a peer
    outer_lr: float = 0.0  # the outer learning rate in force
    outer_momentum: float = 0.0  # the outer momentum in force; 0 also where the outer optimizer has none
    t: float = 0.0  # when it closed, in seconds since 1970

    @property
    def number(self) -> int:
        """Its number as people count."""
        return round_number(self.round_id)

    @property
    def peers(self) -> tuple[PeerRound, ...]:
        """What became of each peer in it, by name: those that contributed, were expected, or are carried over."""
        found: dict[str, list[PeerVerdict]] = {}
        for fragment in self.fragments:
            for verdict in fragment.verdicts:
                found.setdefault(verdict.peer_id, []).append(verdict)
        usual = sorted(norm for each in found.values() if _worst(each) is Verdict.OK and math.isfinite(norm := _norm(each)))
        median = usual[len(usual) // 2] if usual else 0.0
        left_out = _why_left_out({peer_id: _worst(verdicts) for peer_id, verdicts in found.items()}, self.fragments)
        cells = {peer_id: _peer_round(peer_id, verdicts, median, left_out) for peer_id, verdicts in found.items()}
        for peer_id in self.carried:
            cells.setdefault(peer_id, PeerRound(peer_id=peer_id, verdict="carried", reason="late: counts for the next round"))
        for peer_id in self.missing:
            cells.setdefault(
                peer_id, PeerRound(peer_id=peer_id, verdict="absent", reason="its contribution did not come in time")
            )
        return tuple(cells[peer_id] for peer_id in sorted(cells))

    @property
    def norm(self) -> float:
        """The norm of the merged pseudo-gradient, before the clip."""
        return math.hypot(*(fragment.merged_norm for fragment in self.fragments))

    @property
    def cosine(self) -> float | None:
        """How much the peers agree: the mean cosine of their pseudo-gradients to the merged one; None: nothing was merged.

        The mean is weighted by each peer's weight times its norm, in each fragment: so it follows from the norms alone, as
        sum_i w_i <Delta_i, D> = ||D||^2 for D = sum_i w_i Delta_i. Only a merger that is a weighted mean has one;
        with a robust rule, whose weights are those of contributions made equally long, it is an estimate.
        """
        above = sum(fragment.merged_norm * fragment.merged_norm for fragment in self.fragments)
        below = sum(v.weight * v.norm * each.merged_norm for each in self.fragments for v in each.verdicts if v.weight > 0)
        share = above / below if below > 0 else math.nan
        return min(share, 1.0) if 0 <= share <= 1.001 else None

    def as_json(self) -> dict[str, object]:
        """Return the values of a `round` line of metrics.jsonl. `status --json` has `number`, `t`, `cosine` and `peers` too."""
        return {
            "round_id": self.round_id,
            "outer_step": self.outer_step,
            "committed": self.committed,
            "reason": self.reason,
            "seconds": round(self.seconds, 4),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "missing": list(self.missing),
            "carried": list(self.carried),
            "digest": self.digest,
            "every": self.every,
            "batch": self.batch,
            "outer_lr": self.outer_lr,
            "outer_momentum": self.outer_momentum,
            "verdicts": [_verdicts(fragment) for fragment in self.fragments],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RoundReport:
        """Return the round that `as_json` wrote. Raises DAMAGE for anything else."""
        return cls(
            round_id=int(values["round_id"]),
            outer_step=int(values["outer_step"]),
            committed=bool(values["committed"]),
            reason=str(values["reason"]),
            seconds=_number(values["seconds"]),
            bytes_in=int(values["bytes_in"]),
            bytes_out=int(values["bytes_out"]),
            missing=tuple(map(str, values["missing"])),
            carried=tuple(map(str, values.get("carried", ()))),
            digest=str(values["digest"]),
            fragments=tuple(map(_fragment, values["verdicts"])),
            t=_number(values.get("t", 0.0)),
            every=int(values.get("every", 0)),
            batch=int(values.get("batch", 0)),
            outer_lr=_number(values.get("outer_lr", 0.0)),
            outer_momentum=_number(values.get("outer_momentum", 0.0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One member. The numbers of its last heartbeat are 0 before it attends; its loss is NaN."""

    peer_id: str  # the member's name
    role: str  # peer, region, observer, auditor, scorer, operator
    state: str  # invited, starting, training, exchanging, lost, left, evicted
    reason: str  # of the last change
    silent_s: float = 0.0  # since the last sign of life
    outer_step: int = 0  # of the peer's outer parameters
    inner_steps: int = 0  # since the peer's process started
    loss: float = math.nan  # training loss, moving mean; NaN before the first step
    tokens_per_s: float = 0.0  # of its training, moving mean
    step_s: float = 0.0  # seconds per inner step
    bytes_sent: int = 0  # data plane, since the peer's process started
    bytes_received: int = 0  # likewise
    contributions: int = 0  # merged with a weight
    rejections: int = 0  # merged with weight 0
    absences: int = 0  # rounds committed without it while it was expected
    deadline_s: float = 0.0  # how long a round waits for it; 0 before any measurement
    phase: str = ""  # download, compute, upload, waiting; empty: it is not here
    upload_bytes: int = 0  # received so far of the contribution that is held
    upload_total_bytes: int = 0  # 0: no contribution is held
    download_s: float = 0.0  # what a download may take, from measurements; 0 before any
    compute_s: float = 0.0  # the same for its inner steps
    upload_s: float = 0.0  # the same for an upload
    optional: bool = False  # rounds do not wait for it, because it contributed nothing twice in a row
    quarantined_s: float = 0.0  # how long it is still kept out of the rounds, because its bytes were bad too often
    expires: float = 0.0  # when its newest certificate ends, in seconds since 1970; 0: not known here
    device: str = ""  # what it computes on, as it says; empty: it does not say
    metrics: Mapping[str, float] = field(default_factory=dict)  # what else its user reports, by name
    computing: float = 0.0  # share of the time that it has been here, 0 to 1
    exchanging: float = 0.0  # likewise: sending and fetching
    waiting: float = 0.0  # likewise: for the others
    verdict: str = ""  # of `PeerRound`, on the last round that it was expected in; empty: none yet
    verdict_reason: str = ""  # why it has this verdict
    consented: bool = False  # its site has consented to the configuration, and said so since the coordinator was started

    def as_json(self) -> dict[str, object]:
        """Return one row of `members --json`. `json_text` writes it: a number that is not finite as null."""
        return _plain(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MemberStatus:
        """Return the member that `as_json` wrote. Raises DAMAGE for anything else."""
        metrics = {str(name): _number(value) for name, value in values.get("metrics", {}).items()}
        return cls(**_typed(cls, values), metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a chart. x, t and y are as long as each other.

    kind        y                                                      x
    ----------  -----------------------------------------------------  -----------------------------------------
    loss        training loss of a peer                                its inner steps, over all of its processes
    norm        norm of a peer's pseudo-gradient, or of the merged one  outer step
    held_out    a peer's metric `held_out`: on text nobody trains on    outer step
    cosine      `RoundReport.cosine`                                   outer step
    bytes_in    received by the aggregator until then                  outer step
    bytes_out   sent to one peer until then                            outer step
    round_s     seconds of a round                                     outer step
    computing   share of the peers' time, all together, since the      outer step
                outer step before, 0 to 1; likewise exchanging and
                waiting
    """

    kind: str
    peer_id: str = ""  # empty: of the run
    x: tuple[float, ...] = ()
    t: tuple[float, ...] = ()  # seconds since 1970
    y: tuple[float, ...] = ()  # finite, also their sums and squares
    kept: int = 0  # in a message that is news: so many of the points that were told before stay, and these come after them

    def at(self, place: float) -> tuple[float, float]:
        """Return (t, y) at a place between the first x and the last: straight between points, as a chart draws it.

        Of several points there, that of the last. x is in order.
        """
        i = bisect_right(self.x, place) - 1
        if i + 1 >= len(self.x) or self.x[i] == place:
            return self.t[i], self.y[i]
        share = (place - self.x[i]) / (self.x[i + 1] - self.x[i])
        t, y = (values[i] + share * (values[i + 1] - values[i]) for values in (self.t, self.y))
        return t, y

    def after(self, before: Curve | None) -> Curve:
        """Return the whole curve of which this is the news. before: as it was."""
        if not self.kept or before is None:
            return self if not self.kept else replace(self, kept=0)
        x, t, y = (
            (*old[: self.kept], *new)[-_KEPT_POINTS:]
            for old, new in ((before.x, self.x), (before.t, self.t), (before.y, self.y))
        )
        return Curve(kind=self.kind, peer_id=self.peer_id, x=x, t=t, y=y)

    def as_json(self) -> dict[str, object]:
        """Return one entry of `curves`."""
        return {"kind": self.kind, "peer_id": self.peer_id, "x": list(self.x), "t": list(self.t), "y": list(self.y)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Curve:
        """Return the curve that `as_json` wrote. Raises DAMAGE for anything else."""
        x, t, y = (tuple(map(float, values[name])) for name in ("x", "t", "y"))
        return cls(kind=str(values["kind"]), peer_id=str(values["peer_id"]), x=x, t=t, y=y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, in words."""

    number: int  # 1, 2, 3, ... since the aggregator started
    t: float  # seconds since 1970
    kind: str  # member, round, rejected, order, advice, run
    peer_id: str  # empty: of the run
    text: str
    tone: str = "info"  # info, good (overcome), fault (injected), bad

    def as_json(self) -> dict[str, object]:
        """Return one entry of `events`."""
        return _plain(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Event:
        """Return the event that `as_json` wrote. Raises DAMAGE for anything else."""
        return cls(**_typed(cls, values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting of the run."""

    name: str  # as in run.toml: SECTION.KEY
    value: str  # as JSON
    default: str  # likewise

    @property
    def changed(self) -> bool:
        """Whether it differs from the default."""
        return self.value != self.default

    def as_json(self) -> dict[str, object]:
        """Return one entry of `settings`."""
        return _plain(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Setting:
        """Return the setting that `as_json` wrote. Raises DAMAGE for anything else."""
        return cls(**_typed(cls, values))


@dataclass(frozen=True, slots=True, kw_only=True)
class CouncilPart:
    """A part of a swarm's model."""

    part: int
    owner: str  # peer_id
    outer_step: int  # the last one that is agreed on
    held_by: int  # members that are known to have it; -1: nobody knows, as nobody leads
    waiting_for: str = ""  # of its round, in words

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CouncilPart:
        """Return the part that `as_json` of a status wrote. Raises DAMAGE for anything else."""
        return cls(**_typed(cls, values))


@dataclass(frozen=True, slots=True, kw_only=True)
class CouncilMember:
    """A member of a swarm."""

    peer_id: str
    votes: bool
    state: str  # leads, here, late, away, unknown
    owns: tuple[int, ...] = ()  # parts
    why: str = ""  # it is late, away, or does not vote

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CouncilMember:
        """Return the member that `as_json` of a status wrote. Raises DAMAGE for anything else."""
        return cls(**_typed(cls, values), owns=tuple(map(int, values.get("owns", ()))))


@dataclass(frozen=True, slots=True, kw_only=True)
class CouncilStatus:
    """How those who agree in a swarm stand, by what its hosts said."""

    leader: str  # peer_id; empty: nobody leads, or nobody who answers says so
    quorum: str  # how many voters are here and how many are needed, in words
    lost: bool  # too few voters are here: nothing is agreed on until others return
    term: int
    version: int  # of the record in this term
    parts: tuple[CouncilPart, ...]
    members: tuple[CouncilMember, ...]
    notes: tuple[str, ...] = ()  # what else is to be said

    def as_json(self) -> dict[str, object]:
        """Return the values of `council`."""
        lists = {"parts": [_plain(one) for one in self.parts], "members": [_plain(one) for one in self.members]}
        return {**_plain(self), **lists, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CouncilStatus:
        """Return the status that `as_json` wrote. Raises DAMAGE for anything else."""
        return cls(
            **_typed(cls, values),
            parts=tuple(map(CouncilPart.from_json, values["parts"])),
            members=tuple(map(CouncilMember.from_json, values["members"])),
            notes=tuple(map(str, values.get("notes", ()))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One aggregator's run as it stands, or the whole run's (`editpb.whole_run`)."""

    run_id: str  # the run's name and eight hexadecimal digits
    phase: str  # founding, gathering, collecting, committing, paused, finished; stopped: no aggregator runs
    outer_step: int  # the last committed one
    outer_steps: int  # where the run ends
    round_id: int  # the open round; 0: none
    reason: str  # why the run cannot go on as it stands, or empty
    waiting_for: str  # in words: who or what is waited for; empty when the run is finished
    draining: bool  # the operator has ended the run: see `last_step`
    tokens: int  # merged so far
    stop_tokens: int  # where the run ends; 0: no bound
    digest: str  # of the outer parameters at `outer_step`
    parameters: int  # elements of the model; 0 before the founding
    peak_memory_bytes: int  # of the aggregator's process
    expected: tuple[str, ...]  # peers that the open round waits for
    arrived: tuple[str, ...]  # peers whose contribution to the open round is complete
    deadline_in_s: float | None  # until the open round's deadline; -1 in JSON: no round is open, or nobody is waited for
    members: tuple[MemberStatus, ...]  # see below
    rounds: tuple[RoundReport, ...]  # the last ones, newest last
    last_step: int = 0  # the outer step at which a drain ends the run; 0: it was not drained, or that is not known
    warnings: tuple[str, ...] = ()  # of its own certificates, and of its clock
    t: float = 0.0  # when this was said, in seconds since 1970
    eta_s: float | None = None  # until the run's end, from the pace of the last rounds; -1 in JSON: not known
    curves: tuple[Curve, ...] = ()  # of losses, norms and speeds, as the page draws them
    events: tuple[Event, ...] = ()  # the last ones, newest last
    settings: tuple[Setting, ...] = ()  # the run's settings, with their defaults
    aggregator: int = 0  # which one this is; 0 is the coordinator
    aggregators: tuple[RunStatus, ...] = ()  # the further ones, as far as they were asked and answered
    masks: str = ""  # with secure aggregation: the state of the masked round, in words
    privacy: str = ""  # with differential privacy of organisations: epsilon and delta spent so far, in words
    epsilon: float | None = None  # the epsilon spent so far; not in JSON without differential privacy of organisations
    audit: str = ""  # entries of the audit log and the beginning of its head, as signed last; empty: it keeps none
    governance: str = ""  # which approvals a changed configuration waits for, in words; empty: none
    council: CouncilStatus | None = None  # the council; not in JSON where the run has a coordinator, or for one part of a swarm

    def as_json(self) -> dict[str, object]:
        """Return the values of `status --json`: flat, stable names for scripts; no deadline is -1. `json_text` writes them."""
        status: dict[str, object] = {
            "run_id": self.run_id,
            "phase": self.phase,
            "outer_step": self.outer_step,
            "outer_steps": self.outer_steps,
            "round_id": self.round_id,
            "reason": self.reason,
            "waiting_for": self.waiting_for,
            "warnings": list(self.warnings),
            "draining": self.draining,
            "last_step": self.last_step,
            "tokens": self.tokens,
            "stop_tokens": self.stop_tokens,
            "digest": self.digest,
            "parameters": self.parameters,
            "peak_memory_bytes": self.peak_memory_bytes,
            "expected": list(self.expected),
            "arrived": list(self.arrived),
            "deadline_in_s": -1.0 if self.deadline_in_s is None else self.deadline_in_s,
            "t": self.t,
            "eta_s": -1.0 if self.eta_s is None else self.eta_s,
            "members": [member.as_json() for member in self.members],
            "rounds": [_round_row(report) for report in self.rounds],
            "curves": [curve.as_json() for curve in self.curves],
            "events": [event.as_json() for event in self.events],
            "settings": [setting.as_json() for setting in self.settings],
        }
        if self.masks:
            status["masks"] = self.masks
        if self.privacy:
            status["privacy"] = self.privacy
        if self.epsilon is not None:
            status["epsilon"] = self.epsilon
        if self.audit:
            status["audit"] = self.audit
        if self.governance:
            status["governance"] = self.governance
        if self.aggregator:
            return {"aggregator": self.aggregator, **status}
        if self.council is not None:
            status["council"] = self.council.as_json()
        return {**status, "aggregators": [one.as_json() for one in self.aggregators]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunStatus:
        """Return the status that `as_json` wrote, also with null for what is not finite.

        Raises DAMAGE for anything else.
        """
        kinds: dict[str, Any] = {
            "members": MemberStatus,
            "rounds": RoundReport,
            "curves": Curve,
            "events": Event,
            "settings": Setting,
            "aggregators": cls,
        }
        found: dict[str, Any] = {name: tuple(map(kind.from_json, values.get(name, ()))) for name, kind in kinds.items()}
        plain = _typed(cls, {key: value for key, value in values.items() if key not in found})
        for name in ("expected", "arrived", "warnings"):
            plain[name] = tuple(map(str, values.get(name, ())))
        for name in ("deadline_in_s", "eta_s"):
            seconds = _number(values.get(name, -1.0))
            plain[name] = seconds if seconds >= 0 else None
        plain["epsilon"] = _number(values["epsilon"]) if values.get("epsilon") is not None else None
        council = CouncilStatus.from_json(values["council"]) if values.get("council") is not None else None
        return cls(**plain, **found, council=council)

    @property
    def at_its_end(self) -> bool:
        """Whether the last outer step is taken: who does not answer any more then has ended with the run."""
        steps, tokens = 0 < self.outer_steps <= self.outer_step, 0 < self.stop_tokens <= self.tokens
        return self.phase == "finished" or steps or tokens

    def updated(self, news: RunStatus) -> RunStatus:
        """Return the later status that a message of Watch leads to: it has only what is new since this one."""
        of_this = news.run_id == self.run_id
        curves = {(one.kind, one.peer_id): one for one in self.curves} if of_this and news.curves else {}
        return replace(
            news,
            rounds=((*self.rounds, *news.rounds) if of_this else news.rounds)[-KEPT_ROUNDS:],
            events=((*self.events, *news.events) if of_this else news.events)[-KEPT_EVENTS:],
            curves=tuple(one.after(curves.get((one.kind, one.peer_id))) for one in news.curves) or self.curves,
            settings=news.settings or self.settings,
        )

    def shown_to(self, role: str, peer_id: str, share_losses: bool) -> RunStatus:
        """Return what a member may see of it: without the losses and metrics of others, unless the run shares them.

        The operator sees all that members have said; what a peer keeps to itself, it never says.
        """
        if role == "operator" or share_losses:
            return self
        return replace(
            self,
            members=tuple(one if one.peer_id == peer_id else replace(one, loss=math.nan, metrics={}) for one in self.members),
            curves=tuple(one for one in self.curves if one.kind not in ("loss", "held_out") or one.peer_id == peer_id),
        )


def _verdicts(fragment: FragmentCommit) -> dict[str, object]:
    return {
        "fragment_id": fragment.fragment_id,
        "merged_norm": fragment.merged_norm,
        "clip": fragment.clip,
        "peers": {v.peer_id: [v.verdict.value, v.norm, v.weight] for v in fragment.verdicts},
        "staleness": {v.peer_id: v.staleness for v in fragment.verdicts if v.staleness},
    }


def _fragment(values: Mapping[str, Any]) -> FragmentCommit:
    staleness = values.get("staleness", {})
    return FragmentCommit(
        fragment_id=int(values["fragment_id"]),
        payload=None,
        verdicts=tuple(
            PeerVerdict(
                peer_id=str(peer_id),
                verdict=Verdict(verdict),
                norm=_number(norm),
                weight=_number(weight),
                staleness=int(staleness.get(peer_id, 0)),
            )
            for peer_id, (verdict, norm, weight) in values["peers"].items()
        ),
        merged_norm=_number(values["merged_norm"]),
        clip=_number(values["clip"]),
    )


def _round_row(report: RoundReport) -> dict[str, object]:
    peers = [peer.as_json() for peer in report.peers]
    return {**report.as_json(), "number": report.number, "t": report.t, "cosine": report.cosine, "peers": peers}


def _worst(verdicts: Iterable[PeerVerdict]) -> Verdict:
    found = {each.verdict for each in verdicts}
    return next(each for each in WORST if each in found)


def _norm(verdicts: Sequence[PeerVerdict]) -> float:
    return math.hypot(*(each.norm for each in verdicts))


def _why_left_out(worst: Mapping[str, Verdict], fragments: Sequence[FragmentCommit]) -> str:
    """Say why a contribution is REJECTED that has no fault of its own. worst: the worst verdict of each peer."""
    if any(verdict.weight > 0 for each in fragments for verdict in each.verdicts):
        return "refused by the run's policy"
    faulty = [f"{peer_id} is {verdict.value}" for peer_id, verdict in sorted(worst.items()) if verdict not in _SOUND]
    more = f" and {len(faulty) - _NAMED} more" if len(faulty) > _NAMED else ""
    why = f"too few are sound: {', '.join(faulty[:_NAMED])}{more}" if faulty else "the aggregator's log says why"
    return f"nothing was merged, {why}"


def _peer_round(peer_id: str, verdicts: Sequence[PeerVerdict], median: float, left_out: str) -> PeerRound:
    worst, norm = _worst(verdicts), _norm(verdicts)
    bad = sum(each.verdict is not Verdict.OK for each in verdicts)
    where = "" if bad == len(verdicts) else f" in {bad} of {len(verdicts)} fragments"
    return PeerRound(
        peer_id=peer_id,
        verdict=worst.value,
        reason=_why(worst, norm, median, left_out) + (where if bad else ""),
        norm=norm,
        weight=sum(each.weight for each in verdicts) / len(verdicts),
        staleness=max(each.staleness for each in verdicts),
        rejected=bad,
        fragments=len(verdicts),
    )


def _why(verdict: Verdict, norm: float, median: float, left_out: str) -> str:
    """Say what a verdict means. median: of the norms of those that were merged; 0: there are none. left_out: of REJECTED."""
    match verdict:
        case Verdict.OK:
            return "merged"
        case Verdict.NONFINITE if 1e18 < norm < math.inf:
            return f"norm {norm:.3g}, too long to be compared with others"
        case Verdict.NONFINITE:
            return "NaN or infinite values"
        case Verdict.ANOMALOUS if median > 0 and math.isfinite(norm):
            return f"norm {norm / median:.3g} times that of the others"
        case Verdict.ANOMALOUS:
            return "norm far above the usual"
        case Verdict.IDLE:
            return "no work in it"
        case Verdict.COPIED:
            return "a copy of another contribution, or of the last update"
        case Verdict.OUTLIER:
            return "far from most of the others, or it points away from the anchors"
        case Verdict.HARMFUL:
            return "its last ones did not lower the loss that scorers measure, or much less than the others'"
        case Verdict.UNPAIRED:
            return "no swap with its partner"
        case Verdict.REJECTED:
            return left_out


def _plain(record: Any) -> dict[str, object]:
    """Return the fields of a record whose values are all plain."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


def _number(value: Any) -> float:
    """Return a number; null, which stands for what is not finite, as NaN."""
    return math.nan if value is None else float(value)


def _typed(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain fields of a record among the values, each of its type. Names that are not known are left out."""
    of: dict[str, Callable[[Any], Any]] = {"str": str, "int": int, "float": _number, "bool": bool}
    return {
        each.name: of[str(each.type)](values[each.name])
        for each in fields(kind)
        if each.name in values and str(each.type) in of
    }
