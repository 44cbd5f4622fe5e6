"""Measures what the native kernels save on a CPU: products with few rows, decoder layers, attention.

Weights and caches have the sizes of SmolLM2-135M's, each layer its own, so that they come from memory and not from a
cache of the CPU. Prints Markdown tables; progress goes to the standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from kvcore import KVCacheConfig, KVCacheGroupSpec
from kvcore.blocks import KVCacheBlock
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.spec import FullAttentionSpec
from runner.attention import AttentionBackend, TorchBackend
from runner.attention.native_backend import NativeBackend
from runner.batch import GroupBatch, SequenceSlice
from runner.hf_attention import ATTENTION_NAME, BoundLayer, PagedStep, register
from runner.native.build import NativeUnavailableError
from runner.native.kernels import native_kernels
from runner.native_attentions import use_native_attentions
from runner.native_layers import NativeLayer, use_native_layers
from runner.native_mlps import use_native_mlps
from runner.native_modules import restore_modules
from runner.native_norms import use_native_norms
from runner.packed_linear import pack_linear_layers
from runner.packed_products import MklForm, NativeForm, PackedForm
from runner.step_inputs import make_batch
from tests.bench import peer, report

SHAPES = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
"""``[N, K]`` of a layer's linear layers."""

HEAD = (49152, 576)
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 4
ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
STEPS = {
    "1 sequence of 784 tokens": (1, 784, 0),
    "16 of 784, 736 of them shared": (16, 784, 736),
    "16 of 784, nothing shared": (16, 784, 0),
    "1 of 8,192": (1, 8192, 0),
    "16 of 8,192, 8,144 shared": (16, 8192, 8144),
}
"""Sequences, tokens of each, and how many of them are the same blocks."""


def seconds(compute: Callable[[], object], repetitions: int) -> float:
    """The median, after one that is not counted."""
    compute()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        compute()
        times.append(time.perf_counter() - start)
    return median(times)


def products(num_layers: int, repetitions: int) -> Iterator[list[str]]:
    """All products of one step of the model, in milliseconds, for each number of rows."""
    weights = [torch.randn(shape) for _ in range(num_layers) for shape in SHAPES] + [torch.randn(HEAD)]
    forms: dict[str, PackedForm] = {"native": NativeForm(native_kernels(), weights)}
    if MklForm.is_available():
        forms["MKL, packed"] = MklForm()
    packed = {name: [form.pack(weight) for weight in weights] for name, form in forms.items()}

    def by_form(name: str, inputs: dict[int, torch.Tensor]) -> None:
        for weight, ready in zip(weights, packed[name], strict=True):
            forms[name].product(inputs[weight.shape[1]], ready, weight, None)

    def plainly(inputs: dict[int, torch.Tensor]) -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    yield ["rows", *forms, "`F.linear`"]
    for rows in ROWS:
        peer.progress(f"products of {rows} rows")
        inputs = {size: torch.randn(rows, size) for size in (576, 1536)}
        times = [seconds(partial(by_form, name, inputs), repetitions) for name in forms]
        times.append(seconds(partial(plainly, inputs), repetitions))
        yield [f"{rows}", *(report.number(1e3 * time) for time in times)]


