"""`edit-lab bench codecs`: the speed of every codec on one core, in GB/s of fp32, beside a plain copy in the same run.

Seconds are CPU time of this process, and the jobs take turns, so that a busy machine disturbs little and all alike; each figure
is the best of its repetitions. decode_add is what the coordinator does for each contribution: decode, scale, add to a sum;
measure decodes for a norm. hivemind's compressors are measured in the same way, in an environment of their own.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from edit import kernels
from edit.codecs import codec, codec_names
from edit.config.codec import CodecSpec
from edit.fragments.schema import FragmentSpec, TensorSpec
from edit.lab.bench.results import Row, circumstances, figure_note, one_line, results_table
from edit.lab.bench.rivals.environments import HIVEMIND, Environments, foreign_python
from edit.lab.processes import ChildDied, Supervisor
from edit.merging.merge import measure
from edit.records import EncodedTensor
from edit.view.charts import Group, Part, PartedBar, bars_picture

__all__ = ["CODECS", "OPERATIONS", "CodecOptions", "best_seconds", "measure_codecs", "picture", "row_of", "table"]

CODECS = (*codec_names(), "topk:k=128")
OPERATIONS = ("encode", "decode_add", "measure")
_BYTES_PER_ELEMENT = 4
_COPY = ("copy", "copy")
_RIVALS_WITHIN_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecOptions:
    """numel: elements of the vector, by default one block of a 124M GPT; repeat: of each job."""

    numel: int = 7_087_872
    repeat: int = 7
    codecs: Sequence[str] = CODECS
    label: str = ""
    rivals: Path | None = None  # folder of the environments: measure hivemind's compressors, too
    torch_index: str = ""


def measure_codecs(options: CodecOptions) -> list[Row]:
    """Return one row for each codec. Sets the number of torch's threads to 1. Raises ConfigError for an unknown codec."""
    for name in options.codecs:
        CodecSpec.parse(name).values()
    torch.set_num_threads(1)
    kernels.load()
    begins = circumstances(options.label)
    flat = torch.randn(options.numel, generator=torch.Generator().manual_seed(0))
    seconds = best_seconds(_jobs(flat, options.codecs), options.repeat)
    rows = []
    for name in options.codecs:
        bits = 8 * codec(name).encoded_size(options.numel) / options.numel
        own = {operation: seconds[name, operation] for operation in OPERATIONS}
        rows.append(row_of(begins, "edit", name, bits, own, seconds[_COPY], options))
    return rows + (_rivals(options, options.rivals, begins) if options.rivals else [])


def _rivals(options: CodecOptions, folder: Path, begins: Mapping[str, Any]) -> list[Row]:
    """Return one row for each of hivemind's compressors; one with the error when it cannot be installed or fails."""
    script = Path(__file__).parent / "rivals" / "hivemind_compressors.py"
    with tempfile.TemporaryDirectory(prefix="edit-bench-") as scratch, Supervisor(Path(scratch)) as supervisor:
        try:
            python = foreign_python(Environments(folder, supervisor, options.torch_index).python(HIVEMIND))
            command = (*python, str(script), str(options.numel), str(options.repeat))
            said = supervisor.call({"hivemind": command}, _RIVALS_WITHIN_S)["hivemind"]
        except ChildDied as error:
            return [_failed(begins, "compressors", one_line(error), options)]
    rows: list[Row] = []
    for found in (json.loads(line) for line in said.splitlines() if line.startswith("{")):
        if "error" in found:
            rows.append(_failed(begins, found["codec"], found["error"], options))
            continue
        seconds = {operation: found[operation] for operation in ("encode", "decode_add")}
        rows.append(row_of(begins, "hivemind", found["codec"], found["bits"], seconds, found["copy"], options))
    return rows


def _failed(begins: Mapping[str, Any], name: str, error: str, options: CodecOptions) -> Row:
    return {**begins, "numel": options.numel, "repeat": options.repeat, "system": "hivemind", "codec": name, "error": error}


def _jobs(flat: Tensor, names: Sequence[str]) -> dict[tuple[str, str], Callable[[], object]]:
    """Return what is timed, by (codec, operation)."""
    copy, total = torch.zeros_like(flat), torch.zeros_like(flat)
    found: dict[tuple[str, str], Callable[[], object]] = {_COPY: lambda: copy.copy_(flat)}
    fragment = FragmentSpec(fragment_id=0, name="block", tensors=(TensorSpec(name="weight", shape=(flat.numel(),)),))
    for name in names:
        one = codec(name)
        encoded = EncodedTensor(name, flat.numel(), bytearray(one.encode(flat, fragment).data))
        found[name, "encode"] = partial(one.encode, flat, fragment)
        found[name, "decode_add"] = partial(one.decode_add, encoded, total, 0.25)
        found[name, "measure"] = partial(measure, encoded)
    return found


