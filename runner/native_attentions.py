"""What attention begins with, in one call of C: queries, keys and values, their norms and their rotation.

Models of transformers have written it out as three products, six changes of shape and the sixteen operations of a
rotation. In a decode step each of these is short, and most of its time goes into starting it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import nn

from runner.hf_attention import PagedStep
from runner.native.kernels import is_plain, native_kernels
from runner.native.structs import QkvLayer
from runner.native_modules import FLOAT32, NativeModule, has_tensors, make_native, only_computes, random_rows
from runner.native_norms import NativeNorm, PlacedNorm
from runner.packed_linear import Packed, PackedLinear
from runner.packed_products import MOST_NATIVE_ROWS

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
"""What a module calls the layers that queries, keys and values come from."""

NORMS = ("q_norm", "k_norm")
"""And what norms each query and each key, where something does."""

OUTPUT = "o_proj"
"""And the layer behind attention."""

SETTINGS = (bool, int, float, str, type(None))
"""Types of what a module may read at each call: ``scaling``, ``training``, a bound on scores."""

NUM_ROWS = 8
"""Random ones, that tell what a module computes."""

ERROR = 64 * torch.finfo(torch.float32).eps
"""Most that a row may differ from the module's own, as a share of its largest value."""


class Parts(NamedTuple):
    """A module's parts as the kernel would read them. Two are equal if it would read the same from both.

    Args:
        projections: Of queries, keys and values; not held here, so that their memory goes when the layers let go of it.
        norms: Of each query and of each key, if there are any.
    """

    projections: list[ReferenceType[Packed]]
    norms: list[PlacedNorm]


@dataclass(frozen=True)
class Attention:
    """What a module has turned out to compute: attention of queries, keys and values that the kernel makes, ``o_proj``.

    Args:
        parts: What they are made by.
        qkv: The same, for the kernel.
        settings: The module's own numbers and switches, as they were.
        is_rotated: Whether queries and keys are.
        scale: Factor on the scores.
        features: What else the module tells attention.
    """

    parts: Parts
    qkv: QkvLayer
    settings: Mapping[str, Any]
    is_rotated: bool
    scale: float
    features: Mapping[str, Any]

    def __deepcopy__(self, memo: Any) -> Attention:
        return self  # of a module whose copy has other parts: nothing is read


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
    return make_native(model, _NativeAttention, _recognized)


class _NativeAttention(NativeModule):
    def natively(
        self,
        found: Attention,
        /,
        *args: Any,
        hidden_states: Any = None,
        position_embeddings: Any = None,
        paged_step: Any = None,
        position_ids: Any = None,  # have become position_embeddings
        use_cache: Any = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None] | None:
        """For what an engine's step hands to it. ``[1, T, K]``, and no attention weights."""
        angles = position_embeddings if found.is_rotated else ()
        if (
            args
            or not isinstance(paged_step, PagedStep)
            or not is_plain(hidden_states)
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or type(angles) is not tuple
            or len(angles) != (2 if found.is_rotated else 0)
            or any(_is_asked_for(name, value) for name, value in others.items())
            or not found.settings.items() <= vars(self).items()
            or _parts(self) != found.parts
        ):
            return None
        heads = _heads(found.qkv, hidden_states, angles)
        if heads is None:
            return None
        output = paged_step.attend(self, *heads, found.scale, found.features)  # [T, Hq, D]
        return self.o_proj(output.flatten(1)[None]), None


def _is_asked_for(name: str, value: object) -> bool:
    """Whether an argument may change what a module gives back; ``output_attentions=False`` does not."""
    return value is not None and not (value is False and name.startswith("output_"))


def _parts(module: nn.Module) -> Parts | None:
    """None where the kernel cannot read them, or they do something else than to compute."""
    parts = Parts([], [])
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


