"""Reading transformers configs: the shapes that config.json files of real models have, and what cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore import (
    ChunkedLocalAttentionSpec,
    ConfigError,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from kvcore.planning import plan_kv_cache
from kvcore.planning_families import FAMILIES
from kvcore.planning_hf import max_model_len_from_hf_config, plan_from_hf_config, specs_from_hf_config

Config = dict[str, Any]

LLAMA: Config = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
SMOLLM3: Config = {
    "model_type": "smollm3",
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0],
    "no_rope_layer_interval": 4,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
QWEN2: Config = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
QWEN3: Config = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "head_dim": 128,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
MISTRAL: Config = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
GEMMA2: Config = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "head_dim": 256,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "torch_dtype": "float32",
}
GEMMA3_1B: Config = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "head_dim": 256,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}
GEMMA3_4B: Config = {
    # The nested config leaves out what equals the family's defaults: heads, head size, pattern.
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27},
    "torch_dtype": "bfloat16",
}
GEMMA3_12B: Config = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
GEMMA3N: Config = {
    "model_type": "gemma3n",
    "text_config": {
        "model_type": "gemma3n_text",
        "hidden_size": 2048,
        "head_dim": 256,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
        "num_attention_heads": 8,
        "num_hidden_layers": 30,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 10,
        "sliding_window": 512,
    },
    "torch_dtype": "bfloat16",
}
COHERE2: Config = {
    "model_type": "cohere2",
    "hidden_size": 4096,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_switch": 4,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16",
}
OLMO3: Config = {
    "model_type": "olmo3",
    "hidden_size": 4096,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "dtype": "bfloat16",
}
PHI3: Config = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "sliding_window": 2047,
    "torch_dtype": "bfloat16",
}
GPT_OSS: Config = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
}
LLAMA4: Config = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "head_dim": 128,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "attention_chunk_size": 8192,
        "no_rope_layers": [],
        "torch_dtype": "bfloat16",
    },
}


def kinds(specs: dict[str, KVCacheSpec]) -> str:
    """One letter a layer: F for full attention, W for a window, C for chunks."""
    letters = {FullAttentionSpec: "F", SlidingWindowSpec: "W", ChunkedLocalAttentionSpec: "C"}
    return "".join(letters[type(spec)] for spec in specs.values())


def reach(specs: dict[str, KVCacheSpec]) -> set[int]:
    """Every window and chunk size among the layers."""
    sizes = (getattr(spec, "sliding_window", getattr(spec, "attention_chunk_size", None)) for spec in specs.values())
    return {size for size in sizes if size is not None}


def without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("config", "expected", "windows", "heads"),
    [
        pytest.param(LLAMA, "F" * 16, set(), (8, 64), id="Llama 3.2 1B"),
        pytest.param(SMOLLM3, "F" * 8, set(), (4, 128), id="SmolLM3, no windows"),
        pytest.param(
            {**SMOLLM3, "use_sliding_window": True, "sliding_window": 8192},
            "FFFW" * 2,
            {8192},
            (4, 128),
            id="SmolLM3, windows on layers without rotary embeddings",
        ),
        pytest.param(QWEN2, "F" * 28, set(), (4, 128), id="Qwen2.5 7B"),
        pytest.param(
            {**QWEN2, "use_sliding_window": True, "max_window_layers": 21},
            "F" * 21 + "W" * 7,
            {131072},
            (4, 128),
            id="Qwen2.5, windows from layer 21",
        ),
        pytest.param(
            {**QWEN2, "model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 4},
            "WFWF" + "F" * 24,
            {131072},
            (4, 128),
            id="Qwen2 MoE, windows on alternate layers below layer 4",
        ),
        pytest.param(QWEN3, "F" * 28, set(), (8, 128), id="Qwen3 0.6B"),
        pytest.param(MISTRAL, "W" * 32, {4096}, (8, 128), id="Mistral 7B v0.1"),
        pytest.param({**MISTRAL, "sliding_window": None}, "F" * 32, set(), (8, 128), id="Mistral 7B v0.3"),
        pytest.param({**MISTRAL, "head_dim": None}, "W" * 32, {4096}, (8, 128), id="head_dim null"),
        pytest.param(
            {**MISTRAL, "model_type": "ministral", "layer_types": ["full_attention", "sliding_attention"] * 16},
            "FW" * 16,
            {4096},
            (8, 128),
            id="Ministral",
        ),
        pytest.param(GEMMA2, "WF" * 13, {4096}, (4, 256), id="Gemma 2 2B"),
        pytest.param(GEMMA3_1B, "WWWWWF" * 4 + "WW", {512}, (1, 256), id="Gemma 3 1B"),
        pytest.param(GEMMA3_4B, "WWWWWF" * 5 + "WWWW", {1024}, (4, 256), id="Gemma 3 4B"),
        # 3840 / 16 heads would be 240: the head size has to come from the family.
        pytest.param(GEMMA3_12B, "WWWWWF" * 8, {1024}, (8, 256), id="Gemma 3 12B"),
        pytest.param(GEMMA3N, "WWWWF" * 4, {512}, (2, 256), id="Gemma 3n E2B, ten layers share a cache"),
        pytest.param(COHERE2, "WWWF" * 8, {4096}, (8, 128), id="Command R7B"),
        pytest.param({**LLAMA, "model_type": "olmo2"}, "F" * 16, set(), (8, 64), id="OLMo 2"),
        pytest.param(OLMO3, "WWWF" * 8, {4096}, (32, 128), id="OLMo 3 7B"),
        pytest.param(without(OLMO3, "layer_types"), "WWWF" * 8, {4096}, (32, 128), id="OLMo 3, types not listed"),
        pytest.param(PHI3, "W" * 32, {2047}, (32, 96), id="Phi 3 mini 4k"),
        pytest.param(GPT_OSS, "WF" * 12, {128}, (8, 64), id="gpt-oss 20B"),
        pytest.param(without(GPT_OSS, "layer_types"), "WF" * 12, {128}, (8, 64), id="gpt-oss, types not listed"),
        pytest.param(LLAMA4, "CCCF" * 12, {8192}, (8, 128), id="Llama 4 Scout"),
        pytest.param(
            {**LLAMA4["text_config"], "num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1]},
            "CFFC",
            {8192},
            (8, 128),
            id="Llama 4, rotary layers listed",
        ),
        pytest.param(
            {**LLAMA4["text_config"], "attention_chunk_size": None}, "F" * 48, set(), (8, 128), id="Llama 4, no chunks"
        ),
        pytest.param({**LLAMA, "model_type": "granite"}, "F" * 16, set(), (8, 64), id="a family without windows"),
        pytest.param(
            without({**LLAMA, "model_type": "gpt_neox"}, "num_key_value_heads", "head_dim"),
            "F" * 16,
            set(),
            (32, 64),
            id="as many key heads as query heads",
        ),
        pytest.param(
            {**LLAMA, "model_type": "granitemoehybrid", "layer_types": ["attention"] * 16, "mamba_d_state": 128},
            "F" * 16,
            set(),
            (8, 64),
            id="an old name for full attention, in a family that could have Mamba layers",
        ),
        pytest.param(
            {**QWEN3, "layer_types": ["sliding_attention"] * 28},
            "F" * 28,
            set(),
            (8, 128),
            id="windows listed but switched off",
        ),
        pytest.param(
            {**LLAMA, "model_type": "new", "sliding_window": 64, "use_sliding_window": False},
            "F" * 16,
            set(),
            (8, 64),
            id="an unknown family with windows switched off",
        ),
    ],
)
def test_the_layers_of_a_model_are_read_as_the_model_computes_them(
    config: Config, expected: str, windows: set[int], heads: tuple[int, int]
) -> None:
    specs = specs_from_hf_config(config, block_size=32)
    assert kinds(specs) == expected
    assert reach(specs) == windows
    assert {(spec.num_kv_heads, spec.head_size) for spec in specs.values()} == {heads}
    assert list(specs) == [f"layers.{i}" for i in range(len(expected))]
    assert {spec.block_size for spec in specs.values()} == {32}


def test_full_layers_of_gemma_4_have_larger_and_fewer_heads() -> None:
    config = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "dtype": "bfloat16",
    }
    specs = list(specs_from_hf_config(config).values())
    assert specs[0] == SlidingWindowSpec(16, 4, 256, "bfloat16", sliding_window=512)
    assert specs[5] == FullAttentionSpec(16, 2, 512, "bfloat16")
    assert specs_from_hf_config({**config, "attention_k_eq_v": False})["layers.5"].num_kv_heads == 4


def test_a_head_size_given_layer_by_layer_is_not_replaced_by_that_of_the_family() -> None:
    config = {"model_type": "gemma4_text", "num_hidden_layers": 6, "dtype": "bfloat16"}
    heads = {"head_dim": 64, "num_key_value_heads": 1}
    as_json = {**config, "per_layer_config": {"5": heads}}
    layers = [SimpleNamespace(num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=512)] * 5
    as_object = SimpleNamespace(**config, per_layer_config=[*layers, SimpleNamespace(**heads)])
    for given in (as_json, as_object):
        specs = list(specs_from_hf_config(given).values())
        assert specs[4] == SlidingWindowSpec(16, 4, 256, "bfloat16", sliding_window=512)
        assert specs[5] == FullAttentionSpec(16, 1, 64, "bfloat16")


def test_settings_of_single_layers_override_those_of_the_model() -> None:
    config = {**MISTRAL, "per_layer_config": {"03": {"num_key_value_heads": 2}, "10": {"sliding_window": 64}}}
    specs = specs_from_hf_config(config)
    assert [i for i, spec in enumerate(specs.values()) if spec.num_kv_heads == 2] == [3]
    assert reach(specs) == {4096, 64}
    assert specs["layers.10"] == SlidingWindowSpec(16, 8, 128, "bfloat16", sliding_window=64)
    layers = [SimpleNamespace(**{**MISTRAL, "num_key_value_heads": 2 if i == 3 else 8}) for i in range(32)]
    specs = specs_from_hf_config(SimpleNamespace(**MISTRAL, per_layer_config=layers))
    assert [i for i, spec in enumerate(specs.values()) if spec.num_kv_heads == 2] == [3]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_can_be_planned_from_its_defaults(model_type: str) -> None:
    config = {"model_type": model_type, "dtype": "bfloat16"}
    assert plan_from_hf_config(config, num_blocks=10).num_blocks == 10
    assert max_model_len_from_hf_config(config) == FAMILIES[model_type].defaults["max_position_embeddings"]


# Where the config and its dtype come from


@pytest.mark.parametrize("config", [LLAMA, GEMMA3_4B, LLAMA4], ids=["flat", "nested", "nested dtype"])
def test_object_dict_file_and_folder_say_the_same(config: Config, tmp_path: Path) -> None:
    def as_object(value: Any) -> Any:
        return SimpleNamespace(**{k: as_object(v) for k, v in value.items()}) if isinstance(value, dict) else value

    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = specs_from_hf_config(config)
    assert specs_from_hf_config(as_object(config)) == expected
    assert specs_from_hf_config(tmp_path) == expected
    assert specs_from_hf_config(str(tmp_path / "config.json")) == expected


def test_a_nested_config_without_a_model_type_is_read_as_its_familys_text_model() -> None:
    text = without(GEMMA3_4B["text_config"], "model_type")
    assert specs_from_hf_config({**GEMMA3_4B, "text_config": text}) == specs_from_hf_config(GEMMA3_4B)


def test_the_dtype_is_the_callers_or_the_configs() -> None:
    class Dtype:
        def __str__(self) -> str:
            return "torch.float16"

    def dtypes(config: Config, **arguments: object) -> set[str]:
        return {spec.dtype for spec in specs_from_hf_config(config, **arguments).values()}  # type: ignore[arg-type]

    assert dtypes(LLAMA) == {"bfloat16"}
    assert dtypes(LLAMA, dtype="float8_e4m3fn") == {"float8_e4m3fn"}
    assert dtypes({**LLAMA, "dtype": Dtype()}) == {"float16"}
    assert dtypes(without(LLAMA, "torch_dtype"), dtype=Dtype()) == {"float16"}
    for dtype in (None, "auto"):
        with pytest.raises(ConfigError, match='pass the element type of the cache, such as dtype="bfloat16"'):
            specs_from_hf_config({**LLAMA, "torch_dtype": dtype})
    with pytest.raises(ConfigError, match="dtype must be one of"):
        specs_from_hf_config({**LLAMA, "torch_dtype": "int3"})


def test_the_longest_sequence_is_the_configs_or_unknown() -> None:
    assert max_model_len_from_hf_config(LLAMA) == 131072
    assert max_model_len_from_hf_config(GEMMA3_4B) == 131072
    assert max_model_len_from_hf_config({"model_type": "new"}) is None


def test_planning_from_a_config_passes_on_what_planning_takes() -> None:
    specs = specs_from_hf_config(GEMMA3_4B, block_size=32, dtype="float32")
    assert plan_from_hf_config(
        GEMMA3_4B, memory_bytes=2**30, block_size=32, dtype="float32", group_size=10
    ) == plan_kv_cache(specs, memory_bytes=2**30, group_size=10)
    uneven = {**LLAMA, "per_layer_config": {"0": {"num_key_value_heads": 3}}}
    with pytest.raises(ConfigError, match="pages cannot be made equal"):
        plan_from_hf_config(uneven, num_blocks=10)
    assert plan_from_hf_config(uneven, num_blocks=10, pad_pages=True).num_blocks == 10


# What cannot be planned


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(
            {**LLAMA, "layer_types": ["linear_attention", "full_attention"] * 8},
            'layers of type "linear_attention" \\(layer 0\\) have no spec',
            id="linear attention",
        ),
        pytest.param({**LLAMA, "layer_types": ["attention", "mamba"] * 8}, 'layers of type "mamba"', id="mamba"),
        pytest.param(
            {**LLAMA, "model_type": "jamba", "attn_layer_period": 8, "mamba_d_state": 16},
            'layers of type "mamba" \\(the config sets mamba_d_state=16\\)',
            id="mamba, types not listed",
        ),
        pytest.param(
            {**LLAMA, "model_type": "qwen3_next", "full_attention_interval": 4, "linear_num_key_heads": 16},
            'layers of type "linear_attention"',
            id="linear attention, types not listed",
        ),
        pytest.param({**LLAMA, "model_type": "lfm2", "conv_L_cache": 3}, 'layers of type "conv"', id="convolution"),
        pytest.param(
            {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 512, "v_head_dim": 128},
            "multi-head latent attention \\(MLA, kv_lora_rank=512\\)",
            id="MLA",
        ),
        pytest.param(
            {"model_type": "new", "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
            'layers of type "linear_attention" \\(layer 1\\) have no spec here',
            id="the layer types come before what else is missing",
        ),
        pytest.param(
            {"model_type": "new", "ssm_state_size": 128},
            'layers of type "mamba"',
            id="so do the settings that tell them",
        ),
        pytest.param({**LLAMA, "model_type": "rwkv", "rescale_every": 6}, 'layers of type "rwkv"', id="rwkv"),
        pytest.param({**LLAMA, "model_type": "xlstm", "sequence_kernel": "x"}, 'layers of type "xlstm"', id="xlstm"),
        pytest.param(
            {**LLAMA, "cross_attention_layers": [3, 8]},
            "layers of type cross-attention \\(the config sets cross_attention_layers=\\[3, 8\\]\\)",
            id="layers that read an image",
        ),
        pytest.param(
            {**LLAMA, "add_cross_attention": True},
            "cross-attention \\(the config sets add_cross_attention=True\\)",
            id="a decoder that reads an encoder",
        ),
        pytest.param({**LLAMA, "is_encoder_decoder": True}, "cross-attention", id="encoder-decoder"),
        pytest.param({**GEMMA3_1B, "use_bidirectional_attention": True}, "bidirectional attention", id="bidirectional"),
        pytest.param({**LLAMA, "v_head_dim": 32}, "64 elements in a key and 32 in a value", id="smaller values"),
        pytest.param(
            {**LLAMA, "model_type": "new", "sliding_window": 4096},
            'sets sliding_window=4096 but does not say for which layers.*add "layer_types"',
            id="an unknown family with a window",
        ),
        pytest.param(
            {**LLAMA, "model_type": "new", "attention_chunk_size": 128},
            "sets attention_chunk_size=128 but does not say for which layers",
            id="an unknown family with chunks",
        ),
        pytest.param(
            without({**LLAMA, "model_type": "falcon", "multi_query": True}, "num_key_value_heads"),
            "sets multi_query=True and no num_key_value_heads",
            id="key heads under another name",
        ),
        pytest.param({**LLAMA, "layer_types": ["full_attention"] * 15}, "num_hidden_layers=16", id="too few types"),
        pytest.param({**LLAMA, "layer_types": "full_attention"}, "layer_types must list", id="types not a list"),
        pytest.param({**LLAMA, "layer_types": ["sliding_attention"] * 16}, "sliding_window must be", id="no window"),
        pytest.param({**GEMMA2, "sliding_window": 0}, "sliding_window must be a whole number", id="a window of zero"),
        pytest.param({**GEMMA3_1B, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be", id="pattern"),
        pytest.param({**SMOLLM3, "no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 8", id="rope layers"),
        pytest.param({**LLAMA, "num_key_value_heads": [8, 4]}, "num_key_value_heads must be", id="a list of heads"),
        pytest.param({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers must be", id="a flag for a number"),
        pytest.param({**LLAMA, "head_dim": None, "hidden_size": 2049}, "2049 is no multiple of", id="odd head size"),
        pytest.param({"model_type": "new", "dtype": "int8"}, "num_hidden_layers .* the config has none", id="empty"),
        pytest.param({**GEMMA3_1B, "num_kv_shared_layers": 26}, "whole number from 0 to 25", id="all layers share"),
        pytest.param(None, "num_hidden_layers must be", id="None"),
    ],
)
def test_what_kvcore_cannot_plan_for_is_refused_by_name(config: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        specs_from_hf_config(config)


def test_a_setting_that_transformers_will_not_give_for_the_whole_model_asks_for_layer_types() -> None:
    class Uneven(SimpleNamespace):
        @property
        def sliding_window(self) -> int:
            raise RuntimeError("'sliding_window' is a per-layer attribute and may vary across layers")

    with pytest.raises(ConfigError, match='sliding_window differs between the layers: add "layer_types"'):
        specs_from_hf_config(Uneven(**{**LLAMA, "model_type": "new"}))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read .*No such file"), ("{", "is not JSON"), ("[1]", "holds a JSON list, not the object")],
)
def test_a_file_that_is_no_config_is_refused_with_its_name(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message) as refusal:
        specs_from_hf_config(file)
    assert "other.json" in str(refusal.value)
