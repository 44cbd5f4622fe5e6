"""``kvcore replay-calls``: what ``KVCacheManager(record=path)`` wrote, run again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvcore.arguments import count, find_modules_here
from kvcore.cli_inspect import write_page
from kvcore.errors import ConfigError
from kvcore.replay_calls import ReplayedCalls, replay_calls
from kvcore.replay_many import find_policy
from kvcore.snapshot import save_snapshots
from kvcore.snapshot_html import snapshots_to_html


def add_parser(commands: Any) -> None:
    """Adds the command to those of ``kvcore``."""
    parser = commands.add_parser(
        "replay-calls",
        help="run a recording of a manager's calls again",
        description="Run what KVCacheManager(record=FILE) wrote on a new manager, and say whether it answers\n"
        "the same. The status is 0 if it does, 1 at the first difference, 2 if the file cannot be read.",
        epilog="example:\n  kvcore replay-calls calls.jsonl --html calls.html --last 50",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="the recording")
    parser.add_argument("--check", action="store_true", help="check the books after every call (slow for large pools)")
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="evict by this instead: a policy of kvcore, or module:Class for the policy of your own that was recorded",
    )
    parser.add_argument("--html", metavar="PAGE", help="write the pool after each of the last calls as a web page")
    parser.add_argument("--snapshots", metavar="OUT", help="write the same for kvcore inspect")
    parser.add_argument("--last", type=count, default=100, metavar="N", help="how many calls these show (default: 100)")
    parser.set_defaults(run=_replay)


def _replay(args: argparse.Namespace) -> str:
    wanted = args.last if args.html or args.snapshots else 0
    policy = None
    if args.policy is not None:
        find_modules_here()
        policy = find_policy(args.policy)
    replayed = replay_calls(args.file, eviction_policy=policy, num_snapshots=wanted, check_invariants=args.check)
    lines = [_summary(replayed)]
    if replayed.torn:
        lines.append(replayed.torn)
    if args.html and replayed.snapshots:
        page = snapshots_to_html(replayed.snapshots, title=f"KV cache: {Path(args.file).name}")
        lines.append(write_page(args.html, page, len(replayed.snapshots)))
    if args.snapshots:
        try:
            save_snapshots(args.snapshots, replayed.snapshots)
        except OSError as error:
            raise ConfigError(f"cannot write {args.snapshots!r}: {error}") from error
        lines.append(f"wrote {args.snapshots}: {len(replayed.snapshots)} snapshots")
    if replayed.difference is None:
        return "\n".join(lines)
    print("\n".join(lines))
    print(f"kvcore replay-calls: the answers differ from {replayed.difference}", file=sys.stderr)
    raise SystemExit(1)


def _summary(replayed: ReplayedCalls) -> str:
    said = "all answered as recorded" if replayed.difference is None else "the last one answered otherwise"
    skipped = (
        f"; {replayed.num_skipped} that raised are left out, their arguments are not known"
        if replayed.num_skipped
        else ""
    )
    return f"{replayed.num_calls} calls, {replayed.num_raised} of which raised: {said}{skipped}"
