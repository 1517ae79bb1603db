"""Code of others: only what was allowed is loaded, what outer steps are made with is pinned, each fault names its plug-in."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from aggregator.storage.journal_records import Record, fragment_header, fragment_of
from edit import plugins
from edit.codecs import PIECE, codec
from edit.config.run import CODECS, CodecConfig, OuterConfig, PenaltyConfig, RunConfig
from edit.errors import ConfigError, EditError, PluginError, RemoteProtocolError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import OuterState
from edit.merging.penalty import NormStatistics
from edit.records import EncodedTensor, Verdict
from edit.trackers.choose import BUILT_IN
from peers.models import registry  # noqa: F401 # registers
from peers.training import data_source, inner_optimizers  # noqa: F401 # register
from tests.support.encoded import encode

SIZE = 2 * PIECE + 5
SCHEMA = Schema((FragmentSpec(fragment_id=0, name="f", tensors=(TensorSpec(name="f.w", shape=(SIZE,)),)),))


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_admitted", {})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that can be imported as `offered`, and is offered as entry:mine in every group."""
    file = tmp_path / "offered.py"
    file.write_text("raise RuntimeError('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [EntryPoint("mine", "offered:make", group)])
    yield file
    sys.modules.pop("offered", None)


def contributions(*values: Tensor) -> list[Measured]:
    payloads = [encode("fp32", value) for value in values]
    return [Measured(f"p{i}", 2, 10, measure(payload), payload) for i, payload in enumerate(payloads)]


def commit(state: OuterState, *values: Tensor) -> None:
    record = state.record(state.reduce(0, contributions(*values)))
    state.commit(state.outer_step + 1, "", [record])


NESTEROV = RunConfig(
    outer=OuterConfig(optimizer="nesterov", lr=0.5, momentum=0.5),
    penalty=PenaltyConfig(enabled=False),
    codec=CodecConfig(up="fp32", down="int8"),
)


class Own:
    """Nesterov, written as a plug-in, with what a test breaks in it."""

    def __init__(self, config: OuterConfig, spoil: Callable[[Tensor], Any] = lambda step: step) -> None:
        self.config, self.spoil = config, spoil

    def slots(self, numel: int) -> dict[str, Tensor]:
        return {"momentum": torch.zeros(numel)}

    def step(self, slots: dict[str, Tensor], merged: Tensor) -> tuple[Any, dict[str, Tensor]]:
        momentum = slots["momentum"].mul_(0.5).add_(merged)  # its arguments are its own
        return self.spoil(merged.add_(momentum * 0.5) * self.config.lr), {"momentum": momentum}


def own(spoil: Callable[[Tensor], Any] = lambda step: step) -> RunConfig:
    plugins.register("outer", "own", lambda config: Own(config, spoil))
    return dataclasses.replace(NESTEROV, outer=OuterConfig(optimizer="entry:own", lr=0.5))


def moves(seed: int, peers: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator) for _ in range(peers)]


def test_an_optimizer_takes_the_steps_that_the_same_one_built_in_takes_and_is_restored() -> None:
    states = [OuterState(SCHEMA, config, [torch.ones(SIZE)]) for config in (NESTEROV, own())]
    for seed in range(2):
        for state in states:
            commit(state, *moves(seed))
    assert states[0].digest == states[1].digest
    restored = OuterState.restore(SCHEMA, states[1].config, states[1].to_tensors(), states[1].metadata())
    commit(restored, *moves(2))
    commit(states[0], *moves(2))
    assert restored.digest == states[0].digest


