"""The regional daemon: a run below, as one peer of a run above.

It starts and ends both connections, looks at both runs in a loop, reports and logs. What is computed is `edit.regional_peer`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from edit import kernels, plugins
from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.fragments.schema import Schema
from edit.records import Progress
from edit.regional_peer import Below, Memory, RegionalPeer
from editpb.messages import InjectionState, RunPhase
from editpb.transport.send_limit import UNLIMITED, SendLimit, send_limit
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective, Siblings, read_configuration
from peers.carriers.hub.control_stream import ConfigParser
from peers.carriers.hub.masking import MaskFolder
from peers.carriers.hub.site import NOWHERE, Site
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import Interrupted, leaving
from peers.daemon import stopping
from peers.identity.peer_folder import Enrolment, PeerFolder
from peers.identity.policy import SitePolicy
from peers.identity.renewal import Renewal
from peers.own_site import site_of
from peers.regions.last_contribution import SentFile
from peers.regions.lower_run import RunBelow

__all__ = ["run_region"]

LOOK_S = 0.5  # between two looks at the run below
GONE_S = 120.0  # without an answer of the run below, once the run above has finished: it is over, too
_log = logging.getLogger("peers")


def run_region(
    home: Path,
    below: Path,
    max_mbit: float | None = None,
    allowed: frozenset[str] = frozenset(),
    members: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Be the peer that `home` is enrolled as, on behalf of the run that `below` is enrolled in.

    Returns when one of the runs has finished, or at the first SIGINT or SIGTERM. max_mbit: what is sent to the run above, per
    second. allowed: codecs that are plug-ins, which this operator trusts. members: of the run above, as
    `SitePolicy.members` takes them. Raises ConfigError, RefusedError, EvictedError.
    """
    upper, lower = _enrolled(home, "peer", "the run above"), _enrolled(below, "region", "the run below")
    if upper.run_id == lower.run_id:
        raise ConfigError(f"--home {home} and --below {below} are of the same run {upper.run_id}")
    folder = PeerFolder(home)
    policy = SitePolicy.load(home, upper.identity, folder.key)
    if policy.protect.clip:
        clip = f"protect.clip = {policy.protect.clip:g}"
        raise ConfigError(f"{home / 'policy.toml'}: {clip}: the progress of a whole run is not shortened; remove it")
    _log.info(kernels.load())
    with IoThread() as io, stopping(io):
        try:
            regional = _Regional(
                io,
                upper,
                lower,
                SentFile(home / "sent.safetensors", upper.run_id),
                send_limit(max_mbit, home, policy.limits.max_gb_per_day),
                allowed,
                site=site_of(policy, folder, MaskFolder(folder.revealed, policy.members(members, "--members"))),
            )
            for path, enrolled, channels in ((home, upper, regional.above), (below, lower, regional.below)):
                io.spawn(Renewal(PeerFolder(path), enrolled, channels).keep())
            regional.run()
        except Interrupted:
            _log.info("stopping as asked")


def _enrolled(home: Path, role: str, run: str) -> Enrolment:
    enrolled = PeerFolder(home).load(time.time())
    if enrolled.identity.role != role:
        raise ConfigError(f"{home}: enrolled as {enrolled.identity.role}; {run} must invite with --role {role}")
    return enrolled


