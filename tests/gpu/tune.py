"""Times the Triton attention kernel over tile shapes and splits: what the defaults of ``triton_launch`` rest on.

``python -m tests.gpu.tune --json tuned.json`` on a machine with a CUDA device; ``--tiny`` runs every line on a CPU, in
Triton's interpreter, where times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

# Before Triton: without a GPU, it says that the kernels are to be interpreted.
from tests.gpu.tune_step import DEVICE, FULL, ON_GPU, TINY, Sizes, Step, seconds  # isort: split

import triton

from kvcore.spec import KVCacheSpec, cdiv
from runner.attention import triton_ops
from runner.attention.triton_backend import card_of
from runner.attention.triton_launch import Launch, plan_launches
from runner.attention.triton_shapes import TileShape, decode_block_m, power_of_two_from
from tests.gpu.check import positive
from tests.gpu.timing import copy_bandwidth

SHAPES_OF_DECODE = [  # block_n, warps, stages
    *((32, 2, stages) for stages in (3, 4)),
    *((32, 4, stages) for stages in (3, 4, 5)),
    *((64, 2, stages) for stages in (2, 3)),
    *((64, 4, stages) for stages in (2, 3, 4)),
    *((64, 8, stages) for stages in (2, 3)),
    *((128, 4, stages) for stages in (2, 3)),
    *((128, 8, stages) for stages in (2, 3)),
]
SHAPES_OF_PREFILL = [  # block_m, block_n, warps, stages; what spills for a head size of 128 is left out
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (128, 32, 8, 3),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 8, 4),
    (128, 128, 8, 2),
    (128, 128, 8, 3),
]


def launches_of_decode(step: Step, sizes: Sizes, shapes: Iterable[tuple[int, int, int]]) -> list[Launch]:
    """Every shape with some splits around what fills the device."""
    programs = step.batch * sizes.num_kv_heads
    processors = torch.cuda.get_device_properties(0).multi_processor_count if ON_GPU else 4
    keys = min(step.context, step.window or step.context)
    splits = sorted({min(max(1, round(k * processors / programs)), cdiv(keys, 256)) for k in (1, 2, 4, 8, 16)})
    return [
        Launch(
            TileShape(decode_block_m(step.group_size), *shape),
            num_tiles=step.batch,
            num_splits=count,
            tile_is_sequence=True,
        )
        for shape in shapes
        for count in splits
    ]


def launches_of_prefill(step: Step, shapes: Iterable[tuple[int, int, int, int]]) -> list[Launch]:
    return [
        Launch(
            TileShape(*shape),
            num_tiles=cdiv(step.num_queries, shape[0] // step.group_size) + 1,
            most_queries=step.num_queries,
        )
        for shape in shapes
    ]


def default_launch(step: Step) -> Launch:
    (launch,) = plan_launches(
        step.spec,
        [step.num_queries] * step.batch,
        [step.context] * step.batch,
        group_size=step.group_size,
        element_size=step.cache.element_size(),
        card=card_of(step.cache.device),
    )
    return launch


def compile_one(spec: KVCacheSpec, launch: Launch, sizes: Sizes) -> None:
    """Leave what a launch needs in Triton's cache on disk. Runs in a process of its own: compiling takes one core."""
    query = torch.zeros(1, sizes.num_query_heads, sizes.head_size, dtype=sizes.dtype, device=DEVICE)
    cache_shape = (1, 2, spec.block_size, sizes.num_kv_heads, sizes.head_size)
    numbers = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    triton_ops.paged_attention(
        query,
        torch.zeros(cache_shape, dtype=sizes.dtype, device=DEVICE),
        torch.zeros_like(query),
        block_table=numbers[None, :1],
        query_start_loc=numbers,
        seq_lens=numbers[:1],
        launch=replace(launch, num_tiles=1),
        scale=1.0,
        window=getattr(spec, "sliding_window", 0),
        compile_only=True,
    )


