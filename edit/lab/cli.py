"""`edit-lab`: demo, simulation, chaos, measurements and comparisons on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edit.command_line import SHORT_HELP, exit_codes, loading, run_command, with_version

__all__ = ["SIMULATE_EXAMPLE", "app", "main"]

SIMULATE_EXAMPLE = """Example: edit-lab simulate --peers 500 --rounds 200 --set compute.sigma=0.3 --set link.up_mbit=100

A file for --scenario (edit/lab/simulation/scenario.py explains every key):

```
peers = 500
compute.sigma = 0.3                              # lognormal spread of the peers' speeds
classes = [{ share = 0.1, slower = 4.0 }]        # a tenth of the peers is four times slower
link.up_mbit = 100.0
faults.failures_per_hour = 0.05
size.parameters = 50e6
sync = { every = 100, outer_steps = 200, mode = "delayed", delay = 20 }      # as in run.toml
rounds.quorum = 300
```
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings=SHORT_HELP,
    help="Try the project on one machine: a demo, a simulation of many peers, a run under random faults, measurements.\n\n"
    f"{exit_codes(0, 1, 2, 70, 130, 141, one='a rule of `chaos` was broken')}\n\n"
    "Example: edit-lab demo --quick",
)
with_version(app, "edit-lab")

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure on this machine, and compare with a limit or other systems in the same run.\n\n"
    "Each prints a table; --results appends lines of JSON, --plot draws an SVG. While other programs run, compare "
    "CPU seconds rather than wall seconds.",
)
app.add_typer(bench, name="bench")


@app.command()
def demo(
    peers: Annotated[int | None, typer.Option(help="Number of peers.", show_default="4; with --hostile 7")] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Inner steps of each peer.", show_default="750; --hostile 300; with --quick 100, a swarm 200"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial parameters, the data's order, the held-out files.")] = 0,
    swarm: Annotated[
        bool,
        typer.Option(
            "--swarm", help="Without a coordinator: the member that leads is stopped, one that owns a part is killed."
        ),
    ] = False,
    hostile: Annotated[
        bool,
        typer.Option(
            "--hostile",
            help="Three peers attack instead: one flips its sign, one reverses the mean, one copies. Run with the penalty "
            "alone, with a robust rule, and with secure aggregation, compare them, and verify the audit logs.",
        ),
    ] = False,
    no_faults: Annotated[bool, typer.Option("--no-faults", help="Inject no faults.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results; the files of an earlier demo in it are removed.")] = Path(
        "runs/demo"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Take about a minute; with --hostile, a minute for each of the three runs.")
    ] = False,
) -> None:
    """Train one model with a coordinator, or as a swarm, and several peers, inject faults, and write a report.

    Starts real daemons on loopback, enrols them with invitations, trains a small GPT on the source of Python's standard
    library, compares it with one peer alone, and writes results.json, metrics.jsonl, outer.safetensors, sample.txt and
    report.html to the --out folder.

    With --hostile the three runs are in penalty, robust and masked below --out.

    Example: edit-lab demo --quick --out runs/try
    """
    from rich.console import Console

    with loading():
        from edit.lab.demo.command import run_demo  # needs torch; --help answers without it
        from edit.lab.demo.hostile import run_hostile_demo
        from edit.lab.demo.plan import DemoOptions

    options = DemoOptions(
        peers=(7 if hostile else 4) if peers is None else peers,
        steps=steps,
        seed=seed,
        faults=not no_faults,
        out=out,
        quick=quick,
        swarm=swarm,
        hostile=hostile,
    )
    (run_hostile_demo if hostile else run_demo)(options, Console())