def broken(_: Tensor) -> Tensor:
    raise ZeroDivisionError("float division")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (broken, r"ZeroDivisionError: float division \(test_plugins.py:\d+\)"),
        (lambda step: step[1:], "must be torch.float32"),
        (lambda step: step.double(), "not torch.float64"),
        (lambda step: step.numpy(), "not ndarray"),
        (lambda step: step * torch.nan, "step.. is not finite"),
    ],
)
def test_a_broken_optimizer_is_named_before_anything_changes(spoil: Callable[[Tensor], Any], says: str) -> None:
    state = OuterState(SCHEMA, own(spoil), [torch.ones(SIZE)])
    digest, record = state.digest, state.record(state.reduce(0, contributions(*moves(0))))
    with pytest.raises(PluginError, match=rf"^entry:own \(edit.outer\): .*{says}") as raised:
        state.stage_plugins([record], None, {})
    assert "\n" not in str(raised.value)
    assert state.digest == digest and state.outer_step == 0


def test_a_merger_combines_what_has_weight() -> None:
    class Last:
        def __init__(self, config: OuterConfig) -> None:
            pass

        def combine(self, read: Sequence[Callable[[], Tensor]], weights: Sequence[float], fragment: FragmentSpec) -> Tensor:
            assert weights == [0.5, 0.5] and fragment.numel == SIZE
            return read[-1]()

    plugins.register("mergers", "last", Last)
    config = dataclasses.replace(NESTEROV, outer=OuterConfig(optimizer="sgd", lr=1.0, merger="entry:last"))
    state, values = OuterState(SCHEMA, config, [torch.ones(SIZE)]), moves(0)
    merged = state.reduce(0, contributions(values[0], values[1], torch.full((SIZE,), torch.nan)))
    assert torch.equal(merged.merged, values[1])
    assert [verdict.verdict for verdict in merged.verdicts] == [Verdict.OK, Verdict.OK, Verdict.NONFINITE]


@pytest.mark.parametrize(
    ("combined", "says"),
    [
        (lambda: torch.ones(3), "must be torch.float32"),
        (lambda: torch.full((SIZE,), torch.inf), "not finite"),
        (broken, "TypeError"),
    ],
)
def test_a_broken_merger_is_named(combined: Callable[[], Tensor], says: str) -> None:
    class Broken:
        def __init__(self, config: OuterConfig) -> None:
            pass

        def combine(self, *_: object) -> Tensor:
            return combined()

    plugins.register("mergers", "broken", Broken)
    config = dataclasses.replace(NESTEROV, outer=OuterConfig(optimizer="sgd", merger="entry:broken"))
    with pytest.raises(PluginError, match=rf"^entry:broken \(edit.mergers\): .*{says}"):
        OuterState(SCHEMA, config, [torch.ones(SIZE)]).reduce(0, contributions(*moves(0)))


GOOD = {"p0": Verdict.OK, "p1": Verdict.OK}


def judging(judge: Callable[..., Any]) -> OuterState:
    class Detector:
        def __init__(self, config: PenaltyConfig) -> None:
            self.judge = judge

    plugins.register("penalties", "mine", Detector)
    penalty = PenaltyConfig(detector="entry:mine", options={"a": 1})
    return OuterState(SCHEMA, dataclasses.replace(NESTEROV, penalty=penalty), [torch.ones(SIZE)])


def test_a_penalty_judges_what_is_finite_and_remembers() -> None:
    def judge(norms: dict[str, float], steps: dict[str, int], before: dict[str, NormStatistics]) -> Any:
        assert norms.keys() == steps.keys() == {"p0", "p1"}
        seen = {peer: NormStatistics(norms[peer], 0.0, before.get(peer, NormStatistics()).count + 1) for peer in norms}
        return {"p0": Verdict.ANOMALOUS, "p1": Verdict.OK}, seen

    state = judging(judge)
    values = [*moves(0), torch.full((SIZE,), torch.nan)]
    for count in (1, 2):
        merged = state.reduce(0, contributions(*values))
        assert [v.verdict for v in merged.verdicts] == [Verdict.ANOMALOUS, Verdict.OK, Verdict.NONFINITE]
        assert {peer: known.count for peer, known in merged.statistics.items()} == {"p0": count, "p1": count}
        state.commit(count, "", [state.record(merged)])


WINDOW = tuple(float(norm) for norm in range(8))


