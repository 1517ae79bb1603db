"""A folder of format 3 (fp32 merges and residuals, the digest in the commit) recovers to the bit and goes on in the new form.

`format_3/` was written by the version before: int8, topk, bf16 and fp32 updates, a checkpoint of outer step 2, commits until 5,
one fragment of the fourth rolled back; `expected.json` has what that version held in memory then.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from aggregator.storage.journal import FORMAT, Journal
from aggregator.storage.store import Store
from edit.config.run import CodecConfig, FragmentCodec, OuterConfig, RunConfig, StorageConfig
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import OuterState
from edit.records import Commit
from tests.support.encoded import encode

OLD = Path(__file__).parent / "format_3"
EXPECTED: dict[str, Any] = json.loads((OLD / "expected.json").read_text())
CONFIG = RunConfig(
    outer=OuterConfig(optimizer="nesterov", lr=0.7, momentum=0.6),
    codec=CodecConfig(
        up="fp32",
        down="int8",
        fragments={
            "blocks.1": FragmentCodec(down="topk:k=9"),
            "norm": FragmentCodec(down="bf16"),
            "head": FragmentCodec(down="fp32"),
        },
    ),
    storage=StorageConfig(keep_updates=2, keep_checkpoints=1),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(OLD, tmp_path / "outer")
    return tmp_path / "outer"


def recovered(store: Store) -> OuterState:
    outer = store.recover()
    assert outer is not None
    return outer


def advance(store: Store, outer: OuterState) -> Commit:
    generator, records = torch.Generator().manual_seed(outer.outer_step), []
    for i in outer.due:
        delta = encode("fp32", 0.1 * torch.randn(outer.schema.fragments[i].numel, generator=generator))
        records.append(outer.record(outer.reduce(i, [Measured("a", 4, 64, measure(delta), delta)])))
        store.begin_fragment(7, records[-1]).result()
    store.append_commit(7, outer.outer_step + 1, "all in", base=outer.digest)
    commit = outer.commit(7, "all in", records)
    store.applied(commit)
    return commit


def hashes(outer: OuterState) -> dict[str, str]:
    return {name: blake3(tensor.numpy().tobytes()).hexdigest() for name, tensor in outer.to_tensors().items()}


def test_it_recovers_to_its_last_digest_and_holds_what_it_held(folder: Path) -> None:
    store = Store(folder, CONFIG, "run")
    outer = recovered(store)
    assert (outer.outer_step, outer.digest) == (EXPECTED["outer_step"], EXPECTED["digest"])
    assert hashes(outer) == EXPECTED["tensors"]
    assert json.loads(json.dumps(outer.metadata())) == EXPECTED["metadata"]
    for step, payloads in EXPECTED["updates"].items():
        update = store.update(int(step))
        assert update is not None
        found = [blake3(bytes(part.payload.data)).hexdigest() if part.payload else None for part in update.fragments]
        assert found == payloads
    store.close()


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("commits", [0, 1, 3])
def test_it_goes_on_in_the_present_form_and_recovers_from_both(folder: Path, commits: int, checkpoint: bool) -> None:
    store = Store(folder, CONFIG, "run")
    outer, old = recovered(store), (folder / "step-00000002.journal").read_bytes()
    published = [advance(store, outer) for _ in range(commits)]
    assert (folder / "step-00000002.journal").read_bytes() == old, "nothing is added to a segment of an older format"
    if checkpoint:
        store.checkpoint(outer)
    store.close()
    again = Store(folder, CONFIG, "run")
    later = recovered(again)
    assert hashes(later) == hashes(outer) and later.metadata() == outer.metadata()
    assert [again.update(one.outer_step) for one in published[-2:]] == published[-2:]
    assert advance(again, later).digest == advance(store_of(folder.parent / "elsewhere"), outer).digest
    again.close()
    forms = {name: tensor.dtype for name, tensor in later.to_tensors().items() if name.startswith("residual")}
    assert forms == dict.fromkeys(("residual.1", "residual.2", "residual.3"), torch.uint8)


def store_of(folder: Path) -> Store:
    """A store whose journal takes the commits of any state: only what `advance` computes counts."""

    class Anywhere(Store):
        def begin_fragment(self, *_: object) -> Any:
            return type("Written", (), {"result": lambda self: None})()

        def append_commit(self, *_: object, **__: object) -> None: ...

        def applied(self, commit: Commit) -> None: ...

    return Anywhere(folder, CONFIG, "run")


def test_a_segment_of_the_older_format_without_commits_is_replaced(folder: Path) -> None:
    segment = folder / "step-00000002.journal"
    whole = segment.read_bytes()
    segment.write_bytes(whole[: whole.index(b"EdJ1", 4)])
    store = Store(folder, CONFIG, "run")
    outer = recovered(store)
    assert outer.outer_step == 2
    advance(store, outer)
    store.close()
    journal = Journal.open(segment, 2)
    assert (journal.format, journal.outer_step) == (FORMAT, 3)
    journal.close()
    assert recovered(Store(folder, CONFIG, "run")).digest == outer.digest
