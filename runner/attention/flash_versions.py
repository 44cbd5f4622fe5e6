"""The versions of flash-attn: what each can do, and how its functions are called.

What is said here of a version is what its own sources and docstrings say: flash-attn 2.8, flash-attn 3 as its
repository builds it (``hopper/``), and flash-attn 4 as of 4.0.0b36. All three align the causal mask bottom right, take
windows that are inclusive on both sides, multiply scores by ``softmax_scale`` before they cap them, write zeros for a
sequence of length 0, read lengths and tables on the device only, and never wait for it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from runner.attention.base import AttentionLayer
from runner.errors import EngineConfigError


@dataclass(frozen=True)
class FlashPlan:
    """A step for one group.

    Args:
        slot_mapping: ``[T]``, int64; -1: nowhere.
        query_start_loc: ``[B + 1]``, int32.
        seq_lens: ``[B]``, int32, tokens of each sequence in the pages of the table.
        block_table: ``[B, W]``, int32, contiguous.
        window: Tokens that a query reads, itself included; None: all.
        max_query_len: Upper bound of the sequences' new tokens.
        max_context_len: Upper bound of ``seq_lens``.
    """

    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    window: int | None
    max_query_len: int
    max_context_len: int

    @property
    def is_decode(self) -> bool:
        """Each sequence has one query."""
        return self.max_query_len == 1

    @cached_property
    def key_start_loc(self) -> torch.Tensor:
        """``[B + 1]``, int32: where keys would begin if all sequences' stood in a row."""
        return F.pad(self.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))


class FlashVersion(ABC):
    """One major version of flash-attn.

    Args:
        module: What has its functions.
        capability: Compute capability of the device, major and minor.

    Raises:
        EngineConfigError: The module lacks a function or an argument that is used here: another, mostly older, release.
    """

    number: ClassVar[int]
    modules: ClassVar[tuple[str, ...]]
    """Where it may be imported from, the first that is there."""
    distributions: ClassVar[tuple[str, ...]]
    """Names it is installed by, for its version."""
    install: ClassVar[str]
    """How one gets it."""
    capabilities: ClassVar[tuple[int, ...]]
    """Major numbers of the compute capabilities it runs on with pages."""
    calls: ClassVar[Mapping[str, tuple[str, ...]]]
    """The functions used here, and the arguments that tell this version from others."""

    page_multiple: ClassVar[int] = 1
    """Tokens of a page are a multiple of this."""
    default_block_size: ClassVar[int] = 16
    head_size_multiple: ClassVar[int] = 8
    largest_head_size: ClassVar[int] = 256
    has_sinks: ClassVar[bool] = False

    def __init__(self, module: Any, capability: tuple[int, int]) -> None:
        if missing := self.missing_from(module):
            raise EngineConfigError(f"this release of flash-attn {self.number} has no {missing}: run `{self.install}`")
        self.module = module
        self.capability = capability

    @classmethod
    def missing_from(cls, module: Any) -> str | None:
        """What a module lacks to be of this version; None: nothing."""
        for name, arguments in cls.calls.items():
            function = getattr(module, name, None)
            if function is None:
                return name
            known = inspect.signature(function).parameters
            if absent := [argument for argument in arguments if argument not in known]:
                return f"{name}({', '.join(f'{argument}=...' for argument in absent)})"
        return None

    def objection(self, layer: AttentionLayer) -> str | None:
        """Why this version cannot compute a layer's heads; None: it can."""
        head_size = layer.spec.head_size
        if head_size > self.largest_head_size or head_size % self.head_size_multiple:
            return (
                f"a head size of {head_size}, and flash-attn {self.number} takes multiples of "
                f"{self.head_size_multiple} up to {self.largest_head_size}"
            )
        if layer.has_sinks and not self.has_sinks:
            return f"sinks, which of flash-attn only version 4 knows, and this is {self.number}"
        return None

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: FlashPlan,
        *,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend to pages that hold the step's keys and values already.

        Args:
            query: ``[T, Hq, D]``, last dimension contiguous.
            keys: ``[num_blocks, block_size, Hkv, D]``, every other page of keys and values.
            values: As ``keys``.
            plan: The step.
            scale: Factor on the scores.
            softcap: 0: none.
            sinks: ``[Hq]``.

        Returns:
            ``[T, Hq, D]``.
        """


class FlashAttention2(FlashVersion):
    """``flash_attn``. In both functions pages are a multiple of 256 tokens."""

    number = 2
    modules = ("flash_attn",)
    distributions = ("flash-attn",)
    install = "pip install 'flash-attn>=2.6,<3' --no-build-isolation"
    # Built for 8.0, 9.0, 10.0 and 12.0, which covers the later minor numbers of each.
    capabilities = (8, 9, 10, 12)
    calls: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "flash_attn_with_kvcache": ("cache_seqlens", "block_table", "window_size", "softcap"),
        "flash_attn_varlen_func": ("cu_seqlens_q", "cu_seqlens_k", "block_table", "window_size", "softcap"),
    }
    page_multiple = 256
    default_block_size = 256

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: FlashPlan,
        *,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As the contract says."""
        how = {
            "block_table": plan.block_table,
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if plan.window is None else (plan.window - 1, 0),
            "softcap": softcap,
        }
        if plan.is_decode:
            # The only one of the two that splits long contexts among the multiprocessors. num_splits=0: as many as fit.
            decode = self.module.flash_attn_with_kvcache
            return decode(query[:, None], keys, values, cache_seqlens=plan.seq_lens, num_splits=0, **how)[:, 0]
        return self.module.flash_attn_varlen_func(
            query,
            keys,
            values,
            cu_seqlens_q=plan.query_start_loc,
            cu_seqlens_k=plan.key_start_loc,
            max_seqlen_q=plan.max_query_len,
            max_seqlen_k=plan.max_context_len,
            **how,
        )


