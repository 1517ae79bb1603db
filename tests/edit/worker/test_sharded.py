"""EditWorker on a model sharded by FSDP2 against the same peer in one process, with a script that answers both alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from edit import reference
from edit.codecs import decode
from edit.codecs.residuals import Residual
from edit.collective import CompositeCollective
from edit.config.codec import CodecConfig
from edit.errors import ConfigError, TransportError
from edit.fragments.digest import digest
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import (
    Aborted,
    Commit,
    Committed,
    Contribution,
    EncodedTensor,
    FragmentCommit,
    Outcome,
    PeerVerdict,
    Progress,
    Snapshot,
    Verdict,
)
from edit.replica.ranks import Ranks
from edit.replica.replica import Replica
from edit.worker import undone_merges
from edit.worker.worker import EditWorker
from tests.support.encoded import cut, encode
from tests.support.exhaustive import rarely
from tests.support.models import TinyTransformer, train_step
from tests.support.ranks import at_every_rank
from tests.support.settings import worker_config

ROUNDS, EVERY, CLIP = 4, 2, 0.1


class Late:
    """An update on its way to one rank; its first wait may fail."""

    def __init__(self, payload: EncodedTensor, breaks: bool) -> None:
        self.payload, self.breaks = payload, breaks

    def wait(self) -> EncodedTensor:
        if self.breaks:
            self.breaks = False
            raise TransportError("cut off at this rank")
        return self.payload


class Oracle:
    """A run of one peer whose outer step t is a known vector: every rank can tell its own part of every answer.

    breaks_at: (outer step, fragment) at which rank 1's update does not arrive the first time.
    """

    peer_id = "me"

    def __init__(self, theta: Sequence[Tensor], lazy: bool, breaks_at: tuple[int, int] | None = None) -> None:
        self.theta = [part.clone() for part in theta]
        self.outer_step, self.lazy, self.breaks_at = 0, lazy, breaks_at
        self.sent: list[Contribution] = []
        self.lost: set[int] = set()
        self.commits: list[Committed] = []

    def join(self, schema: Schema, found: Any, shards: Sequence[Shard] | None = None, lacks: object = None) -> Snapshot:
        self.shards = tuple(map(Shard, schema.fragments)) if shards is None else tuple(shards)
        return self.snapshot()

    def contribute(self, contribution: Contribution) -> None:
        self.sent.append(contribution)

    def snapshot(self) -> Snapshot:
        parts = tuple(shard.take(part).clone() for shard, part in zip(self.shards, self.theta, strict=True))
        return Snapshot(self.outer_step, digest(self.theta), parts)

    def report(self, progress: Progress) -> None:
        pass

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        if outer_step < self.outer_step:
            return self._cut(self.commits[outer_step])
        if not block:
            return None
        if outer_step == 1 and 1 not in self.lost:
            self.lost.add(1)
            return Aborted("too few")
        generator = torch.Generator().manual_seed(outer_step)
        steps = [encode("int8", 0.01 * torch.randn(part.numel(), generator=generator)) for part in self.theta]
        self.theta = [part - decode(step) for part, step in zip(self.theta, steps, strict=True)]
        self.outer_step += 1
        verdict = PeerVerdict(peer_id="me", verdict=Verdict.OK, norm=1.0, weight=1.0)
        parts = tuple(
            FragmentCommit(fragment_id=i, payload=step, verdicts=(verdict,), merged_norm=1.0, clip=1.0)
            for i, step in enumerate(steps)
        )
        self.commits.append(
            Committed(Commit(outer_step=outer_step + 1, round_id=1, digest=digest(self.theta), reason="known", fragments=parts))
        )
        return self._cut(self.commits[-1])

    def _cut(self, whole: Committed) -> Committed:
        commit, step = whole.commit, whole.commit.outer_step - 1
        cuts = [cut(part.payload, shard) for part, shard in zip(commit.fragments, self.shards, strict=True)]
        if not self.lazy:
            pairs = zip(commit.fragments, cuts, strict=True)
            return Committed(replaced(commit, tuple(replaced_part(part, payload) for part, payload in pairs)))
        late = []
        for i, payload in enumerate(cuts):
            breaks = self.breaks_at == (step, i) and dist.is_initialized() and dist.get_rank() == 1
            late.append(Late(payload, breaks))
        if self.breaks_at and self.breaks_at[0] == step:
            self.breaks_at = None
        return Committed(replaced(commit, tuple(replaced_part(part, None) for part in commit.fragments)), tuple(late))


def replaced(commit: Commit, fragments: tuple[FragmentCommit, ...]) -> Commit:
    return Commit(outer_step=commit.outer_step, round_id=1, digest=commit.digest, reason=commit.reason, fragments=fragments)


def replaced_part(part: FragmentCommit, payload: EncodedTensor | None) -> FragmentCommit:
    return FragmentCommit(fragment_id=part.fragment_id, payload=payload, verdicts=part.verdicts, merged_norm=1.0, clip=1.0)


def batches(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def sharded_model(*, compiled: bool = False) -> nn.Module:
    """compiled: its blocks are compiled in place, then sharded."""
    model, mesh = TinyTransformer(seed=3), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        if compiled:
            block.compile(backend="eager")
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def peer(sharded: bool, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, Oracle, EditWorker]:
    model: nn.Module = sharded_model() if sharded else TinyTransformer(seed=3)
    breaks_at, clip = settings.pop("breaks_at", None), settings.pop("clip", 0.0)
    config = worker_config(**({"every": EVERY, "codec": "fp32"} | settings))
    oracle = Oracle(Replica(TinyTransformer(seed=5)).local(), lazy=config.sync.mode == "forward", breaks_at=breaks_at)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, oracle, EditWorker(model, optimizer, CompositeCollective([oracle], clip), config)


def train(sharded: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """Some rounds, with an evaluation of the local and of the outer parameters in each; what was seen."""
    model, optimizer, oracle, worker = peer(sharded, **settings)
    seen: dict[str, Any] = {"evaluated": [], "digests": []}
    with worker:
        for step in range(ROUNDS * EVERY):
            train_step(model, optimizer, batches(step))
            with torch.no_grad():
                seen["evaluated"].append(model(batches(99)[0]))  # the root stays gathered after this
                with worker.outer_parameters():
                    seen["evaluated"].append(model(batches(99)[0]))
            seen["digests"].append((worker.outer_step, worker.digest))
        seen["state"] = worker.outer_state_dict()
    seen["sent"] = [(c.outer_step, c.fragment_id, c.inner_steps, c.boxes, decode(c.payload)) for c in oracle.sent]
    seen["local"] = [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    return seen


SETTINGS: dict[str, dict[str, Any]] = {
    "blocking": {},
    "forward": {"mode": "forward"},
    "broken": {"mode": "forward", "breaks_at": (2, 1), "strict": True},
    "delayed": {"mode": "delayed", "delay": 1},
    "clipped": {"clip": CLIP},
}


def all_settings() -> dict[str, Any]:
    seen: dict[str, Any] = {kind: train(True, settings) for kind, settings in SETTINGS.items()}
    seen["prefetch"] = refused_prefetch()
    seen["disagree"] = refused_configuration()
    seen["unsent"] = unsent()
    seen["gathered"] = gathered()
    seen["replaced"] = replaced_at_one_rank()
    seen["update points"] = update_points()
    seen["undone"] = undone()
    return seen


def refused_prefetch() -> str:
    model, _, _, worker = peer(True, mode="forward")
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    try:
        worker.__enter__()
    except ConfigError as error:
        return str(error)
    return ""


def refused_configuration() -> str:
    model, optimizer, oracle, _ = peer(True)
    config = worker_config(every=2 + dist.get_rank())
    try:
        EditWorker(model, optimizer, oracle, config, Ranks.world()).__enter__()
    except ConfigError as error:
        return str(error)
    return ""


class Before(Oracle):
    """Keeps the local parameters and theta as they are when the outcome is told: nothing has moved yet."""

    replica: Replica | None = None

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        outcome = super().outcome(outer_step, block=block)
        if outcome is not None and self.replica is not None:
            self.local, self.before = self.replica.local(), self.replica.outer.fragments
        return outcome


def unsent() -> list[tuple[bool, Tensor, Tensor]]:
    """Of each fragment: whether this rank owns some of it, its local parameters after an exchange, and what they should be.

    The blocks are sharded; the other parameters are held by both ranks and owned by one.
    """
    model, mesh = TinyTransformer(seed=3), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    codec = CodecConfig(up="topk:k=5", down="fp32", up_residual="local")
    oracle = Before(Replica(TinyTransformer(seed=5)).local(), lazy=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    with EditWorker(model, optimizer, oracle, worker_config(every=EVERY, codec=codec), Ranks.world()) as worker:
        (share,) = worker._exchanges
        oracle.replica, layout = share.replica, share.replica.layout
        for step in range(EVERY):
            train_step(model, optimizer, batches(step))
        worker.synchronize()
        assert worker.outer_step == 1
        sent = {one.fragment_id: decode(one.payload) for one in oracle.sent}
        for i, (local, theta) in enumerate(zip(share.replica.local(), share.replica.outer.fragments, strict=True)):
            decoded = layout.disown(i, sent.get(i, torch.zeros(0)))
            expected = reference.step_ahead(oracle.before[i], oracle.local[i], decoded, theta, 1.0)
            seen.append((layout.owned[i].numel > 0, local, expected))
    return seen


def gathered() -> tuple[Tensor, Tensor]:
    """What the model answers after an exchange before which all was gathered early, and a model with the outer parameters."""
    model, optimizer, oracle, worker = peer(True, every=1)
    model.set_reshard_after_backward(False)  # so at the contribution the model has the gathered parameters
    with worker:
        train_step(model, optimizer, batches(0))
        for module in (model, *model.blocks):
            module.unshard(async_op=True)
        with torch.no_grad():
            answer = model(batches(99)[0])
        assert worker.outer_step == 1
    plain = TinyTransformer()
    for i, theta in enumerate(oracle.theta):
        Replica(plain).load_local(i, theta)
    return answer, plain(batches(99)[0]).detach()


def replaced_at_one_rank() -> str:
    """What a rank hears on leaving, with a contribution pending, when only rank 0 replaced a parameter."""
    model, optimizer, _, worker = peer(True, every=1)
    try:
        with worker:
            train_step(model, optimizer, batches(0))
            if dist.get_rank() == 0:
                model.get_submodule("embed").weight = nn.Parameter(torch.zeros(2, 2))
    except ConfigError as error:
        return str(error)
    return ""


def update_points() -> list[list[str]]:
    """The names of the modules before whose forward an update comes in, of blocks that are not compiled, and that are."""
    found = []
    for compiled in (False, True):
        model = sharded_model(compiled=compiled)
        points = Replica(model, Ranks.world()).modules.update_points()
        found.append([name for name, module in model.named_modules() if module in points])
    return found


class OwnCopies(torch.optim.Optimizer):
    """Trains copies of the parameters, and writes them into the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(list(model.parameters()), {})
        self.copies = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter, copy in zip(self.param_groups[0]["params"], self.copies, strict=True):
            copy.sub_(parameter.grad.sign(), alpha=1e-4)
            parameter.copy_(copy)


