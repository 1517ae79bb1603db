"""How a run stands, as plain values: what `edit-coordinator status` shows, and what an observer may ask for.

`editpb.status_messages` maps these records to and from the wire. Neither module imports torch, so that commands which only ask
a coordinator answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from edit.records import FragmentCommit

__all__ = ["MemberStatus", "RoundReport", "RunStatus"]


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

    def as_json(self) -> dict[str, object]:
        """Return the values of a `round` line of metrics.jsonl and of `status --json`."""
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
            "verdicts": [_verdicts(fragment) for fragment in self.fragments],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One member. The numbers of its last heartbeat are 0 before it attends."""

    peer_id: str  # the member's name
    role: str  # peer, region, observer, operator
    state: str  # invited, starting, training, exchanging, lost, left, evicted
    reason: str  # of the last change
    silent_s: float = 0.0  # since the last sign of life
    outer_step: int = 0  # of the peer's outer parameters
    inner_steps: int = 0  # since the peer's process started
    loss: float = 0.0  # training loss, moving mean; NaN before the first step
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
    optional: bool = False  # rounds do not wait for it: nothing came of it twice in a row
    quarantined_s: float = 0.0  # for so long it is kept out of the rounds: its bytes were bad too often
    expires: float = 0.0  # when its newest certificate ends, in seconds since 1970; 0: not known here

    def as_json(self) -> dict[str, object]:
        """Return one row of `members --json`. `json_text` writes it: a number that is not finite as null."""
        return {
            "peer_id": self.peer_id,
            "role": self.role,
            "state": self.state,
            "reason": self.reason,
            "silent_s": self.silent_s,
            "outer_step": self.outer_step,
            "inner_steps": self.inner_steps,
            "loss": self.loss,
            "tokens_per_s": self.tokens_per_s,
            "step_s": self.step_s,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "contributions": self.contributions,
            "rejections": self.rejections,
            "absences": self.absences,
            "deadline_s": self.deadline_s,
            "phase": self.phase,
            "upload_bytes": self.upload_bytes,
            "upload_total_bytes": self.upload_total_bytes,
            "download_s": self.download_s,
            "compute_s": self.compute_s,
            "upload_s": self.upload_s,
            "optional": self.optional,
            "quarantined_s": self.quarantined_s,
            "expires": self.expires,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One aggregator's run as it stands."""

    run_id: str  # the run's name and eight hexadecimal digits
    phase: str  # founding, gathering, collecting, committing, paused, finished
    outer_step: int  # the last committed one
    outer_steps: int  # where the run ends
    round_id: int  # the open round; 0: none
    reason: str  # why the run cannot go on as it stands, or empty
    waiting_for: str  # in words: who or what is waited for; empty when the run is finished
    draining: bool  # the run ends with the open round
    tokens: int  # merged so far
    stop_tokens: int  # where the run ends; 0: no bound
    digest: str  # of the outer parameters at `outer_step`
    parameters: int  # elements of the model; 0 before the founding
    peak_memory_bytes: int  # of the aggregator's process
    expected: tuple[str, ...]  # peers that the open round waits for
    arrived: tuple[str, ...]  # peers whose contribution to the open round is complete
    deadline_in_s: float | None  # None: no round is open, or nobody is waited for
    members: tuple[MemberStatus, ...]  # see below
    rounds: tuple[RoundReport, ...]  # the last ones, newest last
    warnings: tuple[str, ...] = ()  # of its own certificates, and of its clock
    aggregator: int = 0  # which one this is; 0 is the coordinator
    aggregators: tuple[RunStatus, ...] = ()  # the further ones, as far as they were asked and answered

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
            "tokens": self.tokens,
            "stop_tokens": self.stop_tokens,
            "digest": self.digest,
            "parameters": self.parameters,
            "peak_memory_bytes": self.peak_memory_bytes,
            "expected": list(self.expected),
            "arrived": list(self.arrived),
            "deadline_in_s": -1.0 if self.deadline_in_s is None else self.deadline_in_s,
            "members": [member.as_json() for member in self.members],
            "rounds": [report.as_json() for report in self.rounds],
        }
        if self.aggregator:
            return {"aggregator": self.aggregator, **status}
        return {**status, "aggregators": [one.as_json() for one in self.aggregators]}


def _verdicts(fragment: FragmentCommit) -> dict[str, object]:
    return {
        "fragment_id": fragment.fragment_id,
        "merged_norm": fragment.merged_norm,
        "clip": fragment.clip,
        "peers": {v.peer_id: [v.verdict.value, v.norm, v.weight] for v in fragment.verdicts},
        "staleness": {v.peer_id: v.staleness for v in fragment.verdicts if v.staleness},
    }
