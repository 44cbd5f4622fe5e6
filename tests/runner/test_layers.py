"""Models the runner cannot compute exactly are refused at load, in a sentence that names the layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from kvcore.planning_hf import specs_from_hf_config
from kvcore.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from runner import Engine, EngineConfig, UnsupportedModelError
from runner.hf_attention import ATTENTION_NAME, register
from runner.layers import attention_layers, check_positions, specs_of
from tests.runner.small_models import ARCHITECTURES, SIZES, SLIDING_THEN_FULL, WINDOW, small_model

REFUSED_BY_CONFIG = {
    "MambaConfig": r"linear_attention|mamba",
    "Mamba2Config": r"linear_attention|mamba",
    "JambaConfig": r"linear_attention|mamba",
    "BambaConfig": r"linear_attention|mamba",
    "FalconH1Config": r"hybrid|mamba",
    "Qwen3NextConfig": r"linear_attention",
    "RwkvConfig": r"rwkv",
    "xLSTMConfig": r"xlstm",
    "DeepseekV2Config": r"multi-head latent attention",
    "DeepseekV3Config": r"multi-head latent attention",
    "T5Config": r"cross-attention .*is_encoder_decoder",
    "BartConfig": r"cross-attention .*is_encoder_decoder",
    "MllamaConfig": r"cross-attention .*cross_attention_layers=\[3, 8,",
    "Gemma3nTextConfig": r"the last 15 layers read the cache of an earlier layer",
    "Gemma3nConfig": r"the last 15 layers read the cache of an earlier layer",
}
"""Configuration classes of transformers with what has to be said of their layers. What transformers calls the type of a
layer may change with its version."""


@pytest.mark.parametrize("name", REFUSED_BY_CONFIG)
def test_a_model_the_runner_has_no_place_for_is_refused_by_its_config_alone(name: str, tmp_path: Path) -> None:
    config = getattr(transformers, name)()
    message = f"cannot serve {config.model_type!r} models: .*({REFUSED_BY_CONFIG[name]})"
    with pytest.raises(UnsupportedModelError, match=message):
        specs_of(config, block_size=16, dtype="float32")
    # From a folder without weights: nothing is loaded before it is refused.
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        Engine.from_pretrained(tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_config_json_of_a_model_says_the_same_as_its_config(architecture: str, tmp_path: Path) -> None:
    config = ARCHITECTURES[architecture]()
    config.save_pretrained(tmp_path)
    assert specs_from_hf_config(tmp_path, dtype="float32") == specs_from_hf_config(config, dtype="float32")


def test_attention_code_that_nothing_can_be_plugged_into_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(
        transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)
    )
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM has attention code of its own"):
        attention_layers(model, {})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            FullAttentionSpec(16, 2, 16, "float32"),
            r"layers.0 \(MistralAttention\) attends to a window of 24 tokens, its config ",
        ),
        (SlidingWindowSpec(16, 2, 16, "float32", 25), r"attends to a window of 24 tokens, its config says 25"),
        (SlidingWindowSpec(16, 4, 16, "float32", 24), r"has keys of 2 heads x 16, its config says 4 x 16"),
    ],
)
def test_a_layer_that_is_not_what_its_config_says_is_refused(spec: FullAttentionSpec, message: str) -> None:
    register()
    model = small_model("mistral")
    model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(UnsupportedModelError, match=message):
        attention_layers(model, {f"layers.{i}": spec for i in range(4)})


def test_a_layer_that_reads_another_layers_cache_is_refused() -> None:
    register()
    model = small_model("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    spec = FullAttentionSpec(16, 2, 16, "float32")
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaAttention \(layer_idx=2\) calls attention, but by its config"
    ):
        attention_layers(model, {"layers.0": spec, "layers.1": spec})


def test_a_layer_that_never_calls_attention_is_refused_by_the_name_of_what_it_has_instead() -> None:
    class Mixer(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
            return hidden_states, None

    register()
    model = small_model("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    model.model.layers[2].self_attn = Mixer()
    spec = FullAttentionSpec(16, 2, 16, "float32")
    with pytest.raises(UnsupportedModelError, match=r"layers.2 \(Mixer\) never calls attention"):
        attention_layers(model, {f"layers.{i}": spec for i in range(4)})


def test_rotary_embeddings_that_change_with_the_longest_sequence_limit_the_length() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = transformers.Phi3Config(
        **SIZES,
        original_max_position_embeddings=256,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
    )
    with pytest.raises(UnsupportedModelError, match=r"rope_type 'longrope'.*pass max_model_len=256 or less"):
        check_positions(config, max_model_len=1024, max_num_batched_tokens=64)
    check_positions(config, max_model_len=256, max_num_batched_tokens=2048)
    check_positions(ARCHITECTURES["llama"](), max_model_len=10**6, max_num_batched_tokens=2048)


def test_queries_scaled_by_their_place_in_the_forward_limit_the_length_and_the_step() -> None:
    config = ARCHITECTURES["llama4-chunks"]()
    assert config.floor_scale == 8192
    check_positions(config, max_model_len=8191, max_num_batched_tokens=8191)
    for lengths in [(8192, 64), (64, 8192)]:
        with pytest.raises(UnsupportedModelError, match=r"attn_temperature_tuning.*pass max_model_len=8191 or less"):
            check_positions(config, max_model_len=lengths[0], max_num_batched_tokens=lengths[1])


KINDS = {
    "gemma3-hybrid": "WWWF",
    "gemma2-softcap": "WFWF",
    "gpt-oss-sinks": "WFWF",
    "llama4-chunks": "CCCF",
    "qwen2-windows": "FFWW",
    "smollm3-no-rope": "FFFF",
    "smollm3-windows": "FWFW",
    "ministral-hybrid": "WWWF",
    "cohere2-hybrid": "WWWF",
    "olmo2": "FFFF",
    "olmo3-hybrid": "WWWF",
    "phi3": "FFFF",
    "phi3-windows": "WWWW",
    "gemma4-two-head-sizes": "WWWF",
}
"""One letter a layer: F for full attention, W for a window, C for chunks."""


def test_layers_are_what_their_model_says() -> None:
    register()
    letters = {FullAttentionSpec: "F", SlidingWindowSpec: "W", ChunkedLocalAttentionSpec: "C"}
    kinds = {}
    for name in KINDS:
        model = small_model(name)
        model.set_attn_implementation(ATTENTION_NAME)
        layers = attention_layers(model, specs_of(model.config, block_size=16, dtype="float32"))
        kinds[name] = "".join(letters[type(layer.spec)] for layer in layers.values())
        assert [layer.num_query_heads for layer in layers.values()] == [4] * 4
        assert all((layer.softcap == 50.0) == (name == "gemma2-softcap") for layer in layers.values())
        assert all(layer.has_sinks == (name == "gpt-oss-sinks") for layer in layers.values())
    assert kinds == KINDS


def test_a_hybrid_gets_groups_of_equal_size_and_one_buffer_for_each_place_in_a_group() -> None:
    config = transformers.Gemma3TextConfig(
        **{**SIZES, **SLIDING_THEN_FULL, "num_hidden_layers": 8, "layer_types": None}
    )
    assert config.sliding_window == WINDOW
    model = AutoModelForCausalLM.from_config(config)
    engine = Engine(model, config=EngineConfig(num_blocks=20))
    groups = engine.kv_cache_config.kv_cache_groups
    assert max(len(group.layer_names) for group in groups) == len(engine.kv_cache_config.kv_cache_tensors)
    pointers = {cache.data_ptr() for cache in engine.model_runner.kv_caches.values()}
    assert len(pointers) == len(engine.kv_cache_config.kv_cache_tensors)


def test_a_model_that_keeps_a_step_from_its_attention_is_refused() -> None:
    config = transformers.NemotronConfig(**SIZES)
    with pytest.raises(UnsupportedModelError, match="NemotronForCausalLM does not hand the keyword arguments"):
        Engine(AutoModelForCausalLM.from_config(config), config=EngineConfig(num_blocks=20))


def test_a_model_with_paged_attention_says_how_to_run_it_otherwise() -> None:
    register()
    model = small_model("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(RuntimeError, match=r"called without paged_step.*set_attn_implementation"):
        model(input_ids=torch.tensor([[1, 2]]))
    model.set_attn_implementation("sdpa")
    model(input_ids=torch.tensor([[1, 2]]))
