"""What the kernels read by its address: the structs of C, as Python makes them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

_long, _float, _pointer = ctypes.c_long, ctypes.c_float, ctypes.c_void_p
_WORK = (
    "span_start",
    "span_blocks",
    "span_parts",
    "blocks",
    "part_token",
    "part_from",
    "part_until",
    "query_token",
    "query_parts",
    "parts_of_queries",
)
_LAYER = ("query_token_stride", "query_head_stride", "block_size", "heads", "group_size", "head_size")


def pointer_to(tensor: torch.Tensor | None) -> int | None:
    """Its address; None for none."""
    return None if tensor is None else tensor.data_ptr()


class _Work(ctypes.Structure):
    _fields_ = (("spans", _long), ("queries", _long), *((name, _pointer) for name in _WORK))


class AttendLayer(ctypes.Structure):
    """What is the same for all queries of a layer: ``struct layer`` of ``kernels.h``."""

    _fields_ = (
        *((name, _long) for name in _LAYER),
        ("scale", _float),
        ("softcap", _float),
        ("sinks", _pointer),
    )


class AttentionWork:
    """What the attention kernel reads for a step, and for which queries: ``struct work`` of ``kernels.h``.

    Args:
        arrays: The struct's arrays, by the names that they have there.
    """

    def __init__(self, **arrays: Sequence[int]) -> None:
        self._arrays = [array("q", arrays[name]) for name in _WORK]  # held: the struct has their addresses only
        addresses = (values.buffer_info()[0] for values in self._arrays)
        self._struct = _Work(len(arrays["span_start"]), len(arrays["query_token"]), *addresses)
        self.address = ctypes.addressof(self._struct)
        self.num_parts = len(arrays["part_token"])


class PlacedNorm(NamedTuple):
    """An RMS norm, as :meth:`~runner.native.kernels.Kernels.rms_norm` computes it, and where its weight lies.

    Args:
        address: Of the weight.
        epsilon: As there.
        offset: As there.
        size: Elements of the weight.
    """

    address: int
    epsilon: float
    offset: float
    size: int


class _Qkv(ctypes.Structure):
    _fields_ = (
        ("weights", _pointer * 3),
        ("biases", _pointer * 3),
        ("norms", _pointer * 2),
        ("epsilons", _float * 2),
        ("offsets", _float * 2),
        ("heads", _long * 3),
        ("head_size", _long),
        ("steps", _long),
    )


class QkvLayer:
    """What makes queries, keys and values of a layer's input: ``struct qkv`` of ``kernels.h``.

    Holds addresses only: whoever uses it makes sure that the weights are still there.

    Args:
        weights: Packed, of queries, keys and values.
        biases: Of each, contiguous, or None.
        norms: Of each query and of each key; empty: there are none.
        num_heads: Of queries, keys and values.
        head_size: Elements of each head.
        size: Elements of an input row.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        norms: Sequence[PlacedNorm],
        *,
        num_heads: Sequence[int],
        head_size: int,
        size: int,
    ) -> None:
        self._struct = _Qkv(
            tuple(map(pointer_to, weights)),
            tuple(map(pointer_to, biases)),
            tuple(norm.address for norm in norms),  # what is left out is 0
            tuple(norm.epsilon for norm in norms),
            tuple(norm.offset for norm in norms),
            tuple(num_heads),
            head_size,
            size,
        )
        self.address = ctypes.addressof(self._struct)
        self.num_heads = tuple(num_heads)
        self.head_size = head_size
        self.size = size


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _pointer), ("epsilon", _float), ("offset", _float))


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("before_attention", _Norm),
        ("behind_attention", _Norm),
        ("before_mlp", _Norm),
        ("behind_mlp", _Norm),
        ("qkv", _Qkv),
        *((name, _pointer) for name in ("output", "output_bias", "gate", "up", "down")),
        ("inner", _long),
        ("activation", ctypes.c_int),
        ("scale", _float),
        ("softcap", _float),
    )


class DecoderLayer:
    """A decoder layer: ``struct decoder`` of ``kernels.h``. Holds addresses only, as :class:`QkvLayer` does.

    Args:
        qkv: What attention begins with.
        output: Packed weight of the layer behind attention, and its bias, contiguous, or None.
        mlp: Packed weights: gate, up, down.
        norms: Before and behind attention, before and behind the MLP, by their names in C; what is left out is not
            there.
        inner: Elements between up and down.
        activation: Number of the MLP's in C.
        scale: Factor on the scores.
        softcap: Bound on the scores; None: there is none.
    """

    def __init__(
        self,
        qkv: QkvLayer,
        output: tuple[torch.Tensor, torch.Tensor | None],
        mlp: Sequence[torch.Tensor],
        norms: Mapping[str, PlacedNorm],
        *,
        inner: int,
        activation: int,
        scale: float,
        softcap: float | None,
    ) -> None:
        weight, bias = output
        gate, up, down = mlp
        self._struct = _Decoder(
            **{name: _Norm(norm.address, norm.epsilon, norm.offset) for name, norm in norms.items()},
            qkv=qkv._struct,
            output=pointer_to(weight),
            output_bias=pointer_to(bias),
            gate=pointer_to(gate),
            up=pointer_to(up),
            down=pointer_to(down),
            inner=inner,
            activation=activation,
            scale=scale,
            softcap=softcap or 0.0,
        )
        self.address = ctypes.addressof(self._struct)
