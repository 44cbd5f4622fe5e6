"""Eight questions that share a long system prompt, on a real model: cache off, cold, warm. Run by `make demo`.

The eight are served as one batch. With the cache on, one of them computes the shared prompt and the other seven find
it; asked again, all eight find it. The answers must not differ by a single token: that is checked, and decides the exit
code.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runner import Engine, EngineConfig, RequestOutput, RunnerError, SamplingParams

SYSTEM_PROMPT = """\
You are Atlas, the assistant at the desk of a public library. Visitors ask you short questions about the world. \
Answer each question in one short and complete sentence. Be polite and be accurate. When a question is about a fact \
that stands in the notes below, answer with that fact. Do not add anything that was not asked for.

Notes on countries.
France: the capital of France is Paris. The longest river of France is the Loire.
Italy: the capital of Italy is Rome. The longest river of Italy is the Po.
Spain: the capital of Spain is Madrid. The longest river of Spain is the Ebro.
Germany: the capital of Germany is Berlin. The longest river of Germany is the Rhine.
Japan: the capital of Japan is Tokyo. The highest mountain of Japan is Mount Fuji.
Egypt: the capital of Egypt is Cairo. The longest river of Egypt is the Nile.
Brazil: the capital of Brazil is Brasilia. The longest river of Brazil is the Amazon.
Canada: the capital of Canada is Ottawa. The longest river of Canada is the Mackenzie.
Australia: the capital of Australia is Canberra. The longest river of Australia is the Murray.
India: the capital of India is New Delhi. The longest river of India is the Ganges.
Greece: the capital of Greece is Athens. The highest mountain of Greece is Mount Olympus.
Norway: the capital of Norway is Oslo. The highest mountain of Norway is Galdhopiggen.

Notes on nature.
The largest planet of the solar system is Jupiter. The planet closest to the Sun is Mercury. The red planet is Mars. \
The planet with the brightest rings is Saturn. The Moon goes around the Earth in about 27 days, and the Earth goes \
around the Sun in about 365 days. Water freezes at 0 degrees Celsius and boils at 100 degrees Celsius. The largest \
animal is the blue whale. The tallest animal is the giraffe. The fastest animal on land is the cheetah. The largest \
ocean is the Pacific Ocean. The highest mountain is Mount Everest. The largest desert of sand is the Sahara.

Notes on books and art.
The play Romeo and Juliet was written by William Shakespeare. The novel Pride and Prejudice was written by Jane \
Austen. The novel Don Quixote was written by Miguel de Cervantes. The novel War and Peace was written by Leo \
Tolstoy. The Odyssey was written by Homer. The painting Mona Lisa was painted by Leonardo da Vinci. The painting The \
Starry Night was painted by Vincent van Gogh. The opera The Magic Flute was composed by Wolfgang Amadeus Mozart.

Notes on the library.
The library opens at nine in the morning and closes at six in the evening. On Sundays the library is closed. A \
visitor may borrow five books at a time, for three weeks. The reading room is on the second floor. The children's \
books are on the first floor. The newspapers are next to the entrance. There is a small cafe in the garden.

If a visitor asks about something else, answer from what you know. If you do not know the answer, say so in one \
sentence, and do not guess. Never answer with a list. Never repeat the question. Never talk about these notes."""

QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Japan?",
    "What is the longest river of Egypt?",
    "Who wrote Romeo and Juliet?",
    "Who painted the Mona Lisa?",
    "What is the largest planet of the solar system?",
    "How many books may I borrow?",
    "At how many degrees Celsius does water boil?",
]


@dataclass(frozen=True)
class Run:
    """The answers to all questions, and how long they took together."""

    name: str
    outputs: list[RequestOutput]
    seconds: float

    @property
    def prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def found_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.outputs)

    @property
    def output_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def seconds_to_first_token(self) -> float:
        times = [output.metrics.time_to_first_token or 0.0 for output in self.outputs]
        return sum(times) / len(times)


def ask(engine: Engine, name: str, console: Console, max_tokens: int) -> Run:
    """Ask all questions at once and show the answers while they come."""
    prompts = [
        [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}] for question in QUESTIONS
    ]
    console.rule(name)
    finished: dict[int, RequestOutput] = {}
    start = time.perf_counter()
    with shown(console) as answers:
        for output in engine.stream(prompts, SamplingParams(max_tokens=max_tokens)):
            answers.update(output)
            if output.finished:
                finished[output.index] = output
    seconds = time.perf_counter() - start
    return Run(name, [finished[index] for index in range(len(QUESTIONS))], seconds)


class Panes:
    """On a terminal: a pane per question, all growing at once."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.texts = [""] * len(QUESTIONS)
        self.refresh()

    def update(self, output: RequestOutput) -> None:
        self.texts[output.index] = output.text
        self.refresh()

    def refresh(self) -> None:
        shape = {"title_align": "left", "width": max(24, self.live.console.width // 2 - 2), "height": 5}
        panes = [
            Panel(Text(text or "reading the prompt ...", style="" if text else "dim"), title=question, **shape)
            for question, text in zip(QUESTIONS, self.texts, strict=True)
        ]
        self.live.update(Columns(panes))


class Lines:
    """Elsewhere: the answers one after another, each streamed as far as it has come when its turn is there."""

    def __init__(self) -> None:
        self.pending = [""] * len(QUESTIONS)
        self.done = [False] * len(QUESTIONS)
        self.turn = 0
        print(f"{QUESTIONS[0]} ", end="", flush=True)

    def update(self, output: RequestOutput) -> None:
        self.pending[output.index] += output.delta
        self.done[output.index] = output.finished
        while self.turn < len(QUESTIONS):
            print(self.pending[self.turn], end="", flush=True)
            self.pending[self.turn] = ""
            if not self.done[self.turn]:
                return
            self.turn += 1
            print()
            if self.turn < len(QUESTIONS):
                print(f"{QUESTIONS[self.turn]} ", end="", flush=True)


@contextmanager
def shown(console: Console) -> Iterator[Panes | Lines]:
    """Whichever way of showing answers suits where they go."""
    if not console.is_terminal:
        yield Lines()
        return
    with Live(console=console, refresh_per_second=12) as live:
        yield Panes(live)


def table_of(runs: list[Run]) -> Table:
    """What was computed and what was found, run by run."""
    table = Table(title=f"{len(QUESTIONS)} questions, one system prompt", caption_justify="left")
    table.caption = (
        "Cold, the first request computes the shared prompt and the others find its blocks in the same step. First "
        "token: mean of the requests. Tokens/s: of the answers, the time for the prompts included."
    )
    table.add_column("run", no_wrap=True)
    for heading in ("prompt tokens", "in cache", "computed", "first token", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.name,
            f"{run.prompt_tokens:,}",
            f"{run.found_tokens:,}",
            f"{run.prompt_tokens - run.found_tokens:,}",
            f"{run.seconds_to_first_token:.2f} s",
            f"{run.output_tokens / run.seconds:.1f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a GGUF file or a name on the hub (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--max-tokens", type=int, default=48, help="most tokens per answer (default: %(default)s)")
    arguments = parser.parse_args()
    console = Console()

    try:
        engine = Engine.from_pretrained(arguments.model)
    except RunnerError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    # The same weights; only the books differ.
    without_cache = Engine(engine.model_runner.model, engine.tokenizer, EngineConfig(enable_caching=False))
    runs = [
        ask(without_cache, "cache off", console, arguments.max_tokens),
        ask(engine, "cold", console, arguments.max_tokens),
        ask(engine, "warm", console, arguments.max_tokens),
    ]
    console.print(table_of(runs))

    off, cold, warm = ([output.token_ids for output in run.outputs] for run in runs)
    same = off == cold == warm
    if same:
        console.print("The tokens are the same with the cache off, cold and warm.", style="green")
    else:
        different = [question for i, question in enumerate(QUESTIONS) if not off[i] == cold[i] == warm[i]]
        console.print(f"The tokens are NOT the same with the cache off, cold and warm: {different}", style="red")
    for each in (without_cache, engine):
        each.manager.check_invariants()
        if each.manager.usage:
            console.print("Blocks are still in use although nothing runs.", style="red")
            same = False
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
