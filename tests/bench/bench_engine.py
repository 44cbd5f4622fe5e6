"""Measures the runner's engine beside what transformers has, on requests that share a long system prompt.

One model; one process, but for ``generate_batch``, which is given one for each call. Each way serves the same prompts,
all there when its clock starts, and generates the same number of tokens for each, greedily. Prints Markdown tables;
progress goes to the standard error.

Exits with 1 if one-by-one ``generate`` and the engine, cold and warm, do not give the same tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from examples.demo_shared_prompt import SYSTEM_PROMPT
from runner import Engine, EngineConfig
from runner.loader import find_model
from tests.bench import engine_batch, engine_decode, engine_tables, peer, report
from tests.bench.engine_contenders import Prompts, Served, by_engine, by_generate

THINGS = (
    "the sky", "a violin", "the moon", "bread", "a glacier", "the Odyssey", "a lighthouse", "salt", "the Sahara",
    "a honeybee", "paper", "a volcano", "the Loire", "chess", "a fresco", "the blue whale",
)  # fmt: skip
"""What the questions are about: one for each request, in turn."""


def make_prompts(tokenizer: Any, *, num_requests: int, num_shared: int) -> list[list[int]]:
    """Prompts that begin with the same ``num_shared`` tokens, the demo's system prompt as often as it takes."""
    system = tokenizer.encode(SYSTEM_PROMPT + "\n\n", add_special_tokens=False)
    shared = (system * (1 + num_shared // len(system)))[:num_shared]
    questions = [f"{i + 1}. Tell me about {THINGS[i % len(THINGS)]}, please.\n" for i in range(num_requests)]
    return [[*shared, *tokenizer.encode(question, add_special_tokens=False)] for question in questions]


def name_of(path: str) -> str:
    """Of a model. A converted GGUF file lies in a folder named after it and a fingerprint."""
    return re.sub(r"-[0-9a-f]{12}$", "", Path(path).name)


def serve(model: PreTrainedModel, prompts: Prompts, max_tokens: int, repetitions: int) -> Iterator[tuple[str, Served]]:
    """Everything in float32: names as in :data:`~tests.bench.engine_tables.TITLES`, and what came out."""
    # The first calls of a process are slow: threads start, memory is mapped. Other prompts, so that nothing is cached.
    other = [prompt[::-1] for prompt in prompts[:2]]
    by_generate(model, other[:1], 2)
    yield "generate", by_generate(model, prompts, max_tokens)
    off = Engine(model, None, EngineConfig(enable_caching=False))
    by_engine(off, other, 2)
    yield "off", by_engine(off, prompts, max_tokens)
    del off
    yield from serve_cold_and_warm(model, prompts, max_tokens, repetitions)


def serve_cold_and_warm(
    model: PreTrainedModel, prompts: Prompts, max_tokens: int, repetitions: int
) -> Iterator[tuple[str, Served]]:
    """A new engine for each repetition: it serves the prompts, and then serves them again."""
    by_engine(Engine(model), [prompt[::-1] for prompt in prompts[:2]], 2)
    for _ in range(repetitions):
        gc.collect()
        engine = Engine(model)
        yield "cold", by_engine(engine, prompts, max_tokens)
        yield "warm", by_engine(engine, prompts, max_tokens)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs everything, the slowest first."""
    torch.set_num_threads(args.threads)
    source = find_model(args.model)
    prompts = make_prompts(source.load_tokenizer(), num_requests=args.requests, num_shared=args.shared_tokens)
    results: dict[str, Any] = {
        "machine": report.machine(),
        "threads": args.threads,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "model": name_of(source.path),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "shared_tokens": args.shared_tokens,
        "max_tokens": args.max_tokens,
        "served": {},
        "not_served": {},
    }

    def keep(served: Iterable[tuple[str, Served]], suffix: str = "") -> None:
        for name, one in served:
            peer.progress(f"{name}{suffix}: {one.seconds:.2f} s, {one.tokens_per_second:.1f} tokens/s")
            results["served"].setdefault(name + suffix, []).append(asdict(one))

    for name, by_defaults in (("generate_batch_defaults", True), ("generate_batch", False)):
        served = engine_batch.in_a_process(
            args.model,
            prompts,
            args.max_tokens,
            threads=args.threads,
            by_defaults=by_defaults,
            memory_gib=args.batch_memory,
        )
        if isinstance(served, str):
            peer.progress(f"{name}: {served}")
            results["not_served"][name] = served
        else:
            keep(zip((name, f"{name}_call"), served, strict=True))

    device = torch.device("cpu")
    model = source.load_model(dtype=torch.float32, device=device)
    keep(serve(model, prompts, args.max_tokens, args.reps))
    peer.progress("decode steps")
    results["decode"] = engine_decode.step_times(model, contexts=args.contexts, repetitions=args.reps + 2)
    del model
    model = source.load_model(dtype=torch.bfloat16, device=device)
    keep(serve_cold_and_warm(model, prompts, args.max_tokens, args.reps), "_bfloat16")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a GGUF file or a name on the hub (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--requests", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--shared-tokens", type=int, default=740, help="of each prompt (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, help="new ones for each prompt (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="that torch computes with (default: %(default)s)")
    parser.add_argument(
        "--reps",
        type=int,
        default=7,
        help="repetitions of the engine, of which the median counts (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-memory",
        type=float,
        metavar="GIB",
        help="that generate_batch may take beyond the model (default: what is free)",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=list(engine_decode.CONTEXTS),
        help="tokens that the decode steps are timed at, multiples of 16",
    )
    parser.add_argument("--from", dest="source", type=Path, metavar="JSON", help="show results measured before")
    parser.add_argument("--out", type=Path, default=report.ROOT / report.OUT, help="folder for the results")
    parser.add_argument("--update-docs", action="store_true", help="put the tables into docs/performance.md")
    args = parser.parse_args()

    results = json.loads(args.source.read_text("utf-8")) if args.source else measure(args)
    report.write_json(args.out / "engine.json", results)
    if found := engine_tables.differences(results):
        sys.exit("\n".join(["tokens differ, so that the speeds cannot be compared:", *found]))
    text = engine_tables.section(results)
    print(text)
    if args.update_docs:
        report.write_json(report.ASSETS / "engine.json", results)
        report.update_section("engine", text)
    peer.progress(f"results: {args.out / 'engine.json'}")


if __name__ == "__main__":
    main()
