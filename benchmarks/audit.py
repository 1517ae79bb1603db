"""How long it takes to verify an audit log, and what the log costs while a run trains.

The log is written by the coordinator's own code: so many commits, to each of which every peer contributes every fragment. Its
signatures are real; the payloads are not made. The cost at the coordinator and at a peer is CPU time of the same process.

    python benchmarks/audit.py --commits 200
    python benchmarks/audit.py --commits 10000 --peers 16 --fragments 12
    python benchmarks/audit.py --exchange --peers 4      # what the audit adds to one exchange: about 5 minutes

With --exchange: CPU seconds of all processes in one exchange of a whole model (`edit-lab bench exchange`) with the audit and
without it, one after the other, in turns: signatures, receipts, the log and its fsync, at coordinator and peers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from aggregator.audit_verification import entries_of, verified_log
from edit.config.audit import AuditConfig
from edit.config.run import RunConfig
from edit.lab.bench.exchange import ours, require_proc
from edit.lab.bench.results import append_lines, circumstances
from edit.lab.bench.turns import Timing
from edit.lab.processes import COORDINATOR
from edit.merging.outer_state import MergeRecord, Staged
from edit.records import EncodedTensor, PeerVerdict, Verdict
from edit.trust.checkpoints import LogSigner
from edit.trust.merkle import MerkleTree, leaf_hash
from editpb.audit_log import RoundFacts, commit_entry, entry_line, genesis_entry
from editpb.messages import ContributionHeader
from editpb.signed_contributions import ContributionSigner, config_digest

CONFIG = RunConfig(audit=AuditConfig(enabled=True))
SCHEMA_HASH = "5" * 64


def new_key() -> bytes:
    """A member's private key, in PEM."""
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(pem, form, serialization.NoEncryption())


def write(path: Path, commits: int, peers: int, fragments: int) -> tuple[str, float, float]:
    """Write a log; return its head, and CPU seconds per commit of signing (all peers) and of writing."""
    names = [f"organisation-{i:02d}" for i in range(peers)]
    signers = {name: ContributionSigner(new_key(), CONFIG) for name in names}
    log, tree, digest = LogSigner("edit/benchmark", LogSigner.new_key()), MerkleTree(), "0" * 64
    payload = EncodedTensor("int8", 1, torch.zeros(1, dtype=torch.int8).numpy().tobytes())
    staged = {i: Staged(payload, b"", merges=True, largest=0.0) for i in range(fragments)}
    verdicts = tuple(PeerVerdict(peer_id=name, verdict=Verdict.OK, norm=1.25, weight=1 / peers) for name in names)
    signing = writing = 0.0
    with path.open("wb") as file:
        genesis = genesis_entry("benchmark", log.key, CONFIG, SCHEMA_HASH, 0, digest)
        file.write((line := entry_line(tree, 0, genesis)) + b"\n")
        tree.append(leaf_hash(line))
        for step in range(commits):
            began, headers = time.process_time(), {}
            for i in range(fragments):
                each = (header(name, step, i) for name in names)
                headers[i] = tuple(signers[one.peer_id](one, memoryview(b"")) for one in each)
            signed, after = time.process_time(), leaf_hash(b"%d" % step).hex()
            records = [
                MergeRecord(
                    outer_step=step,
                    fragment_id=i,
                    payload=payload,
                    residual=None,
                    verdicts=verdicts,
                    statistics={},
                    merged_norm=1.25,
                    clip=1.0,
                )
                for i in range(fragments)
            ]
            entry = commit_entry(
                RoundFacts(round_id=step + 1, outer_step=step + 1, reason="all in"),
                digests=(digest, after),
                config=config_digest(CONFIG),
                records=records,
                staged=staged,
                contributions=headers,
            )
            file.write((line := entry_line(tree, step, entry)) + b"\n")
            tree.append(leaf_hash(line))
            digest = after
            signing, writing = signing + signed - began, writing + time.process_time() - signed
    return log.sign(len(tree), tree.root()), signing / max(commits, 1), writing / max(commits, 1)


def header(name: str, step: int, fragment: int) -> ContributionHeader:
    """What a peer says of one fragment of 4 million elements, as int8."""
    return ContributionHeader(
        run_id="benchmark",
        round_id=step + 1,
        outer_step=step,
        peer_id=name,
        fragment_id=fragment,
        schema_hash=SCHEMA_HASH,
        inner_steps=100,
        tokens=51_200,
        codec="int8",
        numel=1 << 22,
        total_bytes=(1 << 22) + (1 << 14),
        attempt=step,
    )


