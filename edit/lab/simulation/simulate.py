"""Run a scenario in virtual time: build the fleet, run its events, end the run."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from functools import partial
from random import Random

from edit.lab.simulation.accounting import Accounting
from edit.lab.simulation.coordinator import Coordinator
from edit.lab.simulation.event_queue import EventQueue
from edit.lab.simulation.link import HubLink, Line
from edit.lab.simulation.merging import SyntheticMerger
from edit.lab.simulation.outcome import Outcome
from edit.lab.simulation.pace import Pace
from edit.lab.simulation.peer import Peer
from edit.lab.simulation.scenario import PeerClass, Scenario

__all__ = ["Simulation", "simulate"]

BYTES_PER_MBIT = 1e6 / 8
ORDINARY = PeerClass(share=1.0)
LOOK_EVERY = 4096  # events between two reports of progress
Progress = Callable[[int, float], None]  # commits, virtual seconds


class Simulation:
    """One run. Two runs of the same scenario do the same, event by event."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.queue = EventQueue()
        self.accounting = Accounting()
        merger = SyntheticMerger(scenario.run.penalty, scenario.damaged, scenario.seed) if scenario.merge else None
        self.coordinator = Coordinator(scenario, self.queue, self.accounting, merger)
        rate = scenario.hub.gbit_s * 1000 * BYTES_PER_MBIT or math.inf
        self._hub = HubLink(rate), HubLink(rate)
        self._speeds: list[float] = []
        self.peers = [self._peer(place, group) for place, group in enumerate(_groups(scenario))]

    def run(self, progress: Progress = lambda commits, seconds: None) -> Outcome:
        """Run to the last commit, to the end of the hours, or until nothing can happen any more; then let the peers finish."""
        for peer in self.peers:
            peer.start()
        until, queue = self.scenario.hours * 3600.0, self.queue
        while queue.run(until, LOOK_EVERY):
            progress(self.accounting.commits, queue.now)
        ended, events = self.coordinator.finished_at, queue.events
        seconds = ended if ended is not None else min(until, queue.now) if math.isfinite(until) else queue.now
        accounting = self._so_far()
        progress(accounting.commits, seconds)
        if ended is not None:
            self._drain()
        stuck = sum(peer.stuck for peer in self.peers)
        return Outcome.of(self.scenario, accounting, seconds, events, self._ideal_steps(seconds), ended is not None, stuck)

    def _so_far(self) -> Accounting:
        """The sums as they are now, with what the living have done so far."""
        now = self.queue.now
        accounting = copy.copy(self.accounting)
        for peer in self.peers:
            steps, training_s, alive_s = peer.so_far(now)
            accounting.trained += steps
            accounting.training_s += training_s
            accounting.alive_s += alive_s
        return accounting

    def _drain(self) -> None:
        """After the last commit: every peer that lives finds out; nobody returns."""
        while any(peer.alive for peer in self.peers) and self.queue.run(math.inf, len(self.peers)):
            pass

    def _ideal_steps(self, seconds: float) -> float:
        return sum(seconds / step_s for step_s in self._speeds)

    def _peer(self, place: int, group: PeerClass) -> Peer:
        scenario, random = self.scenario, Random(f"{self.scenario.seed} {place}")
        compute, link = scenario.compute, scenario.link
        step_s = compute.step_s * group.slower * math.exp(random.gauss(0.0, compute.sigma))
        rate = group.bandwidth * BYTES_PER_MBIT * math.exp(random.gauss(0.0, link.sigma))
        line = Line(
            up=link.up_mbit * rate,
            down=link.down_mbit * rate,
            latency_s=link.latency_s * group.latency * math.exp(random.gauss(0.0, link.latency_sigma)),
            into=self._hub[0],
            out_of=self._hub[1],
        )
        self._speeds.append(step_s)
        failures = scenario.faults.failures_per_hour * group.failures
        parts = Pace(step_s, compute, random), line, random, failures
        peer = Peer(f"peer-{place:06}", scenario, self.queue, self.coordinator, self.accounting, parts)
        if group.dies_s:
            self.queue.at(group.dies_s, partial(peer.die, group.after_s))
        return peer


def simulate(scenario: Scenario, progress: Progress = lambda commits, seconds: None) -> Outcome:
    """Run one scenario. The garbage collector is off meanwhile: there are no cycles, and it takes a sixth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return Simulation(scenario).run(progress)
    finally:
        if collects:
            gc.enable()


def _groups(scenario: Scenario) -> list[PeerClass]:
    """Return every peer's class: whole peers by the shares, in an order that the seed decides."""
    groups: list[PeerClass] = []
    for group in scenario.classes:
        groups += [group] * min(round(group.share * scenario.peers), scenario.peers - len(groups))
    groups += [ORDINARY] * (scenario.peers - len(groups))
    Random(f"{scenario.seed} classes").shuffle(groups)
    return groups
