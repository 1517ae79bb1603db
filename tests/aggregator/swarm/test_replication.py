"""One part at one member: what it holds, adopts, fetches; what of others it does not believe."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aggregator.storage.journal import Disk
from aggregator.storage.store import Store
from aggregator.swarm.offers import MOST_MANIFEST, Offer
from aggregator.swarm.replication import Claimed, PartReplica, PartSnapshot, carry_out
from edit import plugins
from edit.config.run import PenaltyConfig, RunConfig
from edit.council import events as ev
from edit.council.record import MOST_COUNT, update_id
from edit.errors import ConfigError, GoneError, LocalProtocolError, RemoteProtocolError, StorageError
from edit.lab.council.parts_on_disk import RUN, merged_round, outer_state
from edit.lab.council.replicated import same
from edit.records import Verdict
from tests.support.council.replicated_table import CONFIG, SETTINGS


class Member:
    """A replica in a folder, and its disk, which can be full."""

    def __init__(self, folder: Path, config: RunConfig = SETTINGS) -> None:
        self.full, self._folder, self._config = False, folder, config
        self.store = Store(folder, config, RUN, Disk(write=self._write))
        self.replica = PartReplica(RUN, 0, config, self.store)

    def found(self) -> Member:
        self.replica.found(outer_state(self._config, 0))
        return self

    def again(self) -> Member:
        """After a kill."""
        self.store.close()
        return Member(self._folder, self._config)

    def offer(self, seed: int = 1, grant: int = 1) -> Offer:
        return self.replica.offer(grant, seed, "all are in", 30, merged_round(self.replica.outer, 3, seed))

    def step(self, *others: Member, seed: int = 1) -> Offer:
        """Take an outer step, with others."""
        offer = self.offer(seed)
        for each in (self, *others):
            each.replica.hold(offer)
            each.replica.adopt(offer.update.id)
        return offer

    def _write(self, descriptor: int, data: memoryview) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Member, Member]:
    return Member(tmp_path / "one").found(), Member(tmp_path / "other").found()


class From:
    """A source, and whoever else can say what its state is: the same member, before it changes what it sends."""

    def __init__(self, replica: PartReplica, change: Callable[[PartSnapshot], PartSnapshot] = lambda found: found) -> None:
        self._replica, self._change = replica, change

    def confirm(self, part: int, claimed: Claimed) -> None:
        if claimed != self._replica.claimed():
            raise RemoteProtocolError("it is another state")

    def kept(self, part: int, outer_step: int, update_id: str) -> Offer:
        return self._replica.kept(outer_step, update_id)

    def snapshot(self, part: int) -> PartSnapshot:
        return self._change(self._replica.snapshot())


def fetch(of: Member, *, snapshot: bool = False) -> ev.Fetch:
    state = of.replica.state
    return ev.Fetch(0, state.outer_step, state.digest, state.digest, "source", snapshot)


# -- holding and adopting ------------------------------------------------------------------------------------------------------


def test_what_is_held_moves_nothing_and_survives_a_kill(two: tuple[Member, Member]) -> None:
    one, other = two
    offer = one.offer()
    before = other.replica.snapshot()
    other.replica.hold(offer)
    assert same(other.replica.snapshot(), before)
    other = other.again()
    assert other.replica.state.held == offer.update and same(other.replica.snapshot(), before)
    other.replica.adopt(offer.update.id)
    one.replica.hold(offer)
    one.replica.adopt(offer.update.id)
    assert same(one.replica.snapshot(), other.replica.snapshot())
    assert other.replica.state.digest == offer.update.id
    assert same(other.again().replica.snapshot(), one.replica.snapshot())


def test_the_owner_keeps_what_its_record_left_out_and_the_others_follow_it(two: tuple[Member, Member]) -> None:
    one, other = two
    for seed in range(4):
        records = merged_round(one.replica.outer, 3, seed)
        offer = one.replica.offer(1, seed + 1, "all are in", 30, records)
        one.replica.hold(offer, records)
        other.replica.hold(offer)
        for each in (one, other):
            each.replica.adopt(offer.update.id)
    names = [name for name in one.replica.outer.to_tensors() if name.startswith("unrecorded")]
    assert names and not any(name.startswith("unrecorded") for name in other.replica.outer.to_tensors())
    assert same(one.replica.snapshot(), other.replica.snapshot())
    again = one.again()
    owed = again.replica.outer.to_tensors()
    assert all(torch.equal(owed[name], one.replica.outer.to_tensors()[name]) for name in names), "its restart has it, too"


@pytest.mark.parametrize(("down", "record"), [("fp32", "fp32"), ("bf16", "bf16"), ("int8", "bf16"), ("int8", "int8")])
def test_a_swarm_and_a_hub_come_to_the_same_bits(tmp_path: Path, down: str, record: str) -> None:
    """As long as no owner changes: the next one lacks what the record left out."""
    config = RunConfig.from_mapping({**CONFIG, "codec": {"up": "fp32", "down": down, "record": record}})
    hub = outer_state(config, 0)
    one, other = Member(tmp_path / "one", config).found(), Member(tmp_path / "other", config).found()
    for seed in range(6):
        records = merged_round(one.replica.outer, 3, seed)
        offer = one.replica.offer(1, seed + 1, "all are in", 30, records)
        one.replica.hold(offer, records)
        other.replica.hold(offer)
        other = other.again()  # killed while it holds it
        for each in (one, other):
            each.replica.adopt(offer.update.id)
        hub.commit(seed + 1, "all are in", merged_round(hub, 3, seed))
        assert one.replica.outer.digest == other.replica.outer.digest == hub.digest
    mine, theirs = one.replica.outer.to_tensors(), hub.to_tensors()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert one.replica.outer.metadata() == hub.metadata()


def test_another_update_takes_the_place_of_the_one_that_is_held(two: tuple[Member, Member]) -> None:
    one, other = two
    first, second = one.offer(seed=1), one.offer(seed=2, grant=2)
    other.replica.hold(first)
    other.replica.hold(second)
    with pytest.raises(LocalProtocolError, match="does not hold"):
        other.replica.adopt(first.update.id)
    other = other.again()
    assert other.replica.state.held == second.update
    other.replica.adopt(second.update.id)


def test_a_full_disk_holds_nothing_and_says_so(two: tuple[Member, Member]) -> None:
    one, other = two
    offer, state = one.offer(), other.replica.state
    other.full = True
    answer = carry_out(other.replica, ev.Hold(offer.update), offer=offer)
    assert isinstance(answer, ev.Failed) and "No space left" in answer.reason
    assert other.replica.state == state
    other.full = False
    assert carry_out(other.replica, ev.Hold(offer.update), offer=offer) == ev.Held(offer.update)


def test_a_checkpoint_ends_the_journal_of_what_was_held_before_it(two: tuple[Member, Member]) -> None:
    one, other = two
    for seed in range(5):  # a checkpoint every 2 steps
        one.step(other, seed=seed)
    offer = one.offer(seed=9)
    other.replica.hold(offer)
    other = other.again()
    assert other.replica.state.outer_step == 5 and other.replica.state.held == offer.update
    assert other.replica.outer.digest == one.replica.outer.digest


# -- what others say -----------------------------------------------------------------------------------------------------------


def changed(offer: Offer, change: Callable[[dict[str, Any]], None] = lambda _: None, **of_update: Any) -> Offer:
    """The offer of an owner that lies, under an id that is right."""
    values = json.loads(offer.manifest)
    change(values)
    return rehashed(offer, json.dumps(values).encode(), **of_update)


def rehashed(offer: Offer, manifest: bytes, **of_update: Any) -> Offer:
    update = replace(offer.update, **of_update)
    found = update_id(RUN, 0, update.outer_step, update.base, manifest, offer.hashes)
    return replace(offer, manifest=manifest, update=replace(update, id=found, digest=found))


STATISTICS = [0.0, 0.01, 20, [], None, [0.1, 0.2, 0.3], 0.1]


def lies() -> Iterator[tuple[str, Callable[[Offer], Offer]]]:
    def of_fragment(**values: Any) -> Callable[[Offer], Offer]:
        return lambda offer: changed(offer, lambda manifest: manifest["fragments"][0].update(values))

    yield "other bytes", lambda offer: replace(offer, bodies=(bytes(offer.bodies[0])[:-1] + b"x", offer.bodies[1]))
    yield "another digest", lambda offer: replace(offer, update=replace(offer.update, digest="0" * 64))
    yield "not JSON", lambda offer: rehashed(offer, b"{")
    yield "a fragment twice", of_fragment(fragment_id=1)
    yield "a fragment that is not there", of_fragment(fragment_id=7)
    yield "another codec", of_fragment(encoded=["fp32", 5])
    yield "too many elements", of_fragment(encoded=["int8", 2**40])
    yield "a residual", of_fragment(residual="int8")
    yield "an injection", of_fragment(injected=True)
    yield "another outer step", of_fragment(outer_step=5)
    yield "statistics that are none", of_fragment(statistics={"m0": 7})
    yield "verdicts that are none", of_fragment(verdicts=[["m0", "splendid", 1.0, 1.0, 0]])

    def of_verdict(i: int, value: Any) -> Callable[[Offer], Offer]:
        return lambda offer: changed(offer, lambda manifest: manifest["fragments"][0]["verdicts"][0].__setitem__(i, value))

    def of_statistics(*written: Any, peer_id: str = "m0") -> Callable[[Offer], Offer]:
        return of_fragment(statistics={peer_id: list(written)})

    def in_round(round_id: int) -> Callable[[dict[str, Any]], None]:
        def change(manifest: dict[str, Any]) -> None:
            for each in (manifest, *manifest["fragments"]):
                each["round_id"] = round_id

        return change

    yield "statistics that are no table", of_fragment(statistics=[])
    yield "statistics of a stranger", of_statistics(*STATISTICS, peer_id="stranger")
    yield "a count below 0", of_statistics(0.0, 0.01, -1, [], None, [], 0.1)
    yield "a mean that is none", of_statistics("nan", 0.01, 20, [], None, [], 0.1)
    yield "too many rejected levels", of_statistics(0.0, 0.01, 20, [0.0] * 101, None, [], 0.1)
    yield "a norm that no float is", of_verdict(2, 10**400)
    yield "staleness without end", of_verdict(4, math.inf)
    yield "staleness that no message holds", of_verdict(4, 2**70)
    yield "negative staleness", of_verdict(4, -1)
    yield "a weight that is none", of_verdict(3, "nan")
    yield "a weight above 1", of_verdict(3, 2.0)
    yield "a verdict on nobody", of_verdict(0, [])
    yield "a verdict on two lines", of_verdict(0, "a\nb")
    yield "a merged norm that no float is", of_fragment(merged_norm=10**400)
    yield "a clip above 1", of_fragment(clip=2.0)
    yield "elements without end", of_fragment(encoded=["int8", math.inf])
    yield "an outer step that is no integer", of_fragment(outer_step=2.0)
    yield "a fragment of format 3 without vectors", of_fragment(rollback=False, injected=-1)
    yield "a round that no message holds", lambda offer: changed(offer, in_round(2**70))
    yield "a reason that no message holds", lambda offer: changed(offer, lambda manifest: manifest.update(reason="\ud800"))
    yield "a round that is none", lambda offer: changed(offer, lambda manifest: manifest.update(round_id="one"))
    yield "more", lambda offer: changed(offer, lambda manifest: manifest.update(more=1))
    yield "fewer fragments", lambda offer: changed(offer, lambda manifest: manifest["fragments"].pop())
    yield "tokens that go back", lambda offer: changed(offer, lambda manifest: manifest.update(tokens=0), tokens=0)
    yield "more tokens than its id", lambda offer: replace(offer, update=replace(offer.update, tokens=MOST_COUNT))
    yield "tokens that are none", lambda offer: changed(offer, lambda manifest: manifest.update(tokens=True), tokens=1)
    yield (
        "a manifest that is too long",
        lambda offer: changed(offer, lambda manifest: manifest.update(reason="x" * MOST_MANIFEST)),
    )
    yield (
        "a manifest that is too deep",
        lambda offer: rehashed(offer, b'{"fragments":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    )
    yield "other parameters", lambda offer: changed(offer, lambda manifest: manifest.update(theta="0" * 64))
    yield "another base", lambda offer: changed(offer, base="1" * 64)


@pytest.mark.parametrize(("what", "lie"), list(lies()), ids=[what for what, _ in lies()])
def test_an_owner_that_lies_is_refused_before_anything_is_written(
    two: tuple[Member, Member], what: str, lie: Callable[[Offer], Offer]
) -> None:
    one, other = two
    one.step(other)
    offer, before = one.offer(seed=2), other.replica.snapshot()
    with pytest.raises(RemoteProtocolError) as raised:
        other.replica.hold(lie(offer))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400
    assert other.replica.state.held is None and same(other.replica.snapshot(), before)
    other.replica.hold(offer)


def test_an_owner_may_say_what_it_knows_of_the_norms_of_who_contributed(two: tuple[Member, Member]) -> None:
    one, other = two
    honest = changed(one.offer(), lambda manifest: manifest["fragments"][0].update(statistics={"m0": STATISTICS}))
    other.replica.hold(honest)
    assert other.replica.state.held == honest.update


def test_an_owner_says_what_a_plugin_knows_of_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Detector:
        def __init__(self, config: PenaltyConfig) -> None:
            pass

        def judge(self, norms: dict[str, float], *_: Any) -> Any:
            return dict.fromkeys(norms, Verdict.OK), {}

    monkeypatch.setattr(plugins, "_admitted", {})
    plugins.register("penalties", "mine", Detector)
    config = replace(SETTINGS, penalty=PenaltyConfig(detector="entry:mine"))
    one, other = (Member(tmp_path / name, config).found() for name in ("one", "other"))
    known = [0.0, -1.0, 1.5, [], None, [0.1] * 8, 0.0]
    honest = changed(one.offer(), lambda manifest: manifest["fragments"][0].update(statistics={"m0": known}))
    other.replica.hold(honest)
    assert other.replica.state.held == honest.update


def test_an_offer_that_is_not_finite_is_a_rollback_at_all(two: tuple[Member, Member]) -> None:
    one, other = two
    records = [replace(record, payload=None, residual=None) for record in merged_round(one.replica.outer, 3, 1)]
    offer = one.replica.offer(1, 1, "all are in", 30, records)
    digest = other.replica.outer.digest
    other.replica.hold(offer)
    other.replica.adopt(offer.update.id)
    assert other.replica.outer.digest == digest and other.replica.state.outer_step == 1
    assert other.replica.state.digest != digest, "a state is named by what led to it"


# -- fetching ------------------------------------------------------------------------------------------------------------------


def test_a_source_that_has_another_history_is_not_followed(two: tuple[Member, Member], tmp_path: Path) -> None:
    one, other = two
    one.step(seed=1)
    liar = Member(tmp_path / "liar").found()
    liar.step(seed=2)
    answer = carry_out(other.replica, fetch(one), source=From(liar.replica))
    assert isinstance(answer, ev.Failed) and "another outer step" in answer.reason
    assert other.replica.state.outer_step == 0
    assert carry_out(other.replica, fetch(one), source=From(one.replica)) == ev.Applied(0, 1, one.replica.state.digest)


def test_nothing_is_taken_of_updates_whose_chain_breaks(two: tuple[Member, Member], tmp_path: Path) -> None:
    """The last of them is the record's; the first is not what led there."""
    one, other = two
    liar = Member(tmp_path / "liar").found()
    liar.step(seed=7)
    one.step(seed=1)
    one.step(seed=2)

    class Mixed(From):
        def kept(self, part: int, outer_step: int, update_id: str) -> Offer:
            found = liar.replica.state.digest
            return liar.replica.kept(1, found) if outer_step == 1 else super().kept(part, outer_step, update_id)

        def snapshot(self, part: int) -> PartSnapshot:
            raise GoneError("no snapshot")

    answer = carry_out(other.replica, fetch(one), source=Mixed(one.replica))
    assert isinstance(answer, ev.Failed) and other.replica.state.outer_step == 0 and other.replica.state.held is None


