"""Options that the commands, and servers, have in common: which engine, and what each answer may be."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from rich.console import Console
from transformers.utils import logging as transformers_logging

from kvcore.arguments import count, number_of_bytes
from kvcore.errors import KVCacheError
from kvcore.eviction import POLICIES
from runner.attention import BACKENDS
from runner.config import DTYPES, WINDOW_RETENTIONS, EngineConfig
from runner.engine import Engine
from runner.errors import ModelNotFoundError, RunnerError
from runner.sampling import SamplingParams

SAMPLING_ARGUMENTS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 takes the likeliest token"),
    "top_k": (int, "sample from this many likeliest tokens"),
    "top_p": (float, "sample from the likeliest tokens with this much probability together"),
    "min_p": (float, "leave out tokens with less than this share of the likeliest one's probability"),
    "repetition_penalty": (float, "above 1 makes tokens that occurred less likely"),
    "presence_penalty": (float, "above 0 makes tokens of the output less likely"),
    "frequency_penalty": (float, "above 0 makes tokens of the output less likely each time they occur"),
    "seed": (int, "makes sampling reproducible"),
    "min_tokens": (int, "fewest tokens of output"),
}
"""Fields of SamplingParams as options: their type, and what they do."""


def say(text: str) -> None:
    """Print something about answers, to stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="dim", markup=False)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for :func:`load_engine`."""
    group = parser.add_argument_group("model and cache")
    group.add_argument(
        "--model", metavar="MODEL", help="folder, GGUF file or name on the hub (default: SmolLM2-135M-Instruct)"
    )
    group.add_argument(
        "--dtype", choices=DTYPES, metavar="NAME", help=f"{', '.join(DTYPES)} (default: float32 on a CPU)"
    )
    group.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    group.add_argument(
        "--attention-backend",
        choices=BACKENDS,
        metavar="NAME",
        help=f"{', '.join(BACKENDS)} (default: triton on a GPU if it is installed, else torch)",
    )
    group.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="replay decode steps as CUDA graphs (default: where model, backend and device let it)",
    )
    group.add_argument(
        "--packed-weights",
        action=argparse.BooleanOptionalAction,
        help="on a CPU, keep linear weights a second time, as products read them (default: where memory is plenty)",
    )
    group.add_argument(
        "--kv-cache-memory",
        type=number_of_bytes,
        metavar="SIZE",
        help="8GiB, 500MB or bytes (default: 1GiB on a CPU, 80%% of what is free on a GPU)",
    )
    group.add_argument("--block-size", type=count, metavar="N", help="tokens per block (default: as suits the backend)")
    group.add_argument("--max-model-len", type=count, metavar="N", help="longest sequence (default: the model's)")
    group.add_argument("--max-num-seqs", type=count, metavar="N", help="requests at once (default: %(default)s)")
    group.add_argument(
        "--max-num-batched-tokens", type=count, metavar="N", help="tokens in a step (default: %(default)s)"
    )
    group.add_argument(
        "--eviction-policy",
        choices=sorted(POLICIES),
        metavar="NAME",
        help=f"{', '.join(sorted(POLICIES))} (default: %(default)s)",
    )
    group.add_argument(
        "--window-retention",
        choices=WINDOW_RETENTIONS,
        metavar="NAME",
        help="of what windows leave behind, keep the ends of prompts, or all (default: %(default)s)",
    )
    names = (
        "max_num_seqs",
        "max_num_batched_tokens",
        "eviction_policy",
        "window_retention",
    )
    parser.set_defaults(**{name: getattr(EngineConfig, name) for name in names})


def load_engine(args: argparse.Namespace) -> Engine:
    """The engine that the options of :func:`add_engine_arguments` ask for; its start report goes to stderr.

    Raises:
        RunnerError: It cannot be had; the message says why.
        KVCacheError: Too little memory for a cache.
    """
    settings = {field.name: getattr(args, field.name) for field in fields(EngineConfig) if hasattr(args, field.name)}
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        engine = Engine.from_pretrained(args.model, **settings)
    except (RunnerError, KVCacheError):
        raise
    except Exception as error:
        # A folder without weights, half a file, a config with text for a number: there is no end of what is raised.
        raise ModelNotFoundError(f"the model cannot be loaded: {type(error).__name__}: {error}") from error
    say(engine.describe())
    return engine


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for :func:`sampling_params`."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=count, default=SamplingParams.max_tokens, metavar="N", help="default: %(default)s"
    )
    for name, (kind, text) in SAMPLING_ARGUMENTS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end of sequence")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the options of :func:`add_sampling_arguments` ask for.

    Raises:
        SamplingParamsError: A value out of its range.
    """
    given = {field.name: getattr(args, field.name, None) for field in fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})