def compile_all(pool: Executor, launches: Iterable[tuple[KVCacheSpec, Launch]], sizes: Sizes) -> list[Future[None]]:
    """Start compiling in ``pool``: once for all launches that run the same code."""
    kernels: dict[Any, tuple[KVCacheSpec, Launch]] = {}
    for spec, launch in launches:
        kernels[spec, launch.shape, launch.num_splits > 1] = spec, launch
        # The second kernel depends on the number of splits, rounded up to a power of two.
        kernels[launch.shape.block_m, power_of_two_from(launch.num_splits)] = spec, launch
    return [pool.submit(compile_one, spec, launch, sizes) for spec, launch in set(kernels.values())]


def measure(step: Step, launch: Launch, sizes: Sizes, copy_rate: float) -> dict[str, Any]:
    """One row of the results."""
    row: dict[str, Any] = {
        "batch": step.batch,
        "context": step.context,
        "window": step.window,
        "queries": step.num_queries,
        "page": step.spec.block_size,
        **asdict(launch.shape),
        "splits": launch.num_splits,
    }
    try:
        step.out.fill_(float("nan"))
        step.run(launch)
        row["error"] = step.error()
        row["seconds"] = seconds(lambda turn: step.run(launch, turn), sizes.repeats)
    except Exception as error:  # out of shared memory, or a shape that does not compile
        return {**row, "failed": f"{type(error).__name__}: {error}"[:200]}
    row["of_copy"] = step.bytes_read / row["seconds"] / copy_rate
    row["tflops"] = step.operations / row["seconds"] / 1e12
    return row


def show(title: str, rows: list[dict[str, Any]], default: dict[str, Any], *, most: int = 6) -> None:
    """The best rows, and where the default stands."""
    good = sorted((r for r in rows if "failed" not in r and r["error"] < 2e-2), key=lambda row: row["seconds"])
    print(f"\n{title}: {len(rows)} launches, {len(rows) - len(good)} failed or wrong")
    for label, row in (*(("", row) for row in good[:most]), ("default", default)):
        if "failed" in row:
            print(f"  {label} {row['failed']}")
            continue
        print(
            f"  {row['block_m']:3}x{row['block_n']:<3} {row['num_warps']}w {row['num_stages']}s "
            f"{row['splits']:3} splits "
            f"{row['seconds'] * 1e6:9.1f} us  {row['of_copy']:6.1%} of copy  {row['tflops']:6.1f} TFLOP/s "
            f"error {row['error']:.1e} {label}",
            flush=True,
        )
    for row in [row for row in rows if "failed" in row or not row["error"] < 2e-2][:3]:
        print("  not good:", {key: value for key, value in row.items() if key not in ("batch", "context")}, flush=True)


def beside_sdpa(step: Step, sizes: Sizes) -> float:
    """TFLOP/s of PyTorch on the same prefill without pages."""
    keys, values = (tensor[None].contiguous() for tensor in step.keys_and_values(0))  # [1, Hkv, S, D]
    query = step.query.transpose(0, 1)[None].contiguous()
    time_taken = seconds(
        lambda _: F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True), sizes.repeats
    )
    return step.operations / time_taken / 1e12


def store_microseconds(step: Step, sizes: Sizes, num_tokens: int) -> float:
    """Of :func:`~runner.attention.triton_ops.store_kv`."""
    key = torch.randn(2, num_tokens, sizes.num_kv_heads, sizes.head_size, device=DEVICE).to(sizes.dtype)
    slots = torch.randperm(step.cache.shape[0] * step.spec.block_size)[:num_tokens].to(DEVICE)
    kept = step.cache.clone()
    taken = seconds(lambda _: triton_ops.store_kv(key[0], key[1], step.cache, slots), sizes.repeats)
    step.cache.copy_(kept)
    return taken * 1e6


def host_microseconds(step: Step, launch: Launch) -> float:
    """What a call costs the host, launches included."""
    calls = 100 if ON_GPU else 1
    begin = time.perf_counter()
    for turn in range(calls):
        step.run(launch, turn)
    taken = time.perf_counter() - begin
    if ON_GPU:
        torch.cuda.synchronize()
    return taken / calls * 1e6


