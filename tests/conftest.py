"""For every test process and what it starts: no model hub is ever asked, and torch computes with one thread, since several
tests run at the same time; gRPC is as silent as in the commands.
"""

import gc
import importlib
import os
from collections.abc import Iterator, Sequence

import hypothesis
import pytest

from tests.support.exhaustive import examples, left_out

# Nothing here says how fast something is, and the machine may be busy with other tests.
hypothesis.settings.register_profile(
    "busy", deadline=None, max_examples=examples(100), suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when grpc is first imported

# Nothing waits for the disk: what a killed program wrote stays, and only a power cut would lose it.
os.fsync = os.fstat  # type: ignore[assignment]

PROCESSES = (
    "tests/aggregator/swarm/test_discovery.py",
    "tests/docker/test_images.py::test_the_entry_scripts_train_in_fresh_folders",
    "tests/edit/lab/bench/test_bench_command.py::test_rows_go_to_stdout_where_that_is_a_pipe",
    "tests/edit/lab/bench/test_links.py",
    "tests/edit/lab/bench/test_measured_run.py",
    "tests/edit/lab/bench/test_rivals.py",
    "tests/edit/lab/chaos/test_chaos_real.py",
    "tests/edit/lab/chaos/test_chaos_swarm_real.py",
    "tests/edit/lab/demo/test_demo_real.py",
    "tests/edit/lab/test_network.py::test_without_the_right_to_make_namespaces_one_line_says_so",
    "tests/edit/test_bits.py",
    "tests/edit/test_command_line.py::test_an_integration_whose_package_is_missing_says_in_one_line_what_to_install",
    "tests/edit/test_public_api.py::test_the_example_needs_at_most_five_lines_and_trains",
    "tests/edit/test_public_api.py::test_importing_leaves_torchs_settings_and_random_state_alone",
    "tests/edit/web/test_browser.py",
    "tests/examples/",
    "tests/peers/swarm/test_daemon.py::test_what_leaves_the_site_is_told_before_the_member_was_let_in",
    "tests/peers/test_connection.py::test_what_is_forked_beside_calls_does_not_abort",
    "tests/processes/",
    "tests/test_extras.py",
)
"""Files and folders whose tests start real programs, and wait for them; `make test-processes` runs these."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[object]) -> None:
    """The workers of a run of all tests are forked with their imports done."""
    if config.args == config.getini("testpaths"):
        importlib.import_module("tests.support.forked_workers").fork_workers(config, len(specs))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of PROCESSES, and leave out what only `make test-exhaustive` runs."""
    for item in items:
        if item.nodeid.startswith(PROCESSES):
            item.add_marker(pytest.mark.processes)
    rare = set(left_out(items))
    config.hook.pytest_deselected(items=[item for item in items if item in rare])
    items[:] = [item for item in items if item not in rare]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collection: what is imported stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
