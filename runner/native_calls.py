"""How models call attention modules and decoder layers in a step: whether a kernel serves a call, and random calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from runner.hf_attention import PagedStep
from runner.native.kernels import is_plain
from runner.native.structs import QkvLayer
from runner.native_modules import FLOAT32, NUM_ROWS, random_rows
from runner.packed_products import MOST_NATIVE_ROWS


def is_served(
    qkv: QkvLayer,
    hidden_states: Any,
    angles: Any,
    *,
    is_rotated: bool,
    paged_step: Any = None,
    position_ids: Any = None,
    use_cache: Any = None,
    **others: Any,
) -> bool:
    """Whether a module that has turned out to be native is called in an engine's step, and with what the kernel reads.

    Args:
        qkv: What attention begins with.
        hidden_states: ``[1, T, K]`` in a step.
        angles: Cosines and sines, ``[1, T, D]`` each, as the kernel is to get them; empty: nothing is rotated.
        is_rotated: Whether the module rotates queries and keys.
        paged_step: As in the call.
        position_ids: As in the call; in a step they have become the angles.
        use_cache: As in the call; means nothing in a step.
        others: The call's other arguments. None of them may ask for anything.
    """
    if (
        not isinstance(paged_step, PagedStep)
        or not is_plain(hidden_states)  # before what would keep it from compiling
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or any(_is_asked_for(name, value) for name, value in others.items())
        or hidden_states.dtype != torch.float32
        or hidden_states.ndim != 3
        or type(angles) is not tuple
        or len(angles) != (2 if is_rotated else 0)
    ):
        return False
    batch, rows, size = hidden_states.shape
    if batch != 1 or rows > MOST_NATIVE_ROWS or size != qkv.size:
        return False
    shape = (1, rows, qkv.head_size)
    for tensor in angles:
        if not is_plain(tensor) or tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
            return False
    return True


def _is_asked_for(name: str, value: object) -> bool:
    """Whether an argument may change what a module gives back; ``output_attentions=False`` does not."""
    return value is not None and not (value is False and name.startswith("output_"))


class Recorder:
    """A step that takes note of what modules hand to attention, and has its answer ready.

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


def random_call(qkv: QkvLayer) -> tuple[torch.Tensor, dict[str, Any], Recorder]:
    """Random rows ``[1, NUM_ROWS, K]``, the other arguments of a call with them, and the step among those."""
    generator = torch.Generator().manual_seed(1)
    cosines, sines = torch.randn(2, 1, NUM_ROWS, qkv.head_size, generator=generator, **FLOAT32)
    recorder = Recorder(torch.randn(NUM_ROWS, qkv.num_heads[0], qkv.head_size, generator=generator, **FLOAT32))
    given = {
        "position_embeddings": (cosines, sines),
        "attention_mask": None,
        "position_ids": 8 ** torch.arange(NUM_ROWS, device="cpu")[None],  # far ones too: some models scale by them
        "use_cache": False,
        "paged_step": recorder,
    }
    return random_rows(qkv.size)[None], given, recorder