@pytest.mark.parametrize(
    "known",
    [
        NormStatistics(mean=1.0, count=8, last=WINDOW, rejected=(0.5,) * 101),
        NormStatistics(mean=1.0, count=1.9),  # type: ignore[arg-type]
        NormStatistics(mean=-1e300, variance=-1.0, count=-1, last_error=-1.0, relative=NormStatistics(last=WINDOW)),
    ],
)
def test_a_restart_reads_what_a_penalty_remembers_and_a_built_in_one_may_follow(known: NormStatistics) -> None:
    state = judging(lambda *_: (GOOD, dict.fromkeys(GOOD, known)))
    record = state.record(state.reduce(0, contributions(*moves(0))))
    header = json.loads(json.dumps(fragment_header(1, record, None)))
    read, _ = fragment_of(Path("journal"), Record(0, 0, header, record.payload.data if record.payload else b""))
    assert read.statistics == record.statistics == dict.fromkeys(GOOD, known)
    state.commit(1, "", [record])
    metadata = json.loads(json.dumps(state.metadata()))
    built_in = [dataclasses.replace(NESTEROV, penalty=PenaltyConfig(detector=name)) for name in ("level", "edit")]
    for config in (state.config, *built_in):
        again = OuterState.restore(SCHEMA, config, state.to_tensors(), metadata)
        assert again.metadata()["statistics"] == [dict.fromkeys(GOOD, known.to_json())]
        judged = again.reduce(0, contributions(*moves(0)))
        assert [v.verdict for v in judged.verdicts] == [Verdict.OK, Verdict.OK]
        counts = {peer: each.count for peer, each in judged.statistics.items()}
        assert counts == dict.fromkeys(GOOD, known.count if config is state.config else 1), "it begins anew"


@pytest.mark.parametrize(
    "said",
    [
        ({}, {}),
        ({"p0": Verdict.OK, "p1": True}, {}),
        (GOOD, {"p7": NormStatistics()}),
        (GOOD, {"p0": NormStatistics(mean=float("nan"))}),
        (GOOD, {"p0": NormStatistics(mean=10**400)}),
        (GOOD, {"p0": NormStatistics(last=(float("inf"),))}),
        (GOOD, {"p0": NormStatistics(last=(0.0,) * 1001)}),
        (GOOD, {"p0": NormStatistics(rejected=(0.0,) * 1001)}),
        (GOOD, {"p0": NormStatistics(last=(torch.ones(()),))}),  # type: ignore[arg-type]
        (GOOD, {"p0": NormStatistics(relative=NormStatistics(relative=NormStatistics()))}),
        (GOOD, {"p0": 7}),
        None,
    ],
)
def test_a_broken_penalty_is_named(said: Any) -> None:
    with pytest.raises(PluginError, match=r"^entry:mine \(edit.penalties\): "):
        judging(lambda *_: said).reduce(0, contributions(*moves(0)))


class Halves:
    """bf16, as a block format: two elements in four bytes."""

    granule, block_bytes = 8, 16

    def __init__(self, spec: object) -> None:
        pass

    def encode(self, blocks: Tensor) -> Tensor:
        return blocks.to(torch.bfloat16).view(torch.uint8)

    def decode(self, data: Tensor) -> Tensor:
        return data.view(torch.bfloat16).to(torch.float32)