def best_seconds(jobs: Mapping[tuple[str, str], Callable[[], object]], repeat: int) -> dict[tuple[str, str], float]:
    """Return the best CPU time of each job, all jobs once per turn; the first turn only warms up."""
    best = dict.fromkeys(jobs, float("inf"))
    for turn in range(repeat + 1):
        for key, job in jobs.items():
            start = time.process_time()
            job()
            if turn:
                best[key] = min(best[key], time.process_time() - start)
    return best


def row_of(
    begins: Mapping[str, Any],
    system: str,
    name: str,
    bits: float,
    seconds: Mapping[str, float],
    copy_s: float,
    options: CodecOptions,
) -> Row:
    """Return the row of one codec. seconds: by operation; copy_s: of a plain copy in the same process."""
    gigabytes = _BYTES_PER_ELEMENT * options.numel / 1e9
    return {
        **begins,
        "numel": options.numel,
        "repeat": options.repeat,
        "system": system,
        "codec": name,
        "bits_per_element": round(bits, 4),
        "copy_gb_s": round(gigabytes / copy_s, 2),
        **{f"{operation}_gb_s": round(gigabytes / one, 3) for operation, one in seconds.items()},
        **{f"{operation}_of_copy": round(copy_s / one, 3) for operation, one in seconds.items()},
    }


# ---- for people --------------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table. In brackets: the share of the rate of a plain copy."""
    head = ("codec", "bits", "encode", "(of copy)", "decode, add", "(of copy)", "measure", "(of copy)")
    body = [_cells(row) for row in rows]
    return results_table(
        _title(rows), head, body, f"GB/s of fp32 by CPU time on one thread. {_copies(rows)} {figure_note(rows)}"
    )


def _cells(row: Row) -> tuple[str, ...]:
    if "error" in row:
        return (_name(row), "failed: " + row["error"], *("" for _ in range(6)))
    figures = [
        text
        for operation in OPERATIONS
        for text in (
            (f"{row[f'{operation}_gb_s']:.2f}", f"({row[f'{operation}_of_copy']:.2f})")
            if f"{operation}_gb_s" in row
            else ("", "")
        )
    ]
    return (_name(row), f"{row['bits_per_element']:.4g}", *figures)


def _name(row: Row) -> str:
    return str(row["codec"]) if row["system"] == "edit" else f"{row['system']} {row['codec']}"


def _title(rows: Sequence[Row]) -> str:
    return f"Codecs, {rows[0]['numel']:,} elements, one thread"


def _copies(rows: Sequence[Row]) -> str:
    copies = {row["system"]: row["copy_gb_s"] for row in rows if "copy_gb_s" in row}
    return "A plain copy: " + ", ".join(f"{rate} ({system}'s process)" for system, rate in copies.items()) + "."


def picture(rows: Sequence[Row]) -> str:
    """Return the rows as an SVG file: the rates of encode and decode + add."""
    groups = []
    for row in rows:
        if "error" in row:
            groups.append(Group(_name(row), [PartedBar("", (), f"failed: {row['error']}")]))
            continue
        style = ("s0", "s5") if row["system"] == "edit" else ("lone", "lone")
        bars = [
            PartedBar(name, [Part(rate, one, f"{rate:.2f} GB/s")], f"{rate:.2f}")
            for name, one, rate in (
                ("encode", style[0], row["encode_gb_s"]),
                ("decode, add", style[1], row["decode_add_gb_s"]),
            )
        ]
        groups.append(Group(f"{_name(row)}, {row['bits_per_element']:.4g} bits", bars))
    key = {"s0": "encode", "s5": "decode and add"} | (
        {"lone": "another system"} if any(r["system"] != "edit" for r in rows) else {}
    )
    limit = next((row["copy_gb_s"] for row in rows if "copy_gb_s" in row), None)
    notes = ("GB/s of fp32 by CPU time on one thread, beside a plain copy in the same run.", figure_note(rows))
    return bars_picture(_title(rows), notes, groups, "GB/s", key, limit=(limit, "plain copy") if limit else None)
