"""How a run stands and what it has done in all of its starts: what the coordinator says, and what metrics.jsonl has kept.

A coordinator that does not run says nothing; then it is how the run stood when it stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from aggregator.control.history import History
from aggregator.control.shown_settings import settings_of
from aggregator.metrics import file_names
from aggregator.operator_client import call_every, further_addresses, read_status
from aggregator.run_feed import MemberChanged, PeerReported
from aggregator.security.members import Members
from aggregator.storage.configurations import configurations_of
from aggregator.storage.state_folder import StateFolder
from edit.config.run import RunConfig
from edit.errors import RemoteProtocolError, TransportError
from edit.fragments.schema import Schema
from edit.plain_text import parse_json
from edit.rounds.deadlines import PeerPhase
from editpb.limits import MAX_UNIX
from editpb.messages import Heartbeat, PeerState
from editpb.run_status import DAMAGE, KEPT_EVENTS, KEPT_ROUNDS, MemberStatus, RoundReport, RunStatus
from editpb.transport.whole_hub import whole_hub

__all__ = ["PAST_BYTES", "Past", "Saved", "last_status", "whole_status"]

PAST_BYTES = 16 << 20  # of metrics.jsonl that a coordinator reads when it starts: a second at most

_LIVE = {"starting", "training", "exchanging"}


def last_status(folder: StateFolder) -> RunStatus:
    """Return how the run stood when its coordinator stopped, by the files of its folder. Raises ConfigError, StorageError."""
    return _last(folder, Past.read(folder.metrics))


def _last(folder: StateFolder, past: Past) -> RunStatus:
    config = configurations_of(folder).config
    status = past.alone(folder.run_id, config, "the coordinator", Saved.of(folder.outer))
    if status.phase == "finished" and config.aggregators.addresses and past.attending(config.membership.lease_s):
        # Peers leave at the end of all shares: it was stopped between the end of its own and that.
        others = (
            "the further aggregators: of its own share the coordinator had merged all, and was stopped before its peers left"
        )
        status = replace(status, phase="stopped", waiting_for=others)
    known = {one.peer_id: one for one in status.members}
    enrolled = Members(folder.path / "members.json").all() if folder.aggregator == 0 else ()
    for record in enrolled:
        if record.role == "peer" or record.peer_id in known:
            member = known.get(record.peer_id) or MemberStatus(
                peer_id=record.peer_id, role=record.role, state="invited", reason="never attended"
            )
            if record.evicted is not None:
                member = replace(member, state="evicted", reason=record.evicted)
            known[record.peer_id] = replace(member, role=record.role, expires=record.expires)
    return replace(status, members=tuple(known[peer_id] for peer_id in sorted(known)))


def whole_status(folder: StateFolder) -> RunStatus:
    """Return the run's status with its whole past.

    Raises ConfigError, StorageError, and RefusedError when the coordinator does.
    """
    past = Past.read(folder.metrics)
    own = _last(folder, past)
    addresses = further_addresses(folder)
    if not folder.bound():
        return own
    try:
        answers = call_every(folder, read_status)
    except TransportError:
        return own
    if 0 in answers.said:
        own = past.under(answers.said[0])
    if not addresses:
        return own
    return whole_hub(own, [answers.said.get(number) for number in range(1, len(addresses) + 1)], answers.failures)


def _lines(metrics: Path, most_bytes: int | None) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of metrics.jsonl and of the files before it, oldest first; without those that are damaged."""
    paths = [path for path in reversed(file_names(metrics)) if path.exists()]
    sizes = [path.stat().st_size for path in paths]
    before = max(0, sum(sizes) - most_bytes) if most_bytes is not None else 0
    for path, size in zip(paths, sizes, strict=True):
        skipped, before = min(before, size), max(0, before - size)
        if skipped < size:
            with path.open("rb") as file:
                file.seek(skipped)
                for text in file:
                    try:
                        line = parse_json(text)
                    except ValueError:
                        continue  # the last one of a process that was killed, or one of which the beginning is left out
                    if isinstance(line, dict):
                        yield line


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint says of the run. tokens: merged up to its outer step; parameters: of the model; 0: not known."""

    outer_step: int = 0
    tokens: int = 0
    parameters: int = 0

    @classmethod
    def of(cls, outer: Path) -> Saved:
        """Return what the newest checkpoint of a folder says; of one that cannot be read, nothing. Reads no tensor."""
        newest = max(outer.glob("step-*.safetensors"), default=None)
        try:
            if newest is None:
                return cls()
            with safe_open(newest, "np") as file:
                said = parse_json((file.metadata() or {})["edit"])
            schema = Schema.from_json(said["schema"])
            return cls(int(said["outer_step"]), int(said["tokens"]), schema.numel)
        except (OSError, SafetensorError, RemoteProtocolError, KeyError, ValueError, TypeError, OverflowError):
            return cls()


@dataclass(slots=True)
class Past:
    """What the lines of metrics.jsonl say."""

    history: History = field(default_factory=lambda: History(lambda: 0))
    rounds: list[RoundReport] = field(default_factory=list)
    members: dict[str, MemberStatus] = field(default_factory=dict)
    t: float = 0.0  # of the last line
    heard: dict[str, float] = field(default_factory=dict)  # of the last line of each member, likewise
    counts: dict[str, Counter[str]] = field(default_factory=dict)  # by peer_id: contributions, rejections, absences
    ended: bool = False  # the run has ended, and no round was closed since: by its outer steps, its tokens or a drain

    @classmethod
    def read(cls, metrics: Path, most_bytes: int | None = None) -> Past:
        """Return what a metrics.jsonl and the files before it say; most_bytes: only so many of the last ones."""
        past = cls()
        for line in _lines(metrics, most_bytes):
            past.take(line)
        return past

    def take(self, line: Mapping[str, Any]) -> None:
        """Take one line; of another kind, or without what its kind has, it is left out."""
        try:
            t = float(line["t"])
            if not 0 <= t <= MAX_UNIX:
                return
            match line["kind"]:
                case "round":
                    report = RoundReport.from_json(line)
                    self.history.on_event(report, t)
                    self.rounds = [*self.rounds[-KEPT_ROUNDS + 1 :], report]
                    self._count(report)
                    self.ended = False
                case "member":
                    peer_id, state, reason = str(line["peer_id"]), str(line["state"]), str(line["reason"])
                    self.history.on_event(MemberChanged(peer_id, state, reason, live=state in _LIVE), t)
                    self.members[peer_id] = replace(self._member(peer_id), state=state, reason=reason)
                    self.heard[peer_id] = t
                case "peer":
                    self._report(str(line["peer_id"]), line, t)
                    self.heard[str(line["peer_id"])] = t
                case "end":
                    self.ended = True
                case _:
                    return
            self.t = t
        except DAMAGE:
            return

    def attending(self, lease_s: float) -> bool:
        """Return whether a member attended at the last line. Of one that a killed coordinator heard, none says that it left."""
        return any(each.state in _LIVE and self.t - self.heard[name] <= lease_s for name, each in self.members.items())

    def _count(self, report: RoundReport) -> None:
        """Count what became of each peer in a commit, as `Attendances.count` does."""
        for peer in report.peers if report.committed else ():
            if peer.fragments:
                self.counts.setdefault(peer.peer_id, Counter())["contributions" if peer.weight > 0 else "rejections"] += 1
        for peer_id in report.missing if report.committed else ():
            self.counts.setdefault(peer_id, Counter())["absences"] += 1

    def _report(self, peer_id: str, line: Mapping[str, Any], t: float) -> None:
        phase = PeerPhase(line["phase"]) if line.get("phase") else None
        member = MemberStatus.from_json({**line, "role": "peer", "reason": "", "phase": ""})
        beat = Heartbeat(
            state=PeerState(member.state),
            inner_steps=member.inner_steps,
            outer_step=member.outer_step,
            loss=member.loss,
            metrics=member.metrics,
        )
        self.history.on_event(PeerReported(peer_id, beat, phase), t)
        self.members[peer_id] = replace(member, reason=self._member(peer_id).reason)

    def _member(self, peer_id: str) -> MemberStatus:
        return self.members.get(peer_id, MemberStatus(peer_id=peer_id, role="peer", state="", reason=""))

    def under(self, status: RunStatus) -> RunStatus:
        """Return the status that the coordinator says, with the past of its earlier starts too."""
        began = min((each.t for each in status.events), default=status.t)
        events = (*(each for each in self.history.events() if each.t < began), *status.events)[-KEPT_EVENTS:]
        rounds = {report.round_id: report for report in (*self.rounds, *status.rounds)}
        return replace(
            status,
            curves=self.history.curves() or status.curves,
            rounds=tuple(rounds[each] for each in sorted(rounds))[-KEPT_ROUNDS:],
            events=tuple(replace(event, number=number) for number, event in enumerate(events, 1)),
        )

    def alone(self, run_id: str, config: RunConfig, who: str, saved: Saved | None = None) -> RunStatus:
        """Return how the run stood at the last line. who: does not run; saved: what its newest checkpoint says."""
        last = next((report for report in reversed(self.rounds) if report.committed), None)
        outer_step = last.outer_step if last is not None else 0
        ended = self.ended or outer_step >= config.sync.outer_steps
        saved = saved or Saved()
        members = []
        for peer_id, member in sorted(self.members.items()):
            verdict = self.history.verdict(peer_id)
            told: dict[str, object] = {}
            if verdict is not None:
                told = {"verdict": verdict.verdict, "verdict_reason": verdict.reason}
            told |= {**self.counts.get(peer_id, {}), **self.history.shares(peer_id)}
            members.append(replace(member, **told))  # type: ignore[arg-type]
        return RunStatus(
            run_id=run_id,
            phase="finished" if ended else "stopped",
            outer_step=outer_step,
            outer_steps=config.sync.outer_steps,
            round_id=0,
            reason="",
            waiting_for="" if ended else f"{who}, which does not run",
            draining=False,
            tokens=saved.tokens if saved.outer_step == outer_step else 0,
            stop_tokens=config.sync.tokens,
            digest=last.digest if last is not None else "",
            parameters=saved.parameters,
            peak_memory_bytes=0,
            expected=(),
            arrived=(),
            deadline_in_s=None,
            members=tuple(members),
            rounds=tuple(self.rounds),
            t=self.t,
            curves=self.history.curves(),
            events=self.history.events(),
            settings=settings_of(config),
        )
