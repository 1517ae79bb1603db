"""The demo's output folder: where each file lies, and the promise that only a demo's own folder is ever wiped.

Owns: names of files. Must not know: their content.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from edit.errors import ConfigError

__all__ = ["DemoFolder"]

_MARKER = ".edit-lab-demo"


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """`claim` makes it empty, or refuses."""

    path: Path

    def claim(self) -> None:
        """Empty the folder and mark it as a demo's. Raises ConfigError when it holds something else."""
        try:
            if self.path.exists():
                if not self.path.is_dir() or (any(self.path.iterdir()) and not (self.path / _MARKER).exists()):
                    raise ConfigError(f"--out {self.path}: exists and is no demo's folder; name another, nothing was touched")
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