def _heads(
    qkv: QkvLayer, hidden_states: torch.Tensor, angles: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...] | None:
    """Queries, keys and values ``[T, heads, D]`` by the kernel; None where it does not serve.

    Args:
        qkv: What computes them.
        hidden_states: ``[1, T, K]``.
        angles: Cosines and sines by which queries and keys are rotated, ``[1, T, D]`` each; none: they are not.
    """
    if hidden_states.dtype != torch.float32 or hidden_states.ndim != 3:
        return None
    batch, rows, size = hidden_states.shape
    if batch != 1 or rows > MOST_NATIVE_ROWS or size != qkv.size:
        return None
    for tensor in angles:
        if (
            not is_plain(tensor)
            or tensor.dtype != torch.float32
            or tensor.shape != (1, rows, qkv.head_size)
            or not tensor.is_contiguous()
        ):
            return None
    return native_kernels().qkv(hidden_states[0], qkv, *angles)


class _Recorder:
    """A step that takes note of what a module hands to attention, and has its answer ready.

    Args:
        output: That answer, ``[T, Hq, D]``.
    """

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output
        self.calls: list[tuple[tuple[torch.Tensor, ...], float, Mapping[str, Any]]] = []

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        features: Mapping[str, Any],
    ) -> torch.Tensor:
        """As :class:`~runner.hf_attention.AttentionStep` says."""
        self.calls.append(((query, key, value), scale, features))
        return self.output


@torch.inference_mode()
def _recognized(module: nn.Module) -> Attention | None:
    children = {name for name, _ in module.named_children()}
    if (
        not type(module).__name__.endswith("Attention")
        or children not in ({*PROJECTIONS, OUTPUT}, {*PROJECTIONS, *NORMS, OUTPUT})
        or has_tensors(module)
        or not only_computes(module.o_proj)
    ):
        return None
    parts = _parts(module)
    qkv = None if parts is None else _qkv_layer(parts, getattr(module, "head_dim", None))
    if parts is None or qkv is None:
        return None
    rows = random_rows(NUM_ROWS, qkv.size, (-3, 4))[None]  # [1, T, K]
    generator = torch.Generator().manual_seed(1)
    cosines, sines = torch.randn(2, 1, NUM_ROWS, qkv.head_size, generator=generator, **FLOAT32)
    far_apart = 8 ** torch.arange(NUM_ROWS, device="cpu")[None]  # some models scale queries, from a position on
    recorder = _Recorder(torch.randn(NUM_ROWS, qkv.num_heads[0], qkv.head_size, generator=generator, **FLOAT32))
    try:
        output, weights = module(
            hidden_states=rows,
            position_embeddings=(cosines, sines),
            attention_mask=None,
            position_ids=far_apart,
            use_cache=False,
            paged_step=recorder,
        )
        expected = module.o_proj(recorder.output.flatten(1)[None])
    except Exception:  # whatever it is: who calls the module in earnest will hear of it
        return None
    if len(recorder.calls) != 1 or weights is not None or not _agree(output, expected):
        return None
    ((heads, scale, features),) = recorder.calls
    if features.get("s_aux") is not None:  # a tensor, which may be replaced
        return None
    settings = {name: value for name, value in vars(module).items() if isinstance(value, SETTINGS)}
    for angles in ((cosines, sines), ()):
        found = _heads(qkv, rows, angles)
        if found is not None and all(map(_agree, found, heads)):
            return Attention(parts, qkv, settings, bool(angles), scale, {"softcap": features.get("softcap")})
    return None


def _qkv_layer(parts: Parts, head_size: Any) -> QkvLayer | None:
    """For the kernel; None where heads are not as it takes them."""
    projections = [packed for reference in parts.projections if (packed := reference()) is not None]
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
        [(address, norm.epsilon, norm.offset) for norm, _, address in parts.norms],
        num_heads=[columns // head_size for columns, _ in shapes],
        head_size=head_size,
        size=shapes[0][1],
    )


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Row by row. Rows of zeros tell nothing."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    largest = expected.reshape(NUM_ROWS, -1).abs().amax(-1)
    error = (found - expected).reshape(NUM_ROWS, -1).abs().amax(-1)
    return bool((largest > 0).all() and (error <= ERROR * largest).all())
