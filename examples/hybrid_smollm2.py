"""A hybrid model: SmolLM2 with a window of 256 tokens in most of its layers, in a conversation longer than that.

The weights are those of SmolLM2-135M-Instruct; only the config says something new about the layers. What a window has
left is freed while the answer is still being written, and the full layers remember the rest.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import MinistralConfig

from kvcore.planning import CapacityReport, capacity_report
from kvcore.planning_hf import plan_from_hf_config
from kvcore.planning_text import size
from runner import Engine, EngineConfig, RequestOutput, SamplingParams
from runner.loader import ModelSource, find_model

WINDOW = 256
FULL_LAYERS = (16, 17, 18, 19, 20, 22, 23, 24)
"""SmolLM2 was trained without windows. With the full layers elsewhere, what it writes soon falls apart."""

QUESTIONS = (
    "What is the capital of France?",
    "What is it famous for?",
    "Why is the sky blue?",
    "Why is the sea salty?",
    "How do plants make their food?",
    "Why do birds fly south in winter?",
    "What is a rainbow?",
)
SAMPLING = SamplingParams(max_tokens=80, repetition_penalty=1.1)
"""Always the likeliest token, but with some reluctance to say it again, which so small a model needs."""


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and where their keys and values were.

    Args:
        question: What was asked.
        output: The answer; its prompt is the whole conversation.
        block_tables: For each group, one token before the answer ended; 0 where the window has left.
        num_freed: Blocks that the windows left during the turn.
    """

    question: str
    output: RequestOutput
    block_tables: tuple[list[int], ...]
    num_freed: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the conversation so far, this answer included."""
        return len(self.output.prompt_token_ids) + len(self.output.token_ids)


def hybrid_model() -> ModelSource:
    """SmolLM2's weights as a Ministral model, which is a Llama whose layers may have windows."""
    source = find_model()
    llama = source.config.to_dict()
    del llama["model_type"], llama["architectures"]
    types = ["full_attention" if i in FULL_LAYERS else "sliding_attention" for i in range(llama["num_hidden_layers"])]
    return ModelSource(source.path, MinistralConfig(**llama, sliding_window=WINDOW, layer_types=types))


def hybrid_engine() -> Engine:
    """An engine for it. In each step it computes 256 tokens at most, so that a long prompt needs few blocks at once."""
    source = hybrid_model()
    model = source.load_model(dtype=torch.float32, device=torch.device("cpu"))
    return Engine(
        model, source.load_tokenizer(), EngineConfig(num_blocks=400, block_size=16, max_num_batched_tokens=256)
    )


def converse(engine: Engine, questions: Sequence[str]) -> Iterator[Turn]:
    """Ask one question after another. Each prompt is the conversation so far."""
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        request_id = engine.add_request(messages, SAMPLING)
        tables, outputs = [], engine.step()
        while not (outputs and outputs[0].finished):
            tables.append(engine.manager.get_block_ids(request_id))
            outputs = engine.step()
        # A prompt found in the cache begins with nulls where the window had left it before.
        num_freed = sum(table.count(0) for table in tables[-1]) - sum(table.count(0) for table in tables[0])
        yield Turn(question, outputs[0], tables[-1], num_freed)
        messages.append({"role": "assistant", "content": outputs[0].text})


def without_windows(engine: Engine) -> CapacityReport:
    """What a cache of as many blocks holds for SmolLM2 as it is, all of whose layers are full."""
    config = plan_from_hf_config(find_model().config, num_blocks=engine.kv_cache_config.num_blocks, dtype="float32")
    return capacity_report(config, max_model_len=engine.max_model_len)


def bytes_taken(engine: Engine, turn: Turn) -> tuple[int, int]:
    """By the conversation at the end of a turn, in this layout and in one without windows."""
    num_held = sum(block != 0 for table in turn.block_tables for block in table)
    # Positions in a table never shift, so its length is what it would hold if it had freed nothing.
    num_full = len(turn.block_tables[0])
    return num_held * engine.capacity.bytes_per_block, num_full * without_windows(engine).bytes_per_block


def bytes_taken_at_most(engine: Engine) -> tuple[int, int]:
    """By the longest conversation that the model was made for, in both layouts."""
    both = (engine.capacity, without_windows(engine))
    hybrid, full = (report.lengths[0].blocks_per_request * report.bytes_per_block for report in both)
    return hybrid, full


def main() -> tuple[Engine, list[Turn]]:
    """Hold the conversation, print what happens, and give both back."""
    engine, turns = hybrid_engine(), []
    report = engine.capacity
    print(f"{report.num_blocks} blocks of {size(report.bytes_per_block)} for {len(report.groups)} groups of layers:")
    for group in report.groups:
        print(f"  {len(group.layer_names)} layers, {group.attention}, {group.kv_cache_spec.block_size} tokens a block")

    for turn in converse(engine, QUESTIONS):
        turns.append(turn)
        print(f"\n> {turn.question}\n{textwrap.fill(turn.output.text, width=100)}")
        prompt, found = len(turn.output.prompt_token_ids), turn.output.num_cached_tokens
        print(f"[{prompt} tokens of prompt, {found} found in the cache; {turn.num_freed} blocks freed by windows]")

    print(f"\nThe block tables, {len(turns[-1].block_tables[0])} places each:")
    for group, table in zip(report.groups, turns[-1].block_tables, strict=True):
        held = [str(block) for block in table if block]
        nulls = f"{table.count(0)} x null, " if 0 in table else ""
        print(f"  {group.attention:<10}  {nulls}{' '.join(held[:3])} ... {held[-1]} ({len(held)} held)")

    taken = {turns[-1].num_tokens: bytes_taken(engine, turns[-1]), engine.max_model_len: bytes_taken_at_most(engine)}
    for num_tokens, (hybrid, full) in taken.items():
        print(f"{num_tokens:,} tokens take {size(hybrid)}, without windows {size(full)}: {1 - hybrid / full:.0%} less")
    return engine, turns


if __name__ == "__main__":
    main()
