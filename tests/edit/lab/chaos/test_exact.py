"""`edit-lab chaos --exact`: a seed draws a valid strict run, and a bit that differs between its two runs is found."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from edit.config.run import RunConfig
from edit.errors import ConfigError, EditError
from edit.lab import processes, procfs
from edit.lab.chaos import exact, testbed
from edit.lab.chaos.command import run_exact_chaos
from edit.lab.chaos.exact import Ending, ExactChaos, differences
from edit.lab.chaos.faults import Fault, Kind
from edit.lab.chaos.options import ChaosOptions
from tests.edit.lab.chaos.test_chaos_real import Child
from tests.support import fork_server


def test_each_seed_draws_one_strict_run_that_needs_every_peer_and_together_they_have_every_mode() -> None:
    modes, residuals = set(), set()
    for seed in range(40):
        options = ChaosOptions(exact=True, seed=seed, peers=3)
        config = RunConfig.from_mapping(options.run())
        assert config.sync.strict and config.rounds.quorum == config.rounds.start_peers == 3
        tokens = 120 * config.sync.every * options.step_tokens * 3
        assert (config.sync.outer_steps, config.sync.tokens) in ((120, 0), (480, tokens))
        assert options.run() == ChaosOptions(exact=True, seed=seed, peers=3).run()
        modes.add((config.sync.mode, config.sync.tokens > 0))
        residuals.add(config.codec.up_residual)
    assert len(modes) == 8 and {mode for mode, _ in modes} == {"blocking", "forward", "delayed", "eager"}
    assert residuals == {"fp32", "bf16", "int8", "local"}


@pytest.mark.parametrize("other", [{"swarm": True, "peers": 5}, {"masked": True, "peers": 5}, {"hostile": 1}, {"kills": 3}])
def test_what_cannot_be_combined_is_refused(other: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--exact: cannot be combined"):
        ChaosOptions(exact=True, **other)  # type: ignore[arg-type]


def ending() -> Ending:
    tensors = {"rank-00000/w": torch.tensor([1.0, float("nan"), 0.0])}
    return Ending(
        digests={1: "a" * 64, 2: "b" * 64},
        outer={"theta.0": torch.ones(3), "residual.0": torch.ones(3, dtype=torch.int8)},
        peers={"peer-0": ({"steps": 8, "worker": {"outer_step": 2, "loss": float("nan")}}, tensors)},
    )


def other_digest(it: Ending) -> None:
    it.digests[1] = "c" * 64


def other_length(it: Ending) -> None:
    it.digests[3] = "d" * 64


def other_residual(it: Ending) -> None:
    it.outer["residual.0"][1] = 2


def other_zero(it: Ending) -> None:
    it.peers["peer-0"][1]["rank-00000/w"][2] = -0.0


def other_steps(it: Ending) -> None:
    it.peers["peer-0"][0]["steps"] = 9


def lost_tensor(it: Ending) -> None:
    del it.peers["peer-0"][1]["rank-00000/w"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (other_digest, "outer step 1 has the digest cccccccccccc, not aaaaaaaaaaaa"),
        (other_length, "outer step 3 is in one of the two runs only"),
        (other_residual, "the coordinator's residual.0 has other bits"),
        (other_zero, "peer-0's rank-00000/w has other bits"),
        (other_steps, "peer-0's steps is 9, not 8"),
        (lost_tensor, "peer-0's rank-00000/w is in one of the two runs only"),
    ],
)
def test_each_difference_is_named(change: Callable[[Ending], None], found: str) -> None:
    one, other = ending(), ending()
    assert list(differences(one, other)) == []
    change(other)
    assert list(differences(one, other)) == [found]


@pytest.mark.parametrize(
    ("one", "other"),
    [({"pending": None}, {}), ({"a": {"b": None}}, {"a": {}}), ({"a": True}, {"a": 1.0}), ({"a": 0.0}, {"a": -0.0})],
)
def test_scalars_that_python_calls_equal_differ(one: dict[str, object], other: dict[str, object]) -> None:
    assert len(list(differences(Ending(peers={"p": (one, {})}), Ending(peers={"p": (other, {})})))) == 1
    assert not list(differences(Ending(peers={"p": (one, {})}), Ending(peers={"p": (one, {})})))


@pytest.mark.skipif(not procfs.available(), reason="no /proc")
def test_a_peer_with_another_digest_is_named_by_that_rule(tmp_path: Path) -> None:
    chaos = ExactChaos(ChaosOptions(exact=True, peers=2, out=tmp_path / "chaos"), lambda line: None)
    lines = {"coordinator": {"kind": "round", "committed": True, "outer_step": 1, "digest": "a" * 64}}
    lines |= {name: {"kind": "outer", "outer_step": 1, "digest": d * 64} for name, d in (("peer-0", "a"), ("peer-1", "b"))}
    bed = testbed.Testbed(ChaosOptions(exact=True, peers=2, out=tmp_path / "alone"))
    for name, line in lines.items():
        bed.metrics(name).parent.mkdir(parents=True)
        bed.metrics(name).write_text(json.dumps(line) + "\n")
    with pytest.raises(EditError):
        chaos._read(bed, Ending())
    violation = chaos.report.violation
    assert violation is not None
    assert (violation.rule, violation.who) == ("all digests of an outer step are equal", ("peer-1",))


@pytest.mark.timeout(200)
@pytest.mark.skipif(not procfs.available(), reason="no /proc")
def test_a_peer_and_the_coordinator_are_killed_and_the_bits_are_those_of_a_run_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_server.start()  # outside of the chaos, which leaves no process behind
    monkeypatch.setattr(processes, "_spawn", Child)
    faults = (
        Fault(number=1, at_s=0.2, kind=Kind.KILL_PEER, target="peer-0", lasts_s=0.2),
        Fault(number=2, at_s=0.6, kind=Kind.KILL_COORDINATOR, target=processes.COORDINATOR, lasts_s=0.2),
    )
    options = ChaosOptions(exact=True, peers=2, seconds=10.0, faults=faults, throttle=1.5, out=tmp_path / "chaos")
    report = run_exact_chaos(options, True, Console(file=io.StringIO()))
    values = json.loads(capsys.readouterr().out)
    assert values == json.loads((options.out / "chaos.json").read_text())
    assert values["violation"] is None and values["faults"] == {"kill_coordinator": 1, "kill_peer": 1}
    assert values["digests_compared"] == values["outer_steps"] == 20
    assert set(report.disturbed.peers) == {"peer-0", "peer-1"} and values["tensors_compared"] > 50


class FullDisk:
    """A testbed whose coordinator ends while its disk is full; the peers end once it is started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.done = folder, list[str]()
        self._news: list[processes.Exit] = []

    def metrics(self, name: str) -> Path:
        path = self.folder / f"{name}.jsonl"
        path.write_text(json.dumps({"kind": "round", "committed": True, "outer_step": 1, "digest": "a"}) + "\n")
        return path

    def inject(self, fault: Fault) -> None:
        self.done.append("full")
        self._news.append(processes.Exit(processes.COORDINATOR, 2, False, ()))

    def repair(self, fault: Fault) -> None:
        self.done.append("freed")

    def start(self, name: str) -> None:
        self.done.append(f"start {name}")
        self._news += [processes.Exit(f"peer-{number}", 0, False, ()) for number in range(2)]

    def unexpected_ends(self) -> list[processes.Exit]:
        news, self._news = self._news, []
        return news


def test_a_coordinator_that_ended_on_a_full_disk_is_started_once_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "_POLL_S", 0.0)
    ticks = itertools.count()
    fault = Fault(number=1, at_s=1.0, kind=Kind.FULL_DISK, target=processes.COORDINATOR, lasts_s=20.0)
    chaos = ExactChaos(ChaosOptions(exact=True, peers=2, out=tmp_path / "chaos"), lambda line: None, lambda: float(next(ticks)))
    bed = FullDisk(tmp_path)
    chaos._until_all_have_ended(bed, (fault,), 0.0)  # type: ignore[arg-type]
    assert bed.done == ["full", "freed", "start coordinator"]
