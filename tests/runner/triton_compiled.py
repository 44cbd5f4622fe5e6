"""What the compiler makes of the attention kernel's tile shapes, for cards that need not be there.

``python -m tests.runner.triton_compiled``, in a process that does not interpret: prints a line of JSON for each kernel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from runner.attention.triton_kernels import attention_kernel
from runner.attention.triton_launch import MIN_SPLIT_KEYS
from runner.attention.triton_shapes import (
    Card,
    TileShape,
    decode_shape,
    fitted,
    padded_head_size,
    prefill_shape,
    shared_bytes,
)

CARDS = {  # by compute capability: A100, L4, H200, RTX 5090
    80: Card(108, 166912, 8),
    89: Card(58, 101376, 8),
    90: Card(132, 232448, 9),
    120: Card(170, 101376, 12),
}
TYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
GROUP, KV_HEADS, PAGE = 4, 8, 16


@dataclass(frozen=True)
class Kernel:
    """One to compile."""

    kind: str  # "few decodes", "many decodes", "prefill" or "short prefill"
    capability: int
    head_size: int
    element: str

    @property
    def element_size(self) -> int:
        return 4 if self.element == "fp32" else 2

    @property
    def splits(self) -> bool:
        return self.kind in ("few decodes", "prefill")

    def shape(self) -> TileShape:
        """As it is launched."""
        if self.kind.endswith("decodes"):
            shape = decode_shape(GROUP, self.head_size, self.element_size, 1 if self.kind == "few decodes" else 9)
        else:
            most_queries = 4096 if self.kind == "prefill" else 64 // GROUP
            shape = prefill_shape(GROUP, self.head_size, self.element_size, most_queries)
        return fitted(shape, self.head_size, self.element_size, CARDS[self.capability])


def kernels() -> Iterator[Kernel]:
    """Shapes in bfloat16 on all cards, those of many decodes, which are small, on two; the other types each on one."""
    for number, head_size in enumerate((32, 64, 128, 256)):
        for capability in CARDS:
            for kind in ("few decodes", "prefill", "short prefill"):
                yield Kernel(kind, capability, head_size, "bf16")
        for capability in (89, 90):
            yield Kernel("many decodes", capability, head_size, "bf16")
        one, other = list(CARDS)[number], list(CARDS)[number - 1]
        for kind in ("few decodes", "prefill"):
            yield Kernel(kind, one, head_size, "fp16")
            yield Kernel(kind, other, head_size, "fp32")


def compiled_bytes(kernel: Kernel, shape: TileShape) -> int:
    """Shared memory of a program, as the compiler says."""
    constants: dict[str, Any] = {
        "NUM_KV_HEADS": KV_HEADS,
        "GROUP": GROUP,
        "HEAD_SIZE": kernel.head_size,
        "PAGE": PAGE,
        "WINDOW": 0,
        "CHUNK": 0,
        "HAS_SOFTCAP": False,
        "HAS_SINKS": False,
        "SPLIT": kernel.splits,
        "MIN_SPLIT_TILES": max(MIN_SPLIT_KEYS // shape.block_n, 1),
        "TILE_IS_SEQUENCE": kernel.kind.endswith("decodes"),
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "BLOCK_D": padded_head_size(kernel.head_size),
        "DOT_TYPE": TYPES[kernel.element],
        "sinks": None,
    }
    if not kernel.splits:
        constants |= {"partial_out": None, "partial_sums": None}
    types = dict.fromkeys(("query", "kv_cache", "out"), f"*{kernel.element}")
    types |= dict.fromkeys(("partial_out", "partial_sums"), "*fp32")
    types |= dict.fromkeys(("block_table", "query_start_loc", "seq_lens"), "*i32")
    types |= dict.fromkeys(("scale", "softcap"), "fp32")
    names = attention_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [name for name in names if signature[name].startswith("*")] + ["query_token_stride", "query_head_stride"]
    source = ASTSource(
        attention_kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", kernel.capability, 32), options=options)
    return int(compiled.metadata.shared)


def main() -> None:
    # The assembler takes half of the time and does not change the figure.
    CUDABackend.make_cubin = lambda *_, **__: b""
    for kernel in kernels():
        shape, card = kernel.shape(), CARDS[kernel.capability]
        row = {
            **asdict(kernel),
            **asdict(shape),
            "compiled": compiled_bytes(kernel, shape),
            "computed": shared_bytes(shape, kernel.head_size, kernel.element_size, card),
            "available": card.shared_bytes,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
