"""How models call attention modules and decoder layers in a step: whether a kernel serves a call, and random calls."""

from __future__ import annotations

from typing import Any

import torch

from runner.hf_attention import AttentionProbe, PagedStep
from runner.native.kernels import is_plain
from runner.native.structs import QkvLayer
from runner.native_modules import FLOAT32, NUM_ROWS, random_rows
from runner.packed_products import MOST_NATIVE_ROWS


def angles_if_served(
    qkv: QkvLayer,
    hidden_states: Any,
    *,
    is_rotated: bool,
    position_embeddings: Any = None,
    paged_step: Any = None,
    position_ids: Any = None,
    use_cache: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, ...] | None:
    """The angles for the kernel, empty where nothing is rotated. None where it does not serve.

    It serves what an engine's step hands to a module: rows of the kind that it reads, and nothing that asks for more.

    Args:
        qkv: What attention begins with.
        hidden_states: ``[1, T, K]`` in a step.
        is_rotated: Whether the module rotates queries and keys.
        position_embeddings: As in the call; in a step cosines and sines, ``[1, T, D]`` each.
        paged_step: As in the call.
        position_ids: As in the call; in a step they have become the angles.
        use_cache: As in the call; means nothing in a step.
        others: The call's other arguments. None of them may ask for anything.
    """
    angles = position_embeddings if is_rotated else ()
    if (
        type(paged_step) is not PagedStep
        or not is_plain(hidden_states)  # early: torch's compiler cannot trace what follows
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or any(_is_asked_for(name, value) for name, value in others.items())
        or hidden_states.dtype != torch.float32
        or hidden_states.ndim != 3
        or type(angles) is not tuple
        or len(angles) != (2 if is_rotated else 0)
    ):
        return None
    batch, rows, size = hidden_states.shape
    if batch != 1 or rows > MOST_NATIVE_ROWS or size != qkv.size:
        return None
    shape = (1, rows, qkv.head_size)
    for tensor in angles:
        if not is_plain(tensor) or tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
            return None
    return angles


def _is_asked_for(name: str, value: object) -> bool:
    """Whether an argument may change what a module gives back; ``output_attentions=False`` does not."""
    return value is not None and not (value is False and name.startswith("output_"))


def random_call(qkv: QkvLayer) -> tuple[torch.Tensor, dict[str, Any], AttentionProbe]:
    """A call of a module with random rows.

    Args:
        qkv: What the module's attention begins with.

    Returns:
        The rows, ``[1, NUM_ROWS, K]``, the call's other arguments, and the probe that is their ``paged_step``.
    """
    generator = torch.Generator().manual_seed(1)
    cosines, sines = torch.randn(2, 1, NUM_ROWS, qkv.head_size, generator=generator, **FLOAT32)
    probe = AttentionProbe(torch.randn(NUM_ROWS, qkv.num_heads[0], qkv.head_size, generator=generator, **FLOAT32))
    given = {
        "position_embeddings": (cosines, sines),
        "attention_mask": None,
        "position_ids": 8 ** torch.arange(NUM_ROWS, device="cpu")[None],  # far ones too: some models scale by them
        "use_cache": False,
        "paged_step": probe,
    }
    return random_rows(qkv.size)[None], given, probe
