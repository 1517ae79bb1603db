"""What a regional aggregator brings to a real coordinator: durable before it is promised, in with the next commit, once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import grpc
import pytest
import torch
from torch import Tensor

from aggregator.security.members import Members
from aggregator.storage import checkpoint
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import load_outer
from edit.errors import StorageError
from edit.fragments.digest import digest
from edit.merging.injection import Injected
from editpb import data_pb2, data_pb2_grpc, tensors_pb2
from editpb.control_messages import coordinator_message_from_pb, peer_message_to_pb
from editpb.injection_messages import inject_header_to_pb, injection_state_from_pb
from editpb.messages import Hello, InjectHeader, InjectionState, View
from editpb.transport.chunks import make_chunks
from tests.support.encoded import encode
from tests.support.loops import on_a_loop, until
from tests.support.served import SCHEMA, TOML, BarePeer, Served, found_run, new_folder, served, theta

ABOVE = "above"
ONES = [torch.ones(fragment.numel) for fragment in SCHEMA.fragments]


def delta(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [0.1 * torch.randn(fragment.numel, generator=generator) for fragment in SCHEMA.fragments]


def header(run: Served, parts: Sequence[Tensor], **changes: object) -> InjectHeader:
    values = {
        "run_id": run.folder.run_id,
        "schema_hash": SCHEMA.schema_hash,
        "brings": Injected(ABOVE, 5, 0),
        "base": None,
        "replaces": False,
        "fragments": tuple(range(len(parts))),
        "digest": digest(parts),
    }
    return InjectHeader(**values | changes)  # type: ignore[arg-type]


def messages(said: InjectHeader, parts: Sequence[Tensor]) -> list[data_pb2.InjectPart]:
    chunks = [
        data_pb2.InjectPart(chunk=data_pb2.FragmentChunk(fragment_id=i, chunk=chunk))
        for i, part in zip(said.fragments, parts, strict=True)
        for chunk in make_chunks(part.numpy().tobytes(), 512)
    ]
    return [data_pb2.InjectPart(header=inject_header_to_pb(said)), *chunks]


async def send(run: Served, sent: Iterable[data_pb2.InjectPart], role: str = "region") -> None:
    async with run.channel(f"the-{role}", role) as channel:
        await data_pb2_grpc.DataStub(channel).Inject(iter(sent))


async def state(run: Served) -> InjectionState:
    async with run.channel("the-region", "region") as channel:
        request = data_pb2.InjectionStateRequest(run_id=run.folder.run_id)
        return injection_state_from_pb(await data_pb2_grpc.DataStub(channel).DescribeInjection(request))


async def inject(run: Served, parts: Sequence[Tensor], **changes: object) -> None:
    await send(run, messages(header(run, parts, **changes), parts))


async def refused(run: Served, sent: Iterable[data_pb2.InjectPart], role: str = "region") -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await send(run, sent, role)
    return f"{error.value.code().name}: {error.value.details()}"


async def commit(peer: BarePeer, step: int) -> View:
    view = await peer.view(lambda v: v.outer_step == step and v.round_id > 0)
    await peer.contribute(view.round_id, step, delta(step))
    after = await peer.view(lambda v: v.outer_step == step + 1)
    await peer.report(step + 1)
    return after


def moved(start: Sequence[Tensor], deltas: Sequence[Tensor], injected: Sequence[Tensor]) -> list[Tensor]:
    """theta - (D - injected), as fp32 has it."""
    return [t - (d - i) for t, d, i in zip(start, deltas, injected, strict=True)]


def test_it_is_in_the_next_commit_and_peers_need_nothing_new(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            await found_run(a)
            before = await state(run)
            assert (before.outer_step, before.injected, before.accepted) == (0, None, None)
            await inject(run, ONES)
            assert (await state(run)).accepted == Injected(ABOVE, 5, 0)
            after = await commit(a, 0)
            expected = moved(theta(), delta(0), ONES)
            assert after.digest == digest(expected) == (await a.fetch(1)).digest
            now = await state(run)
            assert (now.outer_step, now.injected, now.accepted) == (1, Injected(ABOVE, 5, 0), None)
            assert now.tokens == 10
            nothing_more = await commit(a, 1)
            assert nothing_more.digest == digest([t - d for t, d in zip(expected, delta(1), strict=True)])

    asyncio.run(scenario())


def test_the_parameters_of_the_run_above_replace_those_of_a_fresh_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            await found_run(a)
            target = theta(seed=9)
            await inject(run, target, replaces=True)
            after = await commit(a, 0)
            assert after.digest == digest([t - (t - x) for t, x in zip(theta(), target, strict=True)])

    asyncio.run(scenario())


def test_a_word_without_bytes_only_says_what_is_in(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            await found_run(a)
            await inject(run, [])
            after = await commit(a, 0)
            assert after.digest == digest([t - d for t, d in zip(theta(), delta(0), strict=True)])
            assert (await state(run)).injected == Injected(ABOVE, 5, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("kill_after", ["promised", "committed", "checkpointed"])
def test_a_killed_coordinator_brings_it_in_once_and_to_the_bit(tmp_path: Path, kill_after: str) -> None:
    async def run_steps(path: Path, kill: str) -> list[str]:
        folder, digests, step, promised = new_folder(path), [], 0, False
        while step < 5:
            async with served(folder, kill=True) as run, run.peer("a") as a:
                await (found_run(a) if step == 0 and not promised else a.attend())
                await a.report(step)
                while step < 5:
                    if step == 1 and not promised:
                        await inject(run, ONES)
                        promised = True
                        if kill == "promised":
                            break
                    digests.append((await commit(a, step)).digest)
                    step += 1
                    if kill == {2: "committed", 4: "checkpointed"}.get(step):
                        assert (await state(run)).injected == Injected(ABOVE, 5, 0)
                        kill = ""
                        break
                kill = "" if kill == "promised" and promised else kill
        assert load_outer(folder).injected == Injected(ABOVE, 5, 0)
        return digests

    async def scenario() -> tuple[list[str], list[str]]:
        return await run_steps(tmp_path / "one", ""), await run_steps(tmp_path / "two", kill_after)

    whole, interrupted = asyncio.run(scenario())
    assert whole == interrupted and len(set(whole)) == 5
    assert not list((tmp_path / "two" / "outer" / "injection").glob("step-*"))


def replace_key(run: Served) -> None:
    """The region has another machine from now on."""
    run.certificate("the-region", "region", anew=True)
    run.coordinator.run.end_replaced()


def evict(run: Served) -> None:
    run.coordinator.run.evict("the-region", "stolen key")


def files(folder: StateFolder) -> list[Path]:
    return list((folder.outer / "injection").glob("step-*"))


def without_the_sender(folder: StateFolder) -> None:
    """Write the file as a version did that did not say who brought it."""
    (path,) = files(folder)
    tensors, metadata = checkpoint.load(path)
    del metadata["sender"]
    checkpoint.save(path.parent, tensors, metadata, keep=1)


def without_keys(folder: StateFolder) -> None:
    """Write members.json as a version did that did not keep the members' keys."""
    path = folder.path / "members.json"
    values = json.loads(path.read_text())
    for row in values["members"]:
        del row["key"], row["expires"]
    path.write_text(json.dumps({"format": 2, "members": values["members"]}))