def verify(path: Path, head: str, sample: int | None = None) -> tuple[float, float, int]:
    """Return the seconds and the CPU seconds, of all its processes, of a verification, and how many signatures it checked."""
    began, cpu = time.perf_counter(), sum(os.times()[:4])
    log = verified_log(entries_of(path), sample=sample)
    log.check_head(head)
    return time.perf_counter() - began, sum(os.times()[:4]) - cpu, log.verified


def exchanges(parameters: int, codec_name: str, peers: int, repeat: int, blocks: int) -> dict[str, object]:
    """Measure `repeat` exchanges in each of so many runs with the audit, and in as many without it, in turns."""
    require_proc()
    timings: dict[bool, list[Timing]] = {False: [], True: []}
    loads = []
    for block in range(blocks):
        for audited in (False, True) if block % 2 == 0 else (True, False):
            loads.append(round(os.getloadavg()[0], 1))
            timings[audited] += ours(peers, parameters, codec_name, repeat, 600.0, audited=audited)
    figures: dict[str, object] = {}
    for audited, name in ((False, "plain"), (True, "audited")):
        of = timings[audited]
        figures[f"{name}_cpu_s"] = round(statistics.median(each.total_cpu_s for each in of), 3)
        figures[f"{name}_best_cpu_s"] = round(min(each.total_cpu_s for each in of), 3)
        figures[f"{name}_coordinator_cpu_s"] = round(statistics.median(each.cpu_s[COORDINATOR] for each in of), 3)
        figures[f"{name}_s"] = round(statistics.median(each.wall_s for each in of), 3)
        figures[f"{name}_all_cpu_s"] = [round(each.total_cpu_s, 3) for each in of]
    medians, least = (
        [float(str(figures[f"{name}_{what}"])) for name in ("plain", "audited")] for what in ("cpu_s", "best_cpu_s")
    )
    return {
        "parameters": parameters,
        "codec": codec_name,
        "peers": peers,
        "repeat": repeat,
        "blocks": blocks,
        "loads": loads,
        **figures,
        "overhead_of_medians": round(medians[1] / medians[0] - 1, 4),
        "overhead_of_best": round(least[1] / least[0] - 1, 4),
    }


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", type=int, default=1000)
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--fragments", type=int, default=12)
    parser.add_argument("--sample", type=int, default=100, help="commits whose signatures a sampled verification checks")
    parser.add_argument("--exchange", action="store_true", help="measure what the audit adds to one exchange instead")
    parser.add_argument("--parameters", type=int, default=50_331_648, help="with --exchange: of the model")
    parser.add_argument("--codec", default="int8", help="with --exchange: both ways")
    parser.add_argument("--repeat", type=int, default=5, help="with --exchange: counted exchanges of one run")
    parser.add_argument("--blocks", type=int, default=4, help="with --exchange: runs with the audit, and as many without")
    parser.add_argument("--results", type=Path, help="file to append the line to")
    arguments = parser.parse_args()
    before = circumstances()
    if arguments.exchange:
        found = exchanges(arguments.parameters, arguments.codec, arguments.peers, arguments.repeat, arguments.blocks)
        print(json.dumps({**before, **found}, indent=1))
        if arguments.results is not None:
            append_lines(arguments.results, [{**before, **found}])
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "audit.jsonl"
        head, signing, writing = write(path, arguments.commits, arguments.peers, arguments.fragments)
        size = path.stat().st_size
        hashes_s, hashes_cpu, _ = verify(path, head, 0)
        sampled_s, sampled_cpu, _ = verify(path, head, arguments.sample)
        whole_s, whole_cpu, signatures = verify(path, head)
    measured = {
        **before,
        "commits": arguments.commits,
        "peers": arguments.peers,
        "fragments": arguments.fragments,
        "sample": arguments.sample,
        "bytes_per_commit": round(size / arguments.commits),
        "signing_cpu_ms_per_peer_and_commit": round(1e3 * signing / arguments.peers, 3),
        "entry_cpu_ms_per_commit": round(1e3 * writing, 3),
        "signatures": signatures,
        "verify_s": round(whole_s, 2),
        "verify_cpu_s": round(whole_cpu, 2),
        "verify_sampled_s": round(sampled_s, 2),
        "verify_sampled_cpu_s": round(sampled_cpu, 2),
        "verify_hashes_s": round(hashes_s, 2),
        "verify_hashes_cpu_s": round(hashes_cpu, 2),
    }
    print(json.dumps(measured, indent=1))
    if arguments.results is not None:
        append_lines(arguments.results, [measured])


if __name__ == "__main__":
    main()
