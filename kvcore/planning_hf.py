"""Read a transformers config, without transformers, into one :class:`~kvcore.spec.KVCacheSpec` per layer.

A config is an object with attributes, the dict of a config.json, or the path of one. For a model of text and images it
is the ``text_config`` inside that counts. Layers are named ``layers.0``, ``layers.1``, ... by their index in the model;
one that reads another layer's cache (Gemma 3n) has none of its own and is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.planning import plan_kv_cache
from kvcore.planning_families import CHUNKED, FAMILIES, FULL, SLIDING, Family
from kvcore.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec

_OLD_NAMES = {"attention": FULL}

_OTHER_STATE = {
    "linear_num_key_heads": "linear_attention",
    "linear_attn_config": "linear_attention",
    "attn_type_list": "linear_attention",
    "mamba_d_state": "mamba",
    "mamba_d_conv": "mamba",
    "ssm_state_size": "mamba",
    "state_size": "mamba",
    "conv_L_cache": "conv",
    "lru_width": "recurrent",
    "rescale_every": "rwkv",
    "sequence_kernel": "xlstm",
}
"""Settings only a model with layers of another kind has: they tell where a config does not list its layer types."""

_OTHER_HEAD_COUNTS = ("multi_query", "num_kv_heads", "multi_query_group_num", "num_query_groups")
"""Other names for ``num_key_value_heads``: where one is set, none of that does not mean "as many as query heads"."""


def plan_from_hf_config(
    config: object,
    *,
    memory_bytes: int | None = None,
    num_blocks: int | None = None,
    block_size: int = 16,
    dtype: object = None,
    group_size: int | None = None,
    pad_pages: bool = False,
) -> KVCacheConfig:
    """Lay out a cache for the model that a transformers config describes. O(layers).

    Args:
        config: See :func:`specs_from_hf_config`, as for ``block_size`` and ``dtype``.
        memory_bytes: See :func:`~kvcore.planning.plan_kv_cache`, as for ``num_blocks``, ``group_size``, ``pad_pages``.

    Raises:
        ConfigError: As these two functions.
    """
    return plan_kv_cache(
        specs_from_hf_config(config, block_size=block_size, dtype=dtype),
        memory_bytes=memory_bytes,
        num_blocks=num_blocks,
        group_size=group_size,
        pad_pages=pad_pages,
    )


def specs_from_hf_config(config: object, *, block_size: int = 16, dtype: object = None) -> dict[str, KVCacheSpec]:
    """What each layer of a model caches, by layer name, in the order of the model. O(layers).

    Args:
        config: A transformers config object, the dict of a config.json, or the path of one or of its folder.
        block_size: Tokens per block, in every layer.
        dtype: Element type of the cache, a string or what ``str`` makes one of (``torch.bfloat16``); by default the
            config's own.

    Raises:
        ConfigError: No such file, or no JSON object in it; a size that is missing; layers that keep no keys and values
            per head (Mamba, linear attention, multi-head latent attention); a window whose layers the config does not
            name.
    """
    text, outer = _text_config(config)
    # What the layers are comes before any of their sizes: a model without attention has no heads to count, and what is
    # to be said about it is the type of its layers.
    _refuse_other_models(text, outer)
    num_layers = _number(text, "num_hidden_layers")
    types = _layer_types(text, num_layers)
    _refuse_other_layers(types)
    dtype_name = _dtype_name(dtype, text, outer)
    # The last num_kv_shared_layers read the cache of an earlier layer of their type.
    num_shared = text.get("num_kv_shared_layers") or 0
    if isinstance(num_shared, bool) or not isinstance(num_shared, int) or not 0 <= num_shared < num_layers:
        raise ConfigError(
            f"num_kv_shared_layers must be a whole number from 0 to {num_layers - 1} (one layer at least has a cache "
            f"to share), got {num_shared!r}"
        )
    return {
        f"layers.{i}": _layer_spec(text.layer(i), layer_type, block_size, dtype_name)
        for i, layer_type in enumerate(types[: num_layers - num_shared])
    }


def max_model_len_from_hf_config(config: object) -> int | None:
    """The longest sequence the model was made for (``max_position_embeddings``), in tokens; None where it is not said.

    Raises:
        ConfigError: No such file, or no JSON object in it.
    """
    text, _ = _text_config(config)
    length = text.get("max_position_embeddings")
    return length if isinstance(length, int) else None


class _Values:
    """A config's values by name, whatever it is made of; what it omits comes from its family."""

    def __init__(self, source: object, *, overrides: Mapping[str, Any] | None = None, family: Family | None = None):
        self.source = source
        self.overrides = overrides or {}
        self.family = family

    def get(self, name: str) -> Any:
        default = self.family.defaults.get(name) if self.family else None
        if name in self.overrides:
            return self.overrides[name]
        if isinstance(self.source, Mapping):
            return self.source.get(name, default)
        try:
            return getattr(self.source, name, default)
        except RuntimeError:  # transformers has no one value to give where per_layer_config makes the layers differ
            raise ConfigError(f'{name} differs between the layers: add "layer_types", the type of each layer') from None

    def layer(self, index: int) -> _Values:
        """The values of one layer, where ``per_layer_config`` makes it differ."""
        per_layer = self.get("per_layer_config")
        if isinstance(per_layer, Mapping):
            # Keys are indices; in JSON they are strings, and transformers writes them with leading zeros.
            found = [overrides for key, overrides in per_layer.items() if (str(key).lstrip("0") or "0") == str(index)]
            return _Values(self.source, overrides=found[0] if found else None, family=self.family)
        if isinstance(per_layer, Sequence):
            # Whole configs, with nothing left for the family to fill in.
            return _Values(per_layer[index])
        return self