def tune(sizes: Sizes, pool: Executor, *, minutes: float, path: Path | None, thorough: bool) -> dict[str, Any]:
    """Everything, as far as the time allows; what is not reached is named."""
    began = time.monotonic()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_second": copy_bandwidth() if ON_GPU else 1e9,
        "rows": [],
        "not_reached": [],
    }
    copy_rate = results["copy_bytes_per_second"]
    print(f"{results['device']}, copy {copy_rate / 1e12:.3f} TB/s read and written", flush=True)

    def save() -> None:
        if path is not None:
            path.write_text(json.dumps(results, indent=1))

    parts: list[tuple[str, Step, list[Launch]]] = []
    for page in sizes.pages:
        for batch, context, window in sizes.decodes:
            step = Step(sizes, page, batch, context, window, 1)
            shapes = SHAPES_OF_DECODE if thorough else SHAPES_OF_DECODE[2:4]
            if window or page == sizes.pages[-1]:
                shapes = [shape for shape in shapes if shape[1:] in ((4, 3), (4, 4), (4, 2))]  # the likely ones
            title = f"decode of {batch} x {context}, window {window}, pages of {page}"
            parts.append((title, step, launches_of_decode(step, sizes, shapes)))
        for window in (0, sizes.decodes[-1][2]):
            step = Step(sizes, page, 1, sizes.prefill, window, sizes.prefill)
            prefill_shapes = SHAPES_OF_PREFILL if thorough else [(16, 32, 4, 2), (64, 16, 4, 3)]
            if window or page == sizes.pages[-1]:
                prefill_shapes = [shape for shape in prefill_shapes if shape[3] < 4][::2]
            title = f"prefill of {sizes.prefill}, window {window}, pages of {page}"
            parts.append((title, step, launches_of_prefill(step, prefill_shapes)))
    compiled = {
        page: compile_all(
            pool,
            [
                (s.spec, launch)
                for _, s, of in parts
                if s.spec.block_size == page
                for launch in (*of, default_launch(s))
            ],
            sizes,
        )
        for page in sizes.pages
    }
    for page in sizes.pages:
        of_page = [part for part in parts if part[1].spec.block_size == page]
        wait(compiled[page])
        print(f"\npages of {page}: {len(compiled[page])} compiled after {time.monotonic() - began:.1f} s", flush=True)
        for title, step, launches in of_page:
            if time.monotonic() - began > minutes * 60:
                results["not_reached"].append(title)
                continue
            rows = [measure(step, launch, sizes, copy_rate) for launch in launches]
            default = {**measure(step, default_launch(step), sizes, copy_rate), "default": True}
            results["rows"] += [*rows, default]
            show(title, rows, default)
            save()
    _, step, _ = parts[0]
    long_step = next(step for title, step, _ in parts if title.startswith("prefill"))
    results["sdpa_tflops"] = beside_sdpa(long_step, sizes)
    results["store_microseconds"] = {n: store_microseconds(step, sizes, n) for n in (step.batch, sizes.prefill)}
    whole = default_launch(step)
    results["host_microseconds"] = {
        "one kernel": host_microseconds(step, replace(whole, num_splits=1)),
        "two kernels": host_microseconds(step, replace(whole, num_splits=2)),
    }
    results["seconds"] = time.monotonic() - began
    print({key: value for key, value in results.items() if key != "rows"}, flush=True)
    save()
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.tune", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write all results")
    parser.add_argument("--minutes", type=positive, default=2.5, help="start nothing new after so many")
    parser.add_argument("--tiny", action="store_true", help="small sizes and few shapes: does every line run?")
    options = parser.parse_args(arguments)
    if not ON_GPU and not options.tiny:
        parser.error("no CUDA device: only --tiny can run here")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    gc.freeze()  # a capture collects garbage first
    # Spawned: a process that uses CUDA cannot fork. In the interpreter there is nothing to compile.
    workers = max(1, (os.cpu_count() or 2) - 2) if ON_GPU else 1
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = tune(
            TINY if options.tiny else FULL,
            pool,
            minutes=options.minutes,
            path=options.json,
            thorough=not options.tiny,
        )
    wrong = [row for row in results["rows"] if "failed" not in row and not row["error"] < 2e-2]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
