"""Speed of the codecs on one core: encode, decode + accumulate, measure, in GB/s of fp32, beside a plain copy in the same run.

    python benchmarks/codecs.py [--numel 7087872] [--repeat 7] [--label "what was changed"]

This is `edit-lab bench codecs` (edit/lab/bench/codecs.py says what is measured). Results are appended to
benchmarks/results/codecs.jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from edit.command_line import run_command
from edit.lab.bench.codecs import CodecOptions
from edit.lab.bench.command import Outputs, run_codecs

RESULTS = Path(__file__).parent / "results" / "codecs.jsonl"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--numel", type=int, default=7_087_872, help="default: one block of a 124M GPT")
    arguments.add_argument("--repeat", type=int, default=7)
    arguments.add_argument("--label", default="", help="written beside the figures")
    given = arguments.parse_args()
    options = CodecOptions(numel=given.numel, repeat=given.repeat, label=given.label)
    run_command("codecs", lambda: run_codecs(options, Outputs(results=RESULTS), Console(stderr=True)))


if __name__ == "__main__":
    main()
