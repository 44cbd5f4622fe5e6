"""Whole decoder layers in one call of C.

Between calls of C, a decode step is short operations of torch and Python around them. Weights go through the CPU's
caches meanwhile, so that each of these begins with what it needs far away: together they took a third of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import nn

from runner.attention.native_backend import NativeBackend
from runner.native.kernels import ACTIVATIONS, native_kernels
from runner.native.structs import DecoderLayer
from runner.native_attentions import OUTPUT, Attention, NativeAttention
from runner.native_calls import is_served, random_call
from runner.native_mlps import NativeMlp
from runner.native_modules import NativeModule, has_tensors, make_native, rows_agree, settings_of
from runner.native_norms import NativeNorm, PlacedNorm
from runner.packed_linear import Packed, PackedLinear

ATTENTION, MLP = "self_attn", "mlp"
"""What a decoder layer calls its halves."""

LAYOUTS: tuple[Mapping[str, str], ...] = (
    {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"},
    {
        "before_attention": "input_layernorm",
        "behind_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "behind_mlp": "post_feedforward_layernorm",
    },
)
"""What it calls its norms, by where they are: as in Llama, and as in Gemma."""


class Parts(NamedTuple):
    """A layer's parts as the kernel would read them. Two are equal if it would read the same from both.

    Args:
        attention: Up to its output.
        output: The layer behind that. Packed weights are not held here, as in
            :class:`~runner.native_attentions.Parts`.
        activation: Of the MLP.
        mlp: Its layers.
        norms: In the order of the layout.
    """

    attention: Attention
    output: ReferenceType[Packed]
    activation: str
    mlp: list[ReferenceType[Packed]]
    norms: list[PlacedNorm]


@dataclass(frozen=True)
class Layer:
    """What a module has turned out to compute: a decoder layer, attention and then an MLP.

    Args:
        parts: What it is made of.
        norms: Names of its norms, a value of :data:`LAYOUTS`.
        settings: The module's own numbers and switches, as they were.
        layer_idx: Of its attention.
        decoder: All of it, for the kernel.
    """

    parts: Parts
    norms: Mapping[str, str]
    settings: Mapping[str, Any]
    layer_idx: int
    decoder: DecoderLayer

    def __deepcopy__(self, memo: Any) -> Layer:
        return self  # of a module whose copy has other parts: nothing is read


def use_native_layers(model: nn.Module) -> int:
    """Have a model's decoder layers computed by the native kernel, in float32; how many there are.

    A module is taken for one if its class says so, if its halves and norms are native by
    :func:`~runner.native_attentions.use_native_attentions`, :func:`~runner.native_mlps.use_native_mlps` and
    :func:`~runner.native_norms.use_native_norms` before this call, and if what it makes of random rows is what they
    make, one behind the other, as in one of :data:`LAYOUTS`. It computes in its own way where the kernel does not
    serve: where one of the halves would, where something hooks into any part, and in steps in which a sequence has many
    new tokens.

    Args:
        model: As for :func:`~runner.native_attentions.use_native_attentions`.
    """
    return make_native(model, NativeLayer, _recognized)


class NativeLayer(NativeModule):
    """A decoder layer that the kernel computes."""

    def natively(
        self, found: Layer, /, *args: Any, position_embeddings: Any = None, **given: Any
    ) -> torch.Tensor | None:
        """For what an engine's step hands to it. ``[1, T, K]``."""
        attention = found.parts.attention
        angles = position_embeddings if attention.is_rotated else ()
        if (
            len(args) != 1
            or not is_served(attention.qkv, args[0], angles, is_rotated=attention.is_rotated, **given)
            or not found.settings.items() <= vars(self).items()
            or _parts(self, found.norms) != found.parts
        ):
            return None
        (hidden_states,), step = args, given["paged_step"]
        layer = step.layers[found.layer_idx]
        plan = step.plans[layer.group]
        rows = hidden_states[0].contiguous()  # [T, K]
        if (
            type(step.backend) is not NativeBackend
            or plan.pieces  # of sequences that the kernel does not attend for
            or len(plan.slots) != len(rows)
            or layer.kv_cache.dtype != torch.float32
        ):
            return None
        kernels = native_kernels()
        return kernels.decoder_layer(rows, found.decoder, plan.work, layer.kv_cache, plan.slots, *angles)[None]


