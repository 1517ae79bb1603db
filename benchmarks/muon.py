"""What a step of Muon costs here and with torch.optim.Muon, whose Newton-Schulz iteration is in bfloat16 on every device.

    .venv/bin/python benchmarks/muon.py                      # matrices of the 0.8M model of `edit-lab compare`, one thread
    .venv/bin/python benchmarks/muon.py --width 1024 --layers 4 --device cuda

The matrices of a GPT's blocks, random gradients. Both take the same steps, in turns; milliseconds of a step are the median of
--repeat, and on a CPU CPU milliseconds stand beside them. `difference`: of the parameters' change by both, the norm of the
difference as a share of the norm (bfloat16 has 8 bits).

Prints a table; appends rows to benchmarks/results/muon.jsonl with --record.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from edit.lab.bench.results import Row, append_lines, circumstances, print_table, results_table
from peers.training.muon import Muon

RESULTS = Path(__file__).parent / "results" / "muon.jsonl"
SETTINGS: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.1, "momentum": 0.95}


def matrices(layers: int, width: int, device: str) -> list[nn.Parameter]:
    """Return the matrices of `layers` blocks."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)) * layers
    return [nn.Parameter(0.02 * torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def change(now: list[nn.Parameter], before: list[Tensor]) -> Tensor:
    return torch.cat([(own.detach() - old).flatten() for own, old in zip(now, before, strict=True)])


def rows(layers: int, width: int, device: str, repeat: int) -> list[Row]:
    """Return the row of each optimizer."""
    both = [matrices(layers, width, device) for _ in range(2)]
    before = [each.detach().clone() for each in both[0]]
    optimizers: dict[str, Optimizer] = {
        "Muon": Muon(both[0], **SETTINGS),
        "torch.optim.Muon": torch.optim.Muon(both[1], **SETTINGS, adjust_lr_fn="match_rms_adamw"),
    }
    generator = torch.Generator().manual_seed(1)
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    cpu: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(repeat + 1):
        for pair in zip(*both, strict=True):
            gradient = torch.randn(pair[0].shape, generator=generator).to(device)
            for parameter in pair:
                parameter.grad = gradient
        for name, optimizer in optimizers.items():
            began, used = time.perf_counter(), time.process_time()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - used)
    moved = [change(own, before) for own in both]
    difference = float((moved[0] - moved[1]).norm() / moved[1].norm())
    parameters = sum(each.numel() for each in both[0])
    return [
        {
            "optimizer": name,
            "parameters": parameters,
            "width": width,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "ms": 1e3 * statistics.median(seconds[name][1:]),  # the first step makes the state
            "cpu_ms": 1e3 * statistics.median(cpu[name][1:]),
            "difference": difference,
        }
        for name in optimizers
    ]


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--layers", type=int, default=4)
    asked.add_argument("--width", type=int, default=128)
    asked.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked.add_argument("--repeat", type=int, default=5)
    asked.add_argument("--record", action="store_true", help=f"append the rows to {RESULTS.name}")
    options = asked.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("not run: this machine has no CUDA device")
        return 0
    torch.set_num_threads(1)
    begins = circumstances()
    found = rows(options.layers, options.width, options.device, options.repeat)
    head = ("optimizer", "ms", "cpu_ms", "difference")
    shown = [[f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in head] for row in found]
    print_table(results_table(f"A step of {found[0]['parameters']:,} parameters on {found[0]['device']}", head, shown, ""))
    if options.record:
        append_lines(RESULTS, [{**begins, **row} for row in found])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
