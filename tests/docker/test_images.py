"""The container files: what can be checked without an engine. The entry scripts run for real, in fresh folders."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.ports import held_port

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
STEPS = 3


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    with held_port() as one, held_port() as two:
        yield one, two


def test_compose_names_only_targets_volumes_and_files_that_exist() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    targets = set(re.findall(r"^FROM .* AS (\w+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
    for service in compose["services"].values():
        assert service["build"]["target"] in targets
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in compose["volumes"]


def test_the_images_do_not_run_as_root_and_copy_only_what_exists() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    for line in re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", text, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists(), source


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_docker_compose_accepts_the_file() -> None:
    done = subprocess.run(["docker-compose", "-f", DOCKER / "compose.yaml", "config", "-q"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_invitation_that_fails_is_written_at_the_next_start(tmp_path: Path) -> None:
    """It leaves no file, or an empty one of before, that a peer would be refused with for ever."""
    state, invitations, programs = tmp_path / "state", tmp_path / "invitations", tmp_path / "bin"
    for folder in (state, invitations, programs):
        folder.mkdir()
    (state / "run.json").touch()
    (invitations / "b").touch()
    program = programs / "edit-coordinator"
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "STATE": str(state), "PEERS": "a b"}

    def start(does: str) -> subprocess.CompletedProcess[str]:
        program.write_text(f'#!/bin/sh\ncase "$1" in\n{does}\n*) echo "$@";;\nesac\n')
        program.chmod(0o755)
        variables = {**environment, "INVITATIONS": str(invitations)}
        return subprocess.run([DOCKER / "coordinator.sh"], env=variables, capture_output=True, text=True)

    failed = start("invite) exit 74;;")
    assert (failed.returncode, failed.stdout) == (74, "")
    assert [path.name for path in invitations.iterdir()] == ["b"]
    assert start('invite) echo "edit://$4"; echo "more words";;').stdout == f"serve --state {state}\n"
    assert {path.name: path.read_text() for path in invitations.iterdir()} == {"a": "edit://a\n", "b": "edit://b\n"}


@pytest.mark.timeout(300)
def test_the_entry_scripts_train_in_fresh_folders(tmp_path: Path, ports: tuple[int, int]) -> None:
    """What the three containers of compose.yaml do: init and invite, serve; redeem and train, twice."""
    toml = (DOCKER / "run.toml").read_text().replace("0.0.0.0", "127.0.0.1").replace('["coordinator"]', '["localhost"]')
    listen, enrol = ports
    toml = toml.replace("7700", str(listen)).replace("7701", str(enrol)).replace("outer_steps = 20", f"outer_steps = {STEPS}")
    toml = toml.replace("every = 20", "every = 2") + "\n[model]\nlayers = 1\nwidth = 32\nheads = 2\ncontext = 32\n"
    (tmp_path / "run.toml").write_text(toml)
    for name in ("invitations", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "text.txt").write_text((ROOT / "README.md").read_text())
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "INVITATIONS": str(tmp_path / "invitations"),
        "OMP_NUM_THREADS": "1",
    }
    coordinator = subprocess.Popen(
        [DOCKER / "coordinator.sh"],
        env={**environment, "STATE": str(tmp_path / "state"), "CONFIG": str(tmp_path / "run.toml"), "PEERS": "peer-1 peer-2"},
        stderr=subprocess.PIPE,
        text=True,
    )
    peers = []
    try:
        assert coordinator.stderr is not None
        heard = []
        for line in coordinator.stderr:  # as the health check of compose.yaml: peers start when it serves
            heard.append(line)
            if " serving " in line:
                break
        assert "serving" in heard[-1], heard
        for name, ranks in (("peer-1", "1"), ("peer-2", "2")):
            home = {"HOME_DIR": str(tmp_path / name), "NAME": name, "DATA": str(tmp_path / "data"), "RANKS": ranks}
            peers.append(subprocess.Popen([DOCKER / "peer.sh"], env={**environment, **home}, stderr=subprocess.PIPE, text=True))
        for peer in peers:
            _, errors = peer.communicate(timeout=200)
            assert peer.returncode == 0, errors
        _, errors = coordinator.communicate(timeout=100)  # it ends with its run
        assert coordinator.returncode == 0, errors
        lines = map(json.loads, (tmp_path / "state" / "metrics.jsonl").read_text().splitlines())
        committed = [line["outer_step"] for line in lines if line["kind"] == "round" and line["committed"]]
        assert committed == [*range(1, STEPS + 1)]
    finally:
        for process in (*peers, coordinator):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
