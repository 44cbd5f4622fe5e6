"""Whole decoder layers in one call of C.

Where each part of a layer is a call of its own, torch and Python run in between. The part before has driven what they
need out of the CPU's caches, so each of them begins slowly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import nn

from runner.attention.native_backend import NativeBackend
from runner.native.kernels import ACTIVATIONS, native_kernels
from runner.native.structs import DecoderLayer, PlacedNorm
from runner.native_attentions import Attention, NativeAttention
from runner.native_calls import angles_if_served, random_call
from runner.native_mlps import NativeMlp
from runner.native_modules import NativeModule, has_tensors, make_native, rows_agree
from runner.native_norms import NativeNorm
from runner.packed_linear import Packed, PackedLinear, held

LAYOUTS: tuple[Mapping[str, str], ...] = (
    {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"},
    {
        "before_attention": "input_layernorm",
        "behind_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "behind_mlp": "post_feedforward_layernorm",
    },
)
"""What it calls its norms, by where they are: as in Llama, and as in Gemma 2 and 3."""


class LayerParts(NamedTuple):
    """A layer's parts as the kernel would read them. Two are equal if it would read the same from both.

    Args:
        attention: Up to its output.
        output: The layer behind that. Packed weights are not held here, as in
            :class:`~runner.native_attentions.AttentionParts`.
        activation: Of the MLP.
        mlp: Its layers.
        norms: In the order of the layout.
    """

    attention: Attention
    output: ReferenceType[Packed]
    activation: str
    mlp: list[ReferenceType[Packed]]
    norms: list[PlacedNorm]

    @property
    def packed(self) -> list[ReferenceType[Packed]]:
        """Of attention, the layer behind it, and the MLP."""
        return [*self.attention.parts.projections, self.output, *self.mlp]


@dataclass(frozen=True)
class Layer:
    """What a module has turned out to compute: a decoder layer, attention and then an MLP.

    Args:
        parts: What it is made of.
        norm_weights: Held, so that nothing else can come to lie where the kernel reads them.
        layout: One of :data:`LAYOUTS`.
        layer_idx: Of its attention.
        decoder: All of it, for the kernel.
    """

    parts: LayerParts
    norm_weights: Sequence[torch.Tensor]
    layout: Mapping[str, str]
    layer_idx: int
    decoder: DecoderLayer

    def __deepcopy__(self, memo: Any) -> Layer:
        return self  # the copy of a module has other parts, which never are these


def use_native_layers(model: nn.Module) -> int:
    """Have a model's decoder layers computed by the native kernel, in float32; how many there are.

    A module is taken for one if its class says so, if its halves and norms are native by
    :func:`~runner.native_attentions.use_native_attentions`, :func:`~runner.native_mlps.use_native_mlps` and
    :func:`~runner.native_norms.use_native_norms` before this call, and if what it makes of random rows is what they
    make, one behind the other, as in one of :data:`LAYOUTS`. It computes in its own way where the kernel does not
    serve: where one of the halves would, where something hooks into any part, where another backend attends, and in
    steps in which a sequence has more new tokens than :data:`~runner.attention.pieces.FEW_QUERIES`.

    Args:
        model: As for :func:`~runner.native_attentions.use_native_attentions`.
    """
    return make_native(model, NativeLayer, _recognized)


class NativeLayer(NativeModule):
    """A decoder layer that the kernel computes."""

    def natively(self, found: Layer, /, *args: Any, **given: Any) -> torch.Tensor | None:
        """For what an engine's step hands to it. ``[1, T, K]``."""
        if len(args) != 1:
            return None
        (hidden_states,), attention = args, found.parts.attention
        angles = angles_if_served(attention.qkv, hidden_states, is_rotated=attention.is_rotated, **given)
        packed = held(found.parts.packed)  # while the kernel reads them
        if angles is None or packed is None or _layer_parts(self, found.layout) != found.parts:
            return None
        step = given["paged_step"]
        layer = step.layers[found.layer_idx]
        plan = step.plans[layer.group]
        rows = hidden_states[0].contiguous()  # [T, K]
        if (
            type(step.backend) is not NativeBackend
            or plan.pieces  # of sequences that the kernel does not attend for
            or len(plan.slots) != len(rows)
            or layer.kv_cache.dtype != torch.float32
            or layer.kv_cache.shape[3:] != (attention.qkv.num_heads[1], attention.qkv.head_size)
        ):
            return None
        kernels = native_kernels()
        return kernels.decoder_layer(rows, found.decoder, plan.work, layer.kv_cache, plan.slots, *angles)[None]


