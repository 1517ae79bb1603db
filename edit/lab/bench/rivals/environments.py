"""Where other systems are installed: virtual environments of their own, by pip, with pinned versions."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from edit.durable_files import write_atomic
from edit.errors import ConfigError
from edit.lab.processes import ChildDied, Supervisor

__all__ = ["FLOWER", "GLOO", "HIVEMIND", "TORCHFT", "Environments", "Needs", "cache_folder", "foreign_python"]

_FREE_BYTES = 4 << 30  # torch alone takes 0.8 GB for the CPU
_INSTALL_WITHIN_S = 1800.0
_NUMPY = "numpy<2.4"  # with 2.4 hivemind's 8-bit compressors raise TypeError


@dataclass(frozen=True, slots=True)
class Needs:
    """What a system needs: the name of an environment, pinned packages, and whether torch (of this project's version)."""

    environment: str
    packages: tuple[str, ...]
    torch: bool = True


GLOO = Needs("torch", ())
TORCHFT = Needs("torch", ("torchft==0.2.0",))
HIVEMIND = Needs("torch", ("hivemind==1.1.12", "bitsandbytes==0.49.2"))  # that one for its BlockwiseQuantization
FLOWER = Needs("flower", ("flwr==1.27.0",), torch=False)


def cache_folder() -> Path:
    """Return the folder for the environments: in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edit" / "rivals"


def foreign_python(python: Path) -> tuple[str, ...]:
    """Return the command line of an environment's Python: without our modules, and with one thread, as torchrun has it."""
    clean = ("env", "-u", "PYTHONPATH", "-u", "PYTHONHOME", "PYTHONNOUSERSITE=1", "OMP_NUM_THREADS=1")
    return (*clean, str(python))


class Environments:
    """Installs what is missing into `folder`, with pip and its own configuration (PIP_INDEX_URL and the like).

    torch_index: a further index for torch, where the usual one has no build for the CPU (the version is this project's).
    """

    def __init__(self, folder: Path, supervisor: Supervisor, torch_index: str = "") -> None:
        self._folder, self._supervisor, self._torch_index = folder, supervisor, torch_index

    def python(self, needs: Needs) -> Path:
        """Return the Python that has what is needed. Raises ChildDied when it cannot be installed, ConfigError without room."""
        home = self._folder / needs.environment
        python, done = home / "bin" / "python", home / "installed.json"
        torch = (f"torch=={metadata.version('torch')}", _NUMPY) if needs.torch else ()
        packages = [*torch, *needs.packages]
        installed = json.loads(done.read_text(encoding="utf-8")) if done.exists() else []
        if packages in installed and python.exists():
            return python
        self._folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(self._folder).free) < _FREE_BYTES:
            raise ConfigError(f"{self._folder}: {free >> 20} MiB are free, the other systems need {_FREE_BYTES >> 20}")
        if not python.exists():
            self._call("venv", (sys.executable, "-m", "venv", str(home)))
        index = ("--extra-index-url", self._torch_index) if self._torch_index and needs.torch else ()
        self._call("pip", (*foreign_python(python), "-m", "pip", "install", "--quiet", *index, *packages))
        write_atomic(done, json.dumps([*installed, packages]).encode())
        return python

    def _call(self, name: str, command: tuple[str, ...]) -> None:
        try:
            self._supervisor.call({name: command}, _INSTALL_WITHIN_S)
        except ChildDied as error:
            said = [line.strip() for line in str(error).splitlines() if "ERROR" in line]
            raise ChildDied(f"not installed: {(said or [str(error)])[-1]}") from error
