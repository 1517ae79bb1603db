"""What a host is started with: whether it uses the DHT, and what cannot be."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from aggregator.server import serve_run
from aggregator.storage.state_folder import StateFolder
from aggregator.swarm import host_folder
from aggregator.swarm.host_folder import HostFolder
from aggregator.swarm.process import settle
from edit.config.run import SwarmConfig
from edit.errors import ConfigError
from tests.support.served import new_folder

MADDR = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWMeRyCUk5dyG5REHphBwiG8eP4C13hyyyzheUgS5g4B5m"
AUTO = SwarmConfig()


def folder(**settings: object) -> HostFolder:
    return HostFolder(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("installed", [True, False])
def test_the_dht_is_used_where_hivemind_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_folder, "find_spec", lambda name: object() if installed and name == "hivemind" else None)
    with caplog.at_level(logging.INFO):
        assert folder().uses_dht(AUTO) is installed
        assert folder(discovery="addresses").uses_dht(AUTO) is False
        assert folder().uses_dht(SwarmConfig(discovery="addresses")) is False
    assert len(caplog.messages) == (not installed) and all("pip install 'edit-localsgd[swarm]'" in m for m in caplog.messages)
    if installed:
        assert folder(discovery="dht").uses_dht(AUTO)
        return
    with pytest.raises(
        ConfigError, match=r"^discovery = \"dht\": the DHT needs hivemind.*\[swarm\].*addresses\" works without$"
    ):
        folder().uses_dht(SwarmConfig(discovery="dht"))


@pytest.mark.parametrize(
    "settings",
    [
        {"discovery": "mdns"},
        {"dht_peers": ("127.0.0.1:4001",)},
        {"dht_peers": (MADDR + "\n",)},
        {"dht_port": 65536},
        {"dht_port": -1},
    ],
    ids=str,
)
def test_what_cannot_be_is_said_in_one_line(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(settings))}.*[^\n]$"):
        folder(**settings)


@pytest.mark.parametrize("listen", ["\udc80:0", "::1:7700", "http://127.0.0.1:7700"])
def test_a_name_that_no_host_can_have_is_not_listened_at(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"^--listen .*: must be HOST:PORT"):
        folder(listen=listen)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = folder(discovery="dht", dht_peers=(MADDR,), dht_port=4001, seeds={"b": ("127.0.0.1:1",)})
    made.save(tmp_path)
    assert HostFolder.load(tmp_path) == made


def test_nodes_of_a_dht_that_cannot_be_used_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_folder, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^--dht-peers: the DHT needs hivemind.*\[swarm\]") as caught:
        folder(dht_peers=(MADDR,)).uses_dht(AUTO)
    assert "\n" not in str(caught.value)
    assert not folder(dht_peers=(MADDR,), discovery="addresses").uses_dht(AUTO)


def test_nodes_of_a_dht_are_kept_until_others_are_named(tmp_path: Path) -> None:
    settle(tmp_path, "127.0.0.1:0", "", {}, (MADDR,))
    assert settle(tmp_path, None, None, {}).dht_peers == HostFolder.load(tmp_path).dht_peers == (MADDR,)
    other = MADDR.replace("4001", "4002")
    assert settle(tmp_path, None, None, {}, (other,)).dht_peers == (other,)
    with pytest.raises(ConfigError, match="dht_peers"):
        settle(tmp_path, None, None, {}, ("127.0.0.1:4001",))
    assert HostFolder.load(tmp_path).dht_peers == (other,)


def test_a_coordinator_that_cannot_say_where_it_is_does_not_begin_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = new_folder(tmp_path / "run")
    for nodes, installed, words in (
        (("127.0.0.1:4001",), True, r"^--dht-peers '127.0.0.1:4001': must be like /ip4/"),
        ((MADDR,), False, r"^--dht-peers: the DHT needs hivemind.*\[swarm\]"),
    ):
        monkeypatch.setattr(host_folder, "find_spec", lambda name, found=installed: object() if found else None)
        with pytest.raises(ConfigError, match=words):
            asyncio.run(serve_run(StateFolder(state.path), dht_peers=nodes))
        assert not state.addresses.exists()