AS_WITHOUT = digest([t - d for t, d in zip(theta(), delta(0), strict=True)])


@pytest.mark.parametrize("killed", [False, True], ids=["", "killed then"])
@pytest.mark.parametrize("shut_out", [evict, replace_key])
@on_a_loop
async def test_what_a_region_brought_that_is_shut_out_is_dropped(
    tmp_path: Path, shut_out: Callable[[Served], None], killed: bool
) -> None:
    folder = new_folder(tmp_path / "run")
    async with served(folder, kill=True) as run, run.peer("a") as a:
        await found_run(a)
        await inject(run, theta(seed=9), replaces=True)
        assert run.coordinator.run.rounds.accepted and files(folder)
        shut_out(run)
        assert run.coordinator.run.rounds.accepted is None and not files(folder)
        if not killed:
            assert (await commit(a, 0)).digest == AS_WITHOUT
    if killed:
        async with served(folder) as run, run.peer("a") as a:
            await a.attend()
            await a.report(0)
            assert (await commit(a, 0)).digest == AS_WITHOUT


@pytest.mark.parametrize("shut_out", ["evicted", "another key"])
@pytest.mark.parametrize("noted", [True, False], ids=["", "by an older version"])
@on_a_loop
async def test_what_a_region_brought_is_dropped_when_only_the_members_were_written_before_a_kill(
    tmp_path: Path, shut_out: str, noted: bool
) -> None:
    folder = new_folder(tmp_path / "run")
    async with served(folder, kill=True) as run, run.peer("a") as a:
        await found_run(a)
        await inject(run, theta(seed=9), replaces=True)
    if shut_out == "evicted":
        Members(folder.path / "members.json").evict("the-region", "stolen key")
    else:
        run.certificate("the-region", "region", anew=True)
    if not noted:
        without_the_sender(folder)
    async with served(folder) as run, run.peer("a") as a:
        comes_in = shut_out == "another key" and not noted  # nobody knows whose it was
        assert (run.coordinator.run.rounds.accepted is not None) == bool(files(folder)) == comes_in
        if comes_in:
            replace_key(run)
        await a.attend()
        await a.report(0)
        assert (await commit(a, 0)).digest == AS_WITHOUT


