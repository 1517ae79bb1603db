"""LocalRun with sharded replicas and streaming groups: parts, answers to every rank, cut payloads and snapshots."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from edit.codecs import codec_names
from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, RunConfig, StorageConfig, SyncConfig
from edit.errors import LocalProtocolError
from edit.fragments.digest import digest
from edit.fragments.groups import fragments_due
from edit.fragments.schema import Schema, plan_fragments
from edit.fragments.shards import Box, Shard
from edit.local import LocalCollective, LocalRun
from edit.records import Aborted, Committed, Contribution, Evicted, Finished, NeedsSnapshot
from tests.support.encoded import cut, decode_shard, encode
from tests.support.layouts import rows, whole
from tests.support.models import TinyTransformer

MODEL = TinyTransformer()
SCHEMA: Schema = plan_fragments(MODEL.named_parameters())
THETA = [
    torch.cat([MODEL.get_parameter(tensor.name).detach().flatten() for tensor in fragment.tensors])
    for fragment in SCHEMA.fragments
]
EXACT = {
    "outer": OuterConfig(optimizer="sgd", lr=1.0),
    "penalty": PenaltyConfig(enabled=False),
    "codec": CodecConfig(up="fp32", down="fp32"),
}


def config(**sections: object) -> RunConfig:
    return RunConfig(**EXACT | sections)  # type: ignore[arg-type]


class Sharded:
    """A peer of `ranks` ranks; each holds, and contributes, its rows (or columns: dimension 1) of every tensor."""

    def __init__(self, run: LocalRun, peer_id: str, ranks: int, dimension: int = 0) -> None:
        layouts = [rows(fragment, ranks, dimension) for fragment in SCHEMA.fragments]
        self.shards = [
            [Shard(fragment, layout[rank]) for fragment, layout in zip(SCHEMA.fragments, layouts, strict=True)]
            for rank in range(ranks)
        ]
        self.sides: list[LocalCollective] = [run.collective(peer_id) for _ in range(ranks)]
        self.joined = [side.join(SCHEMA, lambda: THETA, shards) for side, shards in zip(self.sides, self.shards, strict=True)]
        self.theta = [[part.clone() for part in snapshot.fragments] for snapshot in self.joined]

    def contribute(
        self, deltas: Sequence[Tensor], due: Sequence[int], outer_step: int, ranks: Sequence[int], work: int = 1
    ) -> None:
        for rank in ranks:
            for i in due:
                shard = self.shards[rank][i]
                if shard.numel:
                    payload = encode("fp32", shard.take(deltas[i]))
                    part = Contribution(
                        outer_step=outer_step, fragment_id=i, inner_steps=work, tokens=1, payload=payload, boxes=shard.boxes
                    )
                    self.sides[rank].contribute(part)

    def everywhere(self, deltas: Sequence[Tensor], due: Sequence[int], outer_step: int) -> None:
        self.contribute(deltas, due, outer_step, range(len(self.sides)))

    def apply(self, outer_step: int) -> None:
        """Every rank takes its part of the commit from `outer_step`."""
        for side, shards, theta in zip(self.sides, self.shards, self.theta, strict=True):
            outcome = side.outcome(outer_step, block=True)
            assert isinstance(outcome, Committed)
            for fragment in outcome.commit.fragments:
                if fragment.payload is not None:
                    i = fragment.fragment_id
                    theta[i] = theta[i] - decode_shard(fragment.payload, shards[i])


def random_deltas(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(fragment.numel, generator=generator) for fragment in SCHEMA.fragments]


ALL = tuple(range(len(SCHEMA.fragments)))


def one_peer(**sections: object) -> tuple[LocalRun, Sharded]:
    run = LocalRun(config(**sections), ["a"])
    return run, Sharded(run, "a", 2)


@pytest.mark.sampled(2)
@pytest.mark.covering
@pytest.mark.parametrize("down", codec_names())
@pytest.mark.parametrize(("groups", "pattern"), [(1, "strided"), (2, "strided"), (3, "sequential")])
def test_the_run_is_the_same_to_the_bit_however_its_replicas_are_sharded(down: str, groups: int, pattern: str) -> None:
    sections = {
        "codec": CodecConfig(up="fp32", down=down),
        "outer": OuterConfig(),
        "sync": SyncConfig(every=6, groups=groups, pattern=pattern),
    }
    digests = set()
    for layout in (((1, 0), (1, 0)), ((2, 0), (3, 0)), ((3, 1), (1, 0)), ((5, 0), (2, 1))):
        run = LocalRun(config(**sections), ["a", "b"])
        peers = [Sharded(run, name, *shape) for name, shape in zip("ab", layout, strict=True)]
        for outer_step in range(2 * groups):
            due = fragments_due(outer_step, len(ALL), groups, pattern)
            assert run.state.due == due
            for seed, peer in enumerate(peers):
                peer.everywhere(random_deltas(10 * outer_step + seed), due, outer_step)
            assert run.state.outer_step == outer_step + 1
            for peer in peers:
                peer.apply(outer_step)
        for peer in peers:
            for shards, theta in zip(peer.shards, peer.theta, strict=True):
                for i in ALL:
                    assert torch.equal(theta[i], shards[i].take(run.state.theta[i]))
        digests.add(run.state.digest)
    assert len(digests) == 1 and digests != {digest(THETA)}


def test_a_fragment_is_in_when_its_parts_cover_it_and_not_before() -> None:
    run, peer = one_peer()
    peer.contribute(random_deltas(0), ALL, 0, ranks=[0])
    assert run.state.outer_step == 0 and peer.sides[0].outcome(0, block=False) is None
    with pytest.raises(LocalProtocolError, match="a must contribute first"):
        peer.sides[0].outcome(0, block=True)
    peer.contribute(random_deltas(0), ALL, 0, ranks=[1])
    assert run.state.outer_step == 1
    peer.apply(0)


def test_an_aborted_round_is_told_to_every_rank_once_even_when_another_has_contributed_again() -> None:
    run, peer = one_peer()
    first, second = peer.sides
    peer.contribute(random_deltas(0), ALL, 0, ranks=[0])
    run.abort("power cut")
    assert first.outcome(0, block=False) == Aborted("power cut") and first.outcome(0, block=False) is None
    peer.contribute(random_deltas(1), ALL, 0, ranks=[0], work=2)
    assert second.outcome(0, block=False) == Aborted("power cut") and second.outcome(0, block=False) is None
    peer.contribute(random_deltas(1), ALL, 0, ranks=[1], work=2)
    assert all(isinstance(side.outcome(0, block=True), Committed) for side in peer.sides)
    assert not any(isinstance(side.outcome(1, block=False), Aborted) for side in peer.sides)


def test_a_rank_that_contributed_again_is_not_told_of_the_round_before() -> None:
    run, peer = one_peer()
    peer.contribute(random_deltas(0), ALL, 0, ranks=[0])
    run.abort("power cut")
    peer.contribute(random_deltas(0), ALL, 0, ranks=[0])
    assert peer.sides[0].outcome(0, block=False) is None
    run.abort("again")
    assert [side.outcome(0, block=True) for side in peer.sides] == [Aborted("again")] * 2


def test_a_new_attempt_of_one_rank_takes_nothing_of_the_others_old_one() -> None:
    run, peer = one_peer()
    peer.contribute(random_deltas(0), ALL, 0, ranks=[0], work=1)
    peer.contribute(random_deltas(1), ALL, 0, ranks=[1], work=2)
    assert run.state.outer_step == 0
    peer.contribute(random_deltas(1), ALL, 0, ranks=[0], work=2)
    expected = [theta - delta for theta, delta in zip(THETA, random_deltas(1), strict=True)]
    assert run.state.outer_step == 1 and all(torch.equal(a, b) for a, b in zip(run.state.theta, expected, strict=True))


def test_a_snapshot_is_of_the_ranks_regions_with_the_digest_of_the_whole() -> None:
    run, peer = one_peer()
    peer.everywhere(random_deltas(0), ALL, 0)
    for side, shards in zip(peer.sides, peer.shards, strict=True):
        snapshot = side.snapshot()
        assert (snapshot.outer_step, snapshot.digest) == (1, run.state.digest)
        for shard, part, theta in zip(shards, snapshot.fragments, run.state.theta, strict=True):
            assert torch.equal(part, shard.take(theta))
    assert all(torch.equal(a, b) for a, b in zip(peer.joined[0].fragments, peer.theta[0], strict=True))


def test_payloads_are_cut_to_each_ranks_regions_and_whole_without_any() -> None:
    run = LocalRun(config(codec=CodecConfig(up="fp32", down="int8")), ["a", "b"])
    peer, plain = Sharded(run, "a", 2), run.collective("b")
    plain.join(SCHEMA, list)
    peer.everywhere(random_deltas(0), ALL, 0)
    for i in ALL:
        plain.contribute(
            Contribution(outer_step=0, fragment_id=i, inner_steps=1, tokens=1, payload=encode("fp32", random_deltas(1)[i]))
        )
    published = plain.outcome(0, block=True)
    assert isinstance(published, Committed)
    for side, shards in zip(peer.sides, peer.shards, strict=True):
        mine = side.outcome(0, block=True)
        assert isinstance(mine, Committed) and mine.commit.digest == published.commit.digest
        for ours, all_of_it in zip(mine.commit.fragments, published.commit.fragments, strict=True):
            assert ours.payload is not None and all_of_it.payload is not None
            expected = cut(all_of_it.payload, shards[ours.fragment_id])
            assert (ours.payload.numel, bytes(ours.payload.data)) == (expected.numel, bytes(expected.data))


def test_a_rollback_has_no_payload_at_any_rank() -> None:
    _, peer = one_peer()
    broken = [torch.full((fragment.numel,), float("nan")) for fragment in SCHEMA.fragments]
    peer.everywhere(broken, ALL, 0)
    for side in peer.sides:
        outcome = side.outcome(0, block=True)
        assert isinstance(outcome, Committed) and all(fragment.payload is None for fragment in outcome.commit.fragments)


def test_every_rank_gets_the_same_final_answers() -> None:
    run, peer = one_peer(storage=StorageConfig(keep_updates=1), sync=SyncConfig(outer_steps=2))
    peer.everywhere(random_deltas(0), ALL, 0)
    peer.everywhere(random_deltas(1), ALL, 1)
    for side in peer.sides:
        assert isinstance(side.outcome(0, block=True), NeedsSnapshot) and side.outcome(2, block=True) == Finished(2)
    run.evict("a", "misbehaved")
    assert [side.outcome(2, block=True) for side in peer.sides] == [Evicted("misbehaved")] * 2


def test_only_the_due_fragments_are_taken() -> None:
    run, peer = one_peer(sync=SyncConfig(every=4, groups=2))
    with pytest.raises(
        LocalProtocolError, match=r"fragment 1 for outer step 0; the run is at outer step 0, fragments \[0, 2, 4\]"
    ):
        peer.contribute(random_deltas(0), [1], 0, ranks=[0])
    peer.everywhere(random_deltas(0), [0, 2, 4], 0)
    outcome = peer.sides[0].outcome(0, block=True)
    assert isinstance(outcome, Committed) and [one.fragment_id for one in outcome.commit.fragments] == [0, 2, 4]
    assert all(torch.equal(run.state.theta[i], THETA[i]) for i in (1, 3)) and run.state.due == (1, 3)
    peer.contribute(random_deltas(0), [0], 0, ranks=[0])
    assert run.state.outer_step == 1, "late, and dropped"


def test_shards_that_overlap_or_payloads_of_another_length_are_our_bug() -> None:
    run = LocalRun(config(), ["a"])
    side = run.collective("a")
    side.join(SCHEMA, lambda: THETA)
    fragment = SCHEMA.fragments[0]
    first, whole_box = Box(0, (0, 0), (1, 8)), whole(fragment)[0]

    def part(box: Box, numel: int) -> Contribution:
        payload = encode("fp32", torch.zeros(numel))
        return Contribution(outer_step=0, fragment_id=0, inner_steps=1, tokens=1, payload=payload, boxes=(box,))

    with pytest.raises(LocalProtocolError, match="peer a, fragment embed: 7 elements for 8"):
        side.contribute(part(first, 7))
    side.contribute(part(first, 8))
    with pytest.raises(LocalProtocolError, match=r"peer a: tensor embed.weight: two shards overlap"):
        side.contribute(part(whole_box, whole_box.numel))
