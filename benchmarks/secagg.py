"""What secure aggregation costs: CPU seconds and bytes of one outer step, beside int8 without masks, in the same run.

    .venv/bin/python benchmarks/secagg.py                                  # 50M parameters, 4 and 16 peers: about 3 minutes
    .venv/bin/python benchmarks/secagg.py --parameters 1000000 --peers 4

In one process, one thread, all of the product's own code. Peers send 12 fragments; one of them drops out after it has shared
its keys.

    peer         one peer's contribution: grid, lanes and masks; int8: encode and norm
    keys         one peer's part in the protocol: advert, shares, sealed boxes, confirmation, reveal
    aggregator   the sum of all and its masks taken off, the merged mean; int8: norms, decoded and added

Each is timed as CPU seconds (user + system) of one thread. The limit beside it is AES-256 in counter mode over as many bytes
as all masks have, which a peer cannot do without. Prints a table; appends rows to benchmarks/results/secagg.jsonl with
--record.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from edit.codecs import codec
from edit.codecs.grid import GridCodec, lanes_in, words_in
from edit.config.run import PenaltyConfig
from edit.fragments.schema import FragmentSpec, TensorSpec
from edit.fragments.shards import Shard
from edit.lab.bench.results import append_lines, circumstances
from edit.merging.masked import judge_claims, merge_sum, sum_of
from edit.merging.merge import Measured, MergeRule, measure, weighted_mean
from edit.merging.norms import norm
from edit.records import EncodedTensor
from edit.trust.mask_grid import grid_exponents, largest
from edit.trust.mask_plan import FragmentPlan, plan_digest
from edit.trust.mask_roster import RoundName
from edit.trust.masking import (
    AskConfirm,
    Close,
    MaskClient,
    Masks,
    MaskServer,
    Opened,
    Opening,
    SaveRevealed,
    ShowRoster,
    StartMasking,
)
from edit.trust.masks import lanes_of
from edit.trust.revealed_sets import RevealedSets
from edit.trust.signatures import Signer
from editpb.mask_messages import reply_to_pb, request_to_pb
from peers.carriers.hub.masking import masked

RESULTS = Path(__file__).parent / "results" / "secagg.jsonl"
FRAGMENTS, BITS = 12, 16


class Clock:
    """CPU seconds of this thread, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, call: Any) -> Any:
        began = time.thread_time()
        result = call()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - began
        return result


def keyed(name: RoundName, peers: Sequence[str], dropped: str, clock: Clock) -> tuple[dict[str, Masks], Opening, int, int]:
    """Play the protocol; return the masks, what opens the sum, and the bytes that the first peer sent and got."""
    form = serialization.PrivateFormat.PKCS8
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in peers]
    pems = [key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()) for key in keys]
    server = MaskServer(name, peers, min_peers=3, quorum=3, floor_s=9, answer_s=9, now=0.0)
    draw, first, sent, got = np.random.default_rng(0).bytes, peers[0], 0, 0
    masks: dict[str, Masks] = {}
    opening: Opening | None = None

    def own(peer: str, call: Any) -> Any:
        return clock.time("keys", call) if peer == first else call()

    def tell(peer: str, said: Any) -> None:
        nonlocal sent, opening
        sent += request_to_pb("run", 1, said).ByteSize() if peer == first else 0
        for effect in server.handle(said, 0.0):
            if isinstance(effect, Opened):
                opening = effect.opening

    def hear(peer: str, event: Any) -> None:
        nonlocal got
        got += reply_to_pb(event.roster if isinstance(event, ShowRoster) else event).ByteSize() if peer == first else 0
        for effect in own(peer, lambda: clients[peer].handle(event)):
            match effect:
                case StartMasking(masks=found):
                    masks[peer] = found
                case SaveRevealed():
                    pass
                case _:
                    tell(peer, effect)

    def client(peer: str, pem: bytes) -> MaskClient:
        return MaskClient(peer, signer=Signer(pem), of_round=name, min_peers=3, quorum=3, revealed=RevealedSets(), draw=draw)

    clients = {peer: own(peer, lambda: client(peer, pem)) for peer, pem in zip(peers, pems, strict=True)}  # noqa: B023
    for peer in peers:
        tell(peer, clients[peer].advert)
    assert server.roster is not None
    for peer in peers:
        hear(peer, ShowRoster(roster=server.roster))
    for peer in peers:
        hear(peer, server.inboxes[peer])
    server.handle(Close(complete=frozenset(peers) - {dropped}), 0.0)
    for peer in sorted(server.survivors):
        hear(peer, AskConfirm(survivors=server.survivors))
    assert server.asked is not None
    for peer in sorted(server.survivors):
        if opening is None:
            hear(peer, server.asked)
    assert opening is not None
    return masks, opening, sent, got


