"""On a GPU: codecs beside its memory's bandwidth, training with an exchange beside training without, bits beside the CPU's.

    python benchmarks/gpu.py                              # all parts
    python benchmarks/gpu.py --parts codecs paths
    python benchmarks/gpu.py --parts training --modes delayed --every 200
    python benchmarks/gpu.py --cpu-sizes                  # the same code, tiny and on the CPU: measures nothing

- codecs: encode, and decode and add, on the device: bytes that have to move (each vector and the encoded bytes once) per
  second, beside a plain copy; `encode` with its copy to pinned memory, beside that copy alone; whether the bytes are the CPU's.
- training: a GPT of 1.0e9 parameters, bf16, outer parameters (fp32) in pinned memory; one peer in this process, a coordinator
  in another, gRPC over loopback. Tokens per second with an exchange every `--every` steps, blocking, delayed and streaming,
  beside the same steps without, before and after; seconds of a round that the loop spends in the worker's hooks, where nothing
  new is queued for the GPU, and in the parts of them that take longest (encode and local are within contribute, progress is
  within apply; outcome and update: until they are there); CPU seconds of a round at the coordinator; the GPU's memory at its
  peak, and pinned memory.
- profile: the calls that make the host wait for the GPU, in steps outside of exchanges, with a worker and without. The part
  fails when a worker adds one.
- paths: every mode with fp32 and bf16 parameters, every codec: outer parameters and local ones after each step, to the bit
  those of the same steps on the CPU. The part fails where they differ.

Without a CUDA device each part says that it was not run. Rows are appended to benchmarks/results/gpu.jsonl, but not with
--cpu-sizes.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from edit.codecs import Codec, codec, codec_names
from edit.codecs.base import parts as pieces_of
from edit.codecs.error_feedback import ErrorFeedback
from edit.config.algorithm import SyncConfig
from edit.config.codec import CodecConfig
from edit.config.run import ModelConfig, RunConfig
from edit.fragments.schema import FragmentSpec, TensorSpec
from edit.lab.bench.measured_run import MeasuredRun
from edit.lab.bench.results import Row, append_lines, circumstances, print_table, results_table
from edit.lab.joining import enrol
from edit.lab.processes import terminated_as_interrupt
from edit.local import LocalRun
from edit.replica.device_copies import Transfers
from edit.replica.replica import Replica
from edit.worker.apply import ShareExchange
from edit.worker.contribution import ContributionMaker
from edit.worker.updates import Updates
from edit.worker.worker import EditWorker, WorkerConfig
from peers.connection import connect
from peers.models.gpt import GPT

RESULTS = Path(__file__).parent / "results" / "gpu.jsonl"
CODECS = (*codec_names(), "topk:k=128")
MODES = ("blocking", "delayed", "streaming")
GROUPS = 4  # of streaming
PARTS = ("codecs", "training", "profile", "paths")
HOST_WAITS = (
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
    *("cudaFree", "cudaHostAlloc", "cudaHostRegister", "cudaFreeHost"),  # these wait for the device, too
    "aten::_local_scalar_dense",  # under aten::item, also of a tensor on the CPU
)
STEPS, HOOK, COPIES = "measured steps", "hook of the worker", "copies of an exchange"
HOOKS = ("_before_forward", "_before_any_step", "_before_step", "_after_step")
STAGES: dict[str, tuple[type, str]] = {  # what most of the time in hooks goes to
    "contribute": (ContributionMaker, "contribute"),
    "encode": (ErrorFeedback, "stage"),
    "local": (Replica, "local_fragment"),
    "outcome": (ShareExchange, "_ask"),
    "update": (Updates, "wait"),
    "hash": (Replica, "hashes_after"),
    "apply": (Replica, "apply_fragment"),
    "progress": (Replica, "progress_since"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """numel: of the vector that codecs encode; every: H; rounds: counted ones of each mode; threads: of the coordinator."""

    numel: int = 1 << 27
    repeat: int = 10
    layers: int = 24
    heads: int = 14
    width: int = 1792
    vocabulary: int = 50_304
    context: int = 1024
    batch: int = 8
    every: int = 100
    rounds: int = 2
    codec: str = "int8"
    threads: int = 1

    def model(self) -> ModelConfig:
        """The built-in GPT."""
        return ModelConfig(
            layers=self.layers, heads=self.heads, width=self.width, vocabulary=self.vocabulary, context=self.context
        )


TINY = Sizes(numel=9001, repeat=1, layers=2, heads=2, width=16, vocabulary=64, context=16, batch=2, every=8, rounds=1)


# ---- codecs ------------------------------------------------------------------------------------------------------------------


def best_seconds(job: Callable[[], object], repeat: int, device: torch.device) -> float:
    """The best of `repeat` times on the device's own clock, after two that warm up."""
    found = []
    for turn in range(repeat + 2):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            job()
            end.record()
            end.synchronize()
            seconds = float(begin.elapsed_time(end)) / 1e3
        else:
            start = time.perf_counter()
            job()
            seconds = time.perf_counter() - start
        if turn > 1:
            found.append(seconds)
    return min(found)


