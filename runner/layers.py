"""Check at load that every layer of a model is one the runner computes exactly, or say which is not and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from kvcore.errors import ConfigError
from kvcore.planning_hf import specs_from_hf_config
from kvcore.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from runner.attention.base import AttentionLayer
from runner.errors import UnsupportedModelError
from runner.hf_attention import AttentionCall, StepMissingError, probe_attention

NEUTRAL_FEATURES = frozenset({"cache_position", "position_ids", "return_dict", "use_cache"})
"""Keyword arguments that layers hand on and that change nothing for attention; nor do ``output_...``."""


def specs_of(config: PretrainedConfig, *, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
    """What each layer caches, from the model's config alone, before any weight is loaded.

    Raises:
        UnsupportedModelError: The config tells of layers that keep something else than keys and values per token, or
            that read another layer's.
    """
    try:
        specs = specs_from_hf_config(config, block_size=block_size, dtype=dtype)
    except ConfigError as error:
        raise UnsupportedModelError(f"the runner cannot serve {config.model_type!r} models: {error}") from error
    if num_shared := getattr(config.get_text_config(), "num_kv_shared_layers", None):
        raise UnsupportedModelError(
            f"the runner cannot serve {config.model_type!r} models: the last {num_shared} layers read the cache of an "
            f"earlier layer instead of one of their own (num_kv_shared_layers={num_shared}), which the runner does not "
            "know how to give them"
        )
    return specs


def check_positions(config: PretrainedConfig, *, max_model_len: int, max_num_batched_tokens: int) -> None:
    """Refuse what would make a token's keys or queries depend on what else is in the batch.

    Rotary embeddings may change with the longest position of a forward; a key computed beside a long request could then
    not be shared. And queries may be scaled by their place in the forward instead of by their position.

    Raises:
        UnsupportedModelError: With the lengths up to which neither happens.
    """
    text = config.get_text_config()
    if (
        getattr(text, "attn_temperature_tuning", False)
        and max(max_model_len, max_num_batched_tokens) >= text.floor_scale
    ):
        raise UnsupportedModelError(
            f"the model scales queries from token {text.floor_scale:,} of a forward on (attn_temperature_tuning), which"
            f" in a batch is not their position: pass max_model_len={text.floor_scale - 1} or less, and as much for "
            "max_num_batched_tokens"
        )
    parameters = getattr(text, "rope_parameters", None) or {}
    # One set for the model, or one for each layer type.
    for rope in [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]:
        rope_type = rope.get("rope_type")
        if rope_type not in ("dynamic", "longrope"):
            continue
        original = (
            rope.get("original_max_position_embeddings")
            or getattr(text, "original_max_position_embeddings", None)
            or text.max_position_embeddings
        )
        if max_model_len > original:
            raise UnsupportedModelError(
                f"the model's rotary embeddings (rope_type {rope_type!r}) change when a sequence grows beyond "
                f"{original} tokens, and with them every key computed before: pass max_model_len={original} or less"
            )


def attention_layers(model: PreTrainedModel, specs: Mapping[str, KVCacheSpec]) -> dict[int, AttentionLayer]:
    """The model's attention layers by ``layer_idx``, each checked against what its spec says.

    Args:
        model: Loaded with ``attn_implementation="kvcore_paged"``.
        specs: From the config, named ``layers.0``, ``layers.1``, ...

    Raises:
        UnsupportedModelError: Names the layer.
    """
    if not model._supports_attention_backend:
        raise UnsupportedModelError(
            f"{type(model).__name__} has attention code of its own instead of calling transformers' AttentionInterface,"
            " so that no paged attention can be plugged in"
        )
    try:
        calls = probe_attention(model)
    except StepMissingError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not hand the keyword arguments of its forward on to attention, so that no "
            "step can reach it"
        ) from error
    layers: dict[int, AttentionLayer] = {}
    for call in calls:
        layer = _checked(call, specs)
        if call.layer_idx in layers:
            raise UnsupportedModelError(f"{layer.name} ({type(call.module).__name__}) calls attention more than once")
        assert call.layer_idx is not None
        layers[call.layer_idx] = layer
    if missing := specs.keys() - {layer.name for layer in layers.values()}:
        name = min(missing, key=lambda name: int(name.rpartition(".")[2]))
        raise UnsupportedModelError(
            f"{name} ({_mixer_name(model, name)}) never calls attention: it keeps something else than keys and values "
            "per token, which the runner has no place for"
        )
    return dict(sorted(layers.items()))


def _checked(call: AttentionCall, specs: Mapping[str, KVCacheSpec]) -> AttentionLayer:
    kind = type(call.module).__name__
    name = f"layers.{call.layer_idx}"
    spec = specs.get(name)
    if spec is None:
        raise UnsupportedModelError(
            f"{kind} (layer_idx={call.layer_idx}) calls attention, but by its config the model has no such layer with a"
            f" cache of its own (only {', '.join(specs)})"
        )
    where = f"{name} ({kind})"
    if call.key.shape[0] != call.query.shape[0]:
        raise UnsupportedModelError(
            f"{where} has {call.query.shape[0]} queries and {call.key.shape[0]} keys: cross attention, which the runner"
            " has no place for"
        )
    if call.key.shape != call.value.shape or call.query.shape[-1] != call.key.shape[-1]:
        raise UnsupportedModelError(
            f"{where} has keys {list(call.key.shape[1:])} and values {list(call.value.shape[1:])} (heads, head size) "
            "per token; they must be of one shape"
        )
    if call.key.shape[1:] != (spec.num_kv_heads, spec.head_size):
        raise UnsupportedModelError(
            f"{where} has keys of {call.key.shape[1]} heads x {call.key.shape[2]}, its config says {spec.num_kv_heads} "
            f"x {spec.head_size}"
        )
    features = dict(call.features)
    window = features.pop("sliding_window", None)
    expected = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    # A window layer may well say nothing here and leave it to its mask, which is made from the config.
    if window != expected and (window is not None or isinstance(spec, FullAttentionSpec)):
        raise UnsupportedModelError(f"{where} attends to a window of {window} tokens, its config says {expected}")
    if features.pop("is_causal", True) is False:
        raise UnsupportedModelError(f"{where} is not causal: it reads tokens that come later")
    softcap, sinks = features.pop("softcap", None), features.pop("s_aux", None)
    if unknown := {name for name in features if name not in NEUTRAL_FEATURES and not name.startswith("output_")}:
        raise UnsupportedModelError(
            f"{where} asks attention for {', '.join(sorted(unknown))}, which the runner does not know how to honour"
        )
    return AttentionLayer(name, spec, call.query.shape[1], softcap=softcap, has_sinks=sinks is not None)


def _mixer_name(model: PreTrainedModel, layer_name: str) -> str:
    """Class of what stands where a layer's attention would: its first child that is not a norm."""
    index = int(layer_name.rpartition(".")[2])
    stacks: Sequence[nn.ModuleList] = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layer = next((stack[index] for stack in stacks if len(stack) > index), None)
    if layer is None:
        return "unknown"
    mixers = [type(child).__name__ for child in layer.children() if "norm" not in type(child).__name__.lower()]
    return mixers[0] if mixers else type(layer).__name__
