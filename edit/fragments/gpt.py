"""The schema of the built-in GPT, from its sizes alone: a coordinator checks what a peer announces and builds no model.

The model itself is `peers/models/gpt.py`; a test compares the two.
"""

from __future__ import annotations

from edit.fragments.schema import FragmentSpec, Schema, TensorSpec

__all__ = ["gpt_schema"]


def gpt_schema(*, layers: int, width: int, vocabulary: int) -> Schema:
    """Return the schema of `builtin:gpt`: fragments embedding, blocks.0 .. blocks.(layers-1), norm; the head is tied.

    Args:
        layers: number of blocks.
        width: C, size of the residual stream.
        vocabulary: V, number of different tokens.
    """
    block = {
        "attention_norm.weight": (width,),
        "attention.qkv.weight": (3 * width, width),
        "attention.out.weight": (width, width),
        "mlp_norm.weight": (width,),
        "up.weight": (4 * width, width),
        "down.weight": (width, 4 * width),
    }
    modules: dict[str, dict[str, tuple[int, ...]]] = {"embedding": {"weight": (vocabulary, width)}}
    modules |= {f"blocks.{i}": block for i in range(layers)}
    modules["norm"] = {"weight": (width,)}
    return Schema(
        tuple(
            FragmentSpec(
                fragment_id=i,
                name=module,
                tensors=tuple(TensorSpec(name=f"{module}.{name}", shape=shape) for name, shape in tensors.items()),
            )
            for i, (module, tensors) in enumerate(modules.items())
        )
    )
