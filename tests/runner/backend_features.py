"""What each attention backend takes, as a table, found by asking each one.

``python -m tests.runner.backend_features`` writes it into ``docs/backends.md``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

# First: where there is no GPU, it makes Triton interpret, which has to be said before anything imports Triton.
from tests.runner import triton_steps  # noqa: F401

# isort: split
from kvcore.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from runner.attention import AttentionBackend, AttentionLayer, TorchBackend
from runner.attention.flash_backend import FlashAttentionBackend
from runner.attention.native_backend import NativeBackend
from runner.errors import UnsupportedModelError
from tests.runner.flash_stand_ins import STAND_INS, flash_attn_4

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"
BEGIN, END = "<!-- features: begin -->", "<!-- features: end -->"

DTYPES = ("bfloat16", "float16", "float32", "float64")
SIZES = range(1, 1025)


def backends() -> dict[str, AttentionBackend]:
    """Each backend, and each version of flash-attn where it differs, by the name of its row."""
    from runner.attention.triton_backend import TritonBackend

    return {
        "`torch`": TorchBackend(),
        "`native`": NativeBackend(),
        "`triton`": TritonBackend(),
        "`flash`, flash-attn 2": FlashAttentionBackend(STAND_INS[2](), capability=(8, 0)),
        "`flash`, flash-attn 3": FlashAttentionBackend(STAND_INS[3](), capability=(9, 0)),
        "`flash`, flash-attn 4 on Hopper": FlashAttentionBackend(flash_attn_4((9, 0)), capability=(9, 0)),
        "`flash`, flash-attn 4 on Blackwell": FlashAttentionBackend(flash_attn_4((10, 0)), capability=(10, 0)),
    }


def takes(
    backend: AttentionBackend,
    *,
    kind: str = "full",
    block_size: int = 256,
    head_size: int = 64,
    dtype: str = "bfloat16",
    softcap: float | None = None,
    has_sinks: bool = False,
) -> bool:
    """Whether a backend agrees to such a layer on a CUDA device, or on a CPU if that is where it computes."""
    shape = (block_size, 2, head_size, dtype)
    spec = {
        "full": FullAttentionSpec(*shape),
        "window": SlidingWindowSpec(*shape, sliding_window=100),
        "chunk": ChunkedLocalAttentionSpec(*shape, attention_chunk_size=100),
    }[kind]
    layer = AttentionLayer("layer", spec, 4, softcap=softcap, has_sinks=has_sinks)
    try:
        device = torch.device("cpu" if isinstance(backend, NativeBackend) else "cuda")
        backend.check([layer], device=device, dtype=getattr(torch, dtype))
    except UnsupportedModelError:
        return False
    return True


KNOWN_SETS: dict[str, Callable[[int], bool]] = {
    "any": lambda n: True,
    "up to 256": lambda n: n <= 256,
    "multiples of 8 up to 256": lambda n: n % 8 == 0 and n <= 256,
    "multiples of 16 up to 256": lambda n: n % 16 == 0 and n <= 256,
    "multiples of 16 up to 128, and 256": lambda n: n % 16 == 0 and (n <= 128 or n == 256),
    "powers of two from 16": lambda n: n >= 16 and n & (n - 1) == 0,
    "multiples of 256": lambda n: n % 256 == 0,
}


def described(taken: list[int]) -> str:
    """Which of the first 1,024 numbers these are, in words.

    Raises:
        LookupError: There are none for them yet.
    """
    for words, belongs in KNOWN_SETS.items():
        if taken == [n for n in SIZES if belongs(n)]:
            return words
    raise LookupError(f"no words in KNOWN_SETS for {taken[:40]}...: add them")


def row(name: str, backend: AttentionBackend) -> list[str]:
    """A backend's row of the table."""

    def yes(taken: bool) -> str:
        return "yes" if taken else "refused"

    return [
        name,
        described([n for n in SIZES if takes(backend, block_size=n)]),
        str(backend.default_block_size),
        described([n for n in SIZES if takes(backend, head_size=n)]),
        ", ".join(dtype for dtype in DTYPES if takes(backend, dtype=dtype)),
        yes(takes(backend, kind="window")),
        yes(takes(backend, kind="chunk")),
        yes(takes(backend, softcap=30.0)),
        yes(takes(backend, has_sinks=True)),
        "yes" if backend.supports_graphs else "no",
    ]


HEADINGS = [
    "backend",
    "tokens of a page",
    "if none named",
    "head sizes",
    "element types",
    "windows",
    "chunks",
    "softcap",
    "sinks",
    "CUDA graphs",
]


def feature_table() -> str:
    """In Markdown."""
    rows = [HEADINGS, ["---"] * len(HEADINGS), *(row(name, backend) for name, backend in backends().items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def main() -> None:
    """Write the table into the page, if it says something else."""
    text = PAGE.read_text("utf-8")
    between = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?=\n{re.escape(END)})", re.DOTALL)
    new = between.sub(f"\n{feature_table()}\n", text)
    if new != text:
        PAGE.write_text(new, "utf-8")
    print(f"docs/{PAGE.name} {'is new' if new != text else 'stands as it was'}")


if __name__ == "__main__":
    main()
