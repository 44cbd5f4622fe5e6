"""Runs an implementation's script in a process of its own, with the interpreter that has it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
DEFAULT_DIR = Path("artifacts", "peer")
"""Where ``make bench`` puts the environment that has vLLM, relative to :data:`ROOT`."""

COMPILED_DIR = ROOT / "artifacts" / "compiled"
"""Where ``make compiled`` installs kvcore with its hot path compiled."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer-dir",
        type=Path,
        default=ROOT / DEFAULT_DIR,
        help="virtual environment with vLLM, made by tests/bench/setup_peer.sh",
    )


def python_of(args: argparse.Namespace) -> Path:
    """The interpreter that has vLLM; ends the program with a message that says how to make one if there is none."""
    python = Path(args.peer_dir) / "bin" / "python"
    if not python.exists():
        sys.exit(
            f"no interpreter with vLLM at {python}\n"
            f"set one up (a few minutes): tests/bench/setup_peer.sh {args.peer_dir}\n"
            "or name the environment that has it: --peer-dir DIR"
        )
    return python


def run_kvcore(options: Sequence[str], *, installed: Path = ROOT) -> Any:
    """What ``on_kvcore.py`` answers, under the interpreter that runs now; ``installed``: the folder with kvcore."""
    return _run(Path(sys.executable), "tests.bench.on_kvcore", options, installed)


def run_vllm(python: Path, options: Sequence[str]) -> Any:
    """What ``on_vllm.py`` answers, under an interpreter that has vLLM."""
    return _run(python, "tests.bench.on_vllm", options, ROOT)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(python: Path, module: str, options: Sequence[str], folder: Path) -> Any:
    # Equal seeds: sets and dicts of strings are then laid out alike in every run.
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
    command = [str(python), "-m", module, *options]
    # The working folder comes first on Python's path: its kvcore is imported.
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"failed with status {done.returncode}: {' '.join(command)}")
    return json.loads(done.stdout.splitlines()[-1])