def test_a_source_that_lies_about_what_came_before_keeps_nobody_back(two: tuple[Member, Member]) -> None:
    """Only the record can say that another history led to its outer step; a source's word is checked by the id."""
    one, other = two
    one.step(other, seed=1)
    one.step(seed=2)

    class Rebased(From):
        def kept(self, part: int, outer_step: int, update_id: str) -> Offer:
            found = super().kept(part, outer_step, update_id)
            return replace(found, update=replace(found.update, base="1" * 64))

    answer = carry_out(other.replica, fetch(one), source=Rebased(one.replica))
    assert isinstance(answer, ev.Failed) and not answer.is_forked and not other.store.forked
    assert isinstance(carry_out(other.replica, fetch(one), source=From(one.replica)), ev.Applied)


def test_a_note_that_a_state_is_kept_ends_with_the_state_and_is_not_passed_over_when_it_is_damaged(
    two: tuple[Member, Member], tmp_path: Path
) -> None:
    one, other = two
    one.step(other, seed=1)
    one.step(seed=2)
    other.store.mark_forked(other.replica.state.digest)
    far = replace(fetch(one), update="1" * 64)  # which no source has
    answer = carry_out(other.replica, far, source=From(one.replica))
    assert isinstance(answer, ev.Failed) and answer.is_forked and other.replica.state.outer_step == 1
    note = tmp_path / "other" / "forked.json"
    text = note.read_bytes()
    note.write_bytes(text[:9])
    answer = carry_out(other.replica, far, source=From(one.replica))
    assert isinstance(answer, ev.Failed) and "forked.json: cannot be read" in answer.reason
    note.write_bytes(text)
    assert isinstance(carry_out(other.replica, fetch(one), source=From(one.replica)), ev.Applied)
    one.step(seed=3)
    assert carry_out(other.replica, replace(fetch(one), snapshot=True), source=From(one.replica)) == ev.Applied(
        0, 3, one.replica.state.digest
    )


