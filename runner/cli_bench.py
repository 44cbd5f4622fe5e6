"""``python -m runner bench``: requests that share a prefix, with the cache cold and warm."""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcore.arguments import count
from runner.cli_options import add_engine_arguments, load_engine
from runner.outputs import RequestOutput
from runner.sampling import SamplingParams


@dataclass(frozen=True)
class Run:
    """What one run of the benchmark came to. Seconds are wall-clock."""

    name: str
    outputs: list[RequestOutput]
    seconds: float

    def row(self) -> tuple[str, ...]:
        """Its line in the table."""
        waits = [output.metrics.time_to_first_token or 0.0 for output in self.outputs]
        generated = sum(len(output.token_ids) for output in self.outputs)
        return (
            self.name,
            f"{sum(len(output.prompt_token_ids) for output in self.outputs):,}",
            f"{sum(output.num_cached_tokens for output in self.outputs):,}",
            f"{generated:,}",
            f"{sum(waits) / len(waits):.3f} s",
            f"{max(waits):.3f} s",
            f"{generated / self.seconds:.1f}",
        )


def add_bench(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "bench",
        help="measure requests that share a prefix",
        description="Send requests that begin with the same random tokens, all at once, and again when the cache is\n"
        "warm. Prints tokens/s of output (the time for the prompts included), time to the first token, cached tokens.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=count, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--prefix-tokens", type=count, default=512, metavar="N", help="shared (default: %(default)s)")
    parser.add_argument("--suffix-tokens", type=count, default=16, metavar="N", help="own (default: %(default)s)")
    parser.add_argument("--max-tokens", type=count, default=32, metavar="N", help="of output (default: %(default)s)")
    parser.add_argument("--prompt-seed", type=int, default=0, metavar="X", help="of the random tokens (default: 0)")
    add_engine_arguments(parser)
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> None:
    engine = load_engine(args)
    rng = random.Random(args.prompt_seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(engine.vocabulary_size) for _ in range(count)]

    # The first steps of a process are slow: threads start, buffers are made.
    engine.generate([tokens(args.prefix_tokens)], SamplingParams(max_tokens=2, ignore_eos=True))
    prefix = tokens(args.prefix_tokens)
    prompts = [prefix + tokens(args.suffix_tokens) for _ in range(args.requests)]
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    runs = []
    for name in ("cold", "warm"):
        start = time.perf_counter()
        outputs = engine.generate(prompts, params)
        runs.append(Run(name, outputs, time.perf_counter() - start))

    table = Table(title=f"{args.requests} requests that share {args.prefix_tokens:,} tokens", caption_justify="left")
    table.caption = "First token: mean of the requests, and the one that waited longest. Tokens/s: of the outputs."
    table.add_column("run")
    for heading in ("prompt tokens", "cached", "generated", "first token", "slowest", "tokens/s"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(*run.row())
    Console().print(table)