def decoder_layers(num_layers: int, repetitions: int) -> Iterator[list[str]]:
    """All decoder layers of one step of the model, in milliseconds, each row a sequence of 16 tokens."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": NUM_HEADS}
    register()
    with torch.inference_mode(False):
        config = LlamaConfig(**sizes, num_key_value_heads=NUM_KV_HEADS, attn_implementation=ATTENTION_NAME)
        model = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(num_layers)).eval()
    pack_linear_layers(model, whatever_it_takes=True)
    backend = NativeBackend()
    yield ["rows", "one call", "a call a part", "native products"]
    for rows in ROWS:
        peer.progress(f"decoder layers of {rows} rows")
        batch, num_blocks = decode_step(rows, 16, 0)
        shape = (num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
        layers = {i: BoundLayer(0, torch.full(shape, 0.5)) for i in range(num_layers)}
        step = PagedStep(backend, [backend.plan(batch)], layers)
        angles = torch.randn(1, rows, HEAD_SIZE)
        compute = partial(
            call_each,
            model,
            torch.randn(1, rows, 576),
            position_embeddings=(angles.cos(), angles.sin()),
            attention_mask=None,
            paged_step=step,
        )
        for use_native in (use_native_norms, use_native_mlps, use_native_attentions):
            use_native(model)
        if use_native_layers(model) != num_layers:
            sys.exit("LlamaDecoderLayer is not taken for a decoder layer: there is nothing to compare")
        times = [seconds(compute, repetitions)]
        restore_modules(model, NativeLayer)
        times.append(seconds(compute, repetitions))
        restore_modules(model)
        times.append(seconds(compute, repetitions))
        yield [f"{rows}", *(report.number(1e3 * time) for time in times)]


def call_each(modules: nn.ModuleList, hidden_states: torch.Tensor, **given: Any) -> None:
    """One after the other, as a model does."""
    for module in modules:
        hidden_states = module(hidden_states, **given)


def attention(num_layers: int, repetitions: int) -> Iterator[list[str]]:
    """All attention of one step, in milliseconds, for each kind of step."""
    backends: list[AttentionBackend] = [NativeBackend(), TorchBackend()]
    yield ["one new token for each of", *(f"`{backend.name}`" for backend in backends)]
    for name, (num_sequences, num_tokens, num_shared) in STEPS.items():
        peer.progress(f"attention: {name}")
        batch, num_blocks = decode_step(num_sequences, num_tokens, num_shared)
        shape = (num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
        caches = [torch.full(shape, 0.5) for _ in range(num_layers)]
        times = [seconds(partial(attend, backend, batch, caches), repetitions) for backend in backends]
        yield [name, *(report.number(1e3 * time) for time in times)]


def attend(backend: AttentionBackend, batch: GroupBatch, caches: Sequence[torch.Tensor]) -> None:
    """Plan a step and compute it, in every layer."""
    num_tokens = len(batch.slot_mapping)
    query = torch.ones(num_tokens, NUM_HEADS, HEAD_SIZE)
    key = value = torch.ones(num_tokens, NUM_KV_HEADS, HEAD_SIZE)
    plan = backend.plan(batch)
    for cache in caches:
        backend.forward(query, key, value, cache, plan, scale=HEAD_SIZE**-0.5)


def decode_step(num_sequences: int, num_tokens: int, num_shared: int) -> tuple[GroupBatch, int]:
    """A step that computes the last token of each sequence, and the blocks of a cache for it."""
    shared = [KVCacheBlock(1 + i) for i in range(num_shared // BLOCK_SIZE)]
    num_own = num_tokens // BLOCK_SIZE - len(shared)
    sequences = []
    for i in range(num_sequences):
        first = 1 + len(shared) + i * num_own
        table = [*shared, *(KVCacheBlock(first + j) for j in range(num_own))]
        sequences.append(SequenceSlice(f"{i}", [1], num_tokens - 1, KVCacheBlocks((table,)), samples=True))
    num_blocks = 1 + len(shared) + num_sequences * num_own
    spec = FullAttentionSpec(BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, "float32")
    config = KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layer"], spec)])
    return make_batch(sequences, config, "cpu").groups[0], num_blocks


def table(rows: Sequence[Sequence[str]]) -> str:
    """In Markdown, the first row as headings."""
    lines = [rows[0], ["--:"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="that torch computes with (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=30, help="of the model (default: %(default)s)")
    parser.add_argument(
        "--reps", type=int, default=9, help="repetitions, of which the median counts (default: %(default)s)"
    )
    parser.add_argument("--update-docs", action="store_true", help="put the tables into docs/performance.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        native_kernels()
    except NativeUnavailableError as error:
        sys.exit(f"there are no native kernels to measure: {error}")
    with torch.inference_mode():
        text = (
            f"All products of a step with SmolLM2-135M's weights in float32, in milliseconds:\n\n"
            f"{table(list(products(args.layers, args.reps)))}\n\n"
            "All decoder layers of a decode step with contexts of 16 tokens, in milliseconds: in one call each; in one "
            "for each norm, MLP and what attention begins with; and by native products and attention, and torch's "
            f"operations:\n\n{table(list(decoder_layers(args.layers, args.reps)))}\n\n"
            f"All attention of a decode step, in milliseconds:\n\n{table(list(attention(args.layers, args.reps)))}\n\n"
            f"{args.layers} layers, {args.threads} threads, torch {torch.__version__}, {report.machine()['processor']}."
        )
    print(text)
    if args.update_docs:
        report.update_section("native", text)


if __name__ == "__main__":
    main()