def codecs(sizes: Sizes, device: torch.device) -> list[Row]:
    """One row for each codec."""
    flat = torch.randn(sizes.numel, generator=torch.Generator(device).manual_seed(0), device=device) * 1e-3
    other = torch.empty_like(flat)
    best = partial(best_seconds, repeat=sizes.repeat, device=device)
    bandwidth = 8 * sizes.numel / best(lambda: other.copy_(flat))
    fragment = FragmentSpec(fragment_id=0, name="vector", tensors=(TensorSpec(name="weight", shape=(sizes.numel,)),))
    rows: list[Row] = []
    for name in CODECS:
        one = codec(name)
        data = torch.empty(one.encoded_size(sizes.numel), dtype=torch.uint8, device=device)
        host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")

        def encode(one: Codec = one, data: Tensor = data) -> None:
            for part in pieces_of(sizes.numel, device):
                one.encode_part(flat[part], data, sizes.numel, part.start)

        def decode_add(one: Codec = one, data: Tensor = data) -> None:
            for part, piece in zip(pieces_of(sizes.numel, device), one.pieces(data, sizes.numel), strict=True):
                other[part].add_(piece)

        rates = {
            "encode_of_copy": (4 * sizes.numel + data.numel()) / best(encode) / bandwidth,
            "decode_add_of_copy": (8 * sizes.numel + data.numel()) / best(decode_add) / bandwidth,
        }
        to_host = best(lambda one=one: one.encode(flat, fragment))  # type: ignore[misc]
        rows.append(
            {
                "codec": name,
                "copy_gb_s": bandwidth / 1e9,
                **rates,
                "encode_to_host_s": to_host,
                "copy_to_host_s": best(lambda host=host, data=data: host.copy_(data, non_blocking=True)),  # type: ignore[misc]
                "equals_cpu": bytes(one.encode(flat, fragment).data) == bytes(one.encode(flat.cpu(), fragment).data),
            }
        )
    return rows


# ---- training ----------------------------------------------------------------------------------------------------------------


