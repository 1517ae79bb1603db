"""One worker, several aggregators: the bits are those of one; a part goes on without the others; all contribute together."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from edit.collective import CompositeCollective
from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, RunConfig, StorageConfig, SyncConfig
from edit.errors import ConfigError, RefusedError, StorageError
from edit.fragments.digest import digest
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.local import LocalRun
from edit.records import Aborted, Contribution, Lacks, Outcome, Progress, Snapshot
from edit.worker.worker import EditWorker, WorkerConfig
from tests.support.encoded import FAMILIES, LOSSY
from tests.support.exhaustive import rarely
from tests.support.models import TinyTransformer, token_batches, train_step
from tests.support.trainee import config

NAMES, EVERY = ("a", "b"), 4
MODES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "forward": {"mode": "forward"},
    "delayed": {"mode": "delayed", "delay": 2},
    "eager": {"mode": "eager", "delay": 2},
}


def run_of(kind: str = "blocking", up: str = "int8", **sync: Any) -> RunConfig:
    return config(
        sync=SyncConfig(every=EVERY, **(MODES[kind] | sync)),
        outer=OuterConfig(lr=0.7, momentum=0.5),
        penalty=PenaltyConfig(),
        codec=CodecConfig(up=up, down="bf16"),
        storage=StorageConfig(keep_updates=8),
    )


class Gate:
    """A LocalRun's side of a peer whose way to its aggregator can be shut: what is sent then is lost."""

    def __init__(self, run: LocalRun, name: str) -> None:
        self._inner = run.collective(name)
        self.shut = False
        self.lost = False
        self.sent_at: list[int] = []
        self.steps: Callable[[], int] = lambda: 0

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
        return self._inner.join(schema, found, shards, lacks)

    def contribute(self, contribution: Contribution) -> None:
        self.sent_at.append(self.steps())
        if self.shut:
            self.lost = True
        else:
            self._inner.contribute(contribution)

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        if self.shut:
            return None
        if self.lost:
            self.lost = False
            return Aborted("the aggregator was away")
        return self._inner.outcome(outer_step, block=block)

    def snapshot(self) -> Snapshot:
        return self._inner.snapshot()

    def report(self, progress: Progress) -> None:
        self._inner.report(progress)


def reached(runs: Sequence[LocalRun]) -> int:
    """The largest outer step that an aggregator says."""
    return max((run.state.outer_step for run in runs if run._state is not None), default=0)


class Peer:
    """One peer of runs that have a part of the model each."""

    def __init__(self, runs: Sequence[LocalRun], name: str, run_config: RunConfig, saved: dict[str, Any] | None = None) -> None:
        self.model = TinyTransformer(seed=3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.batches = token_batches(NAMES.index(name))
        self.gates = [Gate(run, name) for run in runs]
        for gate in self.gates:
            gate.steps = lambda: self.taken
        self.taken = 0
        joined = CompositeCollective(self.gates, reached=reached(runs))
        self.worker = EditWorker(self.model, self.optimizer, joined, WorkerConfig.of(run_config))
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.worker.load_state_dict(saved["worker"])
            for _ in range(saved["taken"]):
                next(self.batches)
            self.taken = saved["taken"]
        self.worker.__enter__()

    def step(self) -> float:
        self.taken += 1
        self.worker.count_tokens(24)
        return train_step(self.model, self.optimizer, next(self.batches))

    def save(self) -> dict[str, Any]:
        everything = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "taken": self.taken}
        return copy.deepcopy(everything | {"worker": self.worker.state_dict()})

    def die(self) -> None:
        self.worker.__exit__(KeyboardInterrupt, None, None)


def joined_peers(run_config: RunConfig, parts: int) -> tuple[list[LocalRun], list[Peer]]:
    runs = [LocalRun(run_config, NAMES) for _ in range(parts)]
    return runs, [Peer(runs, name, run_config) for name in NAMES]


