"""hivemind's compressors: CPU seconds to compress, and to extract and add, beside a plain copy; a line of JSON for each.

Run by the Python of the rivals' environment: NUMEL REPEAT. The same vector, clock and repetitions as edit/lab/bench/codecs.py.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hivemind.compression import (
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    Uniform8BitQuantization,
)

COMPRESSORS: dict[str, type[CompressionBase]] = {
    "fp32": NoCompression,
    "float16": Float16Compression,
    "uniform8": Uniform8BitQuantization,
    "quantile8": Quantile8BitQuantization,
    "blockwise8": BlockwiseQuantization,
}


def best_seconds(job: Callable[[], object], repeat: int) -> float:
    """Return the best CPU time of this process, all threads; the first time only warms up."""
    best = float("inf")
    for turn in range(repeat + 1):
        start = time.process_time()
        job()
        if turn:
            best = min(best, time.process_time() - start)
    return best


def extract_and_add(compressor: CompressionBase, message: Any, total: torch.Tensor) -> None:
    total.add_(compressor.extract(message), alpha=0.25)


def main(numel: int, repeat: int) -> None:
    torch.set_num_threads(1)
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    copy, total = torch.zeros_like(flat), torch.zeros_like(flat)
    copy_s = best_seconds(lambda: copy.copy_(flat), repeat)
    for name, make in COMPRESSORS.items():
        compressor, info = make(), CompressionInfo.from_tensor(flat)
        try:
            message = compressor.compress(flat, info)
            encode_s = best_seconds(partial(compressor.compress, flat, info), repeat)
            decode_add_s = best_seconds(partial(extract_and_add, compressor, message, total), repeat)
        except (ImportError, TypeError, ValueError, RuntimeError) as error:
            print(json.dumps({"codec": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]}))  # noqa: T201
            continue
        found = {"bits": 8 * message.ByteSize() / numel, "encode": encode_s, "decode_add": decode_add_s, "copy": copy_s}
        print(json.dumps({"codec": name, **found}))  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
