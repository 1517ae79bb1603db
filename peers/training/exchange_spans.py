"""A peer's exchanges as OpenTelemetry's spans: a `Collective` that passes every call on, and notes how long it took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from edit.collective import Collective
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Aborted, Committed, Contribution, Evicted, Finished, Lacks, NeedsSnapshot, Outcome, Progress, Snapshot
from edit.telemetry import Attributes, Span, Telemetry, trace_id

if TYPE_CHECKING:
    from torch import Tensor

    from edit.trust.mask_plan import FragmentPlan
    from edit.worker.masked import PlansRounds

__all__ = ["TracedCollective"]

_MOST_WAITS = 1024  # spans of one exchange


class TracedCollective:
    """One share's connection, traced. An exchange is from the first fragment handed over to the outcome.

    Args:
        inner: the connection.
        telemetry: takes the spans.
        run_id: of the run.
        part: of the model, where there are several.
        unix: the clock, in seconds since 1970.
    """

    def __init__(self, inner: Collective, telemetry: Telemetry, run_id: str, part: int, unix: Callable[[], float]) -> None:
        self._inner, self._telemetry, self._run_id, self._part, self._unix = inner, telemetry, run_id, part, unix
        self._since: float | None = None  # of the exchange under way
        self._base = 0  # the outer step that it goes on from
        self._fragments = 0
        self._bytes = 0
        self._waits: list[Span] = []

    @property
    def peer_id(self) -> str:
        return self._inner.peer_id

    def join(
        self,
        schema: Schema,
        found: Callable[[], Sequence[Tensor]],
        shards: Sequence[Shard] | None = None,
        lacks: Lacks | None = None,
    ) -> Snapshot:
        began = self._unix()
        snapshot = self._inner.join(schema, found, shards, lacks)
        self._record("join", began, snapshot.outer_step)
        return snapshot

    def contribute(self, contribution: Contribution) -> None:
        if self._since is None or contribution.outer_step != self._base:
            self._since, self._base = self._unix(), contribution.outer_step
            self._fragments, self._bytes, self._waits = 0, 0, []
        self._fragments += 1
        self._bytes += len(contribution.payload.data)
        self._inner.contribute(contribution)

    def plan(self, outer_step: int) -> tuple[FragmentPlan, ...] | None:
        began = self._unix()
        plans = cast("PlansRounds", self._inner).plan(outer_step)
        self._record("masks", began, outer_step)
        return plans

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        began = self._unix()
        outcome = self._inner.outcome(outer_step, block=block)
        now = self._unix()
        if self._since is not None and block and len(self._waits) < _MOST_WAITS:
            self._waits.append(Span(name="wait", start=began, end=now))
        if self._since is not None and outcome is not None and outer_step >= self._base:
            self._ended(outcome, now, self._since)
        return outcome

    def snapshot(self) -> Snapshot:
        began = self._unix()
        snapshot = self._inner.snapshot()
        self._record("snapshot", began, snapshot.outer_step)
        return snapshot

    def report(self, progress: Progress) -> None:
        self._inner.report(progress)

    def _ended(self, outcome: Outcome, now: float, since: float) -> None:
        match outcome:
            case Committed(carried=True):
                return  # it is still on its way
            case Committed():
                result, error = "committed", ""
            case Aborted(reason):
                result, error = "aborted", reason
            case Evicted(reason):
                result, error = "evicted", reason
            case NeedsSnapshot() | Finished():
                result, error = type(outcome).__name__.lower(), ""
        attributes: Attributes = {
            **self._where(),
            "edit.outer_step": self._base + 1,
            "edit.outcome": result,
            "edit.fragments": self._fragments,
            "edit.payload_bytes": self._bytes,
        }
        span = Span(name="exchange", start=since, end=now, attributes=attributes, error=error, children=tuple(self._waits))
        self._telemetry.record(span, trace_id(self._run_id, self._base + 1))
        labels: Attributes = {"edit.part": self._part, "edit.outcome": result}
        self._telemetry.measure("edit.exchange.duration", "s", max(0.0, now - since), labels)
        self._telemetry.measure("edit.exchange.wait", "s", sum(max(0.0, each.end - each.start) for each in self._waits), labels)
        self._telemetry.add("edit.exchange.payload", "By", self._bytes, {"edit.part": self._part})
        self._since, self._waits = None, []

    def _record(self, name: str, began: float, outer_step: int) -> None:
        attributes: Attributes = {**self._where(), "edit.outer_step": outer_step}
        span = Span(name=name, start=began, end=self._unix(), attributes=attributes)
        self._telemetry.record(span, trace_id(self._run_id, outer_step))

    def _where(self) -> Attributes:
        return {"edit.run_id": self._run_id, "edit.peer_id": self.peer_id, "edit.part": self._part}
