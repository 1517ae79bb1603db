"""A whole state folder comes back from an older copy while peers run: they go on from there, without a word of the operator."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.integration.test_receipts import EVERY, Member, exchange, members, toml
from tests.support.running import Running, running
from tests.support.served import held_clock, new_folder


@pytest.mark.parametrize("strict", ["false", "true"])
def test_peers_that_run_contribute_to_a_run_that_went_back(tmp_path: Path, strict: str) -> None:
    settings = toml(50, f"strict = {strict}").replace("[audit]\nenabled = true", "[audit]\nenabled = false")
    folder = new_folder(tmp_path / "run", toml=settings)
    serving, hours = ExitStack(), iter(range(1_800_000_000, 1_900_000_000, 3600))

    def serve() -> Running:
        serving.close()
        return serving.enter_context(running(folder, held_clock(partial(float, next(hours)))))

    with serving, ExitStack() as stack:
        two = stack.enter_context(members(folder, serve(), tmp_path))
        exchange(two)
        serving.close()
        shutil.copytree(folder.path, tmp_path / "copy", ignore=shutil.ignore_patterns(".*.tmp"))
        serve()
        for _ in range(3):
            exchange(two)
        serving.close()
        shutil.rmtree(folder.path)
        shutil.move(tmp_path / "copy", folder.path)
        here = serve()
        assert here.run.rounds.published.outer_step == 1 and {one.worker.outer_step for one in two.values()} == {4}

        def go_on(one: Member) -> None:
            """Take a snapshot, then two outer steps. In a thread of its own: who has its snapshot first waits for the other."""
            while one.worker.outer_step != 3:
                for _ in range(EVERY):
                    one.step()
                one.worker.synchronize()

        with ThreadPoolExecutor(len(two)) as threads:
            list(threads.map(go_on, two.values()))
        assert {one.worker.outer_step for one in two.values()} == {here.run.rounds.published.outer_step} == {3}