def test_a_source_that_counts_other_tokens_with_the_right_bytes_is_not_followed(two: tuple[Member, Member]) -> None:
    """Else nothing that comes would be held: tokens never go back."""
    one, other = two
    one.step()

    class Counts(From):
        def kept(self, part: int, outer_step: int, update_id: str) -> Offer:
            found = super().kept(part, outer_step, update_id)
            return replace(found, update=replace(found.update, tokens=MOST_COUNT))

    answer = carry_out(other.replica, fetch(one), source=Counts(one.replica))
    assert isinstance(answer, ev.Failed) and "other tokens" in answer.reason and other.replica.state.outer_step == 0
    assert isinstance(carry_out(other.replica, fetch(one), source=From(one.replica)), ev.Applied)
    one.step(other, seed=2)


def test_a_snapshot_that_is_damaged_changes_nothing(two: tuple[Member, Member]) -> None:
    one, other = two
    one.step()
    before = other.replica.snapshot()

    def flipped(found: PartSnapshot) -> PartSnapshot:
        found.tensors["theta.1"][7] += 1
        return found

    for change in (
        flipped,
        lambda found: replace(found, name="3" * 64),
        lambda found: replace(found, tokens=-1),
        lambda found: replace(found, metadata={**found.metadata, "outer_step": 0}),
        lambda found: replace(found, metadata={**found.metadata, "statistics": [{"m0": [10**400, *STATISTICS[1:]]}, {}]}),
        lambda found: replace(found, metadata={**found.metadata, "injected": ["r", math.inf, 1]}),
        lambda found: replace(found, metadata={}),
        lambda found: replace(found, schema="{}"),
        lambda found: replace(found, tensors={}),
    ):
        answer = carry_out(other.replica, fetch(one, snapshot=True), source=From(one.replica, change))
        assert isinstance(answer, ev.Failed), answer
        assert same(other.replica.snapshot(), before)
    assert same(other.again().replica.snapshot(), before)