def trained(
    run_config: RunConfig, parts: int, steps: int, save_after: int = -1
) -> tuple[list[float], str, list[str], list[Tensor]]:
    """Losses, the digest of all theta, that which both peers show, the local parameters."""
    runs, peers = joined_peers(run_config, parts)
    losses = []
    for step in range(steps):
        if step == save_after:
            saved = [peer.save() for peer in peers]
            for peer in peers:
                peer.die()
            peers = [Peer(runs, name, run_config, one) for name, one in zip(NAMES, saved, strict=True)]
        losses += [peer.step() for peer in peers]
    for peer in peers:
        peer.worker.synchronize()
    seen = [peer.worker.digest for peer in peers]
    local = [parameter.detach().clone() for peer in peers for parameter in peer.model.parameters()]
    for peer in peers:
        peer.die()
    return losses, digest([theta for run in runs for theta in run.state.theta]), seen, local


@functools.cache
def whole_of(kind: str, up: str, parts: int, strict: bool) -> tuple[list[float], str, list[str], list[Tensor]]:
    """`trained` without an interruption, for all tests that compare with it."""
    return trained(run_of(kind, up, strict=strict), parts, 18)


@pytest.mark.sampled(2)
@pytest.mark.covering
@pytest.mark.parametrize(
    ("kind", "up", "aggregators"),
    [(kind, up, number) for kind in MODES for up in ("fp32", "int8") for number in (2, 5)]
    + rarely([("delayed", up, 2) for up in LOSSY], kept=[("delayed", up, 2) for up in FAMILIES]),
)
def test_several_aggregators_give_the_bits_of_one(kind: str, up: str, aggregators: int) -> None:
    one, several = whole_of(kind, up, 1, False), trained(run_of(kind, up), aggregators, 18)
    assert one[:3] == several[:3]
    assert set(several[2]) == {several[1]}  # the digest of all shares together is the model's
    assert all(torch.equal(a, b) for a, b in zip(one[3], several[3], strict=True))


@pytest.mark.covering
@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("save_after", [6, 8, 9])
def test_a_checkpoint_holds_all_shares_and_going_on_changes_no_bit(kind: str, save_after: int) -> None:
    whole, broken = whole_of(kind, "int8", 2, True), trained(run_of(kind, strict=True), 2, 18, save_after)
    assert whole[:3] == broken[:3]
    assert all(torch.equal(a, b) for a, b in zip(whole[3], broken[3], strict=True))


def test_what_is_saved_is_laid_out_by_parameter_whatever_share_it_is_of() -> None:
    _, (peer, other) = joined_peers(run_of("delayed"), 2)
    for _ in range(5):
        peer.step()
        other.step()
    state = peer.save()["worker"]
    names = {name for name, _ in peer.model.named_parameters()}
    assert names == set(state["outer"]) == set(state["sent_from"])
    assert len(state["scalars"]["shares"]) == 2
    empty = peer.worker.empty_state(["outer"], peer.worker.state_dict()["scalars"])
    assert {name: tensor.shape for name, tensor in empty["outer"].items()} == {
        name: parameter.shape for name, parameter in peer.model.named_parameters()
    }
    for count in (1, 3):
        runs = [LocalRun(run_of("delayed"), NAMES) for _ in range(count)]
        worker = EditWorker(
            peer.model,
            peer.optimizer,
            CompositeCollective([run.collective("a") for run in runs]),
            WorkerConfig.of(run_of("delayed")),
        )
        with pytest.raises(StorageError, match="checkpoint: "):
            worker.load_state_dict(state)


@pytest.mark.parametrize("kind", ["blocking", "delayed"])
def test_a_share_whose_aggregator_is_away_waits_and_the_others_go_on(kind: str) -> None:
    """Back again, at another optimizer step at each peer, it contributes together with the others at both: in the blocking mode
    a LocalRun would refuse to wait for a peer that has not."""
    runs, peers = joined_peers(run_of(kind), 2)

    def step(times: int) -> None:
        for _ in range(times):
            for peer in peers:
                peer.step()

    step(6)
    assert [run.state.outer_step for run in runs] == [1, 1]
    for peer in peers:
        peer.gates[1].shut = True
    step(14)
    assert [run.state.outer_step for run in runs] == [5, 1]
    assert all(peer.worker.outer_step >= 4 and peer.worker.shares[1].pending for peer in peers)
    peers[0].gates[1].shut = False
    step(1)
    assert not peers[0].worker.shares[1].pending and peers[1].worker.shares[1].pending
    peers[1].gates[1].shut = False
    step(12)
    assert [run.state.outer_step for run in runs] == [8, 4]
    for peer in peers:
        first, second = ({at for at in gate.sent_at if at > 20} for gate in peer.gates)
        assert second == first == {24, 28, 32}
        peer.worker.synchronize()
        assert [share.digest for share in peer.worker.shares] == [run.state.digest for run in runs]
    for peer in peers:
        peer.die()