@pytest.mark.parametrize("numel", [0, 1, 8, 9, PIECE + 3])
def test_a_codec_of_blocks_has_all_that_a_codec_needs(numel: int) -> None:
    plugins.register("codecs", "halves", Halves)
    mine, built_in = codec("entry:halves"), codec("bf16")
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    fragment = FragmentSpec(fragment_id=0, name="f", tensors=(TensorSpec(name="f.w", shape=(numel,)),))
    encoded = mine.encode(x, fragment)
    assert memoryview(encoded.data).nbytes == mine.encoded_size(numel) == -(-numel // 8) * 16
    assert torch.equal(mine.decode(encoded), built_in.decode(built_in.encode(x, fragment)))
    if numel > 1:
        shard = Shard(fragment, [Box(0, (1,), (numel // 2,))])
        assert torch.equal(mine.decode_shard(mine.cut(encoded, shard), shard), mine.decode(encoded)[1 : 1 + numel // 2])
    with pytest.raises(RemoteProtocolError, match="cannot be"):
        mine.decode(EncodedTensor("entry:halves", numel, bytes(mine.encoded_size(numel) + 1)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"granule": 3}, "granule = 3"),
        ({"block_bytes": 33}, "block_bytes = 33: must be between 1 and 32"),
        ({"block_bytes": 15}, "must be torch.uint8"),
        ({"decode": lambda self, data: data}, "must be torch.float32"),
        ({"decode": lambda self, data: torch.zeros(len(data), 8)}, "with a NaN"),
        ({"encode": lambda self, blocks: 1 / 0}, "ZeroDivisionError"),
        ({"__init__": lambda self, spec: int("x")}, "ValueError"),
    ],
)
def test_a_broken_codec_is_named_when_it_is_chosen(changes: dict[str, Any], says: str) -> None:
    plugins.register("codecs", "broken", type("Broken", (Halves,), changes))
    with pytest.raises(PluginError, match=rf"^entry:broken \(edit.codecs\): .*{says}"):
        codec("entry:broken")


def test_bytes_that_a_codec_stumbles_over_are_their_senders_fault() -> None:
    def decode(self: Halves, data: Tensor) -> Tensor:
        if bool((data == 255).all()):
            raise IndexError("index 255 is out of bounds")
        return data.view(torch.bfloat16).to(torch.float32)

    plugins.register("codecs", "picky", type("Picky", (Halves,), {"decode": decode}))
    with pytest.raises(RemoteProtocolError, match=r"^entry:picky \(edit.codecs\): IndexError: index 255"):
        codec("entry:picky").decode(EncodedTensor("entry:picky", 8, b"\xff" * 16))


@pytest.mark.parametrize("name", ["entry:none", "entry:", "entry:no-name", "entry:os:a=1"])
def test_no_name_from_the_wire_loads_anything(name: str, module: Path) -> None:
    with pytest.raises(RemoteProtocolError, match="has loaded no codec"):
        codec(name)


TOML = '[outer]\noptimizer = "entry:mine"\n'
MAKE = "def make(config):\n    return config\n"


def configured(text: str) -> RunConfig:
    import tomllib

    return RunConfig.from_mapping(tomllib.loads(text))


def test_what_is_not_allowed_is_never_imported(module: Path) -> None:
    with pytest.raises(ConfigError, match=r"entry:mine \(edit.outer\), code of another package: add `--allow mine`"):
        plugins.admit(configured(TOML), {"other"})
    with pytest.raises(ConfigError, match="--allow mine"):
        plugins.pin(TOML, ())
    pinned = plugins.pin(TOML, {"mine"})  # finding and hashing it imports nothing
    with pytest.raises(PluginError, match="cannot be loaded: RuntimeError: it was imported"):
        plugins.admit(configured(pinned), {"mine"})


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 100_000])
def test_a_text_that_cannot_be_pinned_is_one_line(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.toml: (an integer has too many digits|nested too deeply)$"):
        plugins.pin(f"{TOML}[sync]\nevery = {value}\n", ())


def test_a_plugin_that_differs_from_the_pinned_one_is_refused_in_one_line(module: Path) -> None:
    module.write_text(MAKE)
    pinned = plugins.pin(TOML, {"mine"})
    plugins.admit(configured(pinned), {"mine"})
    plugins._admitted.clear()
    before = plugins.find("outer", "mine").pin
    module.write_text(MAKE + "# changed\n")
    after = plugins.find("outer", "mine").pin
    with pytest.raises(ConfigError) as raised:
        plugins.admit(configured(pinned), {"mine"})
    assert str(raised.value) == f"entry:mine (edit.outer): the run has {before}, and here is {after}; install the same"
    with pytest.raises(ConfigError, match="do not pin it"):
        plugins.admit(configured(TOML), {"mine"})


def test_pins_are_written_into_run_toml_and_replaced_there(module: Path) -> None:
    module.write_text(MAKE)
    first = plugins.pin(TOML, {"mine"})
    assert configured(first).plugins == {"outer:mine": plugins.find("outer", "mine").pin}
    assert plugins.pin(first, ()) == first  # it stays as it is pinned
    module.write_text(MAKE + "\n")
    assert plugins.pin(first, ()) == first
    second = plugins.pin(first + "[sync]\nevery = 4\n", {"mine"})
    assert configured(second).plugins != configured(first).plugins
    assert configured(second).sync.every == 4 and second.count("[plugins]") == 1
    assert plugins.without_pins(second).split() == (TOML + "[sync]\nevery = 4\n").split()
    assert "plugins" not in plugins.pin(second.replace("entry:mine", "sgd"), ())


def test_the_hash_is_that_of_the_file_or_of_the_packages_files(module: Path, tmp_path: Path) -> None:
    from hashlib import sha256

    assert plugins.find("outer", "mine").sha256 == sha256(module.read_bytes()).hexdigest()
    module.unlink()
    package = tmp_path / "offered"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text(MAKE)
    (package / "inner" / "more.py").write_text("x = 1\n")
    one = plugins.find("outer", "mine").sha256
    (package / "inner" / "more.py").write_text("x = 2\n")
    assert one != plugins.find("outer", "mine").sha256


@pytest.mark.parametrize(
    "pins",
    [
        {"outer": "x"},
        {"outer:a-b": "0 sha256:" + "0" * 64},
        {"outer:a": "sha256:0"},
        {"outer:a": 3},
        {"os:a": "sha256:" + "0" * 64},
    ],
)
def test_a_pin_that_is_none_is_refused(pins: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="plugins"):
        RunConfig(plugins=pins)


def test_without_plugins_the_configuration_travels_as_before_there_were_any() -> None:
    said = RunConfig().to_json()
    assert "plugins" not in said and 'options": {}, "vocab' in said
    for key in ("merger", "merger_options"):
        assert f'"{key}"' not in said
    assert RunConfig.from_json(said) == RunConfig()
    with_plugin = own()
    assert RunConfig.from_json(with_plugin.to_json()) == with_plugin


@pytest.mark.parametrize(("kind", "name", "make"), [("none", "a", len), ("outer", "a-b", len), ("outer", "a", 3)])
def test_what_cannot_be_registered(kind: str, name: str, make: object) -> None:
    with pytest.raises(EditError):
        plugins.register(kind, name, make)


def test_what_is_built_in_is_in_the_same_table_under_the_names_that_settings_allow() -> None:
    """A name that a setting allows and nothing makes, or the other way round, is noticed here."""
    for kind, section, setting in (
        ("outer", OuterConfig, "optimizer"),
        ("mergers", OuterConfig, "merger"),
        ("penalties", PenaltyConfig, "detector"),
    ):
        rule = get_type_hints(section, include_extras=True)[setting].__metadata__[0].rule
        names = rule.removeprefix("must be one of ").split(", ")
        assert sorted(names) == sorted([*plugins.built_in_names(kind), "entry:NAME"])
    assert plugins.built_in_names("codecs") == tuple(CODECS)
    assert plugins.built_in_names("trackers") == BUILT_IN
    assert plugins.built_in_names("data") == ("files",)
    assert set(plugins.built_in_names("models")) == {"builtin", "hf"}
    assert set(plugins.built_in_names("optimizers")) == {"adamw", "muon", "sgd", "torch"}


def test_a_built_in_one_needs_no_permission_and_one_that_is_not_there_is_named_with_those_that_are() -> None:
    found, make = plugins.resolve("outer", "sgd", ())
    assert found.built_in and str(found) == "sgd (edit.outer)" and make(OuterConfig()).slots(3) is not None
    with pytest.raises(ConfigError, match=r"^nothing: edit.outer has sgd, .*yogi, and plug-ins, entry:NAME$"):
        plugins.make("outer", "nothing", OuterConfig())
