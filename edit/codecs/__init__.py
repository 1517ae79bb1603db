"""Codecs."""


def codec_names() -> tuple[str, ...]:
    return ("fp32", "bf16", "fp16", "int8")
