"""One exchange of a whole model over gRPC with mutual TLS, beside a raw gRPC stream of the same bytes in the same run.

    python benchmarks/exchange.py  # 124M parameters, fp32 and int8, 2 and 4 peers: about 10 minutes on 2 cores
    python benchmarks/exchange.py --parameters 50331648 --codecs int8 --peers 2 4 --label "what was changed"

This is `edit-lab bench exchange` (edit/lab/bench/exchange.py says what is measured) with lists of codecs and peers. Results are
appended to benchmarks/results/exchange.jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from edit.command_line import run_command
from edit.lab.bench.command import Outputs, run_exchange
from edit.lab.bench.exchange import ExchangeOptions

RESULTS = Path(__file__).parent / "results" / "exchange.jsonl"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--parameters", type=float, default=124e6)
    arguments.add_argument("--codecs", nargs="+", default=["fp32", "int8"])
    arguments.add_argument("--peers", nargs="+", type=int, default=[2, 4])
    arguments.add_argument("--repeat", type=int, default=5, help="counted exchanges")
    arguments.add_argument("--label", default="", help="written beside the figures")
    given = arguments.parse_args()
    options = ExchangeOptions(
        parameters=int(given.parameters), codecs=given.codecs, peers=given.peers, repeat=given.repeat, label=given.label
    )
    run_command("exchange", lambda: run_exchange(options, Outputs(results=RESULTS), Console(stderr=True)))


if __name__ == "__main__":
    main()
