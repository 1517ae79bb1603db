"""The choice of a codec: a value with a text form; options that a codec does not have are errors."""

import json

import pytest
import torch

from edit import CodecSpec
from edit.codecs import codec, codec_names
from edit.config.codec import CODECS
from edit.errors import ConfigError, RemoteProtocolError
from tests.support.layouts import fragment

SPECS = [CodecSpec("int8"), CodecSpec("topk", (("chunk", 4096), ("decay", 0.95))), CodecSpec("x", (("bias", -1),))]


@pytest.mark.parametrize("spec", SPECS)
def test_the_text_of_a_spec_gives_it_back(spec: CodecSpec) -> None:
    assert CodecSpec.parse(json.loads(json.dumps(str(spec)))) == spec
    assert {spec: 1}[CodecSpec.parse(str(spec))] == 1


def test_a_name_alone_is_a_spec_without_options_and_options_are_sorted() -> None:
    assert CodecSpec.parse("int8") == CodecSpec("int8") and str(CodecSpec("int8")) == "int8"
    assert CodecSpec.parse("topk:k=64,chunk=4096") == CodecSpec("topk", (("chunk", 4096), ("k", 64)))


@pytest.mark.parametrize("text", ["int4:block", "int4:block=", "int4:block=many", "int4:block=nan", "int4:block=64,"])
def test_an_option_must_be_a_finite_number(text: str) -> None:
    with pytest.raises(ConfigError, match="an option must be NAME=NUMBER"):
        CodecSpec.parse(text)


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        CodecSpec.parse("int4:block=64,block=128")


@pytest.mark.parametrize("name", [name for name in codec_names() if not CODECS[name]])
def test_a_codec_without_options_refuses_any(name: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no option 'block'; {name} has none"):
        codec(CodecSpec(name, (("block", 64),)))


@pytest.mark.parametrize("name", codec_names())
def test_what_a_codec_encodes_names_it_and_has_the_announced_size(name: str) -> None:
    spec, known = fragment((300, 2), (5,)), codec(CodecSpec(name))
    encoded = known.encode(torch.ones(spec.numel), spec)
    assert (encoded.codec, encoded.numel, known.name) == (name, 605, name)
    assert memoryview(encoded.data).nbytes == known.encoded_size(605)


def test_an_unknown_name_is_refused_as_a_spec_and_as_text() -> None:
    for choice in ("int3", CodecSpec("int3"), "int3:block=64"):
        with pytest.raises(RemoteProtocolError, match="unknown codec 'int3'"):
            codec(choice)
