"""``kvcore`` on the command line; ``python -m kvcore`` is the same.

Each command is a pair: a function that adds its arguments, and one that runs it and returns what to print.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvcore import COMPILED, __version__, cli_inspect, cli_replay, cli_replay_calls
from kvcore.arguments import count, number_of_bytes
from kvcore.errors import ConfigError, KVCacheError
from kvcore.planning import CapacityReport, capacity_report
from kvcore.planning_hf import max_model_len_from_hf_config, plan_from_hf_config
from kvcore.spec import DTYPE_BYTES, KVCacheConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 with a message on stderr for anything the caller can mend."""
    args = _parser().parse_args(argv)
    try:
        output = args.run(args)
    except KVCacheError as error:
        print(f"kvcore {args.command}: error: {error}", file=sys.stderr)
        return 2
    print(output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvcore", description="Tools around a paged KV cache.")
    version = f"%(prog)s {__version__} ({'compiled' if COMPILED else 'not compiled'})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_plan(commands)
    cli_inspect.add_parser(commands)
    cli_replay.add_parser(commands)
    cli_replay_calls.add_parser(commands)
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="lay out a cache for a model and say what it holds",
        description="Lay out a KV cache for a model: which layers share a block table and a tensor,\n"
        "how many blocks the memory buys, how many tokens and requests they hold.",
        epilog="example:\n"
        "  kvcore plan gemma-3-4b-it/config.json --memory 8GiB --max-in-flight-tokens 2048 --length 8192",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # the example stays on one line, to be copied
    )
    plan.add_argument("config", metavar="CONFIG", help="config.json of a transformers model, or the folder it is in")
    size = plan.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--memory", type=number_of_bytes, metavar="SIZE", help="memory for the cache: 8GiB, 500MB, or bytes"
    )
    size.add_argument("--num-blocks", type=count, metavar="N", help="blocks in the pool, instead of --memory")
    plan.add_argument("--block-size", type=count, default=16, metavar="N", help="tokens per block (default: 16)")
    plan.add_argument(
        "--dtype", choices=DTYPE_BYTES, metavar="NAME", help=f"{', '.join(DTYPE_BYTES)} (default: the config's)"
    )
    plan.add_argument(
        "--group-size", type=count, metavar="N", help="most layers in a group (default: that of the rarest kind)"
    )
    plan.add_argument("--pad-pages", action="store_true", help="pad pages that cannot be made equal, do not refuse")
    plan.add_argument(
        "--max-model-len", type=count, metavar="N", help="longest request in tokens (default: the config's limit)"
    )
    plan.add_argument(
        "--max-in-flight-tokens",
        type=count,
        metavar="N",
        help="most tokens of one request in one step; without it windows are counted at the request's whole length",
    )
    plan.add_argument(
        "--length",
        type=count,
        action="append",
        default=[],
        metavar="N",
        help="report how many requests of this many tokens fit; may be given again (default: the longest)",
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> str:
    config = plan_from_hf_config(
        args.config,
        memory_bytes=args.memory,
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        dtype=args.dtype,
        group_size=args.group_size,
        pad_pages=args.pad_pages,
    )
    max_model_len = args.max_model_len or max_model_len_from_hf_config(args.config)
    if max_model_len is None:
        raise ConfigError("the config has no max_position_embeddings: pass --max-model-len N, the longest request")
    report = capacity_report(
        config,
        max_model_len=max_model_len,
        request_lengths=args.length,
        max_in_flight_tokens=args.max_in_flight_tokens,
    )
    return json.dumps(_plan_values(config, report), indent=2) if args.json else f"{_layout(config)}\n\n{report}"


def _layout(config: KVCacheConfig) -> str:
    """The layers of each group, in the order of the tensors they live in."""
    lines = ["layers of each group; the i-th of every group share tensor i"]
    for index, group in enumerate(config.kv_cache_groups):
        names = f"group {index:<4}{' '.join(group.layer_names)}"
        lines += textwrap.wrap(names, width=100, subsequent_indent=" " * 10, break_on_hyphens=False)
    return "\n".join(lines)


def _plan_values(config: KVCacheConfig, report: CapacityReport) -> dict[str, Any]:
    return {
        "num_blocks": config.num_blocks,
        "groups": [
            {
                "layer_names": group.layer_names,
                "kv_cache_spec": {"kind": type(group.kv_cache_spec).__name__, **asdict(group.kv_cache_spec)},
                "padded_bytes_per_block": group.padded_bytes_per_block,
                "max_blocks_per_request": group.max_blocks_per_request,
            }
            for group in report.groups
        ],
        "tensors": [asdict(tensor) for tensor in config.kv_cache_tensors],
        "capacity": {
            **{name: value for name, value in asdict(report).items() if name not in ("groups", "num_blocks")},
            "usable_blocks": report.usable_blocks,
            "total_bytes": report.total_bytes,
            "bytes_per_token": report.bytes_per_token,
            "bytes_per_old_token": report.bytes_per_old_token,
        },
    }
