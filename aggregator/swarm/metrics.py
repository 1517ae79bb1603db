"""/metrics of a host: the council as this member sees it, and the rounds of each part that it owns, with the label `part`.

What other members say of themselves, the leader's metrics of their outer steps, is named as their word. Labels are names of
members and numbers of parts, and the record bounds both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from aggregator.control.run import Run
from aggregator.services.metrics_page import RunCollector
from aggregator.swarm.host import Host
from aggregator.swarm.standing import GossipStanding, Standing
from edit.council.machine import Role
from edit.council.record import Phase, peer_of

__all__ = ["HostCollector", "council_metrics", "parts_metrics"]


class HostCollector:
    """The metrics of a host, as Prometheus collects them: none before it has started. host: it, once there is one."""

    def __init__(self, host: Callable[[], Host | None]) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its present values."""
        host = self._host()
        if host is None or not host.started:
            return
        yield from council_metrics(host.standing())
        yield from parts_metrics(host.served)


def parts_metrics(served: Sequence[tuple[int, Run]]) -> Iterator[Metric]:
    """Yield the metrics of the rounds of each part, one family of a name for all parts. served: number and run of each."""
    families: dict[str, Metric] = {}
    for number, run in served:
        for family in RunCollector(run).collect():
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [each._replace(labels={**each.labels, "part": str(number)}) for each in family.samples]
    yield from families.values()


def council_metrics(standing: Standing) -> Iterator[Metric]:
    """Yield what a host knows of the swarm; of the record nothing while it has none."""
    record, me = standing.record, standing.peer_id
    here = {each.peer_id for each in standing.peers if each.connected} | {me}
    info = GaugeMetricFamily("edit_swarm_info", "1, with the run's id and the name of this member", labels=["run_id", "member"])
    info.add_metric([standing.run_id, me], 1)
    yield info
    leader = GaugeMetricFamily(
        "edit_swarm_leader", "1, with the leader that this member hears; no sample: none", labels=["leader"]
    )
    if standing.leader:
        leader.add_metric([standing.leader], 1)
    yield leader
    for name, text, value in (
        ("has_leader", "1 while this member hears a leader; without one nothing is agreed on", bool(standing.leader)),
        ("leads", "1 while this member leads", standing.role == Role.LEADER.value),
        ("term", "The newest term that this member knows", standing.term),
        ("authority", "1 if this member has a copy of the authority's key", standing.authority),
        ("leaving", "1 while this member leaves", standing.leaving),
    ):
        yield GaugeMetricFamily(f"edit_swarm_{name}", text, value=value)
    members = {*record.members} if record is not None else set[str]()
    voters = {*map(peer_of, record.voters)} if record is not None else set[str]()
    for name, text, value in (
        ("lineage", "Lineage of the record; each `recover` adds one", record.lineage if record is not None else 0),
        ("record_version", "Version of the record", record.version if record is not None else 0),
        ("record_committed", "1 if the record is known to be agreed on", standing.committed),
        ("members", "Members in the record", len(members)),
        ("members_connected", "Members connected to this member, itself included", len(members & here)),
        ("voters", "Voters in the record", len(voters)),
        ("voters_connected", "Voters connected to this member, itself included", len(voters & here)),
        ("votes", "1 if this member votes", me in voters),
        ("evicted", "Members that were evicted", len(record.evicted) if record is not None else 0),
    ):
        gauge = GaugeMetricFamily(f"edit_swarm_{name}", text, labels=[])
        if record is not None:
            gauge.add_metric([], value)
        yield gauge
    phases = GaugeMetricFamily("edit_swarm_phase", "1 for the phase in the record", labels=["phase"])
    for phase in Phase if record is not None else ():
        phases.add_metric([phase.value], record is not None and record.phase is phase)
    yield phases
    yield from _of_parts(standing)
    yield from _of_members(standing)
    yield from _of_gossip(standing.gossip)


def _of_parts(standing: Standing) -> Iterator[Metric]:
    agreed = standing.record.parts if standing.record is not None else ()
    owner = GaugeMetricFamily("edit_swarm_part_owner", "1, with the owner of the part in the record", labels=["part", "owner"])
    step = GaugeMetricFamily("edit_swarm_part_outer_step", "The part's last outer step that was agreed on", labels=["part"])
    held = GaugeMetricFamily(
        "edit_swarm_part_held_outer_step", "The outer step of this member's copy of the part", labels=["part"]
    )
    lag = GaugeMetricFamily("edit_swarm_part_lag_steps", "Outer steps that this member's copy is behind", labels=["part"])
    served = GaugeMetricFamily("edit_swarm_part_served", "1 while this member serves the part's rounds", labels=["part"])
    for number, part in enumerate(standing.parts):
        label = [str(number)]
        held.add_metric(label, part.outer_step)
        served.add_metric(label, part.engine is not None)
        if number < len(agreed):
            if agreed[number].owner:
                owner.add_metric([*label, agreed[number].owner], 1)
            step.add_metric(label, agreed[number].outer_step)
            lag.add_metric(label, max(0, agreed[number].outer_step - part.outer_step))
    yield from (owner, step, held, lag, served)


def _of_members(standing: Standing) -> Iterator[Metric]:
    agreed = standing.record.parts if standing.record is not None else ()
    connected = GaugeMetricFamily("edit_swarm_member_connected", "1 while connected to this member", labels=["member"])
    live = GaugeMetricFamily(
        "edit_swarm_member_live", "1 if the leader counts the member as live; at the leader only", labels=["member"]
    )
    lag = GaugeMetricFamily(
        "edit_swarm_member_lag_steps",
        "Outer steps that a member is behind, as it says itself; at the leader only",
        labels=["member", "part"],
    )
    for each in standing.peers:
        connected.add_metric([each.peer_id], each.connected)
        if each.live is not None:
            live.add_metric([each.peer_id], each.live)
        for number, ((outer_step, _), part) in enumerate(zip(each.states, agreed, strict=False)):
            lag.add_metric([each.peer_id, str(number)], max(0, part.outer_step - outer_step))
    yield from (connected, live, lag)


def _of_gossip(gossip: GossipStanding | None) -> Iterator[Metric]:
    step = GaugeMetricFamily(
        "edit_swarm_gossip_outer_step", "With gossip: outer steps (swaps and settlings) of this member's peer", labels=[]
    )
    settlings = GaugeMetricFamily("edit_swarm_gossip_settlings", "With gossip: settlings of this member's peer", labels=[])
    distance = GaugeMetricFamily(
        "edit_swarm_gossip_distance", "Distance between the outer parameters of both peers at the last swap", labels=[]
    )
    swaps = CounterMetricFamily(
        "edit_swarm_gossip_swaps", "Swaps of this process, with the partner or alone", labels=["result"]
    )
    if gossip is not None:
        step.add_metric([], gossip.outer_step)
        settlings.add_metric([], gossip.settlings)
        swaps.add_metric(["together"], gossip.together)
        swaps.add_metric(["alone"], gossip.alone)
        if gossip.distance is not None:
            distance.add_metric([], gossip.distance)
    yield from (step, settlings, distance, swaps)
