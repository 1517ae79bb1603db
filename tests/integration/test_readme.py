"""What README.md and docs/operating.md tell an operator to type is run, in the order in which it stands there.

Left out is what trains: `edit-peer run`. Instead a bare peer founds the run with the key and certificate that `join` stored.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from typer.testing import CliRunner

from aggregator.run_template import RUN_TOML
from aggregator.storage.state_folder import StateFolder
from edit.errors import ConfigError
from peers.identity.peer_folder import PeerFolder
from tests.integration.test_page import home_of
from tests.support.loops import on_a_loop
from tests.support.served import SCHEMA, TOML, BarePeer, found_run, new_folder, served
from tests.test_documented_commands import APPS
from tests.test_documented_settings import blocks
from tests.test_documents import REPOSITORY

README = REPOSITORY / "README.md"
OPERATING = REPOSITORY / "docs" / "operating.md"


def commands(document: Path, heading: str) -> Iterator[list[str]]:
    """The command lines of one chapter."""
    chapter = document.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    for block in blocks(chapter, "sh"):
        yield from (shlex.split(line, comments=True) for line in block.splitlines())


def run(words: list[str]) -> str:
    program, *arguments = words
    result = CliRunner(env={"COLUMNS": "300"}).invoke(APPS[program], arguments)
    assert result.exit_code == 0, (words, result.exception, result.output)
    return result.stdout


def test_the_readmes_way_to_a_swarm_is_two_commands_that_name_the_file_they_lack(tmp_path: Path) -> None:
    """With its files, tests/processes/test_swarm_commands.py runs them."""
    start, join = commands(README, "Run it without a coordinator")
    assert (start[1:3], join[1:3]) == (["swarm", "start"], ["swarm", "join"])
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("a book\n" * 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("HOME", str(tmp_path))
        for program, *arguments in (start, join):
            refused = CliRunner().invoke(APPS[program], [str(Path(word).expanduser()) for word in arguments])  # as a shell
            assert isinstance(refused.exception, ConfigError) and arguments[2] in str(refused.exception), refused


@on_a_loop
async def test_the_readmes_way_to_a_run_and_its_model(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        told = list(commands(README, "Run it on several machines"))
        verbs = [words[1] for words in told]
        assert verbs == ["init", "serve", "invite", "join", "run", "status", "export"]
        init, _, invite, join, _, status, export = told
        await asyncio.to_thread(run, init)
        folder = StateFolder(Path("my-run"))
        folder.run_toml.write_text(TOML.format(start=1, quorum=1))  # "edit my-run/run.toml between the two commands"
        async with served(folder) as at:
            (line,) = (await asyncio.to_thread(run, invite)).splitlines()
            assert join[2].startswith("edit1.") and line.startswith(join[2].removesuffix("...")[:8])
            join[2] = line
            home = Path(join[join.index("--home") + 1])
            assert "next: edit-peer run --home" in await asyncio.to_thread(run, join)
            async with grpc.aio.secure_channel(at.coordinator.listen, PeerFolder(home).load().credentials) as channel:
                peer = BarePeer(home.name, folder.run_id, channel, SCHEMA)
                await found_run(peer)
                shown = await asyncio.to_thread(run, status)
                assert "collecting  outer step 0 of 100" in shown and re.search(
                    r"^\s*university-a\s+peer\s", shown, re.MULTILINE
                )
                assert "model.safetensors: outer step 0" in await asyncio.to_thread(run, export)
                with safe_open("model.safetensors", framework="pt") as file:
                    assert sorted(file.keys()) == sorted(t.name for f in SCHEMA.fragments for t in f.tensors)
                for further in ("pause", "resume", "drain", "members"):
                    assert f"`{further}`" in README.read_text(encoding="utf-8")
                    assert await asyncio.to_thread(run, ["edit-coordinator", further, "--state", "my-run"])
                evict = ["edit-coordinator", "evict", "university-a", "--reason", "key lost", "--state", "my-run"]
                assert "is evicted" in await asyncio.to_thread(run, evict)
                await peer.disconnect()


def test_a_run_with_several_aggregators_is_made_as_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(OPERATING.read_text(encoding="utf-8"), "toml")
    Path("run.toml").write_text(RUN_TOML.replace("[aggregators]\n", "") + block)
    made = [words for words in commands(OPERATING, "Several aggregators") if words[1] != "serve"]
    assert [words[1] for words in made] == ["init", "new-aggregator"]
    for words in made:
        run(words)
    addresses = tuple(tomllib.loads(block)["aggregators"]["addresses"])
    assert StateFolder(Path("my-run-1")).config().aggregators.addresses == addresses
    assert sorted(path.name for path in Path("my-run-1").glob("*.key")) == ["server.key"]


def test_a_region_is_invited_as_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    invites = [words for words in commands(OPERATING, "Two levels: a run of sites") if words[1] == "invite"]
    assert len(invites) == 2
    for words in invites:
        state = words[words.index("--state") + 1]
        run(["edit-coordinator", "init", "--state", state])
        assert run(words).startswith("edit1.")


class Squares(nn.Module):
    """A model as the README's loop has it: called with a batch, it returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(batch).square().mean()


@on_a_loop
async def test_the_readmes_loop_ends_with_the_run_and_saves_the_outer_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (loop,) = (block for block in blocks(README.read_text(encoding="utf-8"), "python") if "until_finished" in block)
    model, data = Squares(), [torch.randn(8, 4) for _ in range(5)]
    around = {"torch": torch, "model": model, "data": data, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    async with served(new_folder(Path("run"), toml=TOML.replace("outer_steps = 100", "outer_steps = 3"))) as at:
        home_of(at, "my-peer", "peer", Path("my-peer"))
        await asyncio.to_thread(exec, compile(loop, "README.md", "exec"), around)
        assert at.coordinator.run.finished
        await asyncio.to_thread(run, ["edit-coordinator", "export", "--state", "run", "--out", "model.safetensors"])
    saved = torch.load("model.pt", weights_only=True)
    with safe_open("model.safetensors", framework="pt") as file:
        assert sorted(saved) == sorted(file.keys())
        assert all(torch.equal(saved[name], file.get_tensor(name)) for name in saved)


def test_what_the_readme_lets_a_run_name_is_a_model(tmp_path: Path) -> None:
    """`builtin:gpt`, `hf:llama` and `entry:NAME` stand in the README; a name of another kind is refused."""
    text = README.read_text(encoding="utf-8")
    for name in ("builtin:gpt", "hf:llama", "entry:NAME"):
        assert f"`{name}`" in text
        folder = StateFolder.create(tmp_path / name.replace(":", "-"), f'[model]\nname = "{name}"\n')
        assert folder.config().model.name == name
    with pytest.raises(ConfigError, match="must be builtin:gpt, hf:MODEL_TYPE or entry:NAME"):
        StateFolder.create(tmp_path / "other", '[model]\nname = "https://models.example/x"\n').config()