def measured(parameters: int, count: int) -> dict[str, Any]:
    """Return the figures of one outer step."""
    numel = parameters // FRAGMENTS
    specs = [
        FragmentSpec(fragment_id=i, name=f"f{i}", tensors=(TensorSpec(name=f"t{i}", shape=(numel,)),)) for i in range(FRAGMENTS)
    ]
    peers = [f"peer-{number:02}" for number in range(count)]
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(numel, generator=generator) * 1e-3
    limit = largest(BITS, count)
    exponents = grid_exponents(before.numpy(), BITS, limit)
    plans = [
        FragmentPlan(fragment_id=i, bits=BITS, limit=limit, exponents=exponents.tobytes(), reference=0.0)
        for i in range(FRAGMENTS)
    ]
    name = RoundName(run_id="run", config_digest="c", round_id="1", outer_step=0, plan=plan_digest(plans))
    clock, penalty = Clock(), PenaltyConfig()
    masks, opening, sent, got = keyed(name, peers, peers[-1], clock)
    vectors = [torch.randn(numel, generator=generator) * 1e-3 for _ in peers]
    plain, wrong = codec("int8"), 0.0
    upload = int8_upload = 0

    def stage(i: int, peer: str, vector: torch.Tensor) -> tuple[EncodedTensor, float]:
        size = norm(vector)
        payload = GridCodec(BITS, limit, exponents, 1.0).encode(vector, specs[i])
        words = words_in(payload.data, BITS)
        lanes_in(payload.data, BITS)[:] = lanes_of(words[:numel])
        return masked(masks[peer], payload, Shard(specs[i]), BITS), size

    for i, spec in enumerate(specs):
        contributions, others = [], []
        for peer, vector in zip(peers, vectors, strict=True):
            own = peer == peers[0]
            payload, size = clock.time("peer", lambda: stage(i, peer, vector)) if own else stage(i, peer, vector)  # noqa: B023
            encoded = plain.encode(vector, spec) if not own else clock.time("peer, int8", lambda: plain.encode(vector, spec))  # noqa: B023
            upload += memoryview(payload.data).nbytes if own else 0
            int8_upload += memoryview(encoded.data).nbytes if own else 0
            contributions.append(Measured(peer, 1, 1, size, payload))
            others.append(encoded)
        judged = judge_claims({i: contributions}, {i: {}}, penalty)

        def merge() -> torch.Tensor:
            inside = [one for one in contributions if one.peer_id in opening.survivors]  # noqa: B023
            total = sum_of(spec, plans[i], inside)  # noqa: B023
            opening.apply(total.words, i, 0)  # noqa: B023
            opening.apply(total.lanes, i, numel)  # noqa: B023
            opening.check(total.words, total.lanes, i)  # noqa: B023
            found = merge_sum(spec, plans[i], total, contributions, judged, opening.survivors, penalty).merged  # noqa: B023
            assert found is not None
            return found

        def merge_int8() -> torch.Tensor:
            kept = [Measured(peer, 1, 1, measure(one), one) for peer, one in zip(peers[:-1], others, strict=False)]  # noqa: B023
            return weighted_mean(spec, [(one, 1 / len(kept)) for one in kept], MergeRule())  # noqa: B023

        mean = clock.time("aggregator", merge)
        clock.time("aggregator, int8", merge_int8)
        exact = torch.stack(vectors[:-1]).mean(0)
        wrong = max(wrong, float((mean - exact).norm() / exact.norm()))
    generator_bytes = count * parameters * BITS // 8
    block = bytes(1 << 20)

    def stretch() -> None:
        cipher = Cipher(algorithms.AES(bytes(32)), modes.CTR(bytes(16))).encryptor()
        for _ in range(generator_bytes // len(block)):
            cipher.update(block)

    clock.time("limit, AES-CTR of a peer's masks", stretch)
    return {
        "parameters": parameters,
        "peers": count,
        "dropped": 1,
        "bits": BITS,
        "cpu_s": {name: round(seconds, 4) for name, seconds in clock.seconds.items()},
        "upload_mb": round(upload / 1e6, 1),
        "int8_upload_mb": round(int8_upload / 1e6, 1),
        "keys_sent_bytes": sent,
        "keys_got_bytes": got,
        "error_of_the_mean": round(wrong, 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=50_331_648)
    parser.add_argument("--peers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/results/secagg.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for count in options.peers:
        begins = circumstances()
        row = measured(options.parameters, count)
        print(f"\n{row['parameters']:,} parameters, {count} peers, one drops out, {BITS} bits")
        for name, seconds in row["cpu_s"].items():
            print(f"  {name:36} {seconds:8.3f} CPU s")
        print(f"  upload {row['upload_mb']} MB (int8 {row['int8_upload_mb']} MB)", end=", ")
        print(f"keys {row['keys_sent_bytes']:,} bytes up, {row['keys_got_bytes']:,} down", end=", ")
        print(f"the merged mean is off by {100 * row['error_of_the_mean']:.3f} %")
        rows.append({**begins, **row})
    if options.record:
        append_lines(RESULTS, rows)


if __name__ == "__main__":
    main()
