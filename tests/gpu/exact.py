"""Attention in float64, many queries at a time: as :mod:`tests.runner.paged_reference`, but fit for long contexts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcore.spec import KVCacheSpec
from runner.attention.base import visible_from, visible_from_each
from tests.runner.paged_reference import RandomStep

MOST_SCORES = 1 << 26
"""Held at once, in float64, over all heads."""


def exact_attention(
    step: RandomStep,
    spec: KVCacheSpec,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[T, Hq, D]`` in float64, on the device of the step. O(T * context)."""
    group = step.batch.groups[0]
    num_query_heads = step.query.shape[1]
    outputs = []
    for start, query_len, context_len, keys, values in zip(
        group.query_starts[:-1], group.query_lens, group.context_lens, step.keys, step.values, strict=True
    ):
        queries = step.query[start : start + query_len].double().unflatten(1, (keys.shape[1], -1))  # [Q, Hkv, G, D]
        most = max(1, MOST_SCORES // (num_query_heads * context_len))
        for begin in range(0, query_len, most):
            part = queries[begin : begin + most]
            positions = torch.arange(part.shape[0], device=part.device) + context_len - query_len + begin  # [Q]
            first, stop = visible_from(spec, int(positions[0])), int(positions[-1]) + 1
            seen = torch.arange(first, stop, device=part.device)  # [S]
            hidden = (seen > positions[:, None]) | (seen < visible_from_each(spec, positions)[:, None])  # [Q, S]
            scores = torch.einsum("qhgd,shd->hgqs", part, keys[first:stop].double()) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                sink = sinks.double().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat((scores, sink), -1)
            weights = scores.softmax(-1)[..., : stop - first]
            outputs.append(torch.einsum("hgqs,shd->qhgd", weights, values[first:stop].double()).flatten(1, 2))
    return torch.cat(outputs)


@dataclass(frozen=True)
class Bound:
    """How far an output may be from the reference.

    Args:
        whole: ``‖output - reference‖ / ‖reference‖``, over everything.
        vector: The same for the worst output vector alone, of one query and head.
    """

    whole: float
    vector: float


BOUNDS = {
    "bfloat16": Bound(5e-3, 2e-2),
    "float16": Bound(1e-3, 4e-3),
    "float32": Bound(2e-5, 1e-4),
}
"""By element type. In bfloat16, rounding weights and result costs 2e-3. A key too many or too few of 1,024 shows as
3e-2 of the whole."""


@dataclass(frozen=True)
class Error:
    """How far an output is from the reference. NaN where anything is.

    Args:
        whole: See :class:`Bound`.
        vector: See :class:`Bound`.
        largest: The largest difference of two numbers.
    """

    whole: float
    vector: float
    largest: float

    @classmethod
    def of(cls, output: torch.Tensor, reference: torch.Tensor) -> Error:
        """Of ``[T, Hq, D]`` each."""
        if output.shape != reference.shape:
            raise ValueError(f"output has the shape {list(output.shape)}, the reference {list(reference.shape)}")
        difference = output.double() - reference
        vectors = difference.norm(dim=-1) / reference.norm(dim=-1)
        return cls(
            whole=float(difference.norm() / reference.norm()),
            vector=float(vectors.max()),
            largest=float(difference.abs().max()),
        )

    def is_within(self, bound: Bound) -> bool:
        """False for NaN."""
        return self.whole <= bound.whole and self.vector <= bound.vector