class FlashAttention3(FlashVersion):
    """``flash_attn_interface``, for Hopper. Pages of any size; one function for prefill and decode."""

    number = 3
    modules = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
    distributions = ("flash-attn-3", "flash_attn_3")
    install = "cd flash-attention/hopper && python setup.py install"
    capabilities = (9,)
    calls: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "flash_attn_with_kvcache": ("cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "softcap")
    }

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: FlashPlan,
        *,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As the contract says."""
        return self.module.flash_attn_with_kvcache(
            query,
            keys,
            values,
            cache_seqlens=plan.seq_lens,
            page_table=plan.block_table,
            cu_seqlens_q=plan.query_start_loc,
            max_seqlen_q=plan.max_query_len,
            softmax_scale=scale,
            # Also for decodes: without, a right side of 0 counts as unbounded where there is one query.
            causal=True,
            window_size=(-1, -1) if plan.window is None else (plan.window - 1, 0),
            softcap=softcap,
            num_splits=0,  # as many as fit
        )


class FlashAttention4(FlashVersion):
    """``flash_attn.cute``, for Hopper and the large Blackwells; compiled at the first call of each kind.

    Pages of any size: one as long as a tile of keys (128 tokens for head sizes up to 128) comes in by TMA, others row
    by row. On Hopper it does not split a context among multiprocessors, so few long decodes leave most of them idle.
    """

    number = 4
    modules = ("flash_attn.cute",)
    distributions = ("flash-attn-4",)
    install = "pip install --pre flash-attn-4"
    # On 8.x and 12.x its kernels take no pages.
    capabilities = (9, 10, 11)
    calls: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "flash_attn_varlen_func": ("cu_seqlens_q", "seqused_k", "max_seqlen_q", "page_table", "softcap", "num_splits")
    }
    # Rows that come in one by one are 16 elements wide at least.
    head_size_multiple = 16
    has_sinks = True

    def objection(self, layer: AttentionLayer) -> str | None:
        """As for all, and on Blackwell there are no kernels for head sizes between 128 and 256."""
        head_size = layer.spec.head_size
        if self.capability[0] > 9 and 128 < head_size < 256:
            return f"a head size of {head_size}, and flash-attn 4 takes up to 128, or 256, on this GPU"
        return super().objection(layer)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: FlashPlan,
        *,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As the contract says."""
        splits = plan.is_decode and self.capability[0] > 9
        output, *_ = self.module.flash_attn_varlen_func(
            query,
            keys,
            values,
            cu_seqlens_q=plan.query_start_loc,
            seqused_k=plan.seq_lens,
            max_seqlen_q=plan.max_query_len,
            max_seqlen_k=plan.max_context_len,
            page_table=plan.block_table,
            softmax_scale=scale,
            causal=True,
            window_size=(None, None) if plan.window is None else (plan.window - 1, 0),
            learnable_sink=sinks,
            softcap=softcap,
            num_splits=0 if splits else 1,
        )
        return output


VERSIONS: dict[int, type[FlashVersion]] = {
    version.number: version for version in (FlashAttention2, FlashAttention3, FlashAttention4)
}
"""By major number."""


def version_of(module: Any, capability: tuple[int, int]) -> FlashVersion:
    """A module's version, told from its functions.

    Raises:
        EngineConfigError: It is none that is known here.
    """
    for version in VERSIONS.values():
        if version.missing_from(module) is None:
            return version(module, capability)
    lacking = "; ".join(f"{number}: no {version.missing_from(module)}" for number, version in VERSIONS.items())
    raise EngineConfigError(
        f"{getattr(module, '__name__', module)!r} is no flash-attn that is known here ({lacking}): pass flash_attn, "
        "flash_attn_interface or flash_attn.cute"
    )
