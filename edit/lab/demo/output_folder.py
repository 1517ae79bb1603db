"""The output folder of the demo and of chaos: the names of its files. Only what such a command made is ever removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edit.durable_files import lock_file
from edit.errors import ConfigError
from edit.plain_text import reason_of

__all__ = ["DemoFolder"]

_MADE = {  # what each command makes in its folder
    "demo": (
        *("run.toml", "coordinator", "data", "logs", "lone", "peers"),
        *("metrics.jsonl", "results.json", "report.html", "sample.txt", "outer.safetensors"),
        *("penalty", "robust", "masked"),  # with --hostile
    ),
    "chaos": (
        *("run.toml", "coordinator", "coordinator.kept", "copy", "data", "logs", "peers", "metrics", "chaos.json"),
        *("alone", "disturbed"),  # with --exact
    ),
}


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """The files of one demo, or of one chaos. Use it only inside `claim`."""

    path: Path
    command: str = "demo"  # or "chaos"

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Create and mark the folder, or remove what the same command has made in it before; hold it for this process.

        Raises ConfigError when it holds something else, or the command is at work in it; StorageError where there are no locks.
        """
        folder, command = Path(os.path.realpath(self.path)), f"`edit-lab {self.command}`"
        marker = folder / f".edit-lab-{self.command}"
        try:
            if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not marker.exists())):
                raise ConfigError(
                    f"--out {self.path}: exists and is no folder of {command}; choose another, nothing was changed"
                )
            folder.mkdir(parents=True, exist_ok=True)
            file = marker.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {self.path}: cannot be written ({reason_of(error)})") from error
        with file:
            if not lock_file(file.fileno(), marker):
                raise ConfigError(f"--out {self.path}: another {command} is at work there; choose another folder")
            try:
                if file.tell() == 0:
                    file.write(f"{command} may remove what it has made here\n")
                    file.flush()
                for name in _MADE[self.command]:
                    _remove(folder / name)
            except OSError as error:
                raise ConfigError(f"--out {self.path}: cannot be written ({reason_of(error)})") from error
            yield

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


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder that need not be there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