def _text_config(config: object) -> tuple[_Values, _Values]:
    """The values of the text model, and those of the config around it (the same where nothing is nested)."""
    outer = _Values(_load(config) if isinstance(config, str | os.PathLike) else config)
    inner = outer.get("text_config")
    text = _Values(outer.source if inner is None else inner)
    model_type, outer_type = text.get("model_type"), outer.get("model_type")
    text.family = FAMILIES.get(str(model_type)) or FAMILIES.get(f"{outer_type}_text") or FAMILIES.get(str(outer_type))
    return text, outer


def _load(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {str(file)!r} ({error.strerror}): pass the path of a model's config.json or of its folder; "
            "for a name on the Hugging Face hub load the config with transformers and pass the object"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{str(file)!r} is not JSON ({error}): pass a transformers model's config.json") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{str(file)!r} holds a JSON {type(values).__name__}, not the object that a config.json is")
    return values


def _refuse_other_models(text: _Values, outer: _Values) -> None:
    for setting in ("is_encoder_decoder", "cross_attention_layers", "add_cross_attention"):
        if value := text.get(setting) or outer.get(setting):
            raise ConfigError(
                f"layers of type cross-attention (the config sets {setting}={value!r}) have no spec here: their keys "
                "and values are those of an encoder's output or of an image; kvcore plans for those of the tokens"
            )
    if (bidirectional := text.get("use_bidirectional_attention")) in (True, "all"):
        raise ConfigError(
            f"layers of type bidirectional attention (use_bidirectional_attention={bidirectional!r}) have no spec "
            "here: they read tokens that come later, so that nothing they cache is final"
        )
    if text.get("layer_types") is None and text.family is None:
        for setting, layer_type in _OTHER_STATE.items():
            if text.get(setting) is not None:
                raise ConfigError(
                    f'layers of type "{layer_type}" (the config sets {setting}={text.get(setting)!r}) have no spec '
                    "here: they keep a state of fixed size, and kvcore plans for keys and values per token"
                )


def _refuse_other_layers(types: Sequence[str]) -> None:
    for index, layer_type in enumerate(types):
        if layer_type not in (FULL, SLIDING, CHUNKED):
            raise ConfigError(
                f'layers of type "{layer_type}" (layer {index}) have no spec here: kvcore plans for layers that keep '
                f'keys and values per token and nothing else, those of type "{FULL}", "{SLIDING}" and "{CHUNKED}"'
            )


def _layer_types(text: _Values, num_layers: int) -> list[str]:
    listed, family = text.get("layer_types"), text.family
    types: list[str]
    # SmolLM3 and Qwen switch all their windows off with one flag, whatever else they say of them.
    windows_off = text.get("use_sliding_window") is False
    if listed is None and family is None:
        types = _types_without_family(text, num_layers, windows_off=windows_off)
    elif listed is None and family is not None:
        types = list(family.layout(text, num_layers))
        windows_off = windows_off or text.get("sliding_window") is None
    elif isinstance(listed, str) or not isinstance(listed, Sequence) or len(listed) != num_layers:
        raise ConfigError(
            f"layer_types must list one type for each of num_hidden_layers={num_layers} layers, got {listed!r}"
        )
    else:
        types = [_OLD_NAMES.get(str(layer_type), str(layer_type)) for layer_type in listed]
    return [FULL if windows_off and layer_type == SLIDING else layer_type for layer_type in types]


def _types_without_family(text: _Values, num_layers: int, *, windows_off: bool) -> list[str]:
    for setting in ("sliding_window", "attention_chunk_size"):
        # To guess would be unsafe: a full layer taken for a window layer loses tokens that it still reads.
        if text.get(setting) is not None and not (windows_off and setting == "sliding_window"):
            raise ConfigError(
                f"the config sets {setting}={text.get(setting)!r} but does not say for which layers, and model_type="
                f'{text.get("model_type")!r} is no family known here: add "layer_types", one of "{FULL}", "{SLIDING}", '
                f'"{CHUNKED}" for each layer'
            )
    return [FULL] * num_layers


def _layer_spec(layer: _Values, layer_type: str, block_size: int, dtype: str) -> KVCacheSpec:
    if (rank := layer.get("kv_lora_rank")) is not None:
        raise ConfigError(
            f"layers of type multi-head latent attention (MLA, kv_lora_rank={rank!r}) have no spec here: they cache "
            "one latent vector per token, and kvcore plans for keys and values per head"
        )
    kv_heads, head_size = _num_kv_heads(layer), _head_size(layer)
    if layer_type == SLIDING:
        return SlidingWindowSpec(block_size, kv_heads, head_size, dtype, _number(layer, "sliding_window"))
    if layer_type == CHUNKED:
        return ChunkedLocalAttentionSpec(block_size, kv_heads, head_size, dtype, _number(layer, "attention_chunk_size"))
    # Gemma 4: full layers have larger heads, and fewer of them where keys serve as values. Where a layer has a head_dim
    # of its own, that is the larger one already.
    if "head_dim" not in layer.overrides:
        head_size = layer.get("global_head_dim") or head_size
    if layer.get("attention_k_eq_v"):
        kv_heads = layer.get("num_global_key_value_heads") or kv_heads
    return FullAttentionSpec(block_size, kv_heads, head_size, dtype)


def _num_kv_heads(layer: _Values) -> int:
    if layer.get("num_key_value_heads") is not None:
        return _number(layer, "num_key_value_heads")
    for other in _OTHER_HEAD_COUNTS:
        if layer.get(other) is not None:
            raise ConfigError(
                f"the config sets {other}={layer.get(other)!r} and no num_key_value_heads: add num_key_value_heads, "
                "the number of key heads in a layer"
            )
    return _number(layer, "num_attention_heads")


def _head_size(layer: _Values) -> int:
    if layer.get("head_dim") is not None:
        head_size = _number(layer, "head_dim")
    else:
        hidden, heads = _number(layer, "hidden_size"), _number(layer, "num_attention_heads")
        head_size, left_over = divmod(hidden, heads)
        if left_over:
            raise ConfigError(
                f"hidden_size={hidden} is no multiple of num_attention_heads={heads}: add head_dim, the size of a head"
            )
    value_size = layer.get("v_head_dim")
    if value_size is not None and value_size != head_size:
        raise ConfigError(
            f"a head has {head_size} elements in a key and {value_size!r} in a value (v_head_dim), and kvcore plans "
            "for equal sizes"
        )
    return head_size


def _number(values: _Values, name: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        given = "the config has none" if value is None else f"got {value!r}"
        raise ConfigError(f"{name} must be a whole number of at least 1, {given} (at its top level or in text_config)")
    return value


def _dtype_name(dtype: object, text: _Values, outer: _Values) -> str:
    found = dtype
    for values in (text, outer):
        for name in ("dtype", "torch_dtype"):
            if found is None:
                found = values.get(name)
    if found is None or str(found) == "auto":
        raise ConfigError('the config names no dtype: pass the element type of the cache, such as dtype="bfloat16"')
    return str(found).removeprefix("torch.")
