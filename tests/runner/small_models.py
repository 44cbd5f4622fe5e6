"""Small random models of real architectures, and what transformers itself generates with them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 199
WINDOW = 24
"""Tokens, for models with sliding layers; prompts in the tests are several windows long."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Tied, with Gemma's scaled embeddings, every token would be its own likeliest successor.
    "tie_word_embeddings": False,
    # Large enough for attention to be sharp and for the likeliest token to be clearly so.
    "initializer_range": 0.3,
}
SLIDING_THEN_FULL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}

ARCHITECTURES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2-windows": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2-softcap": lambda: transformers.Gemma2Config(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=16),
    "gemma3-hybrid": lambda: transformers.Gemma3TextConfig(**SIZES, **SLIDING_THEN_FULL, query_pre_attn_scalar=16),
    "gpt-oss-sinks": lambda: transformers.GptOssConfig(
        **SIZES, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "llama4-chunks": lambda: transformers.Llama4TextConfig(
        **SIZES,
        attention_chunk_size=WINDOW,
        intermediate_size_mlp=96,
        num_local_experts=2,
        no_rope_layers=[1, 1, 1, 0],
    ),
    "smollm3-no-rope": lambda: transformers.SmolLM3Config(**SIZES),
    "smollm3-windows": lambda: transformers.SmolLM3Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, no_rope_layer_interval=2
    ),
    "ministral-hybrid": lambda: transformers.MinistralConfig(**SIZES, **SLIDING_THEN_FULL),
    "cohere2-hybrid": lambda: transformers.Cohere2Config(**SIZES, sliding_window=WINDOW),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "olmo3-hybrid": lambda: transformers.Olmo3Config(**SIZES, sliding_window=WINDOW),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "phi3-windows": lambda: transformers.Phi3Config(**SIZES, sliding_window=WINDOW),
    "gemma4-two-head-sizes": lambda: transformers.Gemma4TextConfig(
        **SIZES,
        **SLIDING_THEN_FULL,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
    ),
}


def small_model(architecture: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model with random weights in float32, always the same for a seed; ``changes`` are to its config."""
    torch.manual_seed(seed)
    config = ARCHITECTURES[architecture]()
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            # What is normed no longer has the size that initializer_range gave it, and attention would be flat.
            torch.nn.init.constant_(parameter, 2.0)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model.eval()


def random_prompts(lengths: list[int], *, shared: int = 0, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths that begin with the same ``shared`` tokens, as far as they are long enough."""
    rng = random.Random(seed)
    prefix = [rng.randrange(VOCABULARY) for _ in range(shared)]
    return [(prefix + [rng.randrange(VOCABULARY) for _ in range(length)])[:length] for length in lengths]


@torch.inference_mode()
def generated_by_transformers(
    model: PreTrainedModel, prompts: list[list[int]], max_tokens: int, **settings: Any
) -> list[list[int]]:
    """Greedy outputs of ``model.generate``, one prompt at a time; it gets ``settings`` too."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    outputs = []
    for prompt in prompts:
        tokens = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            **settings,
        )
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs
