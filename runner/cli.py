"""``python -m runner``: generate text, chat, measure.

Each command is a pair: a function that adds its arguments, and one that runs it with a loaded engine. Answers go to
stdout, everything about them to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from kvcore.errors import KVCacheError
from runner.cli_bench import add_bench
from runner.cli_options import add_engine_arguments, add_sampling_arguments, load_engine, sampling_params, say
from runner.engine import Engine
from runner.errors import RequestRefusedError, RunnerError
from runner.outputs import RequestOutput
from runner.sampling import SamplingParams


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
        print(end="", flush=True)
    except (RunnerError, KVCacheError, CommandError) as error:
        print(f"runner {args.command}: error: {error}", file=sys.stderr)
        return 2
    except UnicodeError as error:
        # What is piped in is no text, or what comes out has characters that the terminal's encoding does not.
        print(f"runner {args.command}: error: {error}; set PYTHONIOENCODING to what is wanted", file=sys.stderr)
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
    for add in (_add_generate, _add_chat, add_bench):
        add(commands)
    return parser


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
    add_sampling_arguments(parser)
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> None:
    texts = args.prompts or _lines_of_stdin()
    params = sampling_params(args)
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
    say(
        f"{sum(len(output.prompt_token_ids) for output in outputs):,} prompt tokens, "
        f"{sum(output.num_cached_tokens for output in outputs):,} of them cached; {generated:,} generated in "
        f"{seconds:.2f} s, {generated / seconds:.1f} tokens/s"
    )


def _lines_of_stdin() -> list[str]:
    if sys.stdin is None or sys.stdin.isatty():
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
    add_sampling_arguments(parser)
    parser.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> None:
    params = sampling_params(args)
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
    if sys.stdin is None:
        raise CommandError("nothing to talk with: stdin is closed")
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
        say(
            f"[{len(output.prompt_token_ids):,} prompt tokens, {output.num_cached_tokens:,} of them cached; "
            f"{len(output.token_ids):,} generated{ended}]"
        )
    except KeyboardInterrupt:
        print(flush=True)
        say("[interrupted]")
    return text


def _check_chat_template(engine: Engine) -> None:
    if not getattr(engine.tokenizer, "chat_template", None):
        raise CommandError("the model's tokenizer has no chat template: use generate without --chat")