@pytest.mark.parametrize("held", [False, True])
def test_a_member_whose_parameters_are_damaged_notices_and_takes_a_snapshot(two: tuple[Member, Member], held: bool) -> None:
    one, other = two
    one.step(other)
    outer = outer_state(SETTINGS, 0)
    outer.commit(1, "all are in", merged_round(outer, 3, 99))  # other parameters than the state's name means
    offer = one.offer(seed=5)
    if held:  # before it is damaged
        assert carry_out(other.replica, ev.Hold(offer.update), offer=offer) == ev.Held(offer.update)
    other.replica._outer = outer
    if held:
        answer = carry_out(other.replica, ev.Adopt(0, 2, offer.update.id, offer.update.digest))
        assert isinstance(answer, ev.Applied) and (answer.outer_step, answer.digest) != (2, offer.update.id)
    else:
        answer = carry_out(other.replica, ev.Hold(offer.update), offer=offer)
        assert isinstance(answer, ev.Failed) and "is for other parameters" in answer.reason
    one.replica.hold(offer)
    one.replica.adopt(offer.update.id)

    class Without(From):
        def snapshot(self, part: int) -> PartSnapshot:
            raise GoneError("not now")

    for _ in range(2):
        assert isinstance(carry_out(other.replica, fetch(one, snapshot=held), source=Without(one.replica)), ev.Failed)
        for ask in (other.replica.snapshot, other.replica.claimed):
            with pytest.raises(GoneError, match="is damaged"):
                ask()
    answer = carry_out(other.replica, fetch(one, snapshot=held), source=From(one.replica))
    assert answer == ev.Applied(0, 2, offer.update.id)
    assert same(one.replica.snapshot(), other.replica.snapshot())
    assert same(other.again().replica.snapshot(), one.replica.snapshot())