def _parts(module: nn.Module, norms: Mapping[str, str]) -> Parts | None:
    """None where the kernel cannot read them, or they do something else than to compute."""
    attention, mlp = module._modules.get(ATTENTION), module._modules.get(MLP)
    if not isinstance(attention, NativeAttention) or not isinstance(mlp, NativeMlp):
        return None
    output = attention._modules.get(OUTPUT)
    if type(output) is not PackedLinear or (output_weight := output.native_weight()) is None:
        return None
    native_attention, native_mlp = attention.native_attention(), mlp.native_mlp()
    if native_attention is None or native_mlp is None:
        return None
    placed = []
    for name in norms.values():
        norm = module._modules.get(name)
        if not isinstance(norm, NativeNorm) or (place := norm.placed()) is None:
            return None
        placed.append(place)
    activation, layers = native_mlp
    return Parts(native_attention, ref(output_weight), activation, [ref(packed) for packed in layers], placed)


@torch.inference_mode()
def _recognized(module: nn.Module) -> Layer | None:
    children = {name for name, _ in module.named_children()}
    norms = next((norms for norms in LAYOUTS if children == {ATTENTION, MLP, *norms.values()}), None)
    if not type(module).__name__.endswith("DecoderLayer") or norms is None or has_tensors(module):
        return None
    parts = _parts(module, norms)
    decoder = None if parts is None else _decoder_layer(parts, norms)
    if parts is None or decoder is None or not _is_made_of(module, parts, norms):
        return None
    return Layer(parts, norms, settings_of(module), module.self_attn.layer_idx, decoder)


def _is_made_of(module: nn.Module, parts: Parts, norms: Mapping[str, str]) -> bool:
    """Whether a layer's output is what its parts make, one behind the other."""
    rows, given, recorder = random_call(parts.attention.qkv)

    def normed(place: str, rows: torch.Tensor) -> torch.Tensor:
        return getattr(module, norms[place])(rows) if place in norms else rows

    try:
        found = module(rows, **given)
        attended = module.self_attn(hidden_states=normed("before_attention", rows), **given)[0]
        between = rows + normed("behind_attention", attended)
        expected = between + normed("behind_mlp", module.mlp(normed("before_mlp", between)))
    except Exception:  # whatever it is: who calls the module in earnest will hear of it
        return False
    if not isinstance(found, torch.Tensor) or not rows_agree(found, expected) or len(recorder.calls) != 2:
        return False
    (by_layer, *_), (by_parts, *_) = recorder.calls
    return all(map(rows_agree, by_layer, by_parts))


def _decoder_layer(parts: Parts, norms: Mapping[str, str]) -> DecoderLayer | None:
    """For the kernel; None where sizes are not as it takes them."""
    qkv, output = parts.attention.qkv, parts.output()
    mlp = [packed for reference in parts.mlp if (packed := reference()) is not None]
    num_queries, num_keys, num_values = qkv.num_heads
    inner = len(mlp[0].origin)
    if (
        output is None
        or output.origin.shape != (qkv.size, num_queries * qkv.head_size)
        or num_keys != num_values
        or num_queries % num_keys
        or mlp[0].origin.shape[1] != qkv.size
        or len(mlp[2].origin) != qkv.size
        or any(norm.size != qkv.size for norm in parts.norms)
    ):
        return None
    return DecoderLayer(
        qkv,
        (output.weight, output.bias),
        [packed.weight for packed in mlp],
        {
            place: (address, norm.epsilon, norm.offset)
            for place, (norm, _, address) in zip(norms, parts.norms, strict=True)
        },
        inner=inner,
        activation=ACTIVATIONS[parts.activation],
        scale=parts.attention.scale,
        softcap=parts.attention.features["softcap"],
    )
