"""Paged attention by flash-attn: whichever version is installed and fits the GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from kvcore.spec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec, cdiv
from runner.attention.base import AttentionBackend, AttentionLayer, has_triton
from runner.attention.flash_versions import VERSIONS, FlashPlan, FlashVersion, version_of
from runner.attention.triton_shapes import LARGEST_HEAD, takes_pages_of
from runner.batch import GroupBatch
from runner.errors import EngineConfigError, UnsupportedModelError

DTYPES = (torch.bfloat16, torch.float16)

SHORTEST_TMA_PAGE = 64
"""Tokens of the shortest page that flash-attn 3 and 4 may load as a whole, the rest of a tile uncleared."""

PREFERENCE = {8: (2,), 9: (3, 4, 2), 10: (4, 2), 11: (4,), 12: (2,)}
"""Versions by the major number of the compute capability, the fastest with pages first."""


class FlashAttentionBackend(AttentionBackend):
    """Half precision on CUDA. Keys and values are stored by this package's own kernel, flash-attn only attends.

    flash-attn multiplies whole tiles of keys, those that a query does not read by 0, and 0 times NaN is NaN. Before a
    window it is given no page that the sequence does not hold. Behind the end of a context it clears what it loads, but
    for flash-attn 3 and 4 with pages of 64 tokens or more, where tiles may come in by TMA: there alone, what an earlier
    owner left in a sequence's last page has to be finite.

    Args:
        module: flash-attn: ``flash_attn``, ``flash_attn_interface`` or ``flash_attn.cute``.
        capability: Compute capability of the device, major and minor.
        device_type: Where the module's functions run; "cpu" for a stand-in.
        choice: Why this version, for :meth:`describe`.

    Attributes:
        version: What the module can, and how it is called.

    Raises:
        EngineConfigError: The module is no version that is known here, or does not run on that capability.
    """

    name: ClassVar[str] = "flash"
    supports_graphs: ClassVar[bool] = True

    def __init__(
        self, module: Any, *, capability: tuple[int, int] = (9, 0), device_type: str = "cuda", choice: str = ""
    ) -> None:
        self.version = version_of(module, capability)
        if capability[0] not in self.version.capabilities:
            raise EngineConfigError(_unfit(type(self.version), capability))
        self._device_type = device_type
        self._choice = choice

    def __repr__(self) -> str:
        return f"FlashAttentionBackend(flash-attn {self.version.number}, {_dotted(self.version.capability)})"

    @classmethod
    def for_device(
        cls,
        device: torch.device | str,
        *,
        capability: tuple[int, int] | None = None,
        load: Callable[[str], Any] = importlib.import_module,
    ) -> FlashAttentionBackend:
        """With the version that is installed and suits a GPU best.

        Args:
            device: A CUDA device.
            capability: Its compute capability; None: asks it.
            load: Imports a module by name.

        Raises:
            EngineConfigError: The device is none of CUDA, or nothing fits it, or Triton is missing; says what was found
                and what to install.
        """
        device = torch.device(device)
        if device.type != "cuda":
            raise EngineConfigError(
                f"attention_backend='flash' needs a CUDA device, the model is on {device}: use "
                "attention_backend='torch'"
            )
        if not has_triton():
            raise EngineConfigError(
                "attention_backend='flash' stores keys and values with a Triton kernel, and Triton is not installed: "
                "run `pip install 'kvcore[cuda]'`"
            )
        capability = capability or torch.cuda.get_device_capability(device)
        preferred = PREFERENCE.get(capability[0], ())
        passed_over: list[str] = []
        for number in preferred:
            try:
                module = _import(VERSIONS[number], load)
            except EngineConfigError as error:
                passed_over.append(str(error))
                continue
            reason = f"compute capability {_dotted(capability)}"
            return cls(module, capability=capability, choice="; ".join([reason, *passed_over]))
        passed_over += [_unfit(version, capability) for n, version in VERSIONS.items() if n not in preferred]
        installs = [f"`{VERSIONS[number].install}`" for number in preferred]
        remedy = f"install one that fits ({' or '.join(installs)}), or use" if installs else "use"
        raise EngineConfigError(
            f"attention_backend='flash' finds no flash-attn for compute capability {_dotted(capability)} "
            f"({'; '.join(passed_over)}): {remedy} attention_backend='triton'"
        )

    @property
    def default_block_size(self) -> int:
        """16, or 256 where the version takes no less."""
        return self.version.default_block_size

    @property
    def page_multiple(self) -> int:
        """Tokens of a page, and with them those that a prefix hit counts in, are a multiple of this."""
        return self.version.page_multiple

    def clears_what_it_skips(self, spec: KVCacheSpec) -> bool:
        """Whether NaN behind the end of a context, in the last page of a sequence, never comes through."""
        return self.version.number == 2 or spec.block_size < SHORTEST_TMA_PAGE

    @property
    def page_note(self) -> str | None:
        """For the start report, behind what prefix hits count in: why that much, and what helps. None: no reason to."""
        if self.page_multiple == 1:
            return None
        return (
            f"flash-attn {self.version.number} takes no pages under {self.page_multiple} tokens; "
            "attention_backend='triton' does"
        )

    def describe(self) -> str:
        """Which release of flash-attn, and why that one."""
        release = f"flash: flash-attn {_installed(self.version) or self.version.number}"
        return f"{release} ({self._choice})" if self._choice else release

    def check(self, layers: Sequence[AttentionLayer], *, device: torch.device, dtype: torch.dtype) -> None:
        """Refuses what the version cannot compute."""
        if device.type != self._device_type:
            raise UnsupportedModelError(
                f"flash-attn runs on {self._device_type}, the model is on {device}: use attention_backend='torch'"
            )
        if dtype not in DTYPES:
            raise UnsupportedModelError(
                f"flash-attn computes in bfloat16 or float16, the model is in {str(dtype).removeprefix('torch.')}: "
                f"pass dtype='bfloat16', or use attention_backend={_instead(dtype)!r}"
            )
        for layer in layers:
            block_size, multiple = layer.spec.block_size, self.page_multiple
            instead = _instead(dtype, layer.spec)
            if block_size % multiple:
                raise UnsupportedModelError(
                    f"{layer.name} has pages of {block_size} tokens, and flash-attn {self.version.number} takes "
                    f"multiples of {multiple}: pass block_size={cdiv(block_size, multiple) * multiple} (prefix hits "
                    f"are then multiples of that), or use attention_backend={instead!r}"
                )
            need = self.version.objection(layer)
            if isinstance(layer.spec, ChunkedLocalAttentionSpec):
                need = "attention within chunks, which no flash-attn documents"
            if need:
                raise UnsupportedModelError(f"{layer.name} needs {need}: use attention_backend={instead!r}")

    def plan(self, batch: GroupBatch) -> FlashPlan:
        """Names what the batch holds already; for windows, see :func:`_within_window`. O(sequences)."""
        plan = FlashPlan(
            slot_mapping=batch.slot_mapping,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            window=None,
            max_query_len=max(batch.query_lens),
            max_context_len=max(batch.context_lens),
        )
        spec = batch.spec
        if isinstance(spec, SlidingWindowSpec):
            return _within_window(plan, spec.sliding_window, spec.block_size)
        return plan

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: FlashPlan,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the contract says."""
        _store(key, value, kv_cache, plan.slot_mapping)
        keys, values = kv_cache.unbind(1)  # [num_blocks, block_size, Hkv, D] each
        return self.version.attend(query, keys, values, plan, scale=scale, softcap=softcap or 0.0, sinks=sinks)


