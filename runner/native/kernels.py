"""The kernels in C, as Python calls them: tensors in, addresses out."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from runner.native.build import NativeUnavailableError, compiled_kernels
from runner.native.structs import AttendLayer, AttentionWork, DecoderLayer, QkvLayer, pointer_to

SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""The element types that attention is compiled for."""

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""Those of gated MLPs, by their numbers in ``kernels.h``."""

_long, _int, _float, _pointer = ctypes.c_long, ctypes.c_int, ctypes.c_float, ctypes.c_void_p


class _Room(threading.local):
    """Memory to compute in, each thread its own, kept from call to call: fresh it costs a page fault every 4 KiB."""

    size = 0  # floats
    address = 0

    def address_of(self, num_floats: int) -> int:
        """Of room for so many, until the next call of this thread."""
        if num_floats > self.size:
            size = num_floats + num_floats // 4
            self.size = 0  # until there is other room: it may fail, or be interrupted
            self.floats = torch.empty(size, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
            self.address = self.floats.data_ptr()
            self.size = size
        return self.address


class Kernels:
    """The compiled library. All tensors are on the CPU; it computes with as many threads as torch does.

    Nothing is checked here: a tensor of a wrong type or layout has other memory read and written.

    Args:
        path: Where :func:`~runner.native.build.compiled_kernels` has put it.

    Raises:
        NativeUnavailableError: It cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            library.packed_size.restype = library.decoder_room.restype = _long
        except (OSError, AttributeError) as error:
            raise NativeUnavailableError(f"what was compiled cannot be loaded ({error})") from error
        library.packed_size.argtypes = (_long, _long)
        library.pack_weight.argtypes = (_pointer, _long, _long, _pointer, _int)
        library.packed_product.argtypes = (*(_pointer,) * 4, *(_long,) * 3, _pointer, _int)
        library.packed_gated_mlp.argtypes = (*(_pointer,) * 4, _int, _pointer, *(_long,) * 4, _pointer, _int)
        library.packed_qkv.argtypes = (*(_pointer,) * 5, _long, _pointer, _int)
        library.decoder_room.argtypes = (_pointer, _long, _long)
        library.decoder_layer.argtypes = (_pointer, _pointer, _long, *(_pointer,) * 6, *(_long,) * 3, _pointer, _int)
        library.rms_norm.argtypes = (*(_pointer,) * 3, _long, _long, _float, _float, _int)
        strided = (_pointer, _long, _long)
        for suffix in SUFFIXES.values():
            store, attend = getattr(library, f"store_{suffix}"), getattr(library, f"attend_{suffix}")
            store.argtypes = (*strided, *strided, _pointer, _pointer, *(_long,) * 4, _int)
            attend.argtypes = (*(_pointer,) * 8, _int)
        self._library = library
        self._room = _Room()
        self._store = {dtype: getattr(library, f"store_{suffix}") for dtype, suffix in SUFFIXES.items()}
        self._attend = {dtype: getattr(library, f"attend_{suffix}") for dtype, suffix in SUFFIXES.items()}

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        """Put keys and values into a cache.

        Args:
            key: ``[T, Hkv, D]``, of the cache's type.
            value: ``[T, Hkv, D]``, of the cache's type.
            kv_cache: ``[num_blocks, 2, block_size, Hkv, D]``, contiguous, of a type in :data:`SUFFIXES`.
            slots: ``[T]``, int64; -1: nowhere.
        """
        key, value = _vectors(key), _vectors(value)
        _, _, block_size, num_heads, head_size = kv_cache.shape
        self._store[kv_cache.dtype](
            key.data_ptr(), key.stride(0), key.stride(1), value.data_ptr(), value.stride(0), value.stride(1),
            kv_cache.data_ptr(), slots.data_ptr(), len(slots), block_size, num_heads, head_size,
            torch.get_num_threads(),
        )  # fmt: skip

    def attend(
        self,
        work: AttentionWork,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Write the output of the queries that the work is for.

        Args:
            work: Of the step.
            query: ``[T, Hq, D]``, of the cache's type.
            kv_cache: ``[num_blocks, 2, block_size, Hkv, D]``, contiguous, of a type in :data:`SUFFIXES`.
            output: ``[T, Hq, D]``, contiguous, of the cache's type.
            scale: As in :meth:`~runner.attention.base.AttentionBackend.forward`.
            softcap: As there.
            sinks: As there.
        """
        query = _vectors(query)
        sinks = None if sinks is None else sinks.float().contiguous()
        _, num_query_heads, head_size = query.shape
        num_heads = kv_cache.shape[3]
        layer = AttendLayer(
            query.stride(0), query.stride(1), kv_cache.shape[2], num_heads, num_query_heads // num_heads, head_size,
            scale, softcap or 0.0, pointer_to(sinks),
        )  # fmt: skip
        num_rows = work.num_parts * num_query_heads
        room = self._room.address_of(num_rows * (head_size + 2))
        maxima = room + 4 * num_rows * head_size
        self._attend[kv_cache.dtype](
            work.address, ctypes.addressof(layer), query.data_ptr(), kv_cache.data_ptr(), output.data_ptr(),
            room, maxima, maxima + 4 * num_rows, torch.get_num_threads(),
        )  # fmt: skip

    def packed_size(self, weight: torch.Tensor) -> int:
        """Floats that a weight ``[N, K]`` takes when it is packed."""
        return int(self._library.packed_size(*weight.shape))

    def pack(self, weight: torch.Tensor, packed: torch.Tensor) -> None:
        """Lay a weight ``[N, K]``, float32 and contiguous, out in ``packed``."""
        self._library.pack_weight(weight.data_ptr(), *weight.shape, packed.data_ptr(), torch.get_num_threads())

    def product(
        self, input: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``[..., N]`` from an input ``[..., K]``, a packed weight and a bias ``[N]``, contiguous; all float32."""
        columns, steps = weight.shape
        input = input.contiguous()
        rows = input.numel() // steps
        output = input.new_empty((*input.shape[:-1], columns))
        self._library.packed_product(
            input.data_ptr(), packed.data_ptr(), pointer_to(bias), output.data_ptr(),
            rows, columns, steps, self._room.address_of(rows * steps), torch.get_num_threads(),
        )  # fmt: skip
        return output

    def gated_mlp(
        self,
        input: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        *,
        inner: int,
        columns: int,
        activation: str,
    ) -> torch.Tensor:
        """``(activation(input gate^T) * (input up^T)) down^T``, ``[..., N]`` from an input ``[..., K]`` in float32.

        Args:
            input: What goes in.
            gate: A packed weight ``[I, K]``.
            up: Another one.
            down: A packed weight ``[N, I]``.
            inner: ``I``.
            columns: ``N``.
            activation: A key of :data:`ACTIVATIONS`.
        """
        input = input.contiguous()
        steps = input.shape[-1]
        rows = input.numel() // steps
        output = input.new_empty((*input.shape[:-1], columns))
        self._library.packed_gated_mlp(
            input.data_ptr(), gate.data_ptr(), up.data_ptr(), down.data_ptr(), ACTIVATIONS[activation],
            output.data_ptr(), rows, columns, inner, steps, self._room.address_of(rows * (steps + inner)),
            torch.get_num_threads(),
        )  # fmt: skip
        return output

    def qkv(
        self,
        input: torch.Tensor,
        layer: QkvLayer,
        cosines: torch.Tensor | None = None,
        sines: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, ``[T, heads, D]`` each, of an input ``[T, K]`` in float32.

        Args:
            input: What goes in.
            layer: What computes them.
            cosines: ``[T, D]``, contiguous, of the angles by which queries and keys are rotated; None: they are not.
            sines: As many.
        """
        input = input.contiguous()
        rows, steps = input.shape
        output = input.new_empty((rows, sum(layer.num_heads), layer.head_size))
        self._library.packed_qkv(
            layer.address, input.data_ptr(), pointer_to(cosines),
            pointer_to(sines), output.data_ptr(), rows,
            self._room.address_of(rows * steps), torch.get_num_threads(),
        )  # fmt: skip
        return output.split_with_sizes(layer.num_heads, 1)

    def decoder_layer(
        self,
        input: torch.Tensor,
        layer: DecoderLayer,
        works: Sequence[AttentionWork],
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        cosines: torch.Tensor | None = None,
        sines: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output ``[T, K]`` of a decoder layer for an input ``[T, K]``, contiguous, in float32.

        Keys and values of its tokens are put into the cache.

        Args:
            input: What goes in.
            layer: What computes.
            works: Of the step; together for all of its tokens.
            kv_cache: As in :meth:`store`, in float32.
            slots: As there.
            cosines: As in :meth:`qkv`.
            sines: As there.
        """
        output = torch.empty_like(input)
        rows, num_parts = len(input), max((work.num_parts for work in works), default=0)
        addresses = (_pointer * len(works))(*(work.address for work in works))
        room = self._library.decoder_room(layer.address, rows, num_parts)
        self._library.decoder_layer(
            layer.address, addresses, len(works), input.data_ptr(), pointer_to(cosines),
            pointer_to(sines), kv_cache.data_ptr(), slots.data_ptr(), output.data_ptr(), rows,
            num_parts, kv_cache.shape[2], self._room.address_of(room), torch.get_num_threads(),
        )  # fmt: skip
        return output

    def rms_norm(self, input: torch.Tensor, weight: torch.Tensor, *, epsilon: float, offset: float) -> torch.Tensor:
        """``input / sqrt(mean(input^2) + epsilon) * (offset + weight)``, for rows ``[..., K]`` and a weight ``[K]``.

        All float32; the weight is contiguous.
        """
        input = input.contiguous()
        output = torch.empty_like(input)
        self._library.rms_norm(
            input.data_ptr(), weight.data_ptr(), output.data_ptr(), input.numel() // len(weight), len(weight),
            epsilon, offset, torch.get_num_threads(),
        )  # fmt: skip
        return output


def native_kernels() -> Kernels:
    """The kernels, compiled and loaded by the first call of a process.

    Raises:
        NativeUnavailableError: They cannot be had here; says why, every time.
    """
    found = _load()
    if isinstance(found, str):
        raise NativeUnavailableError(found)
    return found


@cache
def _load() -> Kernels | str:
    """The kernels, or why there are none."""
    try:
        return Kernels(compiled_kernels())
    except NativeUnavailableError as error:
        return str(error)


def is_plain(input: torch.Tensor) -> bool:
    """Whether a tensor is just its memory, on a CPU, and nobody watches what is done with it.

    Any other must not be handed to a kernel: a fake, a wrapped, a sparse or a meta tensor has no such memory, and what
    compiles, traces, transforms or counts operations would not see the call.
    """
    return (
        type(input) is torch.Tensor
        and not torch.compiler.is_compiling()  # before what would keep it from compiling
        and not torch.jit.is_tracing()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and input.is_cpu
        and input.layout is torch.strided
        and not input.is_nested
        and not input.is_neg()
        and not input._is_zerotensor()
    )


def _vectors(tensor: torch.Tensor) -> torch.Tensor:
    """``[T, heads, D]`` whose last dimension lies together, as it mostly does already."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