class Loop:
    """A user's own loop: a GPT in bf16, AdamW, the same tokens in every step."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.model = GPT(sizes.model(), None).to(device, torch.bfloat16)
        for parameter in self.model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            else:
                nn.init.ones_(parameter)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        shape = (sizes.batch, sizes.context + 1)
        rows = torch.randint(sizes.vocabulary, shape, generator=generator, device=device)
        self._inputs, self._targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        self._device = device
        self.tokens = self._inputs.numel()  # of one step
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def steps(self, count: int) -> None:
        """Take inner steps; the host waits for none of them."""
        for _ in range(count):
            self.model(self._inputs, self._targets).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def tokens_per_s(self, count: int) -> float:
        """The speed of so many steps, until the device is done with the last one."""
        synchronize(self._device)
        start = time.perf_counter()
        self.steps(count)
        synchronize(self._device)
        return count * self.tokens / (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    """Wait for all that is queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def settings(sizes: Sizes, mode: str) -> dict[str, Any]:
    """The run.toml of one mode; streaming is delayed with groups."""
    late = {"mode": "delayed", "delay": sizes.every * 4 // 5}
    modes: dict[str, dict[str, Any]] = {
        "blocking": {},
        "delayed": late,
        "streaming": {"mode": "delayed", "groups": GROUPS, "delay": max(1, sizes.every // GROUPS * 4 // 5)},
    }
    return {
        "name": "gpu",
        "model": {"name": "entry:mine"},
        "sync": {"every": sizes.every, "outer_steps": 1_000_000, **modes[mode]},
        "codec": {"up": sizes.codec, "down": sizes.codec},
        "rounds": {"start_peers": 1, "quorum": 1},
        "storage": {"checkpoint_every": 1_000_000, "keep_updates": 1, "buffer_bytes": 8 << 30},
        "membership": {"heartbeat_s": 2.0, "lease_s": 600.0},
    }


class Stopwatch:
    """Adds up the seconds inside `running`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what is inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


def within(call: Callable[..., Any], context: Callable[[], AbstractContextManager[object]]) -> Callable[..., Any]:
    """Return what calls it within a context of its own each time."""

    @wraps(call)
    def called(*arguments: Any, **named: Any) -> Any:
        with context():
            return call(*arguments, **named)

    return called


@contextmanager
def around_hooks(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Call the hooks of workers that are entered inside each within a context of its own."""
    with ExitStack() as patched:
        for name in HOOKS:
            patched.enter_context(mock.patch.object(EditWorker, name, within(getattr(EditWorker, name), context)))
        yield


@contextmanager
def timed_stages() -> Iterator[dict[str, Stopwatch]]:
    """Time each of STAGES inside, by name."""
    watches = {name: Stopwatch() for name in STAGES}
    with ExitStack() as patched:
        for name, (owner, method) in STAGES.items():
            call = within(getattr(owner, method), watches[name].running)
            patched.enter_context(mock.patch.object(owner, method, call))
        yield watches


@contextmanager
def exchanging(sizes: Sizes, mode: str, device: torch.device) -> Iterator[tuple[Loop, EditWorker, MeasuredRun]]:
    """A loop with a worker that is connected to a coordinator in another process, and that run."""
    with tempfile.TemporaryDirectory(prefix="edit-gpu-") as scratch:
        home = Path(scratch) / "peer"
        with MeasuredRun(Path(scratch) / "run", settings(sizes, mode), Path(os.devnull), threads=sizes.threads) as run:
            enrol(run.state, "gpu", home)
            with connect(home) as (collective, config):
                loop = Loop(sizes, device)
                with EditWorker(loop.model, loop.optimizer, collective, WorkerConfig.of(config)) as worker:
                    yield loop, worker, run


def peaks(device: torch.device, *, reset: bool = False) -> dict[str, float]:
    """Peak memory of the GPU, and pinned memory in all, in GB; reset: since now."""
    if device.type != "cuda":
        return {"gpu_peak_gb": 0.0, "gpu_reserved_gb": 0.0, "pinned_gb": 0.0}
    if reset:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    found = {
        "gpu_peak_gb": torch.cuda.max_memory_allocated(device),
        "gpu_reserved_gb": torch.cuda.max_memory_reserved(device),
        "pinned_gb": torch.cuda.host_memory_stats().get("allocated_bytes.current", 0),
    }
    return {name: value / 1e9 for name, value in found.items()}


def training(sizes: Sizes, device: torch.device, modes: Sequence[str]) -> list[Row]:
    """One row for each mode, between two without any exchange; a line for each as soon as it is measured."""
    rows = [said(without_exchange(sizes, device))]
    for mode in modes:
        peaks(device, reset=True)
        hooks = Stopwatch()
        with around_hooks(hooks.running), timed_stages() as stages, exchanging(sizes, mode, device) as (loop, worker, run):
            # The first exchange pays for new memory. A contribution is under way when the time begins, and one when it ends.
            loop.steps(2 * sizes.every)
            began, before, then = worker.outer_step, hooks.seconds, {name: one.seconds for name, one in stages.items()}
            cpu = run.cpu_s()
            speed = loop.tokens_per_s(sizes.rounds * sizes.every)
            row: Row = {
                "mode": mode,
                "tokens_per_s": speed,
                "hooks_s_per_round": (hooks.seconds - before) / sizes.rounds,
                **{f"{name}_s": (one.seconds - then[name]) / sizes.rounds for name, one in stages.items()},
                "coordinator_cpu_s": (run.cpu_s() - cpu) / sizes.rounds,
                "coordinator_threads": sizes.threads,
                "commits": worker.outer_step - began,
                "parameters": loop.parameters,
                **peaks(device),
            }
            rows.append(said(row))
        del loop, worker, run
    rows.append(said(without_exchange(sizes, device)))
    alone = (rows[0]["tokens_per_s"] + rows[-1]["tokens_per_s"]) / 2
    return [{**row, "of_alone": row["tokens_per_s"] / alone, "every": sizes.every, "codec": sizes.codec} for row in rows]


def said(row: Row) -> Row:
    """Print what is measured so far."""
    parts = ", ".join(f"{name} {row[f'{name}_s']:.2f}" for name in STAGES if f"{name}_s" in row)
    hooks = f"{row['hooks_s_per_round']:.2f} s per round in hooks{f' ({parts})' if parts else ''}"
    print(f"{row['mode']}: {row['tokens_per_s']:.0f} tokens/s, {hooks}", flush=True)
    return row


def without_exchange(sizes: Sizes, device: torch.device) -> Row:
    """The same steps without a worker."""
    peaks(device, reset=True)
    loop = Loop(sizes, device)
    loop.steps(min(3, sizes.every))
    speed = loop.tokens_per_s(sizes.every)
    counted = {"mode": "alone", "tokens_per_s": speed, "hooks_s_per_round": 0.0, "commits": 0, "parameters": loop.parameters}
    return {**counted, **peaks(device)}


# ---- profile -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waits:
    """Calls that make the host wait, by name, outside of exchanges and inside them. An exchange: a hook that copies."""

    outside: Counter[str]
    inside: Counter[str]
    exchanges: int


def host_waits(steps: Callable[[], object], device: torch.device) -> Waits:
    """Profile the steps."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as taken:
        with record_function(STEPS):
            steps()
        synchronize(device)
    spans: dict[str, list[tuple[float, float]]] = {STEPS: [], HOOK: [], COPIES: []}
    calls: list[tuple[str, float]] = []
    for event in taken.events() or ():
        if event.name in spans and event.device_type == DeviceType.CPU:
            spans[event.name].append((event.time_range.start, event.time_range.end))
        elif event.name in HOST_WAITS:
            calls.append((event.name, event.time_range.start))
    exchanges = [hook for hook in spans[HOOK] if any(_within(start, [hook]) for start, _ in spans[COPIES])]
    outside, inside = Counter[str](), Counter[str]()
    for name, start in calls:
        if _within(start, spans[STEPS]):
            (inside if _within(start, exchanges) else outside)[name] += 1
    return Waits(outside, inside, len(exchanges))


def _within(moment: float, spans: Sequence[tuple[float, float]]) -> bool:
    return any(start <= moment <= end for start, end in spans)


@contextmanager
def marked() -> Iterator[None]:
    """Name the hooks of a worker that is entered inside, and the copies between GPU and CPU, in the profile."""
    beside = Transfers.beside

    @contextmanager
    def copies(transfers: Transfers) -> Iterator[None]:
        with record_function(COPIES), beside(transfers):
            yield

    with mock.patch.object(Transfers, "beside", copies), around_hooks(partial(record_function, HOOK)):
        yield


def profiled(sizes: Sizes, device: torch.device, mode: str = "delayed") -> Row:
    """The host's waits in one round with an exchange, and in as many steps without a worker."""
    # Few steps of few layers: each is thousands of events, and the calls are the same in every layer.
    sizes = replace(sizes, every=min(sizes.every, 10), layers=min(sizes.layers, 4))
    loop = Loop(sizes, device)
    loop.steps(3)
    alone = host_waits(partial(loop.steps, sizes.every), device)
    del loop
    with marked(), exchanging(sizes, mode, device) as (own, _, _):
        own.steps(2 * sizes.every)
        beside = host_waits(partial(own.steps, sizes.every), device)
    return {
        "mode": mode,
        "steps": sizes.every,
        "alone": dict(alone.outside),
        "outside_exchanges": dict(beside.outside),
        "in_exchanges": dict(beside.inside),
        "exchanges": beside.exchanges,
        "adds_none": not beside.outside - alone.outside,
    }


# ---- paths -------------------------------------------------------------------------------------------------------------------

Seen = list[tuple[int, str, list[Tensor]]]


def exchanged(mode: Mapping[str, Any], codec_name: str, dtype: torch.dtype, device: torch.device) -> Seen:
    """(outer step, digest of theta, local parameters) after each of some steps whose gradients are given: a lone peer."""
    torch.manual_seed(0)
    sizes = replace(TINY, layers=3).model()
    model = GPT(sizes, 0).to(device, dtype)
    gradients = [[torch.randn(parameter.shape) * 1e-2 for parameter in model.parameters()] for _ in range(21)]
    tokens = torch.zeros((1, sizes.context), dtype=torch.int64, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    config = RunConfig(sync=SyncConfig(every=4, **mode), codec=CodecConfig(up=codec_name, down=codec_name))
    seen: Seen = []
    with EditWorker(model, optimizer, LocalRun(config, ["me"]).collective("me"), WorkerConfig.of(config)) as worker:
        for gradient in gradients:
            with torch.no_grad():
                model(tokens)  # where updates come in
            for parameter, own in zip(model.parameters(), gradient, strict=True):
                parameter.grad = own.to(device, dtype)
            optimizer.step()
            with worker.outer_parameters():
                pass
            local = [parameter.detach().float().cpu().clone() for parameter in model.parameters()]
            seen.append((worker.outer_step, worker.digest, local))
    return seen


def paths(device: torch.device) -> list[Row]:
    """One row for each mode, kind of parameter and codec."""
    modes: dict[str, dict[str, Any]] = {
        "blocking": {},
        "forward": {"mode": "forward"},
        "delayed": {"mode": "delayed", "delay": 2},
        "delayed, lerp": {"mode": "delayed", "delay": 2, "mix": "lerp"},
        "streaming": {"mode": "delayed", "delay": 1, "groups": 4},
        "eager": {"mode": "eager", "delay": 2},
    }
    cases = [(mode, name) for mode in modes for name in ("fp32", "int8")]
    cases += [("delayed", name) for name in CODECS if name not in ("fp32", "int8")]
    rows: list[Row] = []
    for mode, name in cases:
        for dtype in (torch.float32, torch.bfloat16):
            ours, theirs = (exchanged(modes[mode], name, dtype, where) for where in (device, torch.device("cpu")))
            same = len(ours) == len(theirs) and all(
                (a, b) == (c, d) and all(map(torch.equal, p, q)) for (a, b, p), (c, d, q) in zip(ours, theirs, strict=True)
            )
            rows.append(
                {
                    "mode": mode,
                    "codec": name,
                    "dtype": str(dtype),
                    "outer_steps": ours[-1][0],
                    "digest": ours[-1][1],
                    "same": same,
                }
            )
    return rows


# ---- the command -------------------------------------------------------------------------------------------------------------


def show(title: str, rows: Sequence[Row], note: str = "") -> None:
    """Print rows as a table, a column for each key."""
    head = list(dict.fromkeys(name for row in rows for name in row))
    print_table(results_table(title, head, [[_cell(row.get(name, "")) for name in head] for row in rows], note))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def measure(part: str, sizes: Sizes, modes: Sequence[str], device: torch.device) -> list[Row]:
    """Run one part and print it."""
    if part == "codecs":
        rows = codecs(sizes, device)
        show("Codecs, as a share of a plain copy on the device", rows)
    elif part == "training":
        rows = training(sizes, device, modes)
        show("Training with an exchange, and alone", rows)
    elif part == "profile":
        rows = [profiled(sizes, device)]
        show("Calls that make the host wait for the device", rows)
    else:
        rows = paths(device)
        show("Outer and local parameters beside the CPU's", rows)
    return rows


def failed(part: str, rows: Sequence[Row]) -> bool:
    """Whether a part found what must not be."""
    must = {"codecs": ("equals_cpu",), "profile": ("adds_none", "exchanges"), "paths": ("same",), "training": ()}
    return not all(row[name] for row in rows for name in must[part])


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="of the part training")
    arguments.add_argument("--every", type=int, default=0, help=f"inner steps between exchanges; default: {Sizes().every}")
    arguments.add_argument("--batch", type=int, default=0, help=f"rows of {Sizes().context} tokens; default: {Sizes().batch}")
    arguments.add_argument("--rounds", type=int, default=0, help=f"counted ones of each mode; default: {Sizes().rounds}")
    arguments.add_argument("--threads", type=int, default=0, help="that the coordinator merges with; default: 1")
    arguments.add_argument("--codec", default="int8", help="of contributions and updates, in the part training")
    arguments.add_argument("--cpu-sizes", action="store_true", help="tiny sizes on the CPU; nothing is recorded")
    arguments.add_argument("--label", default="", help="written beside the figures")
    given = arguments.parse_args()
    device = torch.device("cpu" if given.cpu_sizes else "cuda")
    sizes = replace(TINY if given.cpu_sizes else Sizes(), codec=given.codec)
    chosen = {name: getattr(given, name) for name in ("every", "batch", "rounds", "threads") if getattr(given, name)}
    sizes = replace(sizes, **chosen)
    worst = 0
    for part in given.parts:
        if device.type == "cuda" and not torch.cuda.is_available():
            print(f"{part}: needs CUDA: not run here")
            continue
        begins = circumstances(given.label)
        with terminated_as_interrupt():  # so that the coordinator is ended, too
            rows = measure(part, sizes, given.modes, device)
        if failed(part, rows):
            print(f"{part}: FAILED")
            worst = 1
        if device.type == "cuda":
            gpu = {"part": part, "gpu": torch.cuda.get_device_name(device), "numel": sizes.numel, "batch": sizes.batch}
            append_lines(RESULTS, [{**begins, **gpu, **row} for row in rows])
    return worst


if __name__ == "__main__":
    sys.exit(main())
