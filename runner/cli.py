"""``python -m runner``: generate text, chat, measure.

Each command is a pair: a function that adds its arguments, and one that runs it with a loaded engine. Answers go to
stdout, everything about them to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from kvcore.errors import KVCacheError
from runner.attention import BACKENDS
from runner.config import EngineConfig
from runner.engine import Engine
from runner.errors import ModelNotFoundError, RequestRefusedError, RunnerError
from runner.outputs import RequestOutput
from runner.sampling import SamplingParams

UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
"""Bytes in a unit of memory, by its name in small letters."""

DTYPES = ("float32", "bfloat16", "float16")

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


class CommandError(Exception):
    """Something the caller can mend that no other error names."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 on success, 2 with a message on stderr for what the caller can mend, 130 after Ctrl-C, 141 when the reader of
        stdout has gone.
    """
    args = _parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except (RunnerError, KVCacheError, CommandError) as error:
        print(f"runner {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end; let it do so into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="runner", description="Serve a transformers model from a paged KV cache, on the command line."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_add_generate, _add_chat, _add_bench):
        add(commands)
    return parser


# -- what the commands, and servers, have in common -------------------------------------------------------------------


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
        "--attention-backend", choices=BACKENDS, metavar="NAME", help=f"{', '.join(BACKENDS)} (default: %(default)s)"
    )
    group.add_argument(
        "--kv-cache-memory",
        type=number_of_bytes,
        metavar="SIZE",
        help="8GiB, 500MB or bytes (default: 1GiB on a CPU, 80%% of what is free on a GPU)",
    )
    group.add_argument("--block-size", type=_count, metavar="N", help="tokens per block (default: %(default)s)")
    group.add_argument("--max-model-len", type=_count, metavar="N", help="longest sequence (default: the model's)")
    group.add_argument("--max-num-seqs", type=_count, metavar="N", help="requests at once (default: %(default)s)")
    names = ("attention_backend", "block_size", "max_num_seqs")
    parser.set_defaults(**{name: getattr(EngineConfig, name) for name in names})


def load_engine(args: argparse.Namespace) -> Engine:
    """The engine that the options of :func:`add_engine_arguments` ask for.

    Raises:
        RunnerError: It cannot be had; the message says why.
        KVCacheError: Too little memory for a cache.
    """
    settings = {field.name: getattr(args, field.name) for field in fields(EngineConfig) if hasattr(args, field.name)}
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        return Engine.from_pretrained(args.model, **settings)
    except (RunnerError, KVCacheError):
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        # A folder without weights, half a file, an unknown device: transformers and torch have no classes for these.
        raise ModelNotFoundError(f"the model cannot be loaded: {error}") from error


def number_of_bytes(text: str) -> int:
    """``8GiB``, ``1.5 GB`` or a plain number, as bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    value = int(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected bytes, or a number with a unit (8GiB, 500MB), got {text!r}")
    return value


def _count(text: str) -> int:
    try:
        value = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=_count, default=SamplingParams.max_tokens, metavar="N", help="default: %(default)s"
    )
    for name, (kind, text) in SAMPLING_ARGUMENTS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end of sequence")


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    given = {field.name: getattr(args, field.name, None) for field in fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _say(text: str) -> None:
    """A line about an answer, to stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="dim", markup=False)


# -- generate ---------------------------------------------------------------------------------------------------------


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue prompts, or answer them",
        description="Continue each prompt, all as one batch. Answers go to stdout in the order of the prompts.",
        epilog="examples:\n"
        '  python -m runner generate --chat "What is the capital of France?"\n'
        "  python -m runner generate --json < prompts.txt > answers.jsonl",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # examples stay on their lines, to be copied
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="without any, one per line is read from stdin")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message, put into the template")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line, with counts of tokens")
    add_engine_arguments(parser)
    _add_sampling_arguments(parser)
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> None:
    texts = args.prompts or _lines_of_stdin()
    params = _sampling_params(args)
    engine = load_engine(args)
    if args.chat:
        _check_chat_template(engine)
    prompts = [[{"role": "user", "content": text}] if args.chat else text for text in texts]
    start = time.perf_counter()
    if args.json:
        outputs = engine.generate(prompts, params, progress=sys.stderr.isatty())
        for text, output in zip(texts, outputs, strict=True):
            print(json.dumps(_values(text, output), ensure_ascii=False))
    elif len(prompts) == 1:
        for output in engine.stream(prompts[0], params):
            print(output.delta, end="", flush=True)
        print(flush=True)
        outputs = [output]
    else:
        outputs = engine.generate(prompts, params, progress=sys.stderr.isatty())
        print("\n\n".join(f"> {text}\n{output.text}" for text, output in zip(texts, outputs, strict=True)))
    seconds = time.perf_counter() - start
    generated = sum(len(output.token_ids) for output in outputs)
    _say(
        f"{sum(len(output.prompt_token_ids) for output in outputs):,} prompt tokens, "
        f"{sum(output.num_cached_tokens for output in outputs):,} of them cached; {generated:,} generated in "
        f"{seconds:.2f} s, {generated / seconds:.1f} tokens/s"
    )


def _lines_of_stdin() -> list[str]:
    if sys.stdin.isatty():
        raise CommandError("no prompt: give one as an argument, or one per line on stdin")
    lines = [line for line in sys.stdin.read().splitlines() if line.strip()]
    if not lines:
        raise CommandError("no prompt: stdin is empty")
    return lines


def _values(prompt: str, output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_generated_tokens": len(output.token_ids),
    }


# -- chat -------------------------------------------------------------------------------------------------------------


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model, a line at a time. The whole conversation is its prompt each time, and what\n"
        "the cache has of it is not computed again. /clear starts over, Ctrl-C ends an answer, Ctrl-D ends it all.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message (default: the template's own, if any)")
    add_engine_arguments(parser)
    _add_sampling_arguments(parser)
    parser.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> None:
    params = _sampling_params(args)
    engine = load_engine(args)
    _check_chat_template(engine)
    beginning = [{"role": "system", "content": args.system}] if args.system else []
    conversation = list(beginning)
    for line in _lines_said():
        if line == "/clear":
            conversation = list(beginning)
            continue
        conversation.append({"role": "user", "content": line})
        try:
            answer = _answer(engine, conversation, params)
        except RequestRefusedError as error:
            raise CommandError(f"the conversation has become too long ({error})") from error
        conversation.append({"role": "assistant", "content": answer})


def _lines_said() -> Iterator[str]:
    """What the user types, or what is piped in, without empty lines."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # Windows has a console of its own
            import readline  # noqa: F401 - gives input() a history and keys to edit with
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else input()
        except EOFError:
            if sys.stdin.isatty():
                print()
            return
        if line.strip():
            yield line.strip()


def _answer(engine: Engine, conversation: list[dict[str, str]], params: SamplingParams) -> str:
    """Print one answer as it comes; its text, or as much of it as there was before Ctrl-C."""
    text = ""
    try:
        for output in engine.stream(conversation, params):
            print(output.delta, end="", flush=True)
            text = output.text
        print(flush=True)
        ended = "" if output.finish_reason == "stop" else f", ended by {output.finish_reason}"
        _say(
            f"[{len(output.prompt_token_ids):,} prompt tokens, {output.num_cached_tokens:,} of them cached; "
            f"{len(output.token_ids):,} generated{ended}]"
        )
    except KeyboardInterrupt:
        print(flush=True)
        _say("[interrupted]")
    return text


def _check_chat_template(engine: Engine) -> None:
    if not getattr(engine.tokenizer, "chat_template", None):
        raise CommandError("the model's tokenizer has no chat template: use generate without --chat")


# -- bench ------------------------------------------------------------------------------------------------------------


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


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure requests that share a prefix",
        description="Send requests that begin with the same random tokens, all at once, and again when the cache is\n"
        "warm. Prints tokens/s of output (the time for the prompts included), time to the first token, cached tokens.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=_count, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--prefix-tokens", type=_count, default=512, metavar="N", help="shared (default: %(default)s)")
    parser.add_argument("--suffix-tokens", type=_count, default=16, metavar="N", help="own (default: %(default)s)")
    parser.add_argument("--max-tokens", type=_count, default=32, metavar="N", help="of output (default: %(default)s)")
    parser.add_argument("--prompt-seed", type=int, default=0, metavar="X", help="of the random tokens (default: 0)")
    add_engine_arguments(parser)
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> None:
    engine = load_engine(args)
    rng = random.Random(args.prompt_seed)
    vocabulary = engine.model_runner.model.get_input_embeddings().num_embeddings

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

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
