"""run.toml: every wrong setting is one line that names the field and the mend; nothing is silently ignored (T11)."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edit.config.run
from edit.config.run import OuterConfig, PenaltyConfig, RoundsConfig, RunConfig, SyncConfig, is_address
from edit.errors import ConfigError
from tests.support.exhaustive import examples

ONE_PART = "[swarm]\nparts = 1\n"


def reason(mapping: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping(mapping)
    message = str(caught.value)
    assert "\n" not in message
    return message


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    config = RunConfig.from_toml(written(tmp_path, ""))
    assert config.outer.chosen, "of the outer optimizer's length-dependent settings nothing is written"
    chosen = dataclasses.replace(OuterConfig(), preset="auto", chosen=config.outer.chosen)
    assert config == dataclasses.replace(RunConfig(), outer=chosen)


def test_values_arrive(tmp_path: Path) -> None:
    text = (
        'name = "tiny"\nseed = 7\n[sync]\nevery = 30\n[outer]\noptimizer = "sgd"\nlr = 1\n[server]\nadvertise = ["a.example"]\n'
    )
    config = RunConfig.from_toml(written(tmp_path, text))
    assert (config.name, config.seed, config.sync.every) == ("tiny", 7, 30)
    assert config.outer == OuterConfig(optimizer="sgd", lr=1.0) and isinstance(config.outer.lr, float)
    assert config.server.advertise == ("a.example",)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"snyc": {}}, "snyc: unknown key; did you mean sync?"),
        ({"sync": {"evry": 3}}, "sync.evry: unknown key; did you mean sync.every?"),
        (
            {"sync": {"zzz": 3}},
            f"sync.zzz: unknown key; known keys: {', '.join(field.name for field in dataclasses.fields(SyncConfig))}",
        ),
        ({"sync": 3}, "sync: must be a table ([sync]), not int"),
        ({"sync": {"every": "3"}}, "sync.every: must be int, not str ('3')"),
        ({"sync": {"every": True}}, "sync.every: must be int, not bool (True)"),
        ({"sync": {"every": 3.5}}, "sync.every: must be int, not float (3.5)"),
        ({"outer": {"lr": "fast"}}, "outer.lr: must be float, not str ('fast')"),
        ({"outer": {"lr": True}}, "outer.lr: must be float, not bool (True)"),
        ({"penalty": {"enabled": 1}}, "penalty.enabled: must be bool, not int (1)"),
        ({"server": {"advertise": "host"}}, "server.advertise: must be a list of strings"),
        ({"server": {"advertise": [1]}}, "server.advertise: must be a list of strings"),
        ({"model": {"name": "entry:x", "options": {"a": [1]}}}, "model.options: must be a table of plain values"),
        *(
            ({section: {key: value}}, f"{section}.{key}: must have no integer above 2^64 or below -2^64")
            for section, key, value in [
                ("outer", "lr", 10**400),
                ("outer", "lr", -(16**5000)),  # of more digits than Python shows
                ("sync", "every", 16**5000),
                ("sync", "milestones", [[1, 10**400]]),
                ("outer", "optimizer", 16**5000),
                ("model", "options", {"a": 10**400}),
            ]
        ),
    ],
)
def test_unknown_keys_and_wrong_types_are_named(mapping: Mapping[str, Any], message: str) -> None:
    assert reason(mapping) == message


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("sync", "every", 0),
        ("sync", "every", (1 << 32) + 1),
        ("sync", "outer_steps", 0),
        ("sync", "groups", 0),
        ("sync", "groups", 3),
        ("sync", "groups", 256),
        ("sync", "pattern", "random"),
        ("sync", "mode", "overlap"),
        ("sync", "delay", 0),
        ("sync", "delay", (1 << 32) + 1),
        ("sync", "mix", "mean"),
        ("sync", "alpha", -0.1),
        ("sync", "alpha", 1.1),
        ("sync", "alpha", float("nan")),
        ("sync", "schedule", "clock"),
        ("sync", "time_s", 0),
        ("sync", "time_s", float("nan")),
        ("sync", "tokens", -1),
        ("outer", "optimizer", "lion"),
        ("outer", "period", 0),
        ("outer", "c", -0.1),
        ("outer", "c", 0.26),
        ("outer", "c", float("nan")),
        ("outer", "direction", "median"),
        ("outer", "correct", "all"),
        ("penalty", "weighting", "steps"),
        ("penalty", "staleness", -1),
        ("penalty", "damping", -1),
        ("rounds", "merging", "gossip"),
        ("rounds", "max_staleness", -1),
        ("outer", "lr", 0),
        ("outer", "lr", float("nan")),
        ("outer", "lr", float("inf")),
        ("outer", "momentum", 1.0),
        ("penalty", "alpha", 0),
        ("penalty", "alpha", float("nan")),
        ("penalty", "delta", 0),
        ("penalty", "observations", 0),
        ("penalty", "temperature", -1.0),
        ("penalty", "clip", -1.0),
        ("penalty", "norm", "l1"),
        ("penalty", "detector", "iqr"),
        ("penalty", "step_power", 1.5),
        ("penalty", "relearn", 0),
        ("penalty", "max_ratio", 0.5),
        ("penalty", "max_share", 0.9),
        ("penalty", "idle_ratio", 0.6),
        ("codec", "up", "zip"),
        ("codec", "down", "INT8"),
        ("rounds", "quorum", 0),
        ("rounds", "start_peers", 0),
        ("rounds", "floor_s", 0),
        ("rounds", "grace_s", -1),
        ("rounds", "wait", "nobody"),
        ("membership", "heartbeat_s", 0),
        ("membership", "lease_s", 1.0),
        ("storage", "buffer_bytes", -1),
        ("storage", "keep_updates", 0),
        ("server", "listen", "7700"),
        ("server", "listen", "host:99999"),
        ("server", "enrol_listen", ":1"),
        ("server", "listen", "http://127.0.0.1:7790"),
        ("server", "listen", "::1:7790"),
        ("server", "listen", "[127.0.0.1]:7790"),
        ("server", "listen", "host:" + "1" * 5000),
        ("server", "metrics_listen", "::1:7790"),
        ("server", "advertise", []),
        ("server", "advertise", [""]),
        ("server", "advertise", ["localhost", "http://x.org"]),
        ("server", "advertise", ["x.org:7700"]),
        ("server", "advertise", ["x.org."]),
        ("server", "advertise", [f"host-{i}" for i in range(17)]),
        ("aggregators", "addresses", ["host-b"]),
        ("aggregators", "addresses", ["host-b:0"]),
        ("aggregators", "addresses", [":7700"]),
        ("aggregators", "addresses", ["http://host-b:7700"]),
        ("aggregators", "addresses", ["host-b:7700", "host-b:7700"]),
        ("model", "name", "gpt2"),
        ("model", "name", "entry:os.system"),
        ("model", "layers", 0),
        ("model", "heads", 3),
        ("inner", "lr", -1e-3),
        ("inner", "beta2", 1.0),
        ("inner", "batch_size", 0),
        ("inner", "clip_norm", -1.0),
    ],
)
def test_bounds(section: str, key: str, value: object) -> None:
    message = reason({section: {key: value}})
    named = f"{section}.width" if key == "heads" else f"{section}.{key}"
    assert message.startswith(f"{named} = ") and (": must " in message)


@pytest.mark.parametrize(
    "mapping", [{"name": ""}, {"name": "a/b"}, {"name": "x" * 65}, {"name": "two words"}, {"seed": -1}, {"seed": 2**63}]
)
def test_name_and_seed_are_bounded(mapping: Mapping[str, Any]) -> None:
    assert reason(mapping).startswith(next(iter(mapping)))


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::]", "localhost", "a_b.example-1", "x" * 63])
def test_names_and_addresses_of_hosts_are_addresses(host: str) -> None:
    assert is_address(f"{host}:0") and is_address(f"{host}:65535") and not is_address(f"{host}:65536")


@pytest.mark.parametrize(("mode", "every", "groups"), [("delayed", 12, 3), ("delayed", 4, 1), ("eager", 4, 1)])
def test_an_update_that_would_arrive_after_the_next_contribution_is_an_error(mode: str, every: int, groups: int) -> None:
    sync = {"every": every, "groups": groups, "mode": mode}
    assert RunConfig.from_mapping({"sync": {**sync, "delay": 4}}).sync.interval == 4
    message = reason({"sync": {**sync, "delay": 5}})
    assert message == ("sync.delay = 5: must not exceed sync.every / sync.groups (4): one contribution is on its way at a time")


def test_eager_exchanges_everything_at_once() -> None:
    message = reason({"sync": {"every": 12, "groups": 3, "mode": "eager"}})
    assert message == 'sync.groups = 3: must be 1 with sync.mode = "eager"'


@pytest.mark.parametrize("optimizer", ["adam", "yogi"])
def test_eager_needs_an_outer_step_that_can_be_foreseen(optimizer: str) -> None:
    message = reason({"sync": {"mode": "eager"}, "outer": {"optimizer": optimizer}})
    assert message == f"outer.optimizer = '{optimizer}': must be one of sgd, nesterov with sync.mode = \"eager\""
    for linear in ("sgd", "nesterov"):
        RunConfig.from_mapping({"sync": {"mode": "eager"}, "outer": {"optimizer": linear}})


ARRIVALS = {"merging": "arrivals", "max_staleness": 8}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"rounds": {"merging": "arrivals"}}, "rounds.max_staleness = 0: must be at least 1"),
        ({"outer": {"mean_steps": 4}, "rounds": ARRIVALS}, 'outer.mean_steps = 4: must be 0 with rounds.merging = "arrivals"'),
        ({"sync": {"schedule": "time", "dylu": True}}, 'sync.dylu = True: has no effect with sync.schedule = "time"'),
        ({"sync": {"every": 8, "groups": 2}, "rounds": {"max_staleness": 1}}, "sync.groups = 2: must be 1"),
        ({"sync": {"mode": "eager"}, "rounds": ARRIVALS}, "rounds.max_staleness = 8: must be 0"),
        ({"sync": {"mode": "eager"}, "outer": {"direction": "rda"}}, "outer.direction = 'rda': must be mean"),
        ({"sync": {"mode": "eager"}, "outer": {"correct": "heloco"}}, "outer.correct = 'heloco': must be none"),
        ({"outer": {"optimizer": "sgd", "correct": "heloco"}}, "outer.optimizer = 'sgd': must be one of nesterov, delayed"),
        (
            {"sync": {"tokens": 9}, "aggregators": {"addresses": ["b:1"]}},
            "sync.tokens = 9: must be 0 with aggregators.addresses",
        ),
        *(
            ({"outer": {"algorithm": "gossip"}, **written}, message)
            for written, message in (
                ({"rounds": ARRIVALS}, "rounds.merging = 'arrivals': must be rounds with outer.algorithm = \"gossip\": there"),
                ({"rounds": {"max_staleness": 1}}, 'rounds.max_staleness = 1: must be 0 with outer.algorithm = "gossip": two'),
                (
                    {"sync": {"mode": "eager"}},
                    "sync.mode = 'eager': must not be eager with outer.algorithm = \"gossip\": a step",
                ),
                ({"sync": {"strict": True}}, 'sync.strict = True: cannot be kept with outer.algorithm = "gossip": a peer'),
                ({"sync": {"dylu": True}}, 'sync.dylu = True: must be false with outer.algorithm = "gossip": nobody compares'),
                ({"sync": {"tokens": 9}}, 'sync.tokens = 9: must be 0 with outer.algorithm = "gossip": nobody counts'),
                (
                    {"aggregators": {"addresses": ["b:1"]}},
                    "aggregators.addresses = ('b:1',): must be empty with outer.algorithm = \"gossip\": there is no aggregator",
                ),
                ({"gossip": {"momentum": 0.9}}, "gossip.mixing = 0.7: must be below 2 (1 - gossip.momentum^2) = 0.38, or"),
                (
                    {"gossip": {"settle_every": 3}, "sync": {"every": 8, "groups": 2}},
                    "gossip.settle_every = 3: must be a multiple of sync.groups (2)",
                ),
            )
        ),
        *(
            ({"sync": {"strict": True, **sync}, "rounds": rounds}, "sync.strict = True: cannot be kept with ")
            for sync, rounds in (
                ({"schedule": "time"}, {}),
                ({"dylu": True}, {}),
                ({}, ARRIVALS),
                ({}, {"max_staleness": 1}),
            )
        ),
    ],
)
def test_what_does_not_go_together_is_an_error(mapping: Mapping[str, Any], message: str) -> None:
    assert reason(mapping).startswith(message)


def test_an_asynchronous_run() -> None:
    config = RunConfig.from_mapping(
        {
            "sync": {"every": 12, "schedule": "time", "time_s": 30, "tokens": 10**12},
            "outer": {"optimizer": "delayed_nesterov", "period": 8, "c": 0.125, "momentum": 0.5, "correct": "heloco"},
            "penalty": {"enabled": False, "weighting": "tokens2_per_step", "damping": 1},
            "rounds": ARRIVALS,
        }
    )
    assert config.sync.interval_s == 30.0 and config.outer.c * config.outer.period == 1
    assert config.penalty.damping == 1.0 and config.rounds.max_staleness == 8
    assert RunConfig.from_json(config.to_json()) == config


def test_a_fragment_of_a_streaming_run_by_the_clock_is_exchanged_every_time_s() -> None:
    assert SyncConfig(every=12, groups=3, schedule="time", time_s=30.0).interval_s == 10.0


def test_groups_must_divide_the_inner_steps() -> None:
    assert reason({"sync": {"every": 10, "groups": 4}}) == "sync.groups = 4: must divide sync.every (10)"
    assert SyncConfig(every=10, groups=5).interval == 2 and SyncConfig(every=10).interval == 10


def test_contradicting_bounds_name_both_settings() -> None:
    assert "rounds.ceiling_s (3.0)" in reason({"rounds": {"floor_s": 4.0, "ceiling_s": 3.0}})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"penalty": {"enabled": False, "delta": 2.0}},
            "penalty.delta has no effect with penalty.enabled = false; remove it",
        ),
        (
            {"penalty": {"enabled": False, "clip": 1.0}},
            "penalty.clip has no effect with penalty.enabled = false; remove it",
        ),
        (
            {"penalty": {"detector": "edit", "relearn": 5}},
            'penalty.relearn has no effect with penalty.detector = "edit"; remove it',
        ),
        (
            {"penalty": {"max_share": 2.0}, "rounds": ARRIVALS},
            'penalty.max_share has no effect with rounds.merging = "arrivals"; remove it',
        ),
        (
            {"penalty": {"weighting": "tokens"}},
            "penalty.weighting has no effect with penalty.enabled = true; remove it",
        ),
        (
            {"outer": {"optimizer": "sgd", "momentum": 0.5}},
            'outer.momentum has no effect with outer.optimizer = "sgd"; remove it',
        ),
        (
            {"outer": {"optimizer": "adam", "momentum": 0.5}},
            'outer.momentum has no effect with outer.optimizer = "adam"; remove it',
        ),
        (
            {"gossip": {"mixing": 0.5}},
            'gossip.mixing has no effect with outer.algorithm = "mean"; remove it',
        ),
        *(
            (
                {"outer": {"algorithm": "gossip", **outer}, **written},
                f'{key} has no effect with outer.algorithm = "gossip"{why}',
            )
            for outer, written, key, why in (
                ({"lr": 0.5}, {}, "outer.lr", " (the section [gossip] has); remove it"),
                ({"optimizer": "nesterov"}, {}, "outer.optimizer", " (the section [gossip] has); remove it"),
                ({}, {"codec": {"down": "int8"}}, "codec.down", ": no update is sent; remove it"),
                ({}, {"rounds": {"quorum": 2}}, "rounds.quorum", ": there is no round of all peers; remove it"),
            )
        ),
        (
            {"outer": {"beta1": 0.5}},
            'outer.beta1 has no effect with outer.optimizer = "nesterov"; remove it',
        ),
        (
            {"sync": {"pattern": "sequential"}},
            "sync.pattern has no effect with sync.groups = 1; remove it",
        ),
        (
            {"sync": {"delay": 1}},
            'sync.delay has no effect with sync.mode = "blocking"; remove it',
        ),
        (
            {"sync": {"mode": "forward", "delay": 1}},
            'sync.delay has no effect with sync.mode = "forward"; remove it',
        ),
        *(
            (
                {"sync": {"mode": mode, "mix": "replay"}},
                f'sync.mix has no effect with sync.mode = "{mode}"; remove it',
            )
            for mode in ("blocking", "forward", "eager")
        ),
        *(
            (
                {"sync": {"mode": "delayed", "mix": mix, "alpha": 0.5}},
                'sync.alpha has no effect with sync.mix other than "lerp"; remove it',
            )
            for mix in ("replay", "replace")
        ),
        (
            {"sync": {"mode": "eager", "alpha": 0.5}},
            'sync.alpha has no effect with sync.mix other than "lerp"; remove it',
        ),
        (
            {"sync": {"time_s": 5.0}},
            'sync.time_s has no effect with sync.schedule = "steps"; remove it',
        ),
        (
            {"penalty": {"staleness": 1.0}},
            "penalty.staleness has no effect with rounds.max_staleness = 0; remove it",
        ),
        (
            {"penalty": {"staleness": 1.0}, "rounds": ARRIVALS},
            'penalty.staleness has no effect with rounds.merging = "arrivals" (penalty.damping has); remove it',
        ),
        (
            {"penalty": {"damping": 1.0}},
            'penalty.damping has no effect with rounds.merging = "rounds"; remove it',
        ),
        *(
            (
                {"outer": {key: 0.1 if key == "c" else 2}},
                f'outer.{key} has no effect with outer.optimizer = "nesterov"; remove it',
            )
            for key in ("period", "c")
        ),
        (
            {"outer": {"optimizer": "delayed_nesterov", "eps": 0.1}},
            'outer.eps has no effect with outer.optimizer = "delayed_nesterov"; remove it',
        ),
        *(
            (
                {"rounds": {"merging": "arrivals", "max_staleness": 8, key: value}},
                f'rounds.{key} has no effect with rounds.merging = "arrivals"; remove it',
            )
            for key, value in (
                *((key, 10) for key in ("start_peers", "quorum", "floor_s", "ceiling_s", "spread", "grace_s")),
                ("wait", "slack"),
            )
        ),
        (
            {"model": {"name": "entry:mine", "width": 64}},
            'model.width has no effect with model.name = "entry:mine"; remove it',
        ),
        (
            {"model": {"options": {"a": 1}}},
            "model.options has no effect with builtin:gpt; remove it",
        ),
        *(
            (
                {"inner": {"optimizer": optimizer, "options": {name: 0.5}}},
                f"inner.options.{name} has no effect; set inner.{name}",
            )
            for optimizer, name in (("torch:Adam", "lr"), ("torch:Adam", "weight_decay"), ("entry:mine", "lr"))
        ),
        (
            {"inner": {"optimizer": "torch:Rprop", "weight_decay": 0.5}},
            'inner.weight_decay has no effect with inner.optimizer = "torch:Rprop"; remove it',
        ),
    ],
)
def test_t11_a_setting_that_would_be_ignored_is_an_error(mapping: Mapping[str, Any], message: str) -> None:
    assert reason(mapping) == message


def test_the_same_settings_are_accepted_where_they_have_an_effect() -> None:
    config = RunConfig.from_mapping(
        {
            "penalty": {"enabled": False, "weighting": "tokens"},
            "outer": {"optimizer": "yogi", "beta1": 0.5, "eps": 1e-4},
            "sync": {"groups": 4, "pattern": "sequential", "mode": "delayed", "delay": 3, "mix": "lerp", "alpha": 0.25},
        }
    )
    assert config.sync == SyncConfig(groups=4, pattern="sequential", mode="delayed", delay=3, mix="lerp", alpha=0.25)
    assert RunConfig.from_mapping({"sync": {"mode": "eager", "delay": 2, "strict": True}}).sync.delay == 2
    assert config.penalty == PenaltyConfig(enabled=False, weighting="tokens")
    assert config.outer == OuterConfig(optimizer="yogi", beta1=0.5, eps=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [("sync = [", "is not TOML"), ("[sync]\nevery = 1\nevery = 2\n", "is not TOML"), ("[sync]\nevery = 0\n", "sync.every = 0")],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        RunConfig.from_toml(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_run_with_gossip_is_a_configuration_and_a_swarms_run_toml(tmp_path: Path) -> None:
    config = RunConfig.from_mapping({"outer": {"algorithm": "gossip"}, "gossip": {"mixing": 0.5, "settle_every": 4}})
    assert (config.gossip.mixing, config.gossip.momentum, config.gossip.settle_every) == (0.5, 0.5, 4)
    assert RunConfig.from_json(config.to_json()) == config
    text = '[outer]\nalgorithm = "gossip"\n[swarm]\nparts = 1\n[rounds]\nstart_peers = 2\n'
    assert RunConfig.from_text(text.encode(), "run.toml").rounds.start_peers == 2


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("", "outer.algorithm = 'gossip': needs the section [swarm]: it has no coordinator"),
        ("[swarm]\n", 'swarm.parts = 4: must be 1 with outer.algorithm = "gossip": a swap is of the whole model'),
        (ONE_PART + "[sync]\nevery = 8\ngroups = 2\n", "sync.groups = 2: must be 1 with"),
        (ONE_PART + '[sync]\nmode = "forward"\n', "sync.mode = 'forward': must be blocking with"),
        (
            ONE_PART + '[penalty]\nenabled = false\nweighting = "tokens"\n',
            "penalty.weighting = 'tokens': must be uniform with",
        ),
    ],
)
def test_what_hosts_that_swap_cannot_do_is_refused_in_one_line(written: str, message: str) -> None:
    text = f'[outer]\nalgorithm = "gossip"\n{written}'
    with pytest.raises(ConfigError, match=re.escape(f"run.toml: {message}")) as caught:
        RunConfig.from_text(text.encode(), "run.toml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"outer": {"algorithm": "gossip"}}, 'swarm.verify = 1: must be 0 with outer.algorithm = "gossip"'),
        (
            {"rounds": {"max_staleness": 2}},
            "rounds.max_staleness = 2: must be 0 with swarm.verify = 1: a signature is of one round",
        ),
        ({"rounds": {"merging": "arrivals", "max_staleness": 1}}, "rounds.max_staleness = 1: must be 0 with swarm.verify = 1"),
    ],
)
def test_what_does_not_compose_with_verify_is_refused_and_names_both(beside: dict[str, Any], message: str) -> None:
    assert message in reason({"swarm": {"parts": 1, "verify": 1}, **beside})


def test_verify_is_bounded_and_verify_s_has_no_effect_without() -> None:
    assert "swarm.verify" in reason({"swarm": {"verify": 7}}) and "swarm.verify" in reason({"swarm": {"verify": -1}})
    assert reason({"swarm": {"verify_s": 5.0}}) == "swarm.verify_s has no effect with swarm.verify = 0; remove it"
    assert RunConfig.from_mapping({"swarm": {"verify": 2, "verify_s": 5.0}}).swarm.verify == 2


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read \(No such file.*edit-coordinator init"):
        RunConfig.from_toml(tmp_path / "absent.toml")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        RunConfig.from_toml(path)


@given(
    every=st.integers(1, 1000),
    lr=st.floats(1e-6, 10),
    optimizer=st.sampled_from(["sgd", "nesterov", "adam", "yogi"]),
    enabled=st.booleans(),
    quorum=st.integers(1, 50),
    mode=st.sampled_from(["blocking", "forward", "delayed"]),
)
@settings(deadline=None, max_examples=examples(50))
def test_json_round_trip(every: int, lr: float, optimizer: str, enabled: bool, quorum: int, mode: str) -> None:
    config = RunConfig(
        sync=SyncConfig(every=every, groups=every, mode=mode, mix="lerp", alpha=lr / 10, strict=enabled),
        outer=OuterConfig(optimizer=optimizer, lr=lr),
        penalty=PenaltyConfig(enabled=enabled),
        rounds=RoundsConfig(quorum=quorum),
    )
    assert RunConfig.from_json(config.to_json()) == config


def test_the_servers_addresses_are_not_told_to_peers() -> None:
    assert "server" not in json.loads(RunConfig().to_json())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"sync": {"every": 0}}',
        '{"unknown": 1}',
        "[" * 100_000,
        '{"sync": {"milestones": ' + "[" * 900 + "]" * 900 + "}}",
    ],
)
def test_bad_json_from_the_coordinator_is_an_error_not_a_crash(text: str) -> None:
    with pytest.raises(ConfigError):
        RunConfig.from_json(text)


def test_configurations_are_frozen_values() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 1  # type: ignore[misc]
    assert RunConfig() == RunConfig() and dataclasses.replace(RunConfig(), seed=1) != RunConfig()


def test_the_names_of_codecs_are_those_of_the_registry() -> None:
    assert edit.codec_names() == tuple(edit.config.run.CODECS)


def test_a_peer_that_is_silent_is_lost_sooner_in_a_swarm() -> None:
    hub, swarm = RunConfig.from_mapping({}).membership, RunConfig.from_mapping({"swarm": {}}).membership
    assert (hub.heartbeat_s, hub.lease_s) == (2.0, 6.0) and (swarm.heartbeat_s, swarm.lease_s) == (1.0, 3.0)
    written = RunConfig.from_mapping({"swarm": {}, "membership": {"lease_s": 5.0}}).membership
    assert (written.heartbeat_s, written.lease_s) == (1.0, 5.0)
    assert reason({"swarm": {}, "membership": {"heartbeat_s": 2.0}}).startswith(
        "membership.lease_s = 3.0: must be at least twice"
    )
    assert "membership" in reason({"swarm": {}, "membership": 1})


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (
            {"swarm": {"parts": 1}, "outer": {"algorithm": "gossip"}, "penalty": {"enabled": False}},
            r"audit\.enabled = True: must be false with outer\.algorithm = \"gossip\"",
        ),
        ({"swarm": {}, "rounds": {"max_staleness": 1}}, r"rounds\.max_staleness = 1: must be 0 with audit\.enabled in a swarm"),
    ],
)
def test_an_audit_log_is_refused_where_nobody_would_keep_it(other: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        RunConfig.from_mapping({"audit": {"enabled": True}, **other})


@pytest.mark.parametrize(
    ("audit", "why"),
    [
        ({"keep_contributions": 10_000}, r"audit\.keep_contributions = 10000: must be at most"),
        ({"cosign": True}, r"audit\.cosign has no effect with \[swarm\]: each entry is signed"),
    ],
)
def test_what_a_swarms_log_has_no_use_for_is_refused(audit: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        RunConfig.from_mapping({"audit": {"enabled": True, **audit}, "swarm": {}})
    assert RunConfig.from_mapping({"audit": {"enabled": True}, "swarm": {}}).audit.enabled


def test_a_run_without_an_audit_has_the_configuration_that_it_had_before_there_was_one() -> None:
    assert "audit" not in json.loads(RunConfig().to_json())
    assert json.loads(RunConfig.from_mapping({"audit": {"enabled": True}}).to_json())["audit"] == {"enabled": True}


PRIVATE = {"level": "example", "delta": 1e-6, "epsilon_max": 8.0, "noise_multiplier": 1.0}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"delta": 0.0}, 'privacy.delta = 0.0: must be given, above 0, with privacy.level = "example"'),
        ({"epsilon_max": 0.0}, "privacy.epsilon_max = 0.0: must be given"),
        ({"noise_multiplier": 0.0}, "privacy.noise_multiplier = 0.0: must be given"),
        ({"noise_multiplier": 0.1}, "privacy.noise_multiplier = 0.1: must be at least 0.3"),
        ({"level": "organization"}, "privacy.level = 'organization': must be one of none, example, organisation"),
        ({"sampling": "custom"}, "privacy.sampling = 'custom': must be one of poisson, shuffle"),
        ({"sensitivity": 1e-4}, "privacy.sensitivity: unknown key"),
        ({"level": "none"}, 'privacy.delta has no effect with privacy.level = "none"'),
        ({"delta": float("nan")}, "privacy.delta = nan"),
        ({"clip": float("inf")}, "privacy.clip = inf"),
    ],
)
def test_privacy_without_a_bound_is_refused(changed: dict[str, object], why: str) -> None:
    assert RunConfig.from_mapping({"privacy": PRIVATE}).privacy.of_examples
    assert why in reason({"privacy": {**PRIVATE, **changed}})


def test_a_run_without_privacy_has_the_configuration_that_it_had_before_there_was_any() -> None:
    assert "privacy" not in json.loads(RunConfig().to_json())
    run = RunConfig.from_mapping({"privacy": PRIVATE})
    assert RunConfig.from_json(run.to_json()) == run
