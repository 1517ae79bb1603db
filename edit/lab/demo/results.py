"""The results of a demo as numbers: measured ones, and one computed comparison, which is marked as such."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edit.view.state import RunState

__all__ = [
    "Agreement",
    "DigestCheck",
    "Losses",
    "PeerResult",
    "Restart",
    "Results",
    "Takeover",
    "check_digests",
    "collect",
    "data_parallel_bytes",
]


def data_parallel_bytes(peers: int, parameters: int, steps: int) -> int:
    """Return the bytes that each peer would send, and receive, if gradients were averaged every step: computed, not measured.

    Ring all-reduce of fp32 gradients: 2 (N - 1) / N * 4 bytes * parameters per step (Patarasuk and Yuan 2009).
    """
    return 2 * (peers - 1) * 4 * parameters * steps // peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Held-out losses in nats per byte, all on the same `windows` windows of text."""

    outer_step: int  # of the outer parameters
    initial: float
    outer: float
    lone: float | None  # None: not measured
    windows: int

    @property
    def percent_below_lone(self) -> float | None:
        """How far the outer parameters' loss is below the lone peer's, in percent; negative when it is above."""
        return None if self.lone is None else 100.0 * (self.lone - self.outer) / self.lone


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """One peer over all its processes. sent, received: bytes counted on its data connection."""

    peer_id: str
    own_steps: int
    sent: int
    received: int
    merged: int
    weight: float  # in the committed rounds, the mean over them and the fragments
    verdicts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestCheck:
    """Peers' reports of the digest of their outer parameters, each compared with the committed one of the same outer step."""

    compared: int
    outer_steps: int
    unequal: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Restart:
    """The outer parameters' digest just before the coordinator was killed and when it answered again."""

    outer_step: int
    before: str
    after: str

    @property
    def equal(self) -> bool:
        return self.before == self.after


@dataclass(frozen=True, slots=True)
class Takeover:
    """A member was taken from a swarm; after `seconds` all parts were at another outer step."""

    what: str  # SIGKILL to peer-2, which owns part 1
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """What lay in the folders of a swarm's members when all had ended."""

    outer_step: int
    members: int
    unequal: tuple[str, ...]  # members that have another state than the first, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that results.json, the terminal and report.html show."""

    run_id: str
    complete: bool
    seed: int
    parameters: int
    outer_steps: int
    sync_every: int
    committed: int
    aborted: int
    round_s: float
    wall_s: float
    coordinator_memory_bytes: int
    losses: Losses | None
    peers: tuple[PeerResult, ...]
    lone_steps: int
    data_parallel_bytes: int
    digests: DigestCheck
    restart: Restart | None
    sample: str
    swarm: bool = False  # without a coordinator
    takeovers: tuple[Takeover, ...] = ()
    agreement: Agreement | None = None  # of a swarm

    @property
    def steps(self) -> int:
        return self.outer_steps * self.sync_every

    @property
    def mean_sent(self) -> float:
        return statistics.fmean(peer.sent for peer in self.peers)

    @property
    def fewer_bytes(self) -> float | None:
        """How many times fewer bytes a peer sent than with data-parallel training; None without traffic."""
        return self.data_parallel_bytes / self.mean_sent if self.mean_sent and self.data_parallel_bytes else None

    def as_json(self) -> dict[str, Any]:
        """Return plain values; the names of computed ones say so."""
        values = dataclasses.asdict(self)
        values["data_parallel_bytes_per_peer_computed"] = values.pop("data_parallel_bytes")
        values["times_fewer_bytes_than_data_parallel_computed"] = self.fewer_bytes
        if self.losses is not None:
            values["losses"]["percent_below_lone"] = self.losses.percent_below_lone
        if self.restart is not None:
            values["restart"]["equal"] = self.restart.equal
        return values


def check_digests(state: RunState) -> DigestCheck:
    """Compare every digest that a peer reported with the committed one. A peer reports at most one per second."""
    committed = state.digests
    reports = [report for report in state.digest_reports if report[1:3] in committed]
    unequal = sorted((peer_id, step) for peer_id, part, step, digest in reports if digest != committed[part, step])
    return DigestCheck(compared=len(reports), outer_steps=len({step for _, _, step, _ in reports}), unequal=tuple(unequal))


def collect(
    state: RunState,
    *,
    run_id: str,
    seed: int,
    wall_s: float,
    losses: Losses | None,
    restart: Restart | None,
    sample: str,
    parameters: int = 0,
    takeovers: Sequence[Takeover] = (),
    agreement: Agreement | None = None,
) -> Results:
    """Return the results so far; they are complete when the last outer step is committed.

    parameters: of the model, for a run that was interrupted before it said so.
    """
    committed = [row for row in state.rounds if row.committed]
    parameters = (state.status.parameters if state.status else 0) or parameters
    steps = state.outer_step * state.sync_every
    return Results(
        run_id=run_id,
        complete=state.outer_step >= state.outer_steps,
        seed=seed,
        parameters=parameters,
        outer_steps=state.outer_step,
        sync_every=state.sync_every,
        committed=len(committed),
        aborted=len(state.rounds) - len(committed),
        round_s=statistics.median(row.seconds for row in committed) if committed else 0.0,
        wall_s=wall_s,
        coordinator_memory_bytes=state.status.memory_bytes if state.status else 0,
        losses=losses,
        peers=_peers(state),
        lone_steps=max((point.step for point in state.lone), default=0),
        data_parallel_bytes=data_parallel_bytes(len(state.peers), parameters, steps),
        digests=check_digests(state),
        restart=restart,
        sample=sample,
        swarm=state.status is not None and state.status.swarm is not None,
        takeovers=tuple(takeovers),
        agreement=agreement,
    )


def _peers(state: RunState) -> tuple[PeerResult, ...]:
    verdicts = {peer_id: Counter[str]() for peer_id in state.peers}
    weights = dict.fromkeys(state.peers, 0.0)
    committed = [row for row in state.rounds if row.committed]
    for row in committed:
        for peer_id, cell in row.cells.items():
            if peer_id in verdicts:
                verdicts[peer_id][cell.verdict] += 1
                weights[peer_id] += cell.weight / len(committed)
    return tuple(
        PeerResult(
            peer_id=row.peer_id,
            own_steps=row.steps.value,
            sent=row.sent,
            received=row.received,
            merged=row.merged,
            weight=weights[row.peer_id],
            verdicts=dict(verdicts[row.peer_id]),
        )
        for row in state.peers.values()
    )
