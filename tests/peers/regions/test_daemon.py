"""The regional daemon's loop between two runs in this process."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edit.config.run import SyncConfig
from edit.errors import ConfigError
from edit.fragments.schema import Schema
from edit.local import LocalRun
from edit.merging.injection import Injection
from edit.regional_peer import Below
from editpb.messages import InjectionState, RunPhase
from peers.regions.daemon import _Regional
from tests.support.regions import Site, upper_config


class Nobody:
    """An I/O thread that does not wait, and a collective that is only reported to."""

    def wait(self, look: object, timeout: float) -> None: ...
    def check(self) -> None: ...
    def report(self, heartbeat: object) -> None: ...


class BelowOf:
    """The run below of a site, as `RunBelow` shows it, but for the looks that are cut off. Before each, it takes an outer step,
    and another region completes the round above that waits for it."""

    def __init__(self, site: Site, other: Site, cut_off: set[int]) -> None:
        self.site, self.other, self.cut_off, self.looks = site, other, cut_off, 0

    def look(self) -> InjectionState | None:
        self.looks += 1
        assert self.looks < 50, "the loop does not end"
        self.site.train()
        self.other.hand_down()
        if self.site.region.worker.pending:
            self.other.turn()
        state = self.site.run.state
        if self.looks in self.cut_off:
            return None
        return InjectionState(
            outer_step=state.outer_step, phase=RunPhase.COLLECTING, tokens=0, injected=state.injected, accepted=None
        )

    def came_back(self) -> bool:
        return self.looks - 1 in self.cut_off

    def parameters(self, state: InjectionState, schema: Schema) -> tuple[Schema, Below]:
        return schema, self.site.below()

    def inject(self, injection: Injection, schema: Schema) -> bool:
        self.site.run.inject(injection)
        return True


class Gone:
    """A run below that does not answer."""

    looks = 0

    def look(self) -> None:
        self.looks += 1
        assert self.looks < 500, "the loop does not end"


def daemon_of(site: Site, below: object, clock: Callable[[], float] = time.monotonic) -> _Regional:
    enrolled = cast(Any, SimpleNamespace(endpoints=["nowhere:1"], credentials=None, run_id="below"))
    subject = _Regional(cast(Any, Nobody()), enrolled, enrolled, site.memory, clock=clock)
    subject._below = cast(Any, below)
    return subject


def test_a_region_of_two_runs_that_are_over_ends_when_the_one_below_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    above = upper_config(sync=SyncConfig(every=3, outer_steps=2))
    upper = LocalRun(above, ["east", "west"])
    site, other = Site(upper, above, "east", [1, 2]), Site(upper, above, "west", [3, 4])
    for _ in range(2):
        site.turn()
        other.turn()
    site.region.catch_up()
    assert site.region.finished
    seconds = itertools.count()
    with caplog.at_level(logging.INFO, "peers"):
        daemon_of(site, Gone(), lambda: float(next(seconds)))._loop(
            site.region, site.run.state.schema, cast(Any, Nobody()), site.config
        )
    assert "nobody answers for the run below" in caplog.text and next(seconds) > 120


@pytest.mark.parametrize("cut_off", [set(), {3}, {4}, {5}, {6}, {4, 5}, {5, 6}])
def test_the_last_outer_step_above_goes_below_although_the_one_before_came_in_while_nobody_looked(cut_off: set[int]) -> None:
    above = upper_config(sync=SyncConfig(every=3, outer_steps=4))
    upper = LocalRun(above, ["east", "west"])
    site, other = Site(upper, above, "east", [1, 2]), Site(upper, above, "west", [3, 4])
    subject = daemon_of(site, BelowOf(site, other, cut_off))
    subject._configuration = lambda *_: site.config  # type: ignore[method-assign]
    subject._loop(site.region, site.run.state.schema, cast(Any, Nobody()), site.config)
    assert site.region.finished
    site.train()  # what was handed down comes in with the next commit
    assert site.run.state.injected is not None and site.run.state.injected.upper_step == 4


@pytest.mark.parametrize("every", [1, 3, 6])
def test_other_settings_of_a_run_below_that_was_started_again_count_or_end_the_region(every: int) -> None:
    above = upper_config(sync=SyncConfig(every=3, outer_steps=4))
    upper = LocalRun(above, ["east", "west"])
    site, other = Site(upper, above, "east", [1, 2]), Site(upper, above, "west", [3, 4])
    subject = daemon_of(site, BelowOf(site, other, {3}))
    now = dataclasses.replace(site.config, sync=dataclasses.replace(site.config.sync, every=every))
    subject._configuration = lambda *_: now  # type: ignore[method-assign]
    if every == 6:
        with pytest.raises(ConfigError, match="every 3 inner steps, the run below every 6"):
            subject._loop(site.region, site.run.state.schema, cast(Any, Nobody()), site.config)
        assert cast(Any, subject._below).looks == 4
        return
    subject._loop(site.region, site.run.state.schema, cast(Any, Nobody()), site.config)
    assert site.region.finished and site.region.interval == every
