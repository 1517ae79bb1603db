"""A short chaos run of a real swarm: processes, network namespaces, files."""

from __future__ import annotations

from pathlib import Path

import pytest

from edit.lab.chaos.faults import Fault, Kind
from edit.lab.chaos.options import ChaosOptions
from edit.lab.chaos.swarm import SwarmChaos, as_json


@pytest.mark.exhaustive
@pytest.mark.usefixtures("limited_links")
@pytest.mark.timeout(400)
def test_a_member_is_killed_and_another_is_cut_off_and_all_end_with_the_same_state(tmp_path: Path) -> None:
    faults = (
        Fault(number=1, at_s=0.5, kind=Kind.KILL_PEER, target="peer-1", lasts_s=0.5),
        Fault(number=2, at_s=1.0, kind=Kind.CABLE, target="peer-2", lasts_s=3.0),
    )
    options = ChaosOptions(swarm=True, peers=3, seconds=10.0, faults=faults, out=tmp_path / "chaos")
    said: list[str] = []
    report = SwarmChaos(options, said.append).run()
    assert report.violation is None, (report.violation, report.evidence)
    assert (report.done, report.skipped) == ({Kind.KILL_PEER: 1, Kind.CABLE: 1}, 0)
    assert report.ended == dict.fromkeys(options.peer_ids, 0)
    values = as_json(report)
    assert len(report.history.recovery_s) == 2 and values["digests_compared"] > 0
    assert min(report.history.reached.values()) > 0