@pytest.mark.parametrize("keys", [True, False])
@on_a_loop
async def test_what_an_older_version_promised_comes_in(tmp_path: Path, keys: bool) -> None:
    folder = new_folder(tmp_path / "run")
    async with served(folder, kill=True) as run, run.peer("a") as a:
        await found_run(a)
        await inject(run, ONES)
    without_the_sender(folder)
    if not keys:
        without_keys(folder)
    async with served(folder) as run, run.peer("a") as a:
        if not keys:
            await state(run)  # now the region's key is known
            run.coordinator.run.end_replaced()
        await a.attend()
        await a.report(0)
        assert (await commit(a, 0)).digest == digest(moved(theta(), delta(0), ONES))


@on_a_loop
async def test_another_machine_of_the_region_brings_it_once(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
        await found_run(a)
        await inject(run, ONES)
        replace_key(run)
        assert (await state(run)).accepted is None, "so the region brings it again"
        await inject(run, ONES)
        first = await commit(a, 0)
        expected = moved(theta(), delta(0), ONES)
        assert first.digest == digest(expected)
        assert (await state(run)).injected == Injected(ABOVE, 5, 0)
        assert (await commit(a, 1)).digest == digest([t - d for t, d in zip(expected, delta(1), strict=True)])


@on_a_loop
async def test_a_round_that_merged_a_part_with_what_an_evicted_region_brought_is_aborted(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run", start=2)) as run, run.peer("a") as a, run.peer("b") as b:
        round_id, machine = (await found_run(a, b)).round_id, run.coordinator.run.rounds.machine
        await inject(run, ONES)
        for peer in (a, b):
            data = bytes(encode("fp32", delta(0)[0]).data)
            await peer.send(peer.header(round_id, 0, 0, len(data)), list(make_chunks(data, 512)))
        await until(lambda: machine._round is not None and machine._round.reduced == {0})
        evict(run)
        aborted = await a.view(lambda view: view.round_id > round_id)
        assert aborted.last_reason == "the-region was evicted, and a part of what it sent is merged already"
        for peer in (a, b):
            await peer.contribute(aborted.round_id, 0, delta(0))
        assert (await a.view(lambda view: view.outer_step == 1)).digest == AS_WITHOUT


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "failed"])
@on_a_loop
async def test_what_an_evicted_region_brought_is_in_the_commit_under_way_or_in_none(tmp_path: Path, fails: bool) -> None:
    async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
        round_id = (await found_run(a)).round_id
        await inject(run, ONES)
        rounds = run.coordinator.run.rounds
        begin, accepted = rounds.published.begin, list[Injected | None]()

        def evict_and_begin() -> None:
            evict(run)
            accepted.append(rounds.accepted)  # for this commit another machine of the region waits
            rounds.published.begin = begin
            if fails:
                raise StorageError("the disk is full")
            begin()

        rounds.published.begin = evict_and_begin
        await a.contribute(round_id, 0, delta(0))
        if fails:
            await a.view(lambda view: view.round_id > round_id)
            assert rounds.accepted is None
            after = await commit(a, 0)
        else:
            after = await a.view(lambda view: view.outer_step == 1)
        assert accepted == [Injected(ABOVE, 5, 0)] and rounds.accepted is None
        assert after.digest == (AS_WITHOUT if fails else digest(moved(theta(), delta(0), ONES)))


def test_a_promise_that_the_disk_lost_is_told_and_can_be_repeated(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder, kill=True) as run, run.peer("a") as a:
            await found_run(a)
            await inject(run, ONES)
        file = next((folder.outer / "injection").glob("step-*"))
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        async with served(folder) as run:
            assert (await state(run)).accepted is None
            await inject(run, ONES)
            assert (await state(run)).accepted == Injected(ABOVE, 5, 0)

    asyncio.run(scenario())


def test_a_newer_one_takes_the_place_of_one_that_is_not_in_yet(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            await found_run(a)
            await inject(run, ONES)
            twos = [2 * part for part in ONES]
            await inject(run, twos, brings=Injected(ABOVE, 6, 0))
            assert (await commit(a, 0)).digest == digest(moved(theta(), delta(0), twos))
            assert "computed for nothing, but outer step 6 of above is in" in await refused(
                run, messages(header(run, ONES), ONES)
            )

    asyncio.run(scenario())


def test_only_a_region_may_inject_and_it_takes_no_part_in_rounds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            await found_run(a)
            sent = messages(header(run, ONES), ONES)
            for role in ("peer", "observer", "operator"):
                assert f"PERMISSION_DENIED: role {role} may not do this; it needs region" in await refused(run, sent, role)
            async with run.channel("the-region", "region") as channel:
                bare = BarePeer("the-region", run.folder.run_id, channel, SCHEMA)
                await bare.open_stream()
                expel = await bare._until(lambda m: hasattr(m, "evicted"))
                assert "takes no part in the rounds" in str(expel)
                await bare.disconnect()
                asking = BarePeer("the-region", run.folder.run_id, channel, SCHEMA)
                asking._call = asking.control.Attend()
                await asking._call.write(peer_message_to_pb(Hello(run_id=run.folder.run_id)))
                welcome = coordinator_message_from_pb(await asking._call.read())
                assert "sync" in welcome.config_json  # what a run exchanges, it may know
            assert (await commit(a, 0)).digest == digest([t - d for t, d in zip(theta(), delta(0), strict=True)])

    asyncio.run(scenario())


def flip(chunk: tensors_pb2.Chunk) -> None:
    chunk.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]


Alter = Callable[[list[data_pb2.InjectPart]], object]
DAMAGE: list[tuple[str, Alter, str]] = [
    ("a flipped bit", lambda m: flip(m[1].chunk.chunk), "does not have the digest"),
    ("another digest", lambda m: setattr(m[0].header, "digest", "0" * 64), "does not have the digest"),
    ("a missing chunk", lambda m: m.pop(2), "a chunk at byte 512 where 0 was due"),
    ("too short", lambda m: m.pop(), "bytes arrived"),
    ("a fragment not named", lambda m: setattr(m[1].chunk, "fragment_id", 9), "only chunks of the fragments"),
    ("no header", lambda m: m.pop(0), "begins with its header"),
    ("another model", lambda m: setattr(m[0].header, "schema_hash", "1" * 64), "another model"),
    ("another run", lambda m: setattr(m[0].header, "run_id", "other"), "not other"),
    ("of a later step", lambda m: setattr(m[0].header.brings, "lower_step", 7), "this run is at 0"),
    ("nothing there", lambda m: m.clear(), "begins with its header"),
]


@pytest.mark.parametrize(("alter", "words"), [(a, w) for _, a, w in DAMAGE], ids=[name for name, _, _ in DAMAGE])
def test_a_damaged_one_is_refused_and_touches_nothing(tmp_path: Path, alter: Alter, words: str) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            await found_run(a)
            sent = messages(header(run, ONES), ONES)
            alter(sent)
            assert words in await refused(run, sent)
            assert (await state(run)).accepted is None
            assert (await commit(a, 0)).digest == digest([t - d for t, d in zip(theta(), delta(0), strict=True)])

    asyncio.run(scenario())


def test_what_is_not_finite_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            await found_run(a)
            parts = [ONES[0], torch.full_like(ONES[1], torch.inf)]
            assert "INVALID_ARGUMENT: fragment 1 of an injection is not finite" in await refused(
                run, messages(header(run, parts), parts)
            )
            some = header(run, ONES[:1], replaces=True)
            assert "must be all of them" in await refused(run, messages(some, ONES[:1]))

    asyncio.run(scenario())


def test_before_the_founding_there_is_nothing_to_inject_into(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            assert "FAILED_PRECONDITION: the run has no parameters yet" in await refused(run, messages(header(run, ONES), ONES))

    asyncio.run(scenario())


def test_a_run_with_groups_of_fragments_has_no_run_above(tmp_path: Path) -> None:
    async def scenario() -> None:
        toml = TOML.replace("every = 2", "every = 2\ngroups = 2")
        async with served(new_folder(tmp_path / "run", toml=toml)) as run, run.peer("a") as a:
            await found_run(a)
            said = header(run, ONES)
            assert "PERMISSION_DENIED: sync.groups = 2" in await refused(run, messages(said, ONES))

    asyncio.run(scenario())