def undone() -> list[str]:
    """The warnings of a rank."""
    undone_merges._EVERY = 1  # of a small model some values are too few
    told: list[str] = []
    undone_merges._log.addFilter(lambda record: told.append(record.getMessage()) or False)  # type: ignore[func-returns-value]
    model, _, oracle, _ = peer(True)
    optimizer = OwnCopies(model)
    with EditWorker(model, optimizer, oracle, worker_config(every=EVERY, codec="fp32")):
        for step in range((ROUNDS + 2) * EVERY):
            train_step(model, optimizer, batches(step))
    return told


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return at_every_rank(all_settings, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", SETTINGS)
def test_two_ranks_train_as_one_process_does(kind: str, two_ranks: list[dict[str, Any]]) -> None:
    alone = train(False, {key: value for key, value in SETTINGS[kind].items() if key != "breaks_at"})
    schema = Replica(TinyTransformer()).schema
    for seen in (rank[kind] for rank in two_ranks):
        assert seen["digests"] == alone["digests"]
        for a, b in zip(seen["evaluated"], alone["evaluated"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        for a, b in zip(seen["local"], alone["local"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    whole: dict[tuple[int, int, int], Tensor] = {}
    for seen in (rank[kind] for rank in two_ranks):
        for outer_step, i, inner_steps, boxes, part in seen["sent"]:
            into = whole.setdefault((outer_step, i, inner_steps), torch.full((schema.fragments[i].numel,), torch.nan))
            Shard(schema.fragments[i], boxes).put(part, into)
    assert set(whole) == {(outer_step, i, steps) for outer_step, i, steps, _, _ in alone["sent"]}
    for outer_step, i, inner_steps, boxes, vector in alone["sent"]:
        assert boxes is None
        torch.testing.assert_close(whole[outer_step, i, inner_steps], vector, rtol=1e-3, atol=1e-5)
    attempts = {(key[0], key[2]) for key in whole}
    norms = [reference_norm(vector for key, vector in whole.items() if (key[0], key[2]) == each) for each in attempts]
    assert all(abs(norm - CLIP) < 1e-6 if kind == "clipped" else norm > CLIP for norm in norms)
    first, second = (rank[kind]["state"] for rank in two_ranks)
    assert second == {} and all(torch.equal(first[name], alone["state"][name]) for name in alone["state"])


def reference_norm(fragments: Iterable[Tensor]) -> float:
    return float(sum(each.double().square().sum() for each in fragments)) ** 0.5


def test_every_rank_keeps_what_the_owner_of_a_parameter_did_not_send(two_ranks: list[dict[str, Any]]) -> None:
    for seen in two_ranks:
        for _, local, expected in seen["unsent"]:
            torch.testing.assert_close(local, expected, rtol=1e-6, atol=1e-7)
    assert not all(owns for seen in two_ranks for owns, _, _ in seen["unsent"]), "some fragment has one owner"


def test_parameters_gathered_before_an_outcome_are_not_used_after_it(two_ranks: list[dict[str, Any]]) -> None:
    for seen in two_ranks:
        torch.testing.assert_close(*seen["gathered"])


def test_a_sharded_block_compiled_in_place_gets_its_update_around_the_compiled_code(two_ranks: list[dict[str, Any]]) -> None:
    for seen in two_ranks:
        assert seen["update points"] == [["", "blocks.0", "blocks.1"], [""]]


def test_a_parameter_replaced_at_one_rank_is_an_error_at_every_rank_on_leaving(two_ranks: list[dict[str, Any]]) -> None:
    for seen in two_ranks:
        assert seen["replaced"].startswith("replaced or removed") and "embed.weight" in seen["replaced"]


def test_explicit_forward_prefetch_and_ranks_that_disagree_are_refused(two_ranks: list[dict[str, Any]]) -> None:
    for seen in two_ranks:
        assert "prefetches the parameters of later modules" in seen["prefetch"]
        assert seen["disagree"].startswith("the ranks of this replica disagree on the worker's configuration")


def test_every_rank_says_that_an_optimizer_undoes_merges(two_ranks: list[dict[str, Any]]) -> None:
    for seen in two_ranks:
        (told,) = seen["undone"]
        assert told.startswith("each of the last 3 merges was undone by the next optimizer step: if OwnCopies writes a copy")


# A checkpoint of one number of ranks, loaded by another.

LOSSY = {"mode": "delayed", "delay": 2}
CODECS = {form: CodecConfig(up="int8", down="fp32", up_residual=form) for form in ("fp32", "bf16", "int8")}


def save(folder: str, form: str) -> None:
    """Train and save in the middle of a phase, with a contribution pending."""
    model, optimizer, _, worker = peer(True, **LOSSY, codec=CODECS[form])
    with pytest.raises(KeyboardInterrupt), worker:
        for step in range(5):
            train_step(model, optimizer, batches(step))
        assert worker.pending and worker.outer_step
        state = worker.state_dict()
        scalars = state.pop("scalars")
        dcp.save(state, checkpoint_id=folder)
        if dist.get_rank() == 0:
            (Path(folder) / "scalars.json").write_text(json.dumps(scalars))
        dist.barrier()
        raise KeyboardInterrupt


def loaded(folder: str, form: str) -> tuple[dict[str, Tensor], str]:
    """Every kind of vector, put together at rank 0, and the digest, on this number of ranks."""
    sharded = dist.is_initialized()
    worker = peer(sharded, **LOSSY, codec=CODECS[form])[-1]
    scalars = json.loads((Path(folder) / "scalars.json").read_text())
    state: dict[str, Any] = worker.empty_state([kind for kind, parts in scalars["fragments"].items() if parts], scalars)
    dcp.load(state, checkpoint_id=folder, no_dist=not sharded)
    worker.load_state_dict(state | {"scalars": scalars})
    (checkpoint,) = worker._checkpoints
    layout = checkpoint.replica.layout
    owned = {i: Residual.of(part, layout.owned[i].numel, "fp32").tensor for i, part in checkpoint.residuals.items()}
    kinds = checkpoint.vectors | {"residual": owned}
    parts = {f"{kind}.{i}": layout.gather(i, part) for kind, fragments in kinds.items() for i, part in fragments.items()}
    return {name: part for name, part in parts.items() if part is not None}, checkpoint.outer.digest


def save_and_load(folder: str, form: str) -> tuple[dict[str, Tensor], str]:
    save(folder, form)
    return loaded(folder, form)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one rank is to load what two have saved
@pytest.mark.parametrize("form", rarely(CODECS, kept=["int8"]))
def test_t18_a_checkpoint_of_two_ranks_loads_on_one_and_three(form: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    seen = []
    for ranks, call in ((2, save_and_load), (3, loaded)):
        (tmp_path / str(ranks)).mkdir()
        seen += at_every_rank(call, ranks, tmp_path / str(ranks), folder, form)[:1]
    one, found = loaded(folder, form)
    assert sorted(one) == sorted(f"{kind}.{i}" for kind in ("outer", "residual", "sent_from") for i in range(5))
    assert all(bool(one[f"residual.{i}"].any()) for i in range(5))
    for other, digest_of_other in seen:
        assert digest_of_other == found and all(torch.equal(one[name], other[name]) for name in one)
