"""A host that is started while the one before it still leaves."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from aggregator.storage.state_folder import lock_folder
from aggregator.swarm import process
from edit.errors import ConfigError


def test_beside_a_peer_a_host_waits_until_the_one_before_has_let_the_folder_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lock_folder(tmp_path, "another host has this folder")
    waits = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        os.close(before)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(process, "_is_beside_a_peer", lambda: False)
    with pytest.raises(ConfigError, match="another host has this folder"):
        asyncio.run(process._lock(tmp_path))
    assert not waits
    monkeypatch.setattr(process, "_is_beside_a_peer", lambda: True)
    asyncio.run(process._lock(tmp_path))
    assert len(waits) == 1
    with pytest.raises(ConfigError, match="taken"):
        lock_folder(tmp_path, "taken")
