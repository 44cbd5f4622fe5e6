"""A GGUF file of a few kilobytes, written with the package ``gguf``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS = 32, 4, 2, 64, 2


def write_tiny_gguf(path: Path, *, pre_tokenizer: str = "smollm") -> Path:
    """A Llama with random weights and a byte-level tokenizer that joins line breaks and letters in pairs."""
    rng = np.random.default_rng(0)
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "ĊĊ",
        "ab",
        "ĠĠ",
    ]
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ċ Ċ", "a b", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}")

    def add(name: str, *shape: int) -> None:
        data = rng.standard_normal(shape).astype(np.float32) if len(shape) > 1 else np.ones(shape, np.float32)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType.F32)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    head_size = HIDDEN // HEADS
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm.weight", HIDDEN)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN)
        add(f"blk.{i}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.attn_k.weight", KV_HEADS * head_size, HIDDEN)
        add(f"blk.{i}.attn_v.weight", KV_HEADS * head_size, HIDDEN)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.ffn_gate.weight", INTERMEDIATE, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", INTERMEDIATE, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