def _layer_parts(module: nn.Module, layout: Mapping[str, str]) -> LayerParts | None:
    """None where the kernel cannot read them, or they do something else than to compute."""
    attention, mlp = module._modules.get("self_attn"), module._modules.get("mlp")
    if not isinstance(attention, NativeAttention) or not isinstance(mlp, NativeMlp):
        return None
    output = attention._modules.get("o_proj")
    if type(output) is not PackedLinear or (output_weight := output.native_weight()) is None:
        return None
    native_attention, native_mlp = attention.native_attention(), mlp.native_mlp()
    if native_attention is None or native_mlp is None:
        return None
    placed = []
    for name in layout.values():
        norm = module._modules.get(name)
        if not isinstance(norm, NativeNorm) or (place := norm.placed()) is None:
            return None
        placed.append(place)
    activation, layers = native_mlp
    return LayerParts(native_attention, ref(output_weight), activation, [ref(packed) for packed in layers], placed)


@torch.inference_mode()
def _recognized(module: nn.Module) -> Layer | None:
    children = set(module._modules)
    layout = next((layout for layout in LAYOUTS if children == {"self_attn", "mlp", *layout.values()}), None)
    if not type(module).__name__.endswith("DecoderLayer") or layout is None or has_tensors(module):
        return None
    parts = _layer_parts(module, layout)
    decoder = None if parts is None else _decoder_layer(parts, layout)
    if parts is None or decoder is None or not _is_made_of(module, parts, layout):
        return None
    layer_idx = getattr(module.self_attn, "layer_idx", None)
    if not isinstance(layer_idx, int):
        return None
    weights = [module._modules[name].weight.detach() for name in layout.values()]
    return Layer(parts, weights, layout, layer_idx, decoder)


def _is_made_of(module: nn.Module, parts: LayerParts, layout: Mapping[str, str]) -> bool:
    """Whether a layer's output is what its parts make, one behind the other."""
    rows, given, probe = random_call(parts.attention.qkv)

    def normed(place: str, rows: torch.Tensor) -> torch.Tensor:
        return getattr(module, layout[place])(rows) if place in layout else rows

    try:
        found = type(module).forward(module, rows, **given)
        attended = module.self_attn(hidden_states=normed("before_attention", rows), **given)[0]
        between = rows + normed("behind_attention", attended)
        expected = between + normed("behind_mlp", module.mlp(normed("before_mlp", between)))
    except Exception:  # whatever it is: who calls the module in earnest will hear of it
        return False
    if not isinstance(found, torch.Tensor) or not rows_agree(found, expected) or len(probe.calls) != 2:
        return False
    by_layer, by_parts = probe.calls
    return (
        rows_agree(by_layer.query, by_parts.query)
        and rows_agree(by_layer.key, by_parts.key)
        and rows_agree(by_layer.value, by_parts.value)
        and by_layer.scale == by_parts.scale
        and by_layer.features.get("softcap") == by_parts.features.get("softcap")
        and "s_aux" not in by_layer.features
    )


def _decoder_layer(parts: LayerParts, layout: Mapping[str, str]) -> DecoderLayer | None:
    """For the kernel; None where sizes are not as it takes them."""
    packed = held(parts.packed)
    if packed is None:
        return None
    *_, output, gate, up, down = packed
    qkv = parts.attention.qkv
    num_queries, num_keys, num_values = qkv.num_heads
    if (
        output.origin.shape != (qkv.size, num_queries * qkv.head_size)
        or num_keys != num_values
        or num_queries % num_keys
        or gate.origin.shape[1] != qkv.size
        or len(down.origin) != qkv.size
        or any(norm.size != qkv.size for norm in parts.norms)
    ):
        return None
    return DecoderLayer(
        qkv,
        (output.weight, output.bias),
        [gate.weight, up.weight, down.weight],
        dict(zip(layout, parts.norms, strict=True)),
        inner=len(gate.origin),
        activation=ACTIVATIONS[parts.activation],
        scale=parts.attention.scale,
        softcap=parts.attention.features["softcap"],
    )
