"""The output folder of the demo and of chaos: the names of its files. Only a folder that a demo created is ever wiped."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from edit.errors import ConfigError

__all__ = ["DemoFolder"]

_MARKER = ".edit-lab-demo"


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """The files of one demo. Call `claim` first."""

    path: Path

    def claim(self) -> None:
        """Create or empty the folder and mark it as a demo's. Raises ConfigError when it holds something else."""
        try:
            if self.path.exists():
                if not self.path.is_dir() or (any(self.path.iterdir()) and not (self.path / _MARKER).exists()):
                    raise ConfigError(f"--out {self.path}: exists and is no demo's folder; choose another, nothing was changed")
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True)
            (self.path / _MARKER).write_text("edit-lab demo may wipe this folder\n")
        except OSError as error:
            raise ConfigError(f"--out {self.path}: cannot be written ({error.strerror})") from error

    @property
    def run_toml(self) -> Path:
        return self.path / "run.toml"

    @property
    def state(self) -> Path:
        return self.path / "coordinator"

    @property
    def addresses(self) -> Path:
        return self.state / "addresses.json"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def lone(self) -> Path:
        return self.path / "lone"

    def home(self, peer_id: str) -> Path:
        return self.path / "peers" / peer_id

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def sample(self) -> Path:
        return self.path / "sample.txt"

    @property
    def checkpoint(self) -> Path:
        return self.path / "outer.safetensors"
