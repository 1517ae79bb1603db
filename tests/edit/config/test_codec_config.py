"""The section [codec]: per fragment, per direction, with a decay; what does not go together names both keys."""

from collections.abc import Mapping
from typing import Any

import pytest

from edit.codecs import codec
from edit.config.codec import CODECS, CodecConfig
from edit.config.run import RunConfig
from edit.errors import ConfigError

SOME = {
    "up": "topk:k=128",
    "down": "int4",
    "up_decay": 0.95,
    "up_residual": "bf16",
    "fragments": {
        "*": {"up": "int4"},
        "blocks.1*": {"up": "stat2:range=6", "down": "e3m0"},
        "blocks.12": {"up": "sign"},
        "embedding": {"down": "bf16"},
    },
}


def reason(mapping: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        RunConfig.from_mapping(mapping)
    return str(error.value)


def chosen(config: RunConfig, name: str) -> tuple[str, str]:
    return str(config.codec.uplink.of_fragment(name)), str(config.codec.downlink.of_fragment(name))


def test_the_longest_pattern_that_matches_a_fragment_counts_whatever_their_order() -> None:
    """Peers receive the tables as JSON, where they are sorted."""
    config = RunConfig.from_mapping({"codec": SOME})
    turned = SOME | {"fragments": dict(reversed(list(SOME["fragments"].items())))}  # type: ignore[attr-defined]
    for same in (config, RunConfig.from_json(config.to_json()), RunConfig.from_mapping({"codec": turned})):
        assert chosen(same, "head") == ("int4", "int4")
        assert chosen(same, "blocks.1") == chosen(same, "blocks.10") == ("stat2:range=6", "e3m0")
        assert chosen(same, "blocks.12") == ("sign", "e3m0"), "each direction by itself"
        assert chosen(same, "embedding") == ("int4", "bf16")
        assert (same.codec.uplink.decay, same.codec.downlink.decay) == (0.95, 1.0)
    assert RunConfig.from_json(config.to_json()) == config


def test_without_a_pattern_every_fragment_has_the_runs_codec() -> None:
    assert chosen(RunConfig(), "anything") == ("int8", "bf16")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"up": "zip"}, "codec.up = 'zip': must be one of fp32, bf16, fp16, int8, int4, e3m0, stat2, sign, topk, top1, sdd"),
        ({"up": "topk:k"}, "codec.up: codec 'topk:k': an option must be NAME=NUMBER"),
        ({"down": "int4:block=100"}, "codec.down: codec int4:block=100: block must be a power of two"),
        ({"up": "stat2:range=6,block=64"}, "codec.up = 'stat2:range=6,block=64': must be written stat2:block=64,range=6"),
        ({"up": "topk:k=" + "0" * 60 + "1"}, "codec.up = 'topk:k=" + "0" * 60 + "1': must have at most 64 characters"),
        ({"up_decay": 1.5}, "codec.up_decay = 1.5: must be between 0 and 1"),
        ({"down_decay": float("nan")}, "codec.down_decay = nan: must be between 0 and 1"),
        ({"up_residual": "int4"}, "codec.up_residual = 'int4': must be one of fp32, bf16, int8"),
        ({"fragments": {"a": {}}}, "codec.fragments.\"a\" = FragmentCodec(up='', down=''): must choose up, down or both"),
        ({"fragments": {"a": {"up": "zip"}}}, "codec.fragments.\"a\".up = 'zip': must be one of"),
        ({"fragments": {"a": {"top": "int8"}}}, 'codec.fragments."a".top: unknown key; known keys: up, down'),
        ({"fragments": {"a": "int8"}}, 'codec.fragments."a": must be a table'),
        ({"fragments": ["a"]}, "codec.fragments: must be a table of tables"),
        ({"fragments": {"": {"up": "int8"}}}, 'codec.fragments."" = '),
        ({"fragments": {str(i): {"up": "int8"} for i in range(65)}}, "codec.fragments (their number) = 65: must be between"),
    ],
)
def test_a_wrong_setting_is_named(section: Mapping[str, Any], message: str) -> None:
    assert reason({"codec": section}).startswith(message)