@pytest.mark.parametrize("had", ["nothing", "the same outer step"])
def test_a_restart_after_a_snapshot_publishes_no_update_that_did_not_lead_to_it(
    two: tuple[Member, Member], caplog: pytest.LogCaptureFixture, had: str
) -> None:
    one, other = two
    for seed in (1, 2):
        one.step(seed=seed)
        if had == "the same outer step":
            other.step(seed=10 + seed)  # another history
    if had == "the same outer step":
        other.store.checkpoint(other.replica.outer)
        other.replica._damaged = True  # else it is kept
    answer = carry_out(other.replica, fetch(one, snapshot=True), source=From(one.replica))
    assert answer == ev.Applied(0, 2, one.replica.state.digest)
    again = other.again()
    assert again.store.oldest_update == 0 and not caplog.records
    offer = one.step(again, seed=3)
    assert again.store.oldest_update == 3 and again.replica.state.digest == offer.update.id


def test_a_snapshot_that_cannot_be_written_leaves_what_was_there(
    two: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    other.step(seed=1)
    one.step(seed=2)
    one.step(seed=3)
    before = other.replica.snapshot()

    def full(*_: object, **__: object) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr("aggregator.storage.checkpoint.save", full)
        answer = carry_out(other.replica, fetch(one, snapshot=True), source=From(one.replica))
    assert isinstance(answer, ev.Failed) and same(other.replica.snapshot(), before)
    assert carry_out(other.replica, fetch(one, snapshot=True), source=From(one.replica)) == ev.Applied(
        0, 2, one.replica.state.digest
    )
    assert same(other.again().replica.snapshot(), one.replica.snapshot())


def test_a_folder_of_another_configuration_is_refused(two: tuple[Member, Member], tmp_path: Path) -> None:
    one, other = two
    one.step(other)
    other.store.close()
    values = {**CONFIG, "outer": {"optimizer": "sgd"}}
    with pytest.raises(ConfigError, match="optimizer"):
        Member(tmp_path / "other", RunConfig.from_mapping(values))


def test_what_was_not_asked_for_is_our_own_bug(two: tuple[Member, Member]) -> None:
    one, other = two
    update = one.offer().update
    for effect in (ev.Hold(update), ev.Adopt(0, 1, update.id, update.id), fetch(one)):
        with pytest.raises(LocalProtocolError):
            carry_out(other.replica, effect)