@app.command(epilog=SIMULATE_EXAMPLE)
def simulate(
    scenario: Annotated[Path | None, typer.Option(help="Read this TOML file; options and --set override it.")] = None,
    peers: Annotated[int | None, typer.Option(help="Number of peers.", show_default="100")] = None,
    rounds: Annotated[int | None, typer.Option(help="End after this many commits.", show_default="1000")] = None,
    mode: Annotated[str | None, typer.Option(help="sync.mode: blocking or delayed.", show_default="blocking")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random draw.", show_default="0")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, any key of a scenario. Repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate a run with thousands of peers in virtual time, and report its goodput.

    Uses the round machine, the membership and the peers' sessions of a real run. Speeds, links, failures and returns of the
    peers are drawn from distributions. The same seed gives the same result.
    """
    from rich.console import Console

    with loading():
        from edit.lab.simulation.command import run_simulation

    given = {"peers": peers, "sync.outer_steps": rounds, "sync.mode": mode, "seed": seed}
    options = [f"{key}={value}" for key, value in given.items() if value is not None]
    run_simulation(scenario, options + (settings or []), as_json, Console(stderr=True))


@app.command()
def chaos(
    seed: Annotated[int, typer.Option(help="Seed of the faults; the same seed and options give the same schedule.")] = 0,
    minutes: Annotated[float, typer.Option(help="How many minutes to inject faults.")] = 1.0,
    peers: Annotated[int | None, typer.Option(help="Number of peers.", show_default="3; with --masked 4, --swarm 5")] = None,
    swarm: Annotated[
        bool,
        typer.Option("--swarm", help="Without a coordinator. Needs network namespaces: Linux, as root."),
    ] = False,
    sharded: Annotated[bool, typer.Option("--sharded", help="Make one of them a torchrun replica of two ranks.")] = False,
    kills: Annotated[
        int, typer.Option(help="Only kill, this many times; --minutes is ignored.", show_default="faults of all kinds")
    ] = 0,
    masked: Annotated[bool, typer.Option("--masked", help="With secure aggregation; at least 4 peers.")] = False,
    forked: Annotated[
        bool,
        typer.Option(
            "--forked", help="With an audit log. At the end two coordinators serve the run, and the peers must detect it."
        ),
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="One run twice, alone and under faults; it must end with the same bits.")
    ] = False,
    hostile: Annotated[int, typer.Option(help="Number of hostile members beside them, fewer than there are peers.")] = 0,
    gap: Annotated[float, typer.Option(help="Mean seconds between two faults.")] = 5.0,
    out: Annotated[Path, typer.Option(help="Folder for all files; those of an earlier call are removed.")] = Path("runs/chaos"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a tiny model with real processes, inject random faults, and check the run's invariants from outside.

    Kills and stops peers, ranks and the coordinator; cuts, silences, slows down and disturbs links; fills the coordinator's
    disk. Checks that the digests of all peers are equal, no commit is lost or made twice, the run advances after every repair,
    memory stays flat, no process ends by itself, and none is left behind. Exit code 1 when one of these does not hold.

    With --hostile N, N members attack the run, each in another way every ten seconds (python -m edit.lab.hostile --help lists
    the ways). Then it also checks that honest peers stay in the commits and are never refused, that the coordinator's log and
    folder stay small, and that all parameters stay finite. The penalty is enabled, and each quorum has an honest peer in it.

    With --swarm, members are killed, stopped, cut off alone or in pairs, slowed down, wiped, evicted; they leave and rejoin;
    all are killed at once. One member accepts no connections. Checks that every outer step of a part has one digest, that
    nothing is lost that was reported, that the swarm advances while a quorum is there, and that all end by themselves with the
    same state on disk.

    With --forked, the run has an audit log. At the end a copy of the coordinator's folder is served as well, and half of the
    peers are connected to it for a while. Checks that each of them stops with exit code 3 and keeps the proof, that nothing of
    theirs is merged again, and that the coordinator warns its operator.

    With --exact, a run with sync.strict is made twice, first alone, then under the same faults; --minutes is about how long it
    takes alone. Mode, codecs, optimizers and groups are drawn from the seed. Checks that both end with the same bits: the
    digest of each outer step, the coordinator's outer state, and all that is in the peers' last checkpoints.

    Example: edit-lab chaos --seed 7 --minutes 5 --hostile 1
    """
    from rich.console import Console

    with loading():
        from edit.lab.chaos.command import run_chaos, run_exact_chaos, run_swarm_chaos
        from edit.lab.chaos.options import ChaosOptions

    options = ChaosOptions(
        seed=seed,
        seconds=60 * minutes,
        peers=peers if peers is not None else 5 if swarm else 4 if masked else 3,
        swarm=swarm,
        masked=masked,
        forked=forked,
        exact=exact,
        sharded=sharded,
        hostile=hostile,
        kills=kills,
        gap_s=gap,
        out=out,
    )
    (run_swarm_chaos if swarm else run_exact_chaos if exact else run_chaos)(options, as_json, Console(stderr=True))


_Parameters = Annotated[int, typer.Option(min=12, help="Size of the model, in parameters.")]
_Peers = Annotated[list[int] | None, typer.Option(min=1, max=1000, help="Number of peers. Repeatable.", show_default="2 and 4")]
_Repeat = Annotated[int, typer.Option(min=1, help="Exchanges that count, after one that warms up.")]
_Label = Annotated[str, typer.Option(help="Text beside the figures.")]
_Results = Annotated[Path | None, typer.Option(help="Append the results to this file, as lines of JSON.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw the results to this file, FILE.svg.")]
_Folder = Annotated[
    Path | None,
    typer.Option(help="Folder of the other systems' environments.", show_default="rivals, in the cache folder of edit"),
]
_TorchIndex = Annotated[str, typer.Option(help="A further index for pip, which has the torch that is installed here.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON list instead of the table.")]


@app.command()
def compare(
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="A preset, or a run.toml; settings may follow its name: 'diloco outer.lr=0.9'. Repeatable.",
            show_default="data-parallel, diloco and edit",
        ),
    ] = None,
    list_presets: Annotated[bool, typer.Option("--list", help="List the presets with their sources, and stop.")] = False,
    peers: Annotated[list[int] | None, typer.Option(min=1, help="Number of peers. Repeatable.", show_default="4")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of each peer; a multiple of every H.")] = 1200,
    every: Annotated[
        list[int] | None,
        typer.Option(min=1, help="H of the presets; a run.toml has its own. Repeatable.", show_default="30"),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds: initial parameters, order of the data, held-out files.")
    ] = 3,
    base: Annotated[
        str | None,
        typer.Option(
            help="The method with which the losses of the others are compared.", show_default="the first data-parallel one"
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="SECTION.KEY=VALUE for every method, as model.width=256. Repeatable.")
    ] = None,
    domains: Annotated[bool, typer.Option("--domains", help="Give each peer packages of its own (uneven data).")] = False,
    random_bytes: Annotated[
        str | None,
        typer.Option(
            help="FROM:TO, as 0.3:0.5: from this share of the run to that one, the last peer trains on random bytes.",
            show_default="never",
        ),
    ] = None,
    label_noise: Annotated[float, typer.Option(help="The share of the last peer's targets that are random.")] = 0.0,
    small: Annotated[float, typer.Option(help="The last peer has this share of the text that it would have.")] = 1.0,
    slow: Annotated[
        float, typer.Option(min=1.0, max=1000.0, help="How many times as long the last peer's inner step takes (virtual time).")
    ] = 1.0,
    points: Annotated[int, typer.Option(min=1, max=10_000, help="Points of each curve; spikes are looked for in them.")] = 12,
    device: Annotated[
        str,
        typer.Option(
            help="Train and evaluate on this device of torch: cpu, cuda or cuda:N. Its trials are trials of their own."
        ),
    ] = "cpu",
    processes: Annotated[
        int | None, typer.Option(min=1, help="Trials at a time, each on one thread.", show_default="one per core")
    ] = None,
    results: Annotated[
        Path, typer.Option(help="The file of results, a line of JSON for each trial. A trial that is in it is not run again.")
    ] = Path("compare.jsonl"),
    plot: Annotated[Path | None, typer.Option(help="Draw loss against bytes to this file, FILE.svg.")] = None,
    curves: Annotated[
        Path | None, typer.Option(help="Draw the losses in the course of the run to this file, FILE.svg.")
    ] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Run no trial, and show what --results has.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the trials as a JSON list instead of the table.")] = False,
) -> None:
    """Train one model with several methods, on the same data with the same seeds, and compare loss and bytes.

    All peers run in one process, without a network. They exchange with the code and the codecs of a real run, and the bytes
    that would be sent are counted. The model is the built-in GPT; the text is the source of Python's standard library.
    Data-parallel training sees as many tokens: each of its steps takes the batches of all peers together. A trial is one
    method with one seed, in a process of its own. A finished trial is a line of --results; a trial that was killed starts
    again with the next call. With several --peers or --every the table has a gap for each pair of them. docs/compare.md
    explains the columns.

    Example: edit-lab compare --method data-parallel --method muloco --method "diloco outer.lr=0.9" --plot loss.svg
    """
    from rich.console import Console

    with loading():
        from edit.lab.compare.command import CompareOptions, Outputs, print_presets, run_comparison
        from edit.lab.compare.method import DEFAULT_EVERY

    if list_presets:
        print_presets()
        return
    options = CompareOptions.of(
        methods=methods or ["data-parallel", "diloco", "edit"],
        peers=peers or [4],
        steps=steps,
        every=every or [DEFAULT_EVERY],
        seeds=seeds,
        base=base,
        settings=settings or [],
        domains=domains,
        random_bytes=random_bytes,
        label_noise=label_noise,
        small=small,
        slow=slow,
        points=points,
        device=device,
    )
    outputs = Outputs(results=results, plot=plot, curves=curves, as_json=as_json, print_only=print_only)
    run_comparison(options, outputs, processes, Console(stderr=True))


@bench.command()
def exchange(
    parameters: _Parameters = 50_331_648,
    codecs: Annotated[
        list[str] | None, typer.Option("--codec", help="Codec of both directions. Repeatable.", show_default="int8 and fp32")
    ] = None,
    peers: _Peers = None,
    repeat: _Repeat = 5,
    label: _Label = "",
    results: _Results = None,
    plot: _Plot = None,
    as_json: _Json = False,
) -> None:
    """Measure one exchange of a whole model, beside raw gRPC of the same bytes.

    Coordinator and peers are separate processes on loopback, with mutual TLS, the penalty enabled, a journal with fsync.
    Reports wall seconds, and CPU seconds (user + system) of all processes, of the coordinator and of a peer. The raw stream
    moves the same bytes between as many clients and one server with the same TLS, up and then down, and does nothing else.

    Example: edit-lab bench exchange --codec int8 --codec int4 --peers 4 --plot exchange.svg
    """
    from rich.console import Console

    with loading():
        from edit.lab.bench.command import Outputs, run_exchange  # needs torch; --help answers without it
        from edit.lab.bench.exchange import ExchangeOptions

    options = ExchangeOptions(
        parameters=parameters, codecs=codecs or ["int8", "fp32"], peers=peers or [2, 4], repeat=repeat, label=label
    )
    run_exchange(options, Outputs(results=results, plot=plot, as_json=as_json), Console(stderr=True))


@bench.command()
def codecs(
    numel: Annotated[int, typer.Option(min=4096, help="Elements of the vector; one block of a 124M GPT.")] = 7_087_872,
    codecs: Annotated[
        list[str] | None, typer.Option("--codec", help="A codec with its options. Repeatable.", show_default="all")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of each job; the best counts.")] = 7,
    rivals: Annotated[
        bool, typer.Option("--rivals", help="Also measure hivemind's compressors, installed as by `edit-lab bench rivals`.")
    ] = False,
    folder: _Folder = None,
    torch_index: _TorchIndex = "",
    label: _Label = "",
    results: _Results = None,
    plot: _Plot = None,
    as_json: _Json = False,
) -> None:
    """Measure the codecs on one core: GB/s of fp32 to encode, to decode and add, to measure a norm, beside a plain copy.

    Example: edit-lab bench codecs --repeat 40 --rivals --plot codecs.svg
    """
    from rich.console import Console

    with loading():
        from edit.lab.bench.codecs import CODECS, CodecOptions
        from edit.lab.bench.command import Outputs, run_codecs  # needs torch; --help answers without it
        from edit.lab.bench.rivals.environments import cache_folder

    options = CodecOptions(
        numel=numel,
        repeat=repeat,
        codecs=codecs or CODECS,
        label=label,
        rivals=(folder or cache_folder()) if rivals else None,
        torch_index=torch_index,
    )
    run_codecs(options, Outputs(results=results, plot=plot, as_json=as_json), Console(stderr=True))


@bench.command()
def links(
    parts: Annotated[
        list[str] | None,
        typer.Option("--part", help="throughput or heartbeats. Repeatable.", show_default="both"),
    ] = None,
    mbit: Annotated[float, typer.Option(min=0.1, max=1e6, help="Rate of the fat link, Mbit/s.")] = 1000.0,
    rtts: Annotated[
        list[float] | None,
        typer.Option(
            "--rtt", min=0.0, max=60.0, help="Its round-trip time, seconds. Repeatable.", show_default="0, 0.02, 0.1, 0.2"
        ),
    ] = None,
    megabytes: Annotated[float, typer.Option(min=0.1, max=1e6, help="Size of a contribution, an update, a snapshot.")] = 100.0,
    repeat: Annotated[int, typer.Option(min=2, help="How often each is measured; the first is on new connections.")] = 4,
    slow_mbit: Annotated[float, typer.Option(min=0.1, max=1e6, help="Rate of the slow link, for heartbeats.")] = 10.0,
    slow_rtts: Annotated[
        list[float] | None,
        typer.Option(
            "--slow-rtt", min=0.0, max=60.0, help="Its round-trip time, seconds. Repeatable.", show_default="0.02, 0.1"
        ),
    ] = None,
    label: _Label = "",
    results: _Results = None,
    plot: _Plot = None,
    as_json: _Json = False,
) -> None:
    """Measure contributions, updates and snapshots over long links beside raw TCP, and heartbeats while data fills a slow link.

    A coordinator, a peer and a link that delays are processes on loopback, with mutual TLS. --plot draws the throughput; the
    heartbeats when only they are measured.

    Example: edit-lab bench links --part throughput --rtt 0.1 --plot links.svg
    """
    from rich.console import Console

    with loading():
        from edit.errors import ConfigError
        from edit.lab.bench.command import Outputs, run_links  # needs torch; --help answers without it
        from edit.lab.bench.links import PARTS, LinkOptions

    if wrong := [part for part in parts or () if part not in PARTS]:
        raise ConfigError(f"--part {wrong[0]}: known are {', '.join(PARTS)}")
    options = LinkOptions(
        parts=parts or PARTS,
        mbit=mbit,
        rtts_s=rtts or [0.0, 0.02, 0.1, 0.2],
        payload_bytes=int(1e6 * megabytes),
        repeats=repeat,
        slow_mbit=slow_mbit,
        slow_rtts_s=slow_rtts or [0.02, 0.1],
        label=label,
    )
    run_links(options, Outputs(results=results, plot=plot, as_json=as_json), Console(stderr=True))


@bench.command()
def rivals(
    parameters: _Parameters = 50_331_648,
    peers: _Peers = None,
    mbit: Annotated[
        list[float] | None,
        typer.Option(
            min=0.1,
            help="Rate of each process's own link in each direction, Mbit/s (Linux, as root). Repeatable.",
            show_default="loopback, no limit",
        ),
    ] = None,
    codecs: Annotated[
        list[str] | None,
        typer.Option("--codec", help="Codec of this project. Repeatable.", show_default="int8, int4 and fp32"),
    ] = None,
    swarm: Annotated[bool, typer.Option("--swarm", help="This project in a swarm, too: a host beside each peer.")] = False,
    repeat: _Repeat = 5,
    only: Annotated[list[str] | None, typer.Option(help="Only systems whose name contains this text. Repeatable.")] = None,
    limit: Annotated[
        float, typer.Option(min=1.0, help="Seconds that one exchange may take, beside what a server's link needs.")
    ] = 120.0,
    folder: _Folder = None,
    torch_index: _TorchIndex = "",
    label: _Label = "",
    results: _Results = None,
    plot: _Plot = None,
    as_json: _Json = False,
) -> None:
    """Measure one exchange with this project, gloo, torchft, hivemind and Flower in one run.

    The other systems are installed by pip, with its own configuration, into environments of their own (1.5 GB) when they are
    measured for the first time. A system that cannot be installed or fails is a row with its error.

    With --mbit every process of a system, a coordinator too, is a host with a link of its own on one switch (network namespaces
    of this machine, token buckets). The table then also shows the bytes through the busiest link, and how long these take at
    least. --json and --results also have the CPU seconds of each process, and the bytes of each link.

    Example: edit-lab bench rivals --peers 4 --mbit 1000 --mbit 100 --plot rivals.svg
    """
    from rich.console import Console

    with loading():
        from edit.lab.bench.command import Outputs, run_rivals  # needs torch; --help answers without it
        from edit.lab.bench.rivals.contest import DEFAULT_CODECS, RivalOptions
        from edit.lab.bench.rivals.environments import cache_folder

    options = RivalOptions(
        parameters=parameters,
        peers=peers or [2, 4],
        folder=folder or cache_folder(),
        mbit=mbit or (),
        codecs=codecs or DEFAULT_CODECS,
        swarm=swarm,
        repeat=repeat,
        limit_s=limit,
        torch_index=torch_index,
        only=only or (),
        label=label,
    )
    run_rivals(options, Outputs(results=results, plot=plot, as_json=as_json), Console(stderr=True))


def main() -> None:
    """Entry point of `edit-lab`."""
    run_command("edit-lab", app)