SPARSE_UP = {"up": "topk"}
SPARSE_DOWN = {"fragments": {"blocks.*": {"down": "topk:k=128"}}}
HELOCO = {"optimizer": "nesterov", "correct": "heloco"}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"codec": {"up": "fp32", "up_decay": 0.5}}, 'codec.up_decay has no effect with codec.up = "fp32"'),
        ({"codec": {"up": "fp32", "up_residual": "int8"}}, 'codec.up_residual has no effect with codec.up = "fp32"'),
        ({"codec": {"up_decay": 0.0, "up_residual": "int8"}}, "codec.up_residual has no effect with codec.up_decay = 0"),
        ({"codec": {"down": "fp32", "down_decay": 1.0}}, 'codec.down_decay has no effect with codec.down = "fp32"'),
        (
            {"codec": SPARSE_DOWN | {"down_decay": 0.95}},
            "codec.down_decay = 0.95: must be 1 with topk or top1 or sdd in codec.down or codec.frag",
        ),
        (
            {"codec": SPARSE_UP, "sync": {"mode": "eager"}},
            "codec.up = 'topk': must not be topk or top1 or sdd with sync.mode = \"eager\", nor in",
        ),
        (
            {"codec": SPARSE_DOWN, "sync": {"mode": "eager"}},
            "codec.down = 'bf16': must not be topk or top1 or sdd with sync.mode = \"eager\"",
        ),
        (
            {"codec": {"up": "top1:of=16"}, "outer": HELOCO},
            "codec.up = 'top1:of=16': must not be topk or top1 or sdd with outer.correct",
        ),
        (
            {"codec": SPARSE_UP, "outer": HELOCO},
            "codec.up = 'topk': must not be topk or top1 or sdd with outer.correct = \"heloco\"",
        ),
    ],
)
def test_what_does_not_go_together_names_both_keys(mapping: Mapping[str, Any], message: str) -> None:
    assert reason(mapping).startswith(message)


@pytest.mark.parametrize(
    "mapping",
    [
        {"codec": {"up": "fp32", "up_decay": 0.5, "fragments": {"a": {"up": "sign"}}}},
        {"codec": SPARSE_UP | {"up_decay": 0.0}},
        {"codec": {"up": "stat2", "down": "sign", "down_decay": 0.9}, "sync": {"mode": "eager"}},
        {"codec": SPARSE_DOWN, "outer": HELOCO},
        {"codec": SPARSE_UP, "rounds": {"merging": "arrivals", "max_staleness": 8}},
        {"codec": SPARSE_UP, "sync": {"every": 8, "groups": 4, "mode": "delayed", "delay": 2}},
        {"codec": SPARSE_UP, "aggregators": {"addresses": ["b:1"]}},
    ],
)
def test_what_goes_together_is_a_configuration(mapping: Mapping[str, Any]) -> None:
    assert RunConfig.from_json((config := RunConfig.from_mapping(mapping)).to_json()) == config


def test_a_pattern_must_match_a_fragment_of_the_model() -> None:
    config = RunConfig.from_mapping({"codec": SOME}).codec
    config.check_fragments(["embedding", "blocks.1", "blocks.12"])
    with pytest.raises(
        ConfigError, match=r'codec.fragments."blocks.12": matches no fragment; the model has blocks.1, embedding'
    ):
        config.check_fragments(["embedding", "blocks.1"])


def test_only_fp32_leaves_nothing_out() -> None:
    """The configuration says so without asking the codecs, whose import needs torch."""
    assert [name for name in CODECS if codec(name).lossless] == ["fp32"]
    assert CodecConfig(up="fp32").uplink.names == {"fp32"}
