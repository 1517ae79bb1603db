"""What decides the bits of theta, computed from fixed inputs: a hash of each result.

    python -m tests.support.bits

prints them as JSON, so that a test can compare processes that use the CPU in different ways.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from edit import kernels
from edit.codecs import PIECE, codec
from edit.codecs.error_feedback import ErrorFeedback
from edit.config.codec import CodecChoice, CodecSpec
from edit.config.run import OuterConfig, PenaltyConfig
from edit.fragments.shards import Shard
from edit.merging.heloco import Momentum, correct
from edit.merging.merge import Measured, MergeRule, measure
from edit.merging.mergers import EditMerger
from edit.merging.norms import dot, norm
from edit.merging.outer_optimizers import outer_optimizer
from edit.merging.penalty import NormStatistics, judge_round, weights
from tests.support.encoded import SPECS, elements, encode
from tests.support.layouts import fragment

__all__ = ["hashes"]

NUMELS = (1, 1000, 4097, PIECE + 4711)
# NaN, Inf, -0, denormal, tiny, huge.
SPECIAL = (0x7FC00000, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x0D000000, 0x7F7FFFFF)


def vector(numel: int, seed: int) -> Tensor:
    """Even in [-1, 1) times a power of two from 2**-10 to 1, from integers: torch.randn has other bits on other CPUs."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.randint(-(1 << 24), 1 << 24, (numel,), generator=generator).to(torch.float32) / (1 << 24)
    return total / (1 << seed % 11)


def special(numel: int, seed: int) -> Tensor:
    """The same with special values here and there."""
    flat = vector(numel, seed)
    for i, bits in enumerate(SPECIAL):
        where = (i * 7919 + seed) % numel
        flat[where] = torch.tensor(bits - (bits >> 31 << 32), dtype=torch.int32).view(torch.float32)
    return flat


def hashes() -> dict[str, str]:
    """The hash of each result, by its name."""
    return {
        name: hashlib.sha256(b"".join(parts)).hexdigest()[:16]
        for name, parts in {**_of_norms(), **_of_codecs(), **_of_outer_steps(), **_of_merges(), **_of_scalars()}.items()
    }


def _raw(*values: Tensor | float) -> list[bytes]:
    """The bytes of tensors and numbers; one NaN stands for all: which one comes out of an operation is left to the CPU."""
    tensors = (value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64) for value in values)
    return [tensor.masked_fill(tensor.isnan(), torch.nan).numpy().tobytes() for tensor in tensors]


def _of_norms() -> dict[str, list[bytes]]:
    vectors = [(vector(numel, numel), vector(numel, numel + 2)) for numel in (*range(1, 700, 9), *NUMELS)]
    corrected = [first.clone() for first, _ in vectors]
    for one, (_, second) in zip(corrected, vectors, strict=True):
        correct(one, Momentum(second, 0.9, [one.numel() - one.numel() // 3, one.numel() // 3]))
    return {
        "norm": _raw(*(norm(first) for first, _ in vectors)),
        "dot": _raw(*(dot(*both) for both in vectors)),
        "heloco": _raw(*corrected),
    }


def _of_codecs() -> dict[str, list[bytes]]:
    found = {}
    for name in SPECS:
        parts = []
        for flat in (make(numel, seed) for make in (vector, special) for seed, numel in enumerate(NUMELS)):
            one, total = codec(name), vector(flat.numel(), 3)
            feedback = ErrorFeedback(CodecChoice(CodecSpec.parse(name), decay=0.9), [Shard(fragment((flat.numel(),)))])
            feedback.load({0: vector(flat.numel(), 4)})
            encoded = feedback.stage(0, flat)
            feedback.commit(0, flat)
            one.decode_add(encoded, total, 0.3)
            parts += _raw(
                one.decode(encoded), total, measure(encoded), *(elements(one) for one in feedback.residuals().values())
            )
            parts += [bytes(encoded.data)] if one.granule > 1 else []
        found[f"codec {name}"] = parts
    return found


def _of_outer_steps() -> dict[str, list[bytes]]:
    found = {}
    for optimizer in ("sgd", "nesterov", "delayed_nesterov", "adam", "yogi"):
        config, numel = OuterConfig(optimizer=optimizer, lr=0.7, momentum=0.9), 4097
        slots, theta = outer_optimizer(config).slots(numel), vector(numel, 5)
        for seed in range(5):
            step, slots = outer_optimizer(config).step(slots, vector(numel, seed))
            theta.sub_(step)
        found[f"outer step {optimizer}"] = _raw(theta, *(slots[name] for name in sorted(slots)))
    return found


def _of_merges() -> dict[str, list[bytes]]:
    found = {}
    for text in ("level", "edit", "rda", "arrivals"):
        config = PenaltyConfig(detector="edit" if text == "edit" else "level", observations=2, damping=0.3)
        rule = MergeRule("rda" if text == "rda" else "mean", None, damped=text == "arrivals")
        known: dict[str, NormStatistics] = {}
        parts = []
        for turn in range(8):
            contributions = [
                Measured(f"peer-{i}", 17 + i + turn, 1000 * (i + 1), measure(payload), payload, turn % 3 if i else 0)
                for i, payload in enumerate(encode("int8", vector(4097, 11 * (16 * turn + i)) * (1 + i / 7)) for i in range(5))
            ]
            merged = EditMerger(config).merge(fragment((4097,)), contributions, known, rule)
            known |= merged.statistics
            assert merged.merged is not None
            parts += _raw(merged.merged, merged.merged_norm, merged.clip, *(one.weight for one in merged.verdicts))
        found[f"merge {text}"] = [*parts, json.dumps([one.to_json() for one in known.values()]).encode()]
    return found


def _of_scalars() -> dict[str, list[bytes]]:
    found = {}
    for detector in ("level", "edit"):
        config, known, parts = PenaltyConfig(detector=detector, alpha=0.03, staleness=0.7), dict[str, NormStatistics](), []
        sizes = (vector(8 * 400, 11).abs() + 1).view(400, 8).tolist()
        for turn, row in enumerate(sizes):
            norms = {f"peer-{i}": size for i, size in enumerate(row)}
            steps = [20 + (turn + i) % 5 for i in range(len(norms))]
            judged, known = judge_round(norms, dict(zip(norms, steps, strict=True)), known, config)
            parts += _raw(*weights(list(judged.values()), row, steps, steps, config, [(turn + i) % 4 for i in range(8)]))
        found[f"verdicts and weights, {detector}"] = [*parts, json.dumps([one.to_json() for one in known.values()]).encode()]
    return found


if __name__ == "__main__":
    kernels.load()
    print(json.dumps(hashes()))
