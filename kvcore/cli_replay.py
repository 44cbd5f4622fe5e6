"""``kvcore replay``: which policy, and how large a pool, for one's own traffic."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcore.arguments import count, find_modules_here, number_of_bytes
from kvcore.errors import ConfigError, FileFormatError
from kvcore.eviction import POLICIES
from kvcore.planning_hf import plan_from_hf_config
from kvcore.replay import OUTPUTS, SECONDS_PER_TOKEN, summarize
from kvcore.replay_chart import check_chart, write_chart
from kvcore.replay_formats import DEFAULT_BLOCK_SIZE, LineParser, load_tokenizer
from kvcore.replay_many import ReplaySettings, find_policy, replay_many
from kvcore.replay_report import Report
from kvcore.replay_trace import MOONCAKE_BLOCK_SIZE, TraceRequest, read_trace
from kvcore.spec import DTYPE_BYTES, FullAttentionSpec

BAD_LINES_SHOWN = 10


def add_parser(commands: Any) -> None:
    """Adds the command to those of ``kvcore``."""
    parser = commands.add_parser(
        "replay",
        help="run a trace of requests through pools of several sizes and policies",
        description="Run a trace of requests through the books, for pools of several sizes and several eviction\n"
        "policies, and show what each finds, beside a policy that knows the future. A trace has a JSON\n"
        "object a line: Mooncake's (hash_ids), token ids (token_ids or prompt_token_ids, output_token_ids),\n"
        "or text (text or prompt, output) with --tokenizer. Several files are one trace, in that order.",
        epilog="examples:\n"
        "  kvcore replay trace.jsonl --blocks 1000 4000 16000 --policy lru adaptive\n"
        "  kvcore replay trace.jsonl --memory 8GiB 16GiB --config Qwen3-8B/config.json --chart found.html\n"
        "  kvcore replay trace.jsonl --blocks 4000 --concurrency 32 --outputs cache --policy my_module:MyPolicy",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", nargs="+", metavar="TRACE", help="file of requests, one a line")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--blocks", type=count, nargs="+", metavar="N", help="blocks of the pools, the null block aside")
    size.add_argument(
        "--memory", type=number_of_bytes, nargs="+", metavar="SIZE", help="their memory: 8GiB; with --config"
    )
    parser.add_argument("--config", metavar="FILE", help="config.json of the model, to turn memory into blocks")
    parser.add_argument(
        "--dtype", choices=DTYPE_BYTES, metavar="NAME", help="element type of the cache (default: the config's)"
    )
    parser.add_argument(
        "--block-size",
        type=count,
        metavar="N",
        help=f"tokens per block (default: {MOONCAKE_BLOCK_SIZE} for Mooncake's traces, else {DEFAULT_BLOCK_SIZE})",
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        default=["lru", "adaptive"],
        metavar="NAME",
        help=f"{', '.join(sorted(POLICIES))}, or module:Class for one of your own (default: lru adaptive)",
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="for text: name or folder of a transformers tokenizer")
    parser.add_argument(
        "--concurrency",
        type=count,
        metavar="N",
        help="start requests when they arrive, at most N at once (default: one after another)",
    )
    parser.add_argument(
        "--seconds-per-token",
        type=_seconds,
        default=SECONDS_PER_TOKEN,
        metavar="S",
        help=f"with --concurrency: how long a token of an answer takes (default: {SECONDS_PER_TOKEN})",
    )
    parser.add_argument(
        "--outputs",
        choices=OUTPUTS,
        default="ignore",
        help="answers take no blocks; take blocks until the request ends; or stay cached then (default: ignore)",
    )
    parser.add_argument("--no-bound", action="store_true", help="leave out the all-knowing policy")
    parser.add_argument(
        "--on-bad-line", choices=("refuse", "skip"), default="refuse", help="what to do (default: refuse)"
    )
    parser.add_argument("--jobs", type=count, metavar="N", help="processes (default: one for each core)")
    parser.add_argument("--histograms", action="store_true", help="also show the ages at eviction")
    parser.add_argument(
        "--json", metavar="FILE", help="write everything as JSON; - for standard output, in place of tables"
    )
    parser.add_argument("--chart", metavar="FILE", help="draw a chart: .png, .svg or .html")
    parser.set_defaults(run=_replay)


def _replay(args: argparse.Namespace) -> str:
    if args.chart:
        check_chart(args.chart)
    if (args.memory is None) != (args.config is None):
        raise ConfigError("--memory SIZE and --config FILE go together: how large a block is depends on the model")
    find_modules_here()
    for policy in args.policy:
        find_policy(policy)
    parse = LineParser(args.block_size, load_tokenizer(args.tokenizer) if args.tokenizer else None)
    requests, num_bad_lines = _read(args, parse)
    settings = ReplaySettings(
        block_size=parse.block_size or DEFAULT_BLOCK_SIZE,
        outputs=args.outputs,
        concurrency=args.concurrency,
        seconds_per_token=args.seconds_per_token,
    )
    sizes = args.blocks or [_blocks_in(memory, args, settings.block_size) for memory in args.memory]
    with _progress() as on_done:
        results = replay_many(
            requests,
            [*dict.fromkeys(sizes)],
            [*dict.fromkeys(args.policy)],
            settings,
            jobs=args.jobs,
            bound=not args.no_bound,
            on_done=on_done,
        )
    report = Report(summarize(requests), settings, results, num_bad_lines)
    if args.chart:
        write_chart(args.chart, report)
    written = json.dumps(report.as_dict(), indent=2)
    if args.json == "-":
        return written
    if args.json:
        try:
            Path(args.json).write_text(written + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {args.json!r}: {error}") from error
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else 120
    text = report.render(width=width, colour=terminal, histograms=args.histograms)
    return "\n".join([text, *(f"\nwrote {path}" for path in (args.json, args.chart) if path)])


def _read(args: argparse.Namespace, parse: LineParser) -> tuple[list[TraceRequest], int]:
    """The requests of all files, and how many lines were passed over, which are reported on standard error."""
    bad: list[FileFormatError] = []

    def report(error: FileFormatError) -> None:
        bad.append(error)
        if len(bad) <= BAD_LINES_SHOWN:
            print(f"kvcore replay: skipped {error}", file=sys.stderr)

    on_bad_line = report if args.on_bad_line == "skip" else None
    requests = [request for path in args.trace for request in read_trace(path, parse, on_bad_line=on_bad_line)]
    if len(bad) > BAD_LINES_SHOWN:
        print(f"kvcore replay: skipped {len(bad) - BAD_LINES_SHOWN} more lines", file=sys.stderr)
    if not requests:
        raise ConfigError(f"there is no request in {', '.join(args.trace)}")
    return requests, len(bad)


def _blocks_in(memory: int, args: argparse.Namespace, block_size: int) -> int:
    """Blocks beside the null block that fit into a number of bytes."""
    config = plan_from_hf_config(args.config, memory_bytes=memory, block_size=block_size, dtype=args.dtype)
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        raise ConfigError(
            "a replay is of full attention in one group of layers, and this model has others: pass --blocks N, or "
            "the config of a model without windows"
        )
    return config.num_blocks - 1


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}")
    return value


@contextmanager
def _progress() -> Iterator[Any]:
    """Shows how far it is on standard error, if that is a terminal and rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda num_done, num_all: None
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("replaying", total=None)
        yield lambda num_done, num_all: progress.update(task, completed=num_done, total=num_all)
