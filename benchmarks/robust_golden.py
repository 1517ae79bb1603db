"""What byzfl 0.0.11 (EPFL) computes for the robust rules: the golden values of tests/edit/merging/test_robust.py.

    python benchmarks/robust_golden.py FOLDER --out tests/edit/merging/byzfl.json

Installs byzfl, without its dependencies, into FOLDER. Its package imports torchvision, which the aggregators do not need.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np

VERSION = "0.0.11"


def golden(folder: Path) -> str:
    """Return, as JSON, the vectors and what each rule makes of them."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), f"byzfl=={VERSION}"]
    subprocess.run(install, check=True)
    package = types.ModuleType("byzfl")
    package.__path__ = [str(folder / "byzfl")]
    sys.modules["byzfl"] = package
    rules = importlib.import_module("byzfl.aggregators.aggregators")
    before = importlib.import_module("byzfl.aggregators.preaggregators")
    cases = []
    for seed, n, f in ((0, 5, 1), (1, 8, 2), (2, 9, 3), (3, 11, 4)):
        random = np.random.default_rng(seed)
        rows = (random.normal(size=(n, 12)) + random.normal(size=12)).astype(np.float32).astype(np.float64)
        rows[:f] = rows[:f] * -1.5 + 0.25
        rows = rows.astype(np.float32).astype(np.float64)
        mixed = before.NNM(f=f)(rows)

        def weiszfeld(points: np.ndarray) -> np.ndarray:  # from the mean; byzfl starts at 0
            middle = points.mean(axis=0)
            near = 1e-3 * float(np.median(np.square(points).sum(axis=1))) ** 0.5  # what our rule takes for rounding
            return np.asarray(rules.GeometricMedian(nu=near, T=32)(points - middle) + middle)

        clipping = rules.CenteredClipping(L=5, tau=1.5)
        found = {
            "median": rules.Median()(rows),
            "trimmed_mean": rules.TrMean(f=f)(rows),
            "geometric_median": weiszfeld(rows),
            "centered_clip": clipping(rows),
            "nnm": mixed,
            "nnm geometric_median": weiszfeld(mixed),
        }
        if n >= 2 * f + 3:
            found["multi_krum"] = rules.MultiKrum(f=f)(rows)
        cases.append({"hostile": f, "rows": rows.tolist(), **{name: value.tolist() for name, value in found.items()}})
    return json.dumps({"byzfl": VERSION, "cases": cases})


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where byzfl is installed")
    parser.add_argument("--out", type=Path, required=True, help="the file that is written")
    arguments = parser.parse_args()
    arguments.out.write_text(golden(arguments.folder))


if __name__ == "__main__":
    main()
