"""What a model family's config leaves unsaid: which layers keep a window, and the sizes it takes for granted.

A config.json omits values that equal the family's defaults (a nested one almost always does), and an older one does not
list its ``layer_types``. The defaults and patterns here are those of the configuration classes of transformers 5. A
family that is not listed must spell everything out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvcore.errors import ConfigError

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


class ConfigValues(Protocol):
    """A config with its family's defaults filled in."""

    def get(self, name: str) -> Any:
        """The value, or None where neither the config nor its family has one."""


Layout = Callable[[ConfigValues, int], Sequence[str]]
"""From a config and its number of layers to the type of each layer, as if a window were set."""


def full_everywhere(config: ConfigValues, num_layers: int) -> Sequence[str]:
    """No windows at all."""
    return [FULL] * num_layers


def window_everywhere(config: ConfigValues, num_layers: int) -> Sequence[str]:
    """One window for the whole model (Mistral, Phi 3)."""
    return [SLIDING] * num_layers


def full_every(period: int) -> Layout:
    """Windows but for every ``period``-th layer; ``sliding_window_pattern`` in the config overrides the period."""

    def layout(config: ConfigValues, num_layers: int) -> Sequence[str]:
        pattern = config.get("sliding_window_pattern")
        if pattern is None:
            pattern = period
        if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
            raise ConfigError(
                "sliding_window_pattern must be a whole number of at least 1 (one layer in so many has full "
                f'attention), got {pattern!r}; write out "layer_types" for any other pattern'
            )
        return [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]

    return layout


def window_from_layer(config: ConfigValues, num_layers: int) -> Sequence[str]:
    """Full layers below ``max_window_layers``, windows from there on (Qwen 2 and 3)."""
    return [SLIDING if i >= config.get("max_window_layers") else FULL for i in range(num_layers)]


def window_on_alternate_layers_below(config: ConfigValues, num_layers: int) -> Sequence[str]:
    """Every other layer below ``max_window_layers`` has a window (Qwen 2 MoE)."""
    return [SLIDING if i % 2 == 0 and i < config.get("max_window_layers") else FULL for i in range(num_layers)]


def window_without_rope(config: ConfigValues, num_layers: int) -> Sequence[str]:
    """Windows where there are no rotary embeddings (SmolLM3)."""
    return [FULL if rope else SLIDING for rope in _rope_layers(config, num_layers)]


def chunks_with_rope(config: ConfigValues, num_layers: int) -> Sequence[str]:
    """Chunks where there are rotary embeddings (Llama 4)."""
    chunked = config.get("attention_chunk_size") is not None
    return [CHUNKED if rope and chunked else FULL for rope in _rope_layers(config, num_layers)]


def _rope_layers(config: ConfigValues, num_layers: int) -> Sequence[Any]:
    """Whether each layer has rotary embeddings. ``no_rope_layers`` says it with a 1 where it does, against its
    name."""
    listed = config.get("no_rope_layers")
    if not listed:
        interval = config.get("no_rope_layer_interval") or 4
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if len(listed) < num_layers:
        raise ConfigError(
            f"no_rope_layers has {len(listed)} entries for {num_layers} layers; it needs one for each (or none at all)"
        )
    return list(listed[:num_layers])


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    Args:
        layout: Layer types where the config lists none.
        defaults: Values the config may omit, by their names in it.
    """

    layout: Layout
    defaults: Mapping[str, Any]


def _family(
    layout: Layout, layers: int, heads: int, kv_heads: int | None, hidden: int, max_len: int, **other: Any
) -> Family:
    return Family(
        layout,
        {
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_size": hidden,
            "max_position_embeddings": max_len,
            **other,
        },
    )


_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: Mapping[str, Family] = {
    "llama": _family(full_everywhere, 32, 32, None, 4096, 2048),
    "llama4_text": _family(chunks_with_rope, 48, 40, 8, 5120, 131072, head_dim=128, attention_chunk_size=8192),
    "smollm3": _family(window_without_rope, 36, 16, 4, 2048, 32768, use_sliding_window=False),
    "qwen2": _family(window_from_layer, 32, 32, 32, 4096, 32768, **_QWEN),
    "qwen2_moe": _family(window_on_alternate_layers_below, 24, 16, 16, 2048, 32768, **_QWEN),
    "qwen2_vl_text": _family(window_from_layer, 80, 64, 8, 8192, 32768, **{**_QWEN, "max_window_layers": 80}),
    "qwen2_5_vl_text": _family(window_from_layer, 80, 64, 8, 8192, 32768, **{**_QWEN, "max_window_layers": 80}),
    "qwen3": _family(window_from_layer, 32, 32, 32, 4096, 32768, head_dim=128, **_QWEN),
    "qwen3_moe": _family(window_everywhere, 24, 32, 4, 2048, 32768, use_sliding_window=False, sliding_window=4096),
    "mistral": _family(window_everywhere, 32, 32, 8, 4096, 131072, sliding_window=4096),
    "ministral": _family(window_everywhere, 32, 32, 8, 4096, 131072, sliding_window=4096),
    "ministral3": _family(window_everywhere, 34, 32, 8, 4096, 262144, head_dim=128),
    "mixtral": _family(window_everywhere, 32, 32, 8, 4096, 131072),
    "phi3": _family(window_everywhere, 32, 32, None, 3072, 4096),
    "phimoe": _family(window_everywhere, 32, 32, 8, 4096, 131072),
    "starcoder2": _family(window_everywhere, 30, 24, 2, 3072, 4096),
    "gemma": _family(full_everywhere, 28, 16, 16, 3072, 8192, head_dim=256),
    "gemma2": _family(full_every(2), 26, 8, 4, 2304, 8192, head_dim=256, sliding_window=4096),
    "gemma3_text": _family(full_every(6), 26, 8, 4, 2304, 131072, head_dim=256, sliding_window=4096),
    "gemma3n_text": _family(
        full_every(5), 35, 8, 2, 2048, 32768, head_dim=256, sliding_window=512, num_kv_shared_layers=15
    ),
    "gemma4_text": _family(
        full_every(6), 30, 8, 4, 2304, 131072, head_dim=256, global_head_dim=512, sliding_window=512
    ),
    "cohere2": _family(full_every(4), 40, 64, None, 8192, 8192, sliding_window=4096),
    "olmo2": _family(full_everywhere, 32, 32, None, 4096, 2048),
    "olmo3": _family(full_every(4), 32, 32, None, 4096, 2048, sliding_window=4096),
    "exaone4": _family(full_every(4), 32, 32, 32, 4096, 2048, sliding_window=4096),
    "gpt_oss": _family(full_every(2), 36, 64, 8, 2880, 131072, head_dim=64, sliding_window=128),
}
"""By ``model_type`` of the text model."""
