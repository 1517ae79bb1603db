"""A real coordinator over mutual TLS: whole rounds, restarts, and everything a faulty or hostile peer may send."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import torch

from aggregator.export import export_parameters
from aggregator.security.authority import Authority
from aggregator.server import Coordinator
from aggregator.storage.operator_flags import OperatorFlags
from aggregator.storage.store import load_outer
from edit.codecs import decode
from edit.errors import ConfigError, RefusedError, StorageError
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.records import Verdict
from editpb import control_pb2, control_pb2_grpc, data_pb2
from editpb.control_messages import peer_message_to_pb
from editpb.data_messages import contribution_header_to_pb
from editpb.identity import Identity
from editpb.messages import PROTOCOL, Expel, Hello, RunPhase
from editpb.status_messages import status_from_pb
from editpb.transport.chunks import make_chunks
from tests.aggregator.security.test_authority import new_key, request
from tests.support.encoded import encode
from tests.support.loops import on_a_loop, until
from tests.support.served import SCHEMA, TOML, BarePeer, Served, found_run, new_folder, served, theta


def delta(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [0.1 * torch.randn(fragment.numel, generator=generator) for fragment in SCHEMA.fragments]


async def commit_one(peers: list[BarePeer], step: int, seeds: list[int]) -> None:
    """Every peer contributes to the round of `step` and reports the next one."""
    view = await peers[0].view(lambda v: v.outer_step == step and v.round_id > 0)
    for peer, seed in zip(peers, seeds, strict=True):
        await peer.contribute(view.round_id, step, delta(seed))
    for peer in peers:
        await peer.view(lambda v: v.outer_step == step + 1)
        await peer.report(step + 1)


def test_a_round_commits_the_mean_and_every_peer_gets_the_same_bytes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", start=2)) as run, run.peer("a") as a, run.peer("b") as b:
            view = await found_run(a, b)
            await a.contribute(view.round_id, 0, delta(1))
            await b.contribute(view.round_id, 0, delta(2))
            after = await a.view(lambda v: v.outer_step == 1)
            one, other = await a.fetch(1), await b.fetch(1)
            assert [bytes(f.payload.data) for f in one.fragments] == [bytes(f.payload.data) for f in other.fragments]
            mean = [(x * 0.5 + y * 0.5) for x, y in zip(delta(1), delta(2), strict=True)]
            expected = [t - m for t, m in zip(theta(), mean, strict=True)]
            assert after.digest == digest(expected) == one.digest
            assert after.last_reason == "all 2 contributors in"

    asyncio.run(scenario())


def test_peers_share_what_may_be_on_its_way_and_a_peers_ranks_share_its_part(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a, run.replica("b", 4) as (b, *others):
            whole = run.folder.config().storage.buffer_bytes // 4
            await found_run(a)
            assert (await a.view(lambda v: v.round_id > 0)).ahead_bytes == whole
            for rank in (b, *others):
                await rank.attend()
            assert (await b.view(lambda v: v.outer_step == 0)).ahead_bytes == whole // 2 // 4
            assert (await a.view(lambda v: v.ahead_bytes != whole)).ahead_bytes == whole // 2

    asyncio.run(scenario())


@pytest.mark.parametrize("kill_after", [1, 2, 3, 4])
def test_a_killed_coordinator_continues_bit_for_bit(tmp_path: Path, kill_after: int) -> None:
    """Around the checkpoint at step 3: kill, restart, and the rest of the run equals the uninterrupted one."""

    async def run_steps(folder_path: Path, kills: set[int]) -> str:
        folder, step = new_folder(folder_path), 0
        while step < 6:
            async with served(folder, kill=True) as run, run.peer("a") as a:
                if step == 0:
                    await found_run(a)
                else:
                    await a.attend()
                    await a.report(step)
                while step < 6:
                    await commit_one([a], step, [step])
                    step += 1
                    if step in kills:
                        kills.discard(step)
                        break
        return load_outer(folder).digest

    async def scenario() -> tuple[str, str]:
        return await run_steps(tmp_path / "one", set()), await run_steps(tmp_path / "two", {kill_after})

    whole, interrupted = asyncio.run(scenario())
    assert whole == interrupted


def test_a_torn_journal_loses_only_what_was_never_committed(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder, kill=True) as run, run.peer("a") as a:
            await found_run(a)
            await commit_one([a], 0, [1])
            assert run.coordinator.run.rounds.outer.outer_step == 1
        before = load_outer(folder)
        journal = folder.outer / "step-00000000.journal"
        journal.write_bytes(journal.read_bytes() + b"torn half of a record")
        async with served(folder) as run:
            assert run.coordinator.run.founded
            assert run.coordinator.run.rounds.outer.digest == before.digest
            assert run.coordinator.run.rounds.outer.outer_step == 1

    asyncio.run(scenario())


def test_the_update_of_an_in_doubt_contribution_survives_the_restart(tmp_path: Path) -> None:
    """Killed right after commit and checkpoint: the peer must still learn that its work is merged, or it would count twice."""

    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder) as run, run.peer("a") as a:
            await found_run(a)
            for step in range(3):
                await commit_one([a], step, [step])
        assert (folder.outer / "step-00000003.safetensors").exists()
        async with served(folder) as run, run.peer("a") as a:
            await a.attend()
            view = await a.view()
            assert (view.outer_step, view.oldest_update) == (3, 1)
            commits = [await a.fetch(outer_step) for outer_step in (1, 2, 3)]
            assert [commit.outer_step for commit in commits] == [1, 2, 3]
            assert commits[-1].digest == view.digest
            assert commits[-1].fragments[0].verdict_of("a").verdict is Verdict.OK

    asyncio.run(scenario())


def test_round_ids_are_never_used_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder, seen = new_folder(tmp_path / "run"), []
        async with served(folder) as run, run.peer("a") as a:
            seen.append((await found_run(a)).round_id)
        async with served(folder) as run, run.peer("a") as a:
            await a.attend()
            await a.report(0)
            seen.append((await a.view(lambda v: v.round_id > 0)).round_id)
        assert seen[1] > seen[0]

    asyncio.run(scenario())


def test_nonfinite_contributions_roll_back_and_the_run_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            view = await found_run(a)
            bad = delta(1)
            bad[0][2], bad[1][7] = float("nan"), float("inf")
            await a.contribute(view.round_id, 0, bad)
            after = await a.view(lambda v: v.outer_step == 1)
            assert after.digest == digest(theta())
            commit = await a.fetch(1)
            assert [f.verdict_of("a").verdict for f in commit.fragments] == [Verdict.NONFINITE] * 2
            assert all(f.payload is None for f in commit.fragments)
            await a.report(1)
            await commit_one([a], 1, [5])

    asyncio.run(scenario())


Sabotage = Callable[[BarePeer, int], "tuple[object, list[object]]"]
DATA = bytes(encode("fp32", delta(1)[1]).data)
CHUNKS = list(make_chunks(DATA, 512))


@pytest.mark.parametrize(
    ("changes", "chunks", "code", "words"),
    [
        ({"peer_id": "somebody"}, CHUNKS, grpc.StatusCode.PERMISSION_DENIED, "certificate is a's"),
        ({"run_id": "another-run"}, CHUNKS, grpc.StatusCode.PERMISSION_DENIED, "this is run"),
        ({"schema_hash": "0" * 64}, CHUNKS, grpc.StatusCode.PERMISSION_DENIED, "another model"),
        ({"round_id": 999_000_001}, CHUNKS, grpc.StatusCode.FAILED_PRECONDITION, "is not open"),
        ({"outer_step": 7}, CHUNKS, grpc.StatusCode.FAILED_PRECONDITION, "computed against outer step 7"),
        ({"total_bytes": 4}, CHUNKS, grpc.StatusCode.INVALID_ARGUMENT, "bytes"),
        ({"numel": 299, "total_bytes": 299 * 4}, CHUNKS, grpc.StatusCode.INVALID_ARGUMENT, "299"),
        ({}, [*CHUNKS, *make_chunks(b"more" * 4)], grpc.StatusCode.INVALID_ARGUMENT, ""),
        ({}, [CHUNKS[1], CHUNKS[0], *CHUNKS[2:]], grpc.StatusCode.INVALID_ARGUMENT, "gap"),
    ],
    ids=["peer_id", "run", "schema", "round", "outer_step", "size", "numel", "surplus", "reordered"],
)
def test_a_bad_contribution_is_refused_in_one_line_and_touches_nothing(
    tmp_path: Path, changes: dict[str, object], chunks: list[object], code: grpc.StatusCode, words: str
) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", start=2)) as run, run.peer("a") as a, run.peer("b") as b:
            view = await found_run(b, a)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await a.send(a.header(view.round_id, 0, 1, len(DATA), changes), chunks)
            assert refused.value.code() is code, refused.value.details()
            assert words in refused.value.details()
            assert "\n" not in refused.value.details()
            await a.disconnect()  # without a, b's contribution alone is the round
            await b.contribute(view.round_id, 0, delta(2))
            after = await b.view(lambda v: v.outer_step == 1)
            assert after.digest == digest([t - d for t, d in zip(theta(), delta(2), strict=True)])

    asyncio.run(scenario())


def test_another_codec_than_the_runs_takes_the_peer_out_of_the_round(tmp_path: Path) -> None:
    """Whoever sends fp32 where the run says top-k sends a hundred times the bytes, and has an advantage by it."""

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", start=2)) as run, run.peer("a") as a, run.peer("b") as b:
            view = await found_run(b, a)
            data = bytes(encode("bf16", delta(1)[1]).data)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                header = a.header(view.round_id, 0, 1, len(data), {"codec": "bf16"})
                await a.send(header, make_chunks(data))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "fragment 1, rank 0 is encoded as bf16, the run takes fp32" in refused.value.details()
            await b.contribute(view.round_id, 0, delta(2))  # the round no longer waits for a
            after = await b.view(lambda v: v.outer_step == 1)
            assert after.digest == digest([t - d for t, d in zip(theta(), delta(2), strict=True)])

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["twice", "descending", "padding"])
def test_bytes_that_no_encoder_writes_take_the_peer_out_of_the_round(tmp_path: Path, where: str) -> None:
    """Right size, right checksums, and yet no vector: it is found when the fragment is decoded, before anything is merged."""

    async def scenario() -> None:
        folder = new_folder(tmp_path / "run", start=2, toml=TOML.replace('up = "fp32"', 'up = "topk:k=3"'))
        async with served(folder) as run, run.peer("a") as a, run.peer("b") as b:
            view = await found_run(b, a)
            data = bytearray(encode("topk:k=3", delta(1)[1]).data)
            if where == "padding":
                data[-1] |= 0x40
            else:  # positions 5, 5 or 5, 4; 12 bits each
                data[8:11] = bytes([5, (5 if where == "twice" else 4) << 4, 0])
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await a.send(a.header(view.round_id, 0, 1, len(data), {"codec": "topk:k=3"}), make_chunks(bytes(data)))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            words = "padding bits are not zero" if where == "padding" else "do not ascend, or are outside"
            assert words in refused.value.details() and "\n" not in refused.value.details()
            for i, one in enumerate(delta(2)):
                whole = bytes(encode("topk:k=3", one).data)
                await b.send(b.header(view.round_id, 0, i, len(whole), {"codec": "topk:k=3"}), make_chunks(whole))
            after = await b.view(lambda v: v.outer_step == 1)
            sent = [decode(encode("topk:k=3", one)) for one in delta(2)]
            assert after.digest == digest([t - d for t, d in zip(theta(), sent, strict=True)])

    asyncio.run(scenario())


def test_duplicated_chunks_and_a_repeated_contribution_count_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            view = await found_run(a)
            first, second = (bytes(encode("fp32", d).data) for d in delta(1))
            pieces = list(make_chunks(second, 256))
            await a.send(a.header(view.round_id, 0, 1, len(second)), [pieces[0], pieces[0], *pieces[1:], pieces[1]])
            await a.send(a.header(view.round_id, 0, 1, len(second)), pieces)
            await a.send(a.header(view.round_id, 0, 0, len(first)), make_chunks(first))
            after = await a.view(lambda v: v.outer_step == 1)
            assert after.digest == digest([t - d for t, d in zip(theta(), delta(1), strict=True)])

    asyncio.run(scenario())


def test_a_broken_stream_resumes_where_it_broke(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            view = await found_run(a)
            first, second = (bytes(encode("fp32", d).data) for d in delta(1))
            header = a.header(view.round_id, 0, 1, len(second))
            receipt = await a.send(header, list(make_chunks(second, 512))[:2])
            assert (receipt.complete, receipt.received_bytes) == (False, 1024)

            probe = await a.data.Probe(contribution_header_to_pb(header))
            receipt = await a.send(header, make_chunks(second, 512, start=probe.received_bytes))
            assert receipt.complete
            await a.send(a.header(view.round_id, 0, 0, len(first)), make_chunks(first))
            after = await a.view(lambda v: v.outer_step == 1)
            assert after.digest == digest([t - d for t, d in zip(theta(), delta(1), strict=True)])

    asyncio.run(scenario())


def test_what_came_whole_before_its_stream_broke_is_measured_when_the_peer_resumes(tmp_path: Path) -> None:
    """The stream breaks after its last byte, while the norm waits for the worker thread: a commit or a checkpoint has it."""

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            view = await found_run(a)
            first, second = (bytes(encode("fp32", d).data) for d in delta(1))
            await a.send(a.header(view.round_id, 0, 0, len(first)), make_chunks(first))
            free, rounds = threading.Event(), run.coordinator.run.rounds
            busy = asyncio.ensure_future(run.coordinator.background.in_worker(free.wait, 30.0))
            header = a.header(view.round_id, 0, 1, len(second))
            sending = asyncio.ensure_future(a.send(header, make_chunks(second)))

            def came_whole() -> bool:
                contribution = rounds._contributions.of_peer("a")
                return contribution is not None and contribution.received_bytes == len(first + second)

            await until(came_whole)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            free.set()
            await busy
            probe = await a.data.Probe(contribution_header_to_pb(header))
            assert probe.complete
            after = await a.view(lambda v: v.outer_step == 1)
            assert after.digest == digest([t - d for t, d in zip(theta(), delta(1), strict=True)])

    asyncio.run(scenario())


def test_a_peer_that_vanishes_does_not_block_the_round(tmp_path: Path) -> None:
    """Neither the deadline nor the lease can help here: no time passes."""

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", start=2)) as run, run.peer("a") as a, run.peer("b") as b:
            view = await found_run(a, b)
            await a.contribute(view.round_id, 0, delta(1))
            await b.disconnect()
            after = await a.view(lambda v: v.outer_step == 1)
            assert "lost: b" in after.last_reason

    asyncio.run(scenario())


def test_another_model_is_refused_with_the_first_tensor_that_differs(tmp_path: Path) -> None:
    other = Schema(
        (
            SCHEMA.fragments[0],
            FragmentSpec(fragment_id=1, name="layer1", tensors=(TensorSpec(name="layer1.weight", shape=(301,)),)),
        )
    )

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a, run.peer("b", other) as b:
            await found_run(a)
            await b.open_stream()
            expel = await b.receive(Expel)
            assert not expel.evicted
            assert "layer1.weight has shape [300] in the run and [301] at the peer" in expel.reason

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1], ids=["an older peer", "a newer peer"])
def test_a_peer_of_another_protocol_is_refused_in_one_line_that_names_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, protocol: int
) -> None:
    """Its operator reads it, and this run's, too, once however often the peer tries."""
    words = f"the peer speaks protocol {protocol}, this side {PROTOCOL}; update the older one"

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            for _ in range(2):
                call = a.control.Attend()
                hello = Hello(run_id=a.run_id, schema_hash=SCHEMA.schema_hash, protocol=protocol)
                await call.write(peer_message_to_pb(hello))
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert refused.value.details() == words
            assert [one.getMessage() for one in caplog.records if "protocol" in one.getMessage()] == [f"a: {words}"]
            await found_run(a)  # nothing of it is left: the founder is whoever attends first

    asyncio.run(scenario())


def test_a_certificate_of_another_authority_opens_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        (tmp_path / "other").mkdir()
        impostor = Authority.create(tmp_path / "other", folder.run_id, ("localhost",), now=time.time())
        async with served(folder) as run, run.channel("a", authority=impostor) as channel:
            peer = BarePeer("a", folder.run_id, channel, SCHEMA)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await peer.data.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=folder.run_id))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(scenario())


def test_a_new_certificate_of_an_identity_shuts_the_old_one_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as old:
            run.keys.clear()  # the next one is of another machine
            async with run.peer("a") as new:
                await old.open_stream()
                expel = await old.receive(Expel)
                assert "replaced by a newer one" in expel.reason
                await found_run(new)

    asyncio.run(scenario())


def test_roles_are_kept_apart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a, run.channel("eye", "observer") as watching:
            await found_run(a)
            eye = BarePeer("eye", a.run_id, watching, SCHEMA)
            assert (await eye.control.Status(control_pb2.StatusRequest())).members[0].peer_id == "a"
            for call in (
                eye.control.Pause(control_pb2.PauseRequest()),
                a.control.Evict(control_pb2.EvictRequest(peer_id="a")),
                a.control.Status(control_pb2.StatusRequest()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(scenario())


def test_an_evicted_peer_hears_why_and_stays_out_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder) as run, run.peer("a") as a, run.channel("op", "operator") as channel:
            await found_run(a)
            operator = BarePeer("op", a.run_id, channel, SCHEMA)
            await operator.control.Evict(control_pb2.EvictRequest(peer_id="a", reason="key lost"))
            expel = await a.receive(Expel)
            assert (expel.evicted, expel.reason) == (True, "key lost")
        members = Authority.load(folder.path, folder.run_id).members
        assert members.why_refused(Identity(folder.run_id, "peer", "a")) == "key lost"

    asyncio.run(scenario())


@on_a_loop
async def test_a_name_that_is_only_invited_can_be_evicted_and_nobody_joins_with_it(tmp_path: Path) -> None:
    folder, now = new_folder(tmp_path / "run"), time.time()
    async with served(folder) as run, run.channel("op", "operator") as channel:
        authority = Authority.load(folder.path, folder.run_id)  # of `invite`, a process of its own
        leaked, other = (
            authority.invite(name, role=role, enrol=("127.0.0.1:1",), lifetime_s=3600, now=now)
            for name, role in (("b", "region"), ("c", "peer"))
        )
        control = BarePeer("op", folder.run_id, channel, SCHEMA).control
        await control.Evict(control_pb2.EvictRequest(peer_id="b", reason="it leaked"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await control.Evict(control_pb2.EvictRequest(peer_id="stranger", reason="x"))
        assert refused.value.details() == "stranger is not a member of this run, and has no open invitation"
        enrols = [run.coordinator.authority, Authority.load(folder.path, folder.run_id)]  # also that of a restart
        for each in enrols:
            assert each is not None
            with pytest.raises(RefusedError, match=r"b was evicted \(it leaked\); choose another name"):
                each.redeem(leaked.token, request(new_key()), now=now)
            with pytest.raises(RefusedError, match="choose another name"):
                each.invite("b", role="region", enrol=("127.0.0.1:1",), lifetime_s=3600, now=now)
        assert enrols[0] is not None
        assert enrols[0].redeem(other.token, request(new_key()), now=now)[1].peer_id == "c"


def test_pause_aborts_the_round_and_resume_opens_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a, run.channel("op", "operator") as channel:
            first = await found_run(a)
            operator = BarePeer("op", a.run_id, channel, SCHEMA)
            await operator.control.Pause(control_pb2.PauseRequest())
            paused = await a.view(lambda v: v.phase is RunPhase.PAUSED)
            assert (paused.last_committed, paused.last_reason) == (False, "paused")
            await operator.control.Resume(control_pb2.ResumeRequest())
            again = await a.view(lambda v: v.round_id > first.round_id)
            assert again.outer_step == 0

    asyncio.run(scenario())


async def operate(run: Served, order: str) -> str:
    """One order of the operator; the phase and the reason that `status` then shows."""
    async with run.channel(f"boss-{order}", "operator") as channel:
        boss = control_pb2_grpc.ControlStub(channel)
        if order != "status":
            await getattr(boss, order.capitalize())(getattr(control_pb2, f"{order.capitalize()}Request")())
        seen = status_from_pb(await boss.Status(control_pb2.StatusRequest())).as_json()
        return f"{seen['phase']}: {seen['reason']}"


@pytest.mark.parametrize("kill", [False, True])
def test_a_paused_run_is_paused_after_a_restart(tmp_path: Path, kill: bool) -> None:
    paused = "paused: paused by the operator; `resume` lets it go on"

    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder, kill=kill) as run, run.peer("a") as a:
            await found_run(a)
            await commit_one([a], 0, [1])
            assert await operate(run, "pause") == paused
        for _ in range(2):
            async with served(folder, kill=kill) as run, run.peer("a") as a:
                await a.attend()
                await a.report(1)
                view = await a.view(lambda v: v.phase is RunPhase.PAUSED)
                assert (view.round_id, view.outer_step) == (0, 1)
                assert await operate(run, "status") == paused
        async with served(folder, kill=kill) as run, run.peer("a") as a:
            await a.attend()
            await a.report(1)
            assert (await operate(run, "resume")).endswith(": ")
            await commit_one([a], 1, [2])
        async with served(folder) as run:
            assert await operate(run, "status") == "gathering: "

    asyncio.run(scenario())


def test_a_pause_before_the_founding_holds_after_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder) as run:
            assert (await operate(run, "pause")).startswith("founding: paused by the operator")
        async with served(folder) as run, run.peer("a") as a:
            await a.attend()
            await a.view(lambda v: v.found)
            await a.found(theta())
            await a.report(0)
            assert (await a.view(lambda v: v.phase is not RunPhase.FOUNDING)).phase is RunPhase.PAUSED
            assert (await operate(run, "resume")).endswith(": ")
            await commit_one([a], 0, [1])

    asyncio.run(scenario())


def test_an_order_that_cannot_be_written_is_not_given(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder) as run, run.peer("a") as a:
            await found_run(a)
            folder.orders.mkdir()  # nothing can take its place
            with pytest.raises(grpc.aio.AioRpcError, match=r"orders\.json: cannot be written"):
                await operate(run, "pause")
            assert await operate(run, "status") == "collecting: "
            await commit_one([a], 0, [1])

    asyncio.run(scenario())


@pytest.mark.parametrize("kept", ["", "[]", '{"paused": true}'])
def test_damaged_orders_are_one_line_that_names_the_file_and_the_mend(tmp_path: Path, kept: str) -> None:
    path = tmp_path / "orders.json"
    path.write_text(kept)
    with pytest.raises(StorageError, match=r"orders\.json: is damaged \(.*remove it, and pause or drain the run again"):
        OperatorFlags(path)


def test_a_wrong_digest_is_healed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            await found_run(a)
            await a.report(0, digest_="0" * 64)
            view = await a.view(lambda v: v.resync != "")
            assert view.resync.startswith("digest 000000000000")
            manifest = await a.data.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=a.run_id))
            await a.report(0, digest_=manifest.digest)
            await a.view(lambda v: v.resync == "" and v.sequence >= view.sequence)

    asyncio.run(scenario())


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run:
            port = run.coordinator.listen
            toml = (tmp_path / "run" / "run.toml").read_text().replace('listen = "127.0.0.1:0"', f'listen = "{port}"', 1)
            other = Coordinator.open(new_folder(tmp_path / "second", toml=toml.replace("{", "{{").replace("}", "}}")))
            try:
                with pytest.raises(ConfigError, match=r"server\.listen: 127.0.0.1:\d+ cannot be bound; is the port in use"):
                    await other.start()
            finally:
                await other.close()

    asyncio.run(scenario())