def test_a_part_that_is_finished_stays_at_theta_while_the_others_train_on() -> None:
    runs, peers = joined_peers(run_of(outer_steps=3), 2)
    for peer in peers:
        peer.gates[1].shut = True
    for step in range(26):
        if step == 14:
            for peer in peers:
                assert [share.finished for share in peer.worker.shares] == [True, False] and not peer.worker.finished
                peer.gates[1].shut = False
        for peer in peers:
            peer.step()
            if peer.worker.shares[1].pending and step > 14 and peer.worker.round_inner_steps == 0:
                theta = peer.worker.outer_state_dict()["embed.weight"]
                assert torch.equal(peer.model.embed.weight, theta)
    assert [run.state.outer_step for run in runs] == [3, 3]
    for peer in peers:
        assert peer.worker.finished and peer.worker.digest == digest([t for run in runs for t in run.state.theta])
        peer.die()


def test_the_model_shows_the_outer_parameters_of_all_parts() -> None:
    peers = joined_peers(run_of(), 3)[1]
    for _ in range(7):
        for peer in peers:
            peer.step()
    peer = peers[0]
    theta = peer.worker.outer_state_dict()
    before = {name: parameter.detach().clone() for name, parameter in peer.model.named_parameters()}
    with peer.worker.outer_parameters():
        assert all(torch.equal(parameter, theta[name]) for name, parameter in peer.model.named_parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in peer.model.named_parameters())
    assert {name for name, _ in peer.model.named_parameters()} == set(theta)
    assert any(not torch.equal(before[name], theta[name]) for name in theta)
    for peer in peers:
        peer.die()


class TestFounding:
    """Each aggregator chooses a founder of its own; the run must begin with one model's parameters all the same."""

    def enter(self, runs: Sequence[LocalRun], name: str, seed: int) -> EditWorker:
        model = TinyTransformer(seed=seed)
        optimizer = torch.optim.AdamW(model.parameters())
        collectives = CompositeCollective([run.collective(name) for run in runs], reached=reached(runs))
        return EditWorker(model, optimizer, collectives, WorkerConfig.of(run_of())).__enter__()

    def half_founded(self) -> list[LocalRun]:
        """By `a`, with the model of seed 0, which then goes away."""
        runs = [LocalRun(run_of(), NAMES) for _ in range(2)]

        class Gone(Exception):
            pass

        def die(*_: object) -> Snapshot:
            raise Gone

        gate = Gate(runs[1], "a")
        gate.join = die  # type: ignore[method-assign]
        model = TinyTransformer(seed=0)
        worker = EditWorker(
            model,
            torch.optim.SGD(model.parameters()),
            CompositeCollective([runs[0].collective("a"), gate]),
            WorkerConfig.of(run_of()),
        )
        with pytest.raises(Gone):
            worker.__enter__()
        return runs

    def test_a_peer_with_the_same_model_founds_the_rest(self) -> None:
        runs = self.half_founded()
        worker = self.enter(runs, "b", seed=0)
        assert worker.digest == digest([theta for run in runs for theta in run.state.theta])
        assert torch.equal(worker.outer_state_dict()["head.weight"], TinyTransformer(seed=0).head.weight)
        worker.__exit__(KeyboardInterrupt, None, None)

    def test_a_peer_with_another_model_does_not(self) -> None:
        runs = self.half_founded()
        with pytest.raises(
            ConfigError, match="aggregator 1 asks this peer for initial parameters, but another peer has founded"
        ):
            self.enter(runs, "b", seed=1)

    @pytest.mark.parametrize("lost", [0, 1, 2])
    def test_an_aggregator_that_has_lost_its_state_is_not_founded_anew(self, lost: int) -> None:
        runs, peers = joined_peers(run_of(), 3)
        for _ in range(4):
            for peer in peers:
                peer.step()
        saved = peers[0].save()
        runs[lost] = LocalRun(run_of(), NAMES)
        said = f"aggregator {lost} has no parameters, but others of the run are at outer step 1"
        with pytest.raises(RefusedError, match=said):
            self.enter(runs, "a", seed=3)
        with pytest.raises(RefusedError, match=said):
            Peer(runs, "a", run_of(), saved)
        assert runs[lost]._state is None
        for peer in peers:
            peer.die()


