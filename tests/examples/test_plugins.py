"""Each package of examples/plugins, installed, in a run that uses it; and what becomes of one that is not as it should be."""

from __future__ import annotations

import csv
import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aggregator.cli
import peers.cli
from aggregator.storage import checkpoint
from edit import plugins
from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.lab.council.replicated import same
from tests.processes.test_swarm_commands import swarm
from tests.support.daemons import Site, call, small

PACKAGES = Path(__file__).parents[2] / "examples" / "plugins"
pytestmark = pytest.mark.timeout(300)
TWO = {"rounds": {"start_peers": 2, "quorum": 2}, "sync": {"every": 2, "outer_steps": 3}}


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, as pip installs them, in a folder of their own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("packages")
    shutil.copytree(PACKAGES, source, dirs_exist_ok=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    folders = [os.fspath(path.parent) for path in sorted(source.glob("*/pyproject.toml"))]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run([*install, "--target", os.fspath(target), *folders], check=True, env=environment)
    return target


@pytest.fixture
def installed(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """They are installed for this test and the processes that it starts; nothing that it admits outlives it."""
    monkeypatch.syspath_prepend(os.fspath(packages))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.fspath(packages), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setattr(plugins, "_admitted", {})
    before = set(sys.modules)
    yield packages
    for name in set(sys.modules) - before:
        if name.startswith("edit_example_"):
            del sys.modules[name]


def trains(site: Site, *options: object) -> dict[str, object]:
    """Two peers to the end of the run; its status then."""
    site.serve()
    site.enrol("a", "b")
    both = [site.peer(name, *options) for name in ("a", "b")]
    assert [peer.finish() for peer in both] == [0, 0]
    return site.status()


def test_an_outer_optimizer_trains_and_is_replayed_to_the_same_bits(installed: Path, tmp_path: Path) -> None:
    outer = {"optimizer": "entry:lion", "lr": 1e-3, "options": {"beta1": 0.8}}
    with Site(tmp_path / "run", small("lion", outer=outer, **TWO), "--allow", "lion") as site:
        assert '"outer:lion" = "0.1.0 sha256:' in (site.state / "run.toml").read_text()
        finished = trains(site)
        assert finished["outer_step"] == 3
        site.daemons[0].kill()
        checkpoint.path_of(site.state / "outer", 3).unlink()  # what is left is the founding's, and the journal

        def export() -> str:
            return call(aggregator.cli.app, "export", "--state", site.state, "--out", tmp_path / "model.safetensors")

        assert str(finished["digest"])[:12] in export()

        # Another plug-in under the same name and version: refused, and told apart by its bits where its operator insists.
        source = installed / "edit_example_outer.py"
        before = source.read_text()
        try:
            source.write_text(before.replace("sign_()", "tanh_()"))
            plugins._admitted.clear()
            del sys.modules["edit_example_outer"]
            with pytest.raises(
                ConfigError, match=r"^entry:lion \(edit.outer\): the run has 0.1.0 sha256:\w+, and here is 0.1.0 sha256"
            ):
                export()
            refused = site.start("aggregator", "serve", "--state", site.state)
            assert refused.finish() == 2
            assert "the run has 0.1.0 sha256:" in refused.lines[-1], refused.lines
            insists = site.start("aggregator", "serve", "--state", site.state, "--allow", "lion")
            assert insists.finish() == 2
            assert "was committed with digest" in insists.lines[-1]
        finally:
            source.write_text(before)


def test_a_codec_trains_and_a_peer_that_has_not_allowed_it_is_told_so(installed: Path, tmp_path: Path) -> None:
    codec = {"up": "entry:ternary:block=64", "down": "entry:ternary"}
    with Site(tmp_path / "run", small("ternary", codec=codec, **TWO), "--allow", "ternary") as site:
        assert trains(site, "--allow", "ternary")["outer_step"] == 3
        site.enrol("c")
        refused = site.peer("c")
        assert refused.finish() == 2
        words = "the run uses entry:ternary (edit.codecs), code of another package: add `--allow ternary` if you trust"
        assert refused.lines[-1].startswith(f"edit-peer: {words}"), refused.lines


def table(file: Path) -> list[tuple[int, str, str]]:
    """What the example tracker has written."""
    with file.open(newline="") as rows:
        return [(int(step), name, value) for step, name, value in csv.reader(rows)]


def test_a_model_trains_on_data_of_a_plugin_and_both_sides_are_tracked_by_one(installed: Path, tmp_path: Path) -> None:
    settings = {**small("lstm", **TWO), "model": {"name": "entry:lstm", "context": 32, "options": {"hidden": 16}}}
    with Site(tmp_path / "run", settings, "--allow", "lstm") as site:
        assert '"models:lstm" = "0.1.0 sha256:' in (site.state / "run.toml").read_text()
        with gzip.open(tmp_path / "text.gz", "wb") as text:
            text.write(b"to be or not to be, that is the question. " * 40)
        coordinator = site.serve("--tracker", "entry:table", "--allow", "table")
        site.enrol("a", "b")
        data = ("--data", "entry:gzipped", "--data-option", f"path={tmp_path / 'text.gz'}", "--allow", "gzipped")
        with pytest.raises(
            ConfigError, match=r"^an option uses entry:gzipped \(edit.data\), code of another package: add `--al"
        ):
            call(peers.cli.app, "run", "--home", site.folder / "a", *data[:-2])
        with pytest.raises(
            ConfigError, match=r"^an option uses entry:table \(edit.trackers\), code of another package: add `--"
        ):
            call(peers.cli.app, "run", "--home", site.folder / "a", *data, "--tracker", "entry:table")
        tracked = ("--tracker", "entry:table", "--allow", "table")
        both = [site.peer("a", *data, "--allow", "lstm"), site.peer("b", *data, "--allow", "lstm", *tracked)]
        assert [each.finish() for each in (*both, coordinator)] == [0, 0, 0]
        folder = "trackers/table"
        (own,), (run,) = (list((each / folder).glob("*.csv")) for each in (site.folder / "b", site.state))
        assert [float(value) for _, name, value in table(own) if name == "edit/outer_step"] == [1, 2, 3]
        assert [(step, float(value)) for step, name, value in table(run) if name == "edit/merged"] == [(1, 2), (2, 2), (3, 2)]


def test_a_merger_and_a_penalty_train(installed: Path, tmp_path: Path) -> None:
    settings = small(
        "robust",
        outer={"optimizer": "sgd", "lr": 1.0, "merger": "entry:trimmed", "merger_options": {"trim": 0.0}},
        penalty={"detector": "entry:factor", "options": {"factor": 2.0}},
        **TWO,
    )
    with Site(tmp_path / "run", settings, "--allow", "trimmed", "--allow", "factor") as site:
        assert trains(site)["outer_step"] == 3


@pytest.mark.exhaustive
def test_all_hosts_of_a_swarm_have_the_same_plugins_and_another_file_is_refused(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c only hosts. It is refused without permission, and with another file of the same version; then it has the bits of a."""
    sections = {
        "outer": {"optimizer": "entry:lion", "lr": 1e-3, "merger": "entry:trimmed", "merger_options": {"trim": 0.0}},
        "penalty": {"detector": "entry:factor", "options": {"factor": 4.0}},
        "codec": {"up": "entry:ternary", "down": "fp32"},
    }
    allow = [word for name in ("lion", "trimmed", "factor", "ternary") for word in ("--allow", name)]
    other = shutil.copytree(installed, tmp_path / "other")
    source = other / "edit_example_outer.py"
    source.write_text(source.read_text().replace("sign_()", "tanh_()"))
    (tmp_path / "swarm").mkdir()
    with swarm(tmp_path / "swarm", parts=1, outer_steps=2, start_peers=2, sections=sections) as members:
        a = members.start("a", *allow)
        a.until("owns part")
        pins = RunConfig.from_toml(members.path / "a" / "run.toml").plugins
        assert sorted(pins) == ["codecs:ternary", "mergers:trimmed", "outer:lion", "penalties:factor"]
        c = members.host("c")
        assert c.finish() == 2
        assert "uses entry:lion (edit.outer), code of another package: add `--allow lion` if you trust" in c.lines[-1], c.lines
        with monkeypatch.context() as at_c:
            at_c.setenv("PYTHONPATH", os.environ["PYTHONPATH"].replace(os.fspath(installed), os.fspath(other)))
            c = members.host("c", *allow)
            assert c.finish() == 2
        assert "entry:lion (edit.outer): the run has 0.1.0 sha256:" in c.lines[-1], c.lines
        c = members.host("c", *allow)
        a.until("2 vote, of 2 members")
        b = members.join("b", *allow)
        assert [each.finish() for each in (a, b, c)] == [0, 0, 0]
        plugins.admit(RunConfig.from_toml(members.path / "a" / "run.toml"), {"lion", "trimmed", "factor", "ternary"})
        one, another = (replica.snapshot() for replica in members.states(0, "a", "c"))
        assert one.metadata["outer_step"] == 2 and same(one, another)


def test_a_run_is_not_made_with_what_its_operator_has_not_allowed(installed: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"run.toml names entry:lion \(edit.outer\), code of another package: add `--allow lion`"
    ):
        Site(tmp_path / "run", small("lion", outer={"optimizer": "entry:lion"}))