def test_between_two_starts_no_other_program_gets_the_ports_of_a_test(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")

    async def serve() -> tuple[str, str]:
        async with served(folder) as run:
            return run.coordinator.listen, run.coordinator.enrol_listen

    ports = asyncio.run(serve())
    for address in ports:
        host, _, port = address.rpartition(":")
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind((host, int(port)))
    assert asyncio.run(serve()) == ports


def test_a_full_disk_under_the_journal_aborts_the_round_and_a_later_one_commits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as a:
            view = await found_run(a)
            run.disk.full = True
            data = bytes(encode("fp32", delta(1)[0]).data)
            await a.send(a.header(view.round_id, 0, 0, len(data)), make_chunks(data))
            lost = await a.view(lambda v: v.last_round_id == view.round_id)
            assert not lost.last_committed
            assert "No space left" in lost.last_reason
            assert lost.digest == digest(theta())
            run.disk.full = False
            await a.report(0)
            await commit_one([a], 0, [1])

    asyncio.run(scenario())


def test_export_writes_the_outer_parameters_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    async def scenario() -> None:
        folder = new_folder(tmp_path / "run")
        async with served(folder) as run, run.peer("a") as a:
            await found_run(a)
            await commit_one([a], 0, [1])
            exported = export_parameters([folder], tmp_path / "out.safetensors")
        assert exported.outer_steps == (1,)
        named = load_file(tmp_path / "out.safetensors")
        expected = [t - d for t, d in zip(theta(), delta(1), strict=True)]
        assert torch.equal(named["layer0.weight"], expected[0])
        assert torch.equal(named["layer1.weight"], expected[1])

    asyncio.run(scenario())


def test_a_copied_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = new_folder(tmp_path / "one"), new_folder(tmp_path / "two")
        async with served(one) as run, run.peer("a") as a:
            await found_run(a)
        shutil.copytree(one.outer, two.outer)
        shutil.copy(one.incarnation, two.incarnation)
        with pytest.raises(ConfigError, match="belongs to run"):
            async with served(two):
                pass

    asyncio.run(scenario())
