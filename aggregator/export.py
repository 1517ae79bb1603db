"""The run's outer parameters as files for others: by tensor name, or as a folder that transformers' `from_pretrained` loads.

The fragments of all aggregators are put together. An export says which run and outer step it is of, and appears whole or not at
all.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from aggregator.storage.configurations import configurations_of
from aggregator.storage.high_water import read_mark
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import load_outer
from edit.config.run import RunConfig
from edit.durable_files import check_outside, hidden_prefix, write_atomic_with
from edit.errors import ConfigError
from edit.fragments.digest import combine
from edit.integrations import huggingface as hf
from edit.merging.outer_state import OuterState
from edit.plain_text import parse_json, reason_of

__all__ = ["Committed", "Exported", "export_parameters", "export_pretrained", "write_parameters", "write_pretrained"]


@dataclass(frozen=True, slots=True)
class Committed:
    """What a run has committed, of all its shares or parts, in their order."""

    run_id: str
    config: RunConfig
    outers: tuple[OuterState, ...]
    counted: str = "outer step"  # what their outer steps count; with gossip settlings


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    run_id: str
    outer_steps: tuple[int, ...]  # by aggregator, or part of a swarm, each at its last committed one
    digest: str  # of the whole model's outer parameters, of now also where their average was written
    average: str = ""  # which one was written; "": none, the outer parameters of now
    counted: str = "outer step"
    digests: tuple[str, ...] = ()  # of each share or part, in their order

    def origin(self) -> dict[str, str]:
        """Return what the export says of its origin."""
        averaged = {"average": self.average} if self.average else {}
        shares = {"digests": ", ".join(self.digests)} if len(self.digests) > 1 else {}
        return {"run_id": self.run_id, self.counted.replace(" ", "_"): self.shown, "digest": self.digest, **shares, **averaged}

    @property
    def told(self) -> str:
        """What it is, for people."""
        average = f", their average ({self.average})" if self.average else ""
        return f"{self.counted} {self.shown}{average}, digest {self.digest[:12]}"

    @property
    def shown(self) -> str:
        """`40`, or `40, 38` where not all are at the same outer step."""
        return ", ".join(map(str, self.outer_steps if len(set(self.outer_steps)) > 1 else self.outer_steps[:1]))


def export_parameters(folders: Sequence[StateFolder], out: Path, *, averaged: bool = False) -> Exported:
    """Write the outer parameters by tensor name to a safetensors file.

    Args:
        folders: of every aggregator of one run, in any order.
        averaged: the average that the section [average] keeps, instead of the outer parameters of the last commit.

    Raises ConfigError (also for folders of other runs, when one is missing, where no average is kept, and for an `out` in
    one of the folders), StorageError.
    """
    check_outside(out, (folder.path for folder in folders))
    return write_parameters(_of_coordinator(folders), out, averaged=averaged)


def write_parameters(run: Committed, out: Path, *, averaged: bool = False) -> Exported:
    """As `export_parameters`."""
    named, exported = _named_of(run, averaged=averaged)
    file = Path(os.path.realpath(out)) if out.is_symlink() else out  # of a link, what it leads to is replaced
    write_atomic_with(
        file, lambda temporary: _save(named, temporary, exported.origin()), failures=(SafetensorError,), shared=True
    )
    return exported


def _save(named: dict[str, Tensor], path: Path, origin: dict[str, str]) -> None:
    """Write a safetensors file whose bytes follow from what is in it: the library writes what is said of it in any order."""
    save_file(named, path, origin)
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(size))
        ordered = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
        text = json.dumps(ordered, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:
            file.seek(8)
            file.write(text.ljust(size))


def export_pretrained(folders: Sequence[StateFolder], out: Path, *, averaged: bool = False) -> Exported:
    """Write the outer parameters of an `hf:` run as the new folder `out`; its run.json names the run and the outer step.

    Args:
        folders, averaged: as `export_parameters`.

    Raises ConfigError (also for another kind of model, and when `out` is not empty, or in one of the folders),
    StorageError.
    """
    check_outside(out, (folder.path for folder in folders))
    return write_pretrained(_of_coordinator(folders), out, averaged=averaged)


def write_pretrained(run: Committed, out: Path, *, averaged: bool = False) -> Exported:
    """As `export_pretrained`."""
    named, exported = _named_of(run, averaged=averaged)
    folder = Path(os.path.realpath(out))  # of a link, what it leads to is replaced
    if not folder.name:
        raise ConfigError(f"--out {out}: is the root of all folders; give a new one")
    try:
        if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"--out {out}: exists and is not an empty folder; give a new one")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(
            prefix=hidden_prefix(folder), suffix=".tmp", dir=folder.parent, ignore_cleanup_errors=True
        ) as own:
            made = Path(own, folder.name)
            made.mkdir()  # its permissions follow the umask, those of `own` do not
            hf.save(run.config.model, named, made)
            run_json = made / "run.json"
            run_json.write_text(json.dumps(exported.origin(), indent=1), encoding="utf-8")
            mode = stat.S_IMODE(run_json.stat().st_mode)
            for file in made.iterdir():
                file.chmod(mode)  # safetensors writes files that only their owner reads
            made.replace(folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--out {out}: cannot be written ({reason_of(error)})") from error
    return exported


def _of_coordinator(folders: Sequence[StateFolder]) -> Committed:
    ordered = _of_one_run(folders)
    outers = tuple(map(_last_of, ordered))
    return Committed(ordered[0].run_id, outers[0].config, outers)  # what describes the tensors is what they were read under


def _last_of(folder: StateFolder) -> OuterState:
    mark = read_mark(folder.high_water)  # before the state: a commit may come meanwhile
    outer = load_outer(folder)
    if mark is not None and outer.outer_step < mark.outer_step:
        raise ConfigError(
            f"{folder.path}: holds outer step {outer.outer_step}, but outer step {mark.outer_step} was committed; restore the "
            "folder outer from a newer copy, or go on from there with `serve --accept-rollback`, and export then"
        )
    return outer


def _named_of(run: Committed, *, averaged: bool) -> tuple[dict[str, Tensor], Exported]:
    named = {name: tensor for outer in run.outers for name, tensor in _named(outer, averaged=averaged).items()}
    digest = combine(one for outer in run.outers for one in outer.fragment_hashes)
    average = run.config.average.shown if averaged else ""
    steps, digests = zip(*((outer.outer_step, outer.digest) for outer in run.outers), strict=True)
    return named, Exported(run.run_id, steps, digest, average, run.counted, digests)


def _of_one_run(folders: Sequence[StateFolder]) -> list[StateFolder]:
    """Return the folders by aggregator. Raises ConfigError unless each aggregator of one run is there once."""
    ordered = sorted(folders, key=lambda folder: folder.aggregator)
    other = next((folder for folder in ordered if folder.run_id != ordered[0].run_id), None)
    if other is not None:
        raise ConfigError(f"--state {other.path}: is of run {other.run_id}, {ordered[0].path} of {ordered[0].run_id}")
    count, found = configurations_of(ordered[0]).config.aggregators.count, [folder.aggregator for folder in ordered]
    missing = [number for number in range(count) if number not in found]
    if missing:
        raise ConfigError(
            f"--state {ordered[0].path}: the run has {count} aggregators; give the folder of aggregator {missing[0]}, too"
        )
    if len(found) > count:
        raise ConfigError(f"--state: {len(found)} folders of a run with {count} aggregators; give each one once")
    return ordered


def _named(outer: OuterState, *, averaged: bool) -> dict[str, Tensor]:
    """Return the outer parameters by tensor name, or their average: fp32 copies in full shape."""
    named: dict[str, Tensor] = {}
    for theta, fragment in zip(outer.averaged if averaged else outer.theta, outer.schema.fragments, strict=True):
        parts = torch.split(theta, [tensor.numel for tensor in fragment.tensors])
        named |= {t.name: part.view(t.shape).clone() for t, part in zip(fragment.tensors, parts, strict=True)}
    return named
