"""What attention begins with, in one call of C: queries, keys and values, their norms and their rotation.

Models of transformers have written it out as three products, six changes of shape and the sixteen operations of a
rotation. In a decode step each of these is short, and most of its time goes into starting it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import nn

from runner.native.kernels import native_kernels
from runner.native.structs import PlacedNorm, QkvLayer
from runner.native_calls import angles_if_served, random_call
from runner.native_modules import NativeModule, has_tensors, make_native, only_computes, rows_agree
from runner.native_norms import NativeNorm
from runner.packed_linear import Packed, PackedLinear, held

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
"""What a module calls the layers that queries, keys and values come from."""

NORMS = ("q_norm", "k_norm")
"""And what norms each query and each key, where something does."""


class AttentionParts(NamedTuple):
    """A module's parts as the kernel would read them. Two are equal if it would read the same from both.

    Args:
        projections: Of queries, keys and values; not held here, so that their memory goes when the layers let go of it.
        norms: Of each query and of each key, if there are any.
    """

    projections: list[ReferenceType[Packed]]
    norms: list[PlacedNorm]


@dataclass(frozen=True)
class Attention:
    """What a module has turned out to compute: attention of queries, keys and values of the kernel, then ``o_proj``.

    Args:
        parts: What they are made by.
        norm_weights: Held, so that nothing else can come to lie where the kernel reads them.
        qkv: What they are made by, for the kernel.
        is_rotated: Whether queries and keys are.
        scale: Factor on the scores.
        features: What else the module tells attention.
    """

    parts: AttentionParts
    norm_weights: Sequence[torch.Tensor]
    qkv: QkvLayer
    is_rotated: bool
    scale: float
    features: Mapping[str, Any]

    def __deepcopy__(self, memo: Any) -> Attention:
        return self  # the copy of a module has other parts, which never are these


def use_native_attentions(model: nn.Module) -> int:
    """Have what a model's attention begins with computed by the native kernel, in float32; for how many modules.

    A module is taken for attention if its class says so, it is made of four linear layers, those of queries, keys and
    values packed by :func:`~runner.packed_linear.pack_linear_layers` before this call, and maybe two norms of heads,
    native by :func:`~runner.native_norms.use_native_norms`, and what it makes of random rows is what the kernel makes
    of them. It computes in its own way where the kernel does not serve: outside of an engine's step, with gradients,
    under autocast, for more rows than :data:`~runner.packed_products.MOST_NATIVE_ROWS`, where its layers do not read
    their packed weights, or where something hooks into them.

    Args:
        model: Loaded with ``attn_implementation="kvcore_paged"``, in float32, on a CPU; any other is left as it is.
    """
    return make_native(model, NativeAttention, _recognized)


class NativeAttention(NativeModule):
    """Attention that begins by the kernel."""

    def natively(
        self, found: Attention, /, *args: Any, hidden_states: Any = None, **given: Any
    ) -> tuple[torch.Tensor, None] | None:
        """For what an engine's step hands to it. ``[1, T, K]``, and no attention weights."""
        angles = angles_if_served(found.qkv, hidden_states, is_rotated=found.is_rotated, **given)
        packed = held(found.parts.projections)  # while the kernel reads them
        if args or angles is None or packed is None or _attention_parts(self) != found.parts:
            return None
        heads = native_kernels().qkv(hidden_states[0], found.qkv, *angles)  # [T, H, D] each
        output = given["paged_step"].attend(self, *heads, found.scale, found.features)  # [T, Hq, D]
        return self.o_proj(output.flatten(1)[None]), None

    def native_attention(self) -> Attention | None:
        """What it computes, for a kernel that computes more than this module.

        None where the module computes anything else, as :func:`use_native_attentions` says.
        """
        found: Attention | None = self.undisturbed()
        return None if found is None or _attention_parts(self) != found.parts else found


def _attention_parts(module: nn.Module) -> AttentionParts | None:
    """None where the kernel cannot read them, or they do something else than to compute."""
    parts = AttentionParts([], [])
    for name in PROJECTIONS:
        layer = module._modules.get(name)
        if type(layer) is not PackedLinear or (packed := layer.native_weight()) is None:
            return None
        parts.projections.append(ref(packed))
    for name in NORMS:
        norm = module._modules.get(name)
        if norm is None:
            continue
        if not isinstance(norm, NativeNorm) or (placed := norm.placed()) is None:
            return None
        parts.norms.append(placed)
    return parts


@torch.inference_mode()
def _recognized(module: nn.Module) -> Attention | None:
    children = set(module._modules)
    if (
        not type(module).__name__.endswith("Attention")
        or children not in ({*PROJECTIONS, "o_proj"}, {*PROJECTIONS, *NORMS, "o_proj"})
        or has_tensors(module)
        or not only_computes(module.o_proj)
    ):
        return None
    parts = _attention_parts(module)
    qkv = None if parts is None else _qkv_layer(parts, getattr(module, "head_dim", None))
    if parts is None or qkv is None:
        return None
    rows, given, probe = random_call(qkv)
    try:
        output, weights = type(module).forward(module, hidden_states=rows, **given)
        expected = module.o_proj(probe.output.flatten(1)[None])
    except Exception:  # whatever it is: who calls the module in earnest will hear of it
        return None
    if len(probe.calls) != 1 or weights is not None or not rows_agree(output, expected):
        return None
    (call,) = probe.calls
    if "s_aux" in call.features:  # a tensor, which may be replaced
        return None
    for angles in (given["position_embeddings"], ()):
        found = native_kernels().qkv(rows[0], qkv, *angles)
        if all(map(rows_agree, found, (call.query, call.key, call.value))):
            weights = [module._modules[name].weight.detach() for name in NORMS if name in children]
            return Attention(parts, weights, qkv, bool(angles), call.scale, {"softcap": call.features.get("softcap")})
    return None


def _qkv_layer(parts: AttentionParts, head_size: Any) -> QkvLayer | None:
    """For the kernel; None where heads are not as it takes them."""
    projections = held(parts.projections)
    if projections is None:
        return None
    shapes = [packed.origin.shape for packed in projections]
    if (
        not isinstance(head_size, int)
        or head_size % 2
        or len({size for _, size in shapes}) > 1
        or any(columns % head_size for columns, _ in shapes)
        or any(norm.size != head_size for norm in parts.norms)
    ):
        return None
    return QkvLayer(
        [packed.weight for packed in projections],
        [packed.bias for packed in projections],
        parts.norms,
        num_heads=[columns // head_size for columns, _ in shapes],
        head_size=head_size,
        size=shapes[0][1],
    )
