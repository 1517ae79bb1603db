"""For every test process and what it starts: no model hub is ever asked, and torch computes with one thread, since several
tests run at the same time; gRPC is as silent as in the commands.
"""

import contextlib
import gc
import importlib
import os
from collections.abc import Iterator

import hypothesis
import pytest

# Nothing here says how fast something is, and the machine may be busy with other tests.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when grpc is first imported


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect without garbage collection: what is imported stays. In a fresh clone every worker would compile the same test
    files at the same time, so each begins elsewhere, and reads what the others have compiled."""
    gc.disable()
    try:
        _import_part(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_part(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args != config.getini("testpaths"):
        return
    root = config.rootpath
    files = sorted((root / "tests").rglob("test_*.py"))
    part, parts = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for file in files[len(files) * part // parts : len(files) * (part + 1) // parts]:
        name = ".".join(file.relative_to(root).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it says so
            importlib.import_module(name)
