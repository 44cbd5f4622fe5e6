"""Paged attention for the models of transformers, without a line of model code.

transformers looks its attention up by name in a registry and hands every keyword argument of the model's forward on to
it. So one function is registered, once, and what a step needs travels as the argument ``paged_step``: no globals, and a
model can be shared by several engines.

Masks have a registry of their own. Nothing is registered there, which tells transformers to make none: the lengths and
block tables of the step say all that a mask would. A registered function that makes none would be asked only after
transformers had looked for packed sequences in the position ids, and that waits for the device in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from runner.attention.base import AttentionBackend
from runner.errors import RunnerError

ATTENTION_NAME = "kvcore_paged"
"""What ``config._attn_implementation`` says of a model that the runner drives."""


class StepMissingError(RunnerError, RuntimeError):
    """Attention was called without a step."""


class AttentionStep(Protocol):
    """What a forward of the model carries along as ``paged_step``."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        features: Mapping[str, Any],
    ) -> torch.Tensor:
        """One layer's attention.

        Args:
            module: The layer's attention module.
            query: ``[T, Hq, D]``.
            key: ``[T, Hkv, D]``.
            value: ``[T, Hkv, D]``.
            scale: Factor on the scores.
            features: The other keyword arguments that the module gave.

        Returns:
            ``[T, Hq, D]``.
        """


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,  # [1, Hq, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, D]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    paged_step: AttentionStep | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls; ``[1, T, Hq, D]`` and no attention weights."""
    if paged_step is None:
        raise StepMissingError(
            f"{type(module).__name__} was called without paged_step: a model loaded with "
            f"attn_implementation={ATTENTION_NAME!r} is run by runner.model_runner.ModelRunner; call "
            "model.set_attn_implementation('sdpa') to run it by itself"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, D] each
    return paged_step.attend(module, query, key, value, scale, features)[None], None


def register() -> None:
    """Make ``attn_implementation="kvcore_paged"`` known to transformers. Any number of times."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


@dataclass(frozen=True)
class BoundLayer:
    """An attention layer of the model and where it lives. Resolved once, at load.

    Args:
        group: Index of its KV cache group.
        kv_cache: ``[num_blocks, 2, block_size, Hkv, D]``.
    """

    group: int
    kv_cache: torch.Tensor


@dataclass(frozen=True)
class PagedStep:
    """A step on its way through the model's layers.

    Args:
        backend: What computes.
        plans: The backend's plan for each KV cache group.
        layers: By the ``layer_idx`` of the attention module.
    """

    backend: AttentionBackend
    plans: Sequence[Any]
    layers: Mapping[int, BoundLayer]

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        features: Mapping[str, Any],
    ) -> torch.Tensor:
        """As :class:`AttentionStep` says. Features that change the result are the ones that the probe let pass."""
        layer = self.layers[module.layer_idx]  # type: ignore[index]
        return self.backend.forward(
            query,
            key,
            value,
            layer.kv_cache,
            self.plans[layer.group],
            scale=scale,
            softcap=features.get("softcap"),
            sinks=features.get("s_aux"),
        )


@dataclass(frozen=True)
class AttentionCall:
    """How a module called attention when it was probed: what :class:`AttentionStep` gets, but for features of None."""

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    features: Mapping[str, Any]

    @property
    def layer_idx(self) -> int | None:
        """The layer's index in the model, None if its module does not know."""
        return getattr(self.module, "layer_idx", None)


@dataclass
class AttentionProbe:
    """Takes note of every call instead of computing anything.

    Args:
        output: What it answers, ``[T, Hq, D]``; None: zeros.
        calls: One after the other.
    """

    output: torch.Tensor | None = None
    calls: list[AttentionCall] = field(default_factory=list)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        features: Mapping[str, Any],
    ) -> torch.Tensor:
        """As :class:`AttentionStep` says."""
        given = {name: value for name, value in features.items() if value is not None}
        self.calls.append(AttentionCall(module, query, key, value, scale, given))
        return query.new_zeros(*query.shape[:2], value.shape[-1]) if self.output is None else self.output


@torch.inference_mode()
def probe_attention(model: PreTrainedModel) -> list[AttentionCall]:
    """Run the model on two tokens to see which layers call attention, and how. Costs one small forward.

    Raises:
        StepMissingError: The model does not hand its keyword arguments on to attention.
    """
    probe = AttentionProbe()
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    model(input_ids=tokens, position_ids=positions, use_cache=False, paged_step=probe)
    return probe.calls