def _within_window(plan: FlashPlan, window: int, block_size: int) -> FlashPlan:
    """The same step without the pages that lie wholly before the window of each sequence's first query.

    Masks count from the end of a context, so its beginning can be left out. Then no tile reaches into pages that the
    sequence has given back, and splits of a context are splits of what is read.
    """
    query_lens = plan.query_start_loc.diff()  # [B]
    skipped = (plan.seq_lens - query_lens - (window - 1)).clamp(min=0) // block_size  # [B], pages
    # From the oldest key read to the last one, and up to a page before it.
    width = min(plan.block_table.shape[1], cdiv(window - 1 + plan.max_query_len, block_size) + 1)
    columns = skipped[:, None] + torch.arange(width, device=skipped.device)  # [B, width]
    return replace(
        plan,
        seq_lens=plan.seq_lens - skipped * block_size,
        # Columns behind the end of a row stand for nothing: any entry will do.
        block_table=plan.block_table.gather(1, columns.clamp(max=plan.block_table.shape[1] - 1).long()),
        window=window,
        max_context_len=min(plan.max_context_len, width * block_size),
    )


def _store(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write keys and values ``[T, Hkv, D]`` to their slots, except those whose slot is -1."""
    if kv_cache.is_cuda:
        from runner.attention.triton_ops import store_kv  # Triton is not there where there is no GPU

        store_kv(key, value, kv_cache, slot_mapping)
        return
    # A token that goes nowhere writes to slot 0, which is no one's, what is there: no shape depends on what slots hold.
    written = (slot_mapping >= 0)[:, None, None]
    slots, block_size = slot_mapping.clamp(min=0), kv_cache.shape[2]
    for part, new in enumerate((key, value)):
        rows = (slots // block_size, part, slots % block_size)
        kv_cache[rows] = torch.where(written, new, kv_cache[rows])


def _instead(dtype: torch.dtype, spec: KVCacheSpec | None = None) -> str:
    """The fastest backend that takes what flash-attn does not."""
    if dtype == torch.float64:
        return "torch"
    if spec is None:
        return "triton"
    return "triton" if spec.head_size <= LARGEST_HEAD and takes_pages_of(spec.block_size) else "torch"


def _import(version: type[FlashVersion], load: Callable[[str], Any]) -> Any:
    """The module of a version.

    Raises:
        EngineConfigError: It is not installed, cannot be imported, or is too old; says which.
    """
    problem = f"flash-attn {version.number} is not installed"
    for name in version.modules:
        try:
            module = load(name)
        except ModuleNotFoundError as error:
            if error.name and not name.startswith(error.name):
                problem = f"flash-attn {version.number} cannot be imported: {error}"
        except Exception as error:  # a library that does not fit this torch says so in many ways
            problem = f"flash-attn {version.number} cannot be imported: {error}"
        else:
            missing = version.missing_from(module)
            if missing is None:
                return module
            # flash-attn 4 by itself makes an empty package of that name.
            if getattr(module, "__file__", None) is not None:
                problem = f"flash-attn {version.number} is too old, it has no {missing}"
    raise EngineConfigError(problem)


def _installed(version: FlashVersion) -> str | None:
    """The release of a version that is installed."""
    for name in version.distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _unfit(version: type[FlashVersion], capability: tuple[int, int]) -> str:
    majors = ", ".join(f"{major}.x" for major in version.capabilities)
    return f"flash-attn {version.number} is for compute capability {majors}, this GPU has {_dotted(capability)}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