def test_what_does_not_fit_the_number_of_aggregators_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 aggregators with the coordinator, but the model has 5 fragments"):
        joined_peers(run_of(), 6)
    with pytest.raises(ConfigError, match=r"sync\.groups = 4: aggregator 0 of 2 has only 2 of the model's fragments"):
        joined_peers(run_of(groups=4), 2)


@pytest.mark.parametrize("form", ["fp32", "int8"])
def test_a_share_without_a_residual_is_saved_beside_one_with(form: str) -> None:
    """One aggregator was away: nothing of its share is merged yet."""
    settings = config(sync=SyncConfig(every=EVERY), codec=CodecConfig(up="int8", down="bf16", up_residual=form))
    runs = [LocalRun(settings, NAMES[:1]) for _ in range(2)]
    peer = Peer(runs, "a", settings)
    peer.gates[1].shut = True
    for _ in range(EVERY + 1):
        peer.step()
    saved = peer.save()
    assert [share.outer_step for share in peer.worker.shares] == [1, 0]
    peer.die()
    kinds = saved["worker"].keys() - {"scalars"}
    assert len(kinds & {"residual", "residual_int8"}) == 1
    again = EditWorker(
        TinyTransformer(),
        torch.optim.SGD(TinyTransformer().parameters()),
        CompositeCollective(peer.gates),
        WorkerConfig.of(settings),
    )
    empty = again.empty_state(kinds, saved["worker"]["scalars"])
    assert all(empty[kind].keys() >= saved["worker"][kind].keys() for kind in kinds)
    back = Peer(runs, "a", settings, saved)
    assert [share.outer_step for share in back.worker.shares] == [1, 0]
    back.die()


@pytest.mark.parametrize("kind", ["blocking", "delayed", "eager"])
def test_the_last_outcome_of_one_aggregator_is_waited_for_only_once_the_others_have_none_left(kind: str) -> None:
    class Waits(Gate):
        """Counts the waits while its aggregator is away."""

        waited = 0

        def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
            self.waited += self.shut and block
            return super().outcome(outer_step, block=block)

    run_config = run_of(kind, outer_steps=3)
    runs = [LocalRun(run_config, ["a"]) for _ in range(2)]
    model, batches = TinyTransformer(seed=3), token_batches(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ahead, behind = Waits(runs[0], "a"), Gate(runs[1], "a")
    joined = CompositeCollective([ahead, behind], reached=0)
    with EditWorker(model, optimizer, joined, WorkerConfig.of(run_config)) as worker:

        def step() -> None:
            worker.take_awaited()
            train_step(model, optimizer, next(batches))

        behind.shut = True
        while not (worker.shares[0].outer_step == 2 and worker.shares[0].pending):
            step()
        ahead.shut, behind.shut = True, False
        before = worker.shares[1].outer_step
        for _ in range(2 * EVERY):
            step()
        assert before < worker.shares[1].outer_step < 3, "it goes on meanwhile"
        assert ahead.waited < EVERY, "not at each step"
        while not worker.shares[1].pending or worker.shares[1].outer_step < 2:
            step()
        ahead.waited = 0
        worker.take_awaited()
        assert ahead.waited == 1, "nothing is left to train for"
        ahead.shut = False
