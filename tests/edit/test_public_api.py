"""`import edit`: exactly the promised names, no side effects; the example in examples/ runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import edit

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "bring_your_own_loop.py"

PROMISED = [
    "Aborted",
    "AggregatorsConfig",
    "CodecConfig",
    "CodecSpec",
    "Collective",
    "Commit",
    "Committed",
    "CompositeCollective",
    "ConfigError",
    "Contribution",
    "EditError",
    "EditWorker",
    "EncodedTensor",
    "ErrorFeedback",
    "Evicted",
    "EvictedError",
    "Finished",
    "FragmentCodec",
    "FragmentCommit",
    "FragmentSpec",
    "GossipConfig",
    "InnerConfig",
    "LocalCollective",
    "LocalGossip",
    "LocalProtocolError",
    "LocalRun",
    "MembershipConfig",
    "ModelConfig",
    "NeedsSnapshot",
    "Outcome",
    "OuterConfig",
    "OuterState",
    "PeerVerdict",
    "PenaltyConfig",
    "RefusedError",
    "RemoteProtocolError",
    "RoundsConfig",
    "RunConfig",
    "Schema",
    "ServerConfig",
    "Snapshot",
    "StorageConfig",
    "StorageError",
    "SyncConfig",
    "TensorSpec",
    "TransportError",
    "Verdict",
    "WorkerConfig",
    "codec",
    "codec_names",
    "decode",
    "digest",
    "plan_fragments",
]


def run(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


def test_all_is_exactly_what_is_promised() -> None:
    assert edit.__all__ == PROMISED == sorted(PROMISED)


def test_every_name_exists_and_everything_else_is_a_module() -> None:
    for name in edit.__all__:
        assert getattr(edit, name) is not None
    others = {name for name in vars(edit) if not name.startswith("_")} - set(edit.__all__)
    assert all(isinstance(getattr(edit, name), type(sys)) for name in others)


def test_help_and_completion_know_the_names_before_they_are_used() -> None:
    assert run("-c", "import sys, edit; print(sorted({*edit.__all__} - {*dir(edit)}), 'torch' in sys.modules)") == "[] False\n"


def test_a_module_with_public_names_needs_no_import_of_its_own() -> None:
    code = "import sys, edit; print(edit.errors.EditError.__name__, edit.config.run.RunConfig.__name__, 'torch' in sys.modules)"
    assert run("-c", code) == "EditError RunConfig False\n"


def test_every_name_is_documented() -> None:
    assert [name for name in edit.__all__ if name != "Outcome" and not (getattr(edit, name).__doc__ or "").strip()] == []


def test_importing_brings_no_carrier_and_prints_nothing() -> None:
    """torch itself loads threads and sockets, so what is asked is who of ours and of theirs came with it."""
    code = (
        "import sys, edit; print(sorted({'grpc', 'editpb', 'peers', 'aggregator', 'torch._dynamo', 'rich'} & set(sys.modules)))"
    )
    assert run("-c", code) == "[]\n"


def test_importing_leaves_torchs_settings_and_random_state_alone() -> None:
    state = "(torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed())"
    code = f"import torch; torch.manual_seed(3); before = {state}; import edit; print(before == {state}, torch.rand(1).item())"
    assert run("-c", code) == run("-c", code.replace("import edit; ", ""))


def test_the_example_needs_at_most_five_lines_and_trains() -> None:
    marked = [line for line in EXAMPLE.read_text(encoding="utf-8").splitlines() if line.rstrip().endswith("# edit")]
    assert 1 <= len(marked) <= 5
    losses = [[float(x) for x in re.findall(r"\d+\.\d{4}", line)] for line in run(str(EXAMPLE)).splitlines()]
    (first, _), (ada, grace), (outer, same) = losses
    assert outer == same < min(ada, grace) < first  # together they know the whole curve


def test_the_marked_lines_are_all_that_mentions_edit() -> None:
    code = EXAMPLE.read_text(encoding="utf-8").split('"""', 2)[2]
    plain = [line for line in code.splitlines() if not line.rstrip().endswith("# edit") and "def train" not in line]
    assert not any(re.search(r"\bedit\b|worker", line) for line in plain)
