"""A message that names a missing extra is one line, and its install command works; so does every other one in a message."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = set(PROJECT["optional-dependencies"]) - {"dev"}
SOURCES = [path for folder in ("edit", "aggregator", "peers", "proto") for path in (REPOSITORY / folder).rglob("*.py")]

# What uses each extra first, with all packages of all extras away. Each ends with an exception.
USES = {
    "dp": "Accountant(1e-5)",
    "fast": "kernels.load()",
    "hf": "configuration(ModelConfig(name='hf:gpt2'))",
    "lightning": "import_module('edit.integrations.lightning')",
    "lowbit": "inner_optimizers(torch.nn.Linear(4, 4), InnerConfig(state='int8'), torch.device('cpu'))",
    "mlflow": "TrackerChoice.of(['mlflow'], [], frozenset())",
    "opacus": "import_module('edit.integrations.opacus')",
    "otel": "with_an_endpoint()",
    "swarm": "check_dht('--dht-peers')",
    "tensorboard": "TrackerChoice.of(['tensorboard'], [], frozenset())",
    "trackio": "TrackerChoice.of(['trackio'], [], frozenset())",
    "transformers": "import_module('edit.integrations.transformers')",
    "wandb": "TrackerChoice.of(['wandb'], [], frozenset())",
    "web": "check_installed()",
}
EXTRA = {"opacus": "dp", "transformers": "hf"}  # where a use is not named as its extra
PACKAGES = [
    "accelerate",
    "dp_accounting",
    "hivemind",
    "jinja2",
    "lightning",
    "lightning.pytorch",
    "mlflow",
    "numba",
    "opacus",
    "opentelemetry",
    "peft",
    "starlette",
    "tensorboard",
    "torchao",
    "trackio",
    "transformers",
    "uvicorn",
    "wandb",
]
PROGRAM = f"""
import json, logging, os, sys
sys.modules.update(dict.fromkeys({PACKAGES!r}))
from importlib import import_module
import torch
from aggregator.swarm.host_folder import check_dht
from edit import kernels
from edit.config.run import InnerConfig, ModelConfig
from edit.integrations.huggingface import configuration
from edit.telemetry import telemetry
from edit.trackers.choose import TrackerChoice
from edit.trust.privacy import Accountant
from edit.web import check_installed
from peers.training.inner_optimizers import inner_optimizers

class Told(logging.Handler):
    def emit(self, record):
        raise RuntimeError(record.getMessage())

def with_an_endpoint():
    logging.getLogger("edit.telemetry").addHandler(Told())
    with telemetry("http/protobuf", "edit-peer", "run-1", "a"):
        pass

os.environ["EDIT_KERNELS"] = "numba"
said = {{}}
for name, use in {USES!r}.items():
    try:
        eval(use)
    except Exception as error:
        said[name] = str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=100)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("use", USES)
def test_what_needs_an_extra_says_in_one_line_how_to_install_it(use: str, said: dict[str, str]) -> None:
    line = said[use]
    assert "\n" not in line and len(line) < 250
    assert line.endswith(f": pip install 'edit-localsgd[{EXTRA.get(use, use)}]'"), line


def test_every_extra_is_used_above() -> None:
    assert {EXTRA.get(use, use) for use in USES} == EXTRAS


def test_every_command_that_a_message_names_installs_an_extra_of_this_project() -> None:
    """In quotes, since a shell such as zsh takes brackets for a pattern."""
    found = 0
    for path in SOURCES:
        for command in re.findall(r"(?:pip )?install [^\n]{0,3}edit-localsgd\[.*?\].", path.read_text(encoding="utf-8")):
            found += 1
            named = re.fullmatch(r"pip install '([\w-]+)\[(\w+|\{name\})\]'", command)
            assert named is not None and named[1] == PROJECT["name"], f"{path}: {command}"
            assert named[2] in EXTRAS | {"{name}"}, f"{path}: {command}"
    assert found > len(EXTRAS)