class _Regional:
    """One region between two runs. clock: monotonic seconds."""

    def __init__(
        self,
        io: IoThread,
        upper: Enrolment,
        lower: Enrolment,
        memory: Memory,
        limit: SendLimit = UNLIMITED,
        allowed: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
        site: Site = NOWHERE,
    ) -> None:
        self._io, self._upper, self._lower, self._memory, self._clock = io, upper, lower, memory, clock
        self._parser, self._allowed, self._site = ConfigParser(), allowed, site
        self._above = ConfigParser(site.check, site.configuration)
        self.above = Channels(upper.endpoints, upper.credentials, limit)
        self.below = Channels(lower.endpoints, lower.credentials)
        self._below = RunBelow(io, self.below.to(lower.endpoints), lower.run_id)
        self._step_s = 0.0
        self._moved_at = clock()
        self._told = ""

    def run(self) -> None:
        """Run until one of the runs has finished. Raises Interrupted, ConfigError, RefusedError, EvictedError."""
        with closing(self._below):
            lower, upper = self._configuration(self._lower, self.below), self._configuration(self._upper, self.above)
            schema, below = self._founded()
            channels, siblings = self.above.to(self._upper.endpoints), Siblings(parser=self._above)
            with leaving(
                HubCollective(self._io, channels, self._upper.identity, siblings=siblings, site=self._site)
            ) as collective:
                region = RegionalPeer(schema, below, collective, upper, lower, self._upper.run_id, self._memory)
                with region:
                    self._say_joined(region)
                    self._loop(region, schema, collective, lower)
            self._say_ended(region)

    def _configuration(self, enrolled: Enrolment, channels: Channels) -> RunConfig:
        parser = self._above if enrolled is self._upper else self._parser
        config, _ = read_configuration(self._io, channels.to(enrolled.endpoints), enrolled.identity, parser=parser)
        plugins.admit(config, self._allowed, ("codecs",))
        if config.aggregators.addresses:
            raise ConfigError(
                f"run {enrolled.run_id} has {config.aggregators.count} aggregators (aggregators.addresses); the run above a "
                "region and the run below must have one each"
            )
        return config

    def _founded(self) -> tuple[Schema, Below]:
        """Return the run below, once it has parameters, and in them all that an earlier life of this process injected."""
        _log.info("waiting for the parameters of run %s below", self._lower.run_id)
        while True:
            state = self._look()
            if state.accepted is not None and state.phase is not RunPhase.FINISHED:
                self._tell(f"waiting for the run below to take outer step {state.accepted.upper_step} of the run above")
            elif (found := self._below.parameters(state)) is not None:
                return found

    def _look(self) -> InjectionState:
        """Return the state of the run below, as soon as it says so, after a pause."""
        while True:
            self._io.wait(lambda: None, timeout=LOOK_S)
            if (state := self._below.look()) is not None:
                return state

    def _loop(self, region: RegionalPeer, schema: Schema, collective: HubCollective, lower: RunConfig) -> None:
        """Look at both runs until the one below has finished, or the one above has and all of it is below or nobody there."""
        answered_at = self._clock()
        while True:
            self._io.wait(lambda: None, timeout=LOOK_S)
            collective.check()
            state = self._below.look()
            if state is not None or not region.finished:
                answered_at = self._clock()
            if state is not None and self._below.came_back():
                lower = self._adopt(region, lower)
            if state is not None and state.outer_step != region.below.outer_step:
                self._follow(region, schema, state)
            region.catch_up()
            self._report(region, collective)
            if state is None:
                if self._clock() - answered_at >= GONE_S:
                    _log.info("nobody answers for the run below; restart this region if it goes on")
                    return
                continue
            brought = self._bring(region, schema, state)
            ended = state.phase is RunPhase.FINISHED and state.outer_step == region.below.outer_step
            if ended or (region.finished and brought):
                return

    def _adopt(self, region: RegionalPeer, lower: RunConfig) -> RunConfig:
        """Return the configuration of the run below, which may be another one since its coordinator was started again."""
        now = self._configuration(self._lower, self.below)
        if now != lower:
            _log.info("the run below has other settings now")
            region.adopt(now)
        return now

    def _follow(self, region: RegionalPeer, schema: Schema, state: InjectionState) -> None:
        found, now, before = self._below.parameters(state, schema), self._clock(), region.below.outer_step
        if found is None:
            return
        region.moved(found[1])
        self._step_s = (now - self._moved_at) / max(1, region.interval * (state.outer_step - before))
        self._moved_at = now

    def _bring(self, region: RegionalPeer, schema: Schema, state: InjectionState) -> bool:
        """Inject below what is new above. Return True when there is nothing (more) to inject."""
        injection = region.injection(state.accepted)
        if injection is None:
            return True
        if injection.brings in (state.accepted, state.injected):
            return injection.brings.upper_step == region.worker.outer_step
        if state.injected != injection.base or not self._below.inject(injection, schema):
            return False
        whole = " whole, in place of its own parameters" if injection.replaces else ""
        _log.info("outer step %d of the run above goes below%s", injection.brings.upper_step, whole)
        return True

    # ---- reports and log lines ---------------------------------------------------------------------------------------------

    def _report(self, region: RegionalPeer, collective: HubCollective) -> None:
        worker = region.worker
        collective.report(
            Progress(
                exchanging=worker.pending,
                outer_step=worker.outer_step,
                digest=worker.digest,
                inner_steps=worker.inner_steps,
                round_inner_steps=worker.round_inner_steps,
                step_s=self._step_s,
            )
        )
        line = f"outer step {worker.outer_step} above, {region.below.outer_step} below"
        self._tell(f"{line}: {worker.last_reason}" if worker.last_reason else line)

    def _say_joined(self, region: RegionalPeer) -> None:
        fresh = "; its own parameters will be those of the run above" if region.fresh else ""
        _log.info(
            "joined run %s above at outer step %d, with run %s below at outer step %d%s",
            self._upper.run_id,
            region.worker.outer_step,
            self._lower.run_id,
            region.below.outer_step,
            fresh,
        )

    def _say_ended(self, region: RegionalPeer) -> None:
        which = "above" if region.finished else "below"
        _log.info("the run %s has finished, at outer step %d above", which, region.worker.outer_step)

    def _tell(self, line: str) -> None:
        if line != self._told:
            self._told = line
            _log.info("%s", line)
