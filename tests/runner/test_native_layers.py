"""Decoder layers by the native kernel: the module's own result where the kernel serves, else the module's own way."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from runner import (
    Engine,
    EngineConfig,
    SamplingParams,
    hf_attention,
    native_attentions,
    native_layers,
    native_mlps,
    native_norms,
    packed_products,
)
from runner.attention import AttentionBackend, native_backend, spans
from runner.attention.native_backend import NativeBackend
from runner.attention.torch_backend import TorchBackend
from runner.errors import RunnerError
from runner.hf_attention import BoundLayer, PagedStep
from runner.native.kernels import Kernels
from runner.native_attentions import NativeAttention, use_native_attentions
from runner.native_layers import NativeLayer, use_native_layers
from runner.native_mlps import NativeMlp, use_native_mlps
from runner.native_modules import NativeModule, restore_modules
from runner.native_norms import use_native_norms
from runner.packed_linear import PackedLinear, pack_linear_layers, unpack_linear_layers
from tests.runner.native_checks import ARCHITECTURES, WIDTHS, counting, paged_model, use_kernels
from tests.runner.paged_reference import random_step, spec_of
from tests.runner.small_models import SIZES, generated_by_transformers, random_prompts, small_model

SIZE, INNER, HEAD_SIZE, BLOCK_SIZE = 44, 52, 10, 4  # none a multiple of a vector's floats, 8 or 16
CHANGES = {
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": HEAD_SIZE,
}

STEPS = {
    "a decode": [(9, 1)],
    "decodes": [(5, 1), (70, 1), (0, 1), (130, 1)] * 4,
    "some tokens each": [(64, 1), (3, 9), (0, 30), (20, 2)],
    "as many rows as may be": [(0, 32)] * 8,
}
"""(past, new) tokens of each sequence."""

PARTS = ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "self_attn.q_norm"]
PARTS += ["self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj", "mlp.act_fn"]


@pytest.fixture(autouse=True, params=WIDTHS)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = (native_layers, native_attentions, native_mlps, native_norms, packed_products, native_backend)
    use_kernels(request.param, monkeypatch, *modules)


def model_of(architecture: str) -> PreTrainedModel:
    return paged_model(architecture, **CHANGES)


def native(model: nn.Module, num_layers: int | None = None) -> nn.Module:
    """The model, packed, with all that may be native."""
    pack_linear_layers(model, whatever_it_takes=True)
    use_native_norms(model)
    use_native_mlps(model)
    use_native_attentions(model)
    assert use_native_layers(model) == (len(model.model.layers) if num_layers is None else num_layers)
    return model


class Call:
    """A layer in a random step: its input, what else it is given, and a cache whose unused part is NaN."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        kind: str = "full",
        backend: Callable[[], AttentionBackend] = NativeBackend,
        step_class: type[PagedStep] = PagedStep,
    ) -> None:
        self.step_class = step_class
        self.by_name = False
        spec = spec_of(kind, BLOCK_SIZE, num_kv_heads=2, head_size=HEAD_SIZE, reach=11)
        self.step = random_step(random.Random(0), spec, lengths, num_query_heads=6)
        self.backend = backend()
        num_tokens = sum(new for _, new in lengths)
        angles = torch.randn(1, num_tokens, HEAD_SIZE)
        self.hidden_states = torch.randn(1, num_tokens, SIZE)
        self.given: dict[str, Any] = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}

    def result(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output, and what it left in the cache."""
        kv_cache = self.step.kv_cache.clone()
        bound = {layer.self_attn.layer_idx: BoundLayer(0, kv_cache)}
        step = self.step_class(self.backend, [self.backend.plan(self.step.batch.groups[0])], bound)
        given = {**self.given, "paged_step": step}
        if self.by_name:
            output = layer(hidden_states=self.hidden_states, **given)
        else:
            output = layer(self.hidden_states, **given)
        assert output.isfinite().all()
        return output, kv_cache


def check_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_the_kernel_gives_and_caches_what_the_module_does(
    architecture: str, lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, call = model_of(architecture), Call(lengths)
    layers, own_classes = model.model.layers, [type(layer) for layer in model.model.layers]
    expected = [call.result(layer) for layer in layers]
    native(model)
    with counting("decoder_layer", monkeypatch) as calls:
        for layer, result in zip(layers, expected, strict=True):
            check_same(call.result(layer), result)
    assert len(calls) == len(layers)
    restore_modules(model)
    assert [type(layer) for layer in layers] == own_classes
    assert not any("_found" in vars(module) for module in model.modules())


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_windows_are_those_of_the_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = model_of("llama"), Call(STEPS["decodes"], kind=kind)
    expected = call.result(model.model.layers[0])
    with counting("decoder_layer", monkeypatch) as calls:
        check_same(call.result(native(model).model.layers[0]), expected)
    assert len(calls) == 1


@torch.inference_mode()
def test_a_step_may_take_several_calls_of_the_attention_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MOST_PARTS", 5)
    model, call = model_of("llama"), Call(STEPS["decodes"])
    assert len(call.backend.plan(call.step.batch.groups[0]).work) > 2
    expected = call.result(model.model.layers[0])
    with counting("decoder_layer", monkeypatch) as calls:
        check_same(call.result(native(model).model.layers[0]), expected)
    assert len(calls) == 1


def some_layer() -> nn.Module:
    return native(model_of("qwen3")).model.layers[0]


@torch.inference_mode()
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("how", ["replaced", "given a forward", "hooked", "hooked before"])
def test_a_part_that_is_replaced_or_hooked_into_is_called(part: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, call, seen = some_layer(), Call(STEPS["a decode"]), []
    module = layer.get_submodule(part)

    def hook(*_: object) -> None:
        seen.append(1)

    if how == "replaced":
        parent, _, name = part.rpartition(".")
        setattr(layer.get_submodule(parent), name, copy.deepcopy(module))
        layer.get_submodule(part).register_forward_hook(hook)
    elif how == "given a forward":
        module.forward = lambda *args, **given: seen.append(1) or type(module).forward(module, *args, **given)
    else:
        (module.register_forward_hook if how == "hooked" else module.register_forward_pre_hook)(hook)
    with counting("decoder_layer", monkeypatch) as calls:
        found = call.result(layer)
    assert seen
    assert not calls
    restore_modules(layer)
    check_same(found, call.result(layer))


@torch.inference_mode()
@pytest.mark.parametrize("part", [part for part in PARTS if part not in ("self_attn", "mlp", "mlp.act_fn")])
@pytest.mark.parametrize("how", ["written to", "another parameter"])
def test_a_weight_that_is_written_to_or_replaced_counts_at_once(part: str, how: str) -> None:
    layer, call = some_layer(), Call(STEPS["decodes"])
    before, module = call.result(layer), layer.get_submodule(part)
    factors = torch.linspace(1, 2, module.weight.shape[0]).view(-1, *[1] * (module.weight.ndim - 1))
    with torch.inference_mode(False), torch.no_grad():
        if how == "written to":
            module.weight.mul_(factors)
        else:
            module.weight = nn.Parameter(factors * module.weight)
        plain = copy.deepcopy(layer)
    expected = call.result(plain)
    check_same(call.result(layer), expected)
    assert (before[0] - expected[0]).abs().max() > 0.001


@pytest.mark.parametrize(
    "case",
    [
        "many new tokens",
        "more rows",
        "another backend",
        "a backend of one's own",
        "a step of one's own",
        "called by name",
        "with gradients",
        "in training",
        "a mask",
        "another scale",
        "to be recorded",
    ],
)
def test_where_the_kernel_does_not_serve_the_module_computes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnBackend(NativeBackend):
        pass

    class OwnStep(PagedStep):
        pass

    backends = {"another backend": TorchBackend, "a backend of one's own": OwnBackend}
    lengths = {"many new tokens": [(3, 40), (7, 1)], "more rows": [(0, 32)] * 8 + [(9, 1)]}
    layer = some_layer()
    call = Call(
        lengths.get(case, STEPS["a decode"]),
        backend=backends.get(case, NativeBackend),
        step_class=OwnStep if case == "a step of one's own" else PagedStep,
    )
    if case == "in training":
        layer.train()
    elif case == "another scale":
        layer.self_attn.scaling = 3.0
    elif case == "a mask":
        call.given["attention_mask"] = torch.zeros(1, 1, 1, 1)
    elif case == "to be recorded":
        call.given["output_attentions"] = True
    elif case == "called by name":
        call.by_name = True
    with counting("decoder_layer", monkeypatch) as calls, torch.set_grad_enabled(case == "with gradients"):
        found = call.result(layer)
        restore_modules(layer)
        expected = call.result(layer)
    assert not calls
    check_same(found, expected)


@torch.inference_mode()
def test_a_number_of_the_layer_s_own_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = model_with(ScalingDecoderLayer), Call(STEPS["a decode"])
    layer = native(model).model.layers[0]
    with counting("decoder_layer", monkeypatch) as calls:
        call.result(layer)
        assert len(calls) == 1
        layer.share = 0.5
        found = call.result(layer)
        assert len(calls) == 1
    restore_modules(layer)
    check_same(found, call.result(layer))


@torch.inference_mode()
def test_a_cache_of_another_type_is_refused_as_the_module_does(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, call = some_layer(), Call(STEPS["a decode"])
    call.step.kv_cache = call.step.kv_cache.bfloat16()
    with counting("decoder_layer", monkeypatch) as calls, pytest.raises(RunnerError, match="the cache is"):
        call.result(layer)
    assert not calls


class ScalingDecoderLayer(LlamaDecoderLayer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.share = 1.0

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        return self.share * super().forward(hidden_states, **given)


class DoublingDecoderLayer(LlamaDecoderLayer):
    """Adds what goes in twice."""

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        return hidden_states + super().forward(hidden_states, **given)


class BareDecoderLayer(LlamaDecoderLayer):
    """Whose attention reads what no norm has seen."""

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        attended = hidden_states + self.self_attn(hidden_states=hidden_states, **given)[0]
        return attended + self.mlp(self.post_attention_layernorm(attended))


class CappingDecoderLayer(LlamaDecoderLayer):
    """Tells attention of a bound on scores."""

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        return super().forward(hidden_states, **given, softcap=3.0)


def model_with(layer_class: type[nn.Module]) -> PreTrainedModel:
    model = model_of("llama")
    with torch.inference_mode(False):
        for index in range(len(model.model.layers)):
            model.model.layers[index] = layer_class(model.config, index).eval()
    return model


@pytest.mark.parametrize("layer_class", [DoublingDecoderLayer, BareDecoderLayer, CappingDecoderLayer])
def test_a_module_that_computes_something_else_is_left_alone(layer_class: type[nn.Module]) -> None:
    model = native(model_with(layer_class), num_layers=0)
    for layer in model.model.layers:
        assert type(layer) is layer_class
        assert isinstance(layer.self_attn, NativeAttention)
        assert isinstance(layer.mlp, NativeMlp)


@pytest.mark.parametrize(("residual_multiplier", "num_layers"), [(0.5, 0), (1.0, 4)])
def test_a_layer_that_scales_what_its_halves_give_is_left_alone(residual_multiplier: float, num_layers: int) -> None:
    """Granite's, whose parts are those of Llama."""
    config = transformers.GraniteConfig(**SIZES, residual_multiplier=residual_multiplier)
    model = AutoModelForCausalLM.from_config(config).eval()
    hf_attention.register()
    model.set_attn_implementation(hf_attention.ATTENTION_NAME)
    native(model, num_layers=num_layers)


@pytest.mark.parametrize("part", PARTS)
def test_a_layer_into_whose_parts_somebody_hooks_is_left_alone(part: str) -> None:
    model, heard = model_of("qwen3"), []
    for layer in model.model.layers:
        layer.get_submodule(part).register_forward_hook(lambda *_: heard.append(1))
    native(model, num_layers=0)
    assert not heard


def test_packed_weights_go_with_the_layers_that_have_them() -> None:
    model = native(model_of("llama"))
    packed = [ref(module.packed) for module in model.modules() if isinstance(module, PackedLinear)]
    unpack_linear_layers(model)
    gc.collect()
    assert len(packed) > 4
    assert not any(reference() for reference in packed)


def test_copies_and_pickles_are_of_the_class_that_everyone_knows() -> None:
    layer = native(model_of("llama")).model.layers[0]
    for other in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is LlamaDecoderLayer
        assert torch.equal(other.mlp.up_proj.weight, layer.mlp.up_proj.weight)


@torch.inference_mode()
def test_a_model_that_was_asked_for_hidden_states_has_native_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers leaves hooks on its layers then."""
    model, call = model_of("llama"), Call(STEPS["a decode"])
    model.set_attn_implementation("sdpa")
    model(torch.arange(12)[None], output_hidden_states=True)
    model.set_attn_implementation(hf_attention.ATTENTION_NAME)
    layer = model.model.layers[0]
    assert layer._forward_hooks
    expected = call.result(layer)
    native(model)
    with counting("decoder_layer", monkeypatch) as calls:
        check_same(call.result(layer), expected)
    assert len(calls) == 1


def test_packed_weights_stay_while_the_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may let go of them meanwhile."""
    model, call = native(model_of("llama")), Call(STEPS["a decode"])
    layer, decoder_layer, alive = model.model.layers[0], Kernels.decoder_layer, []

    def let_go(*args: Any) -> Any:
        packed = [ref(module.packed) for module in layer.modules() if isinstance(module, PackedLinear)]
        unpack_linear_layers(model)
        gc.collect()
        alive.extend(reference() is not None for reference in packed)
        return decoder_layer(*args)

    monkeypatch.setattr(Kernels, "decoder_layer", let_go)
    with torch.inference_mode():
        call.result(layer)
    assert alive == [True] * 7


def test_a_cache_of_other_heads_is_not_written_to() -> None:
    layer, call = some_layer(), Call(STEPS["a decode"])
    step = PagedStep(
        call.backend,
        [call.backend.plan(call.step.batch.groups[0])],
        {0: BoundLayer(0, call.step.kv_cache[..., :1, :].contiguous())},
    )
    with torch.inference_mode():
        found = vars(layer)["_found"].found
        assert layer.natively(found, call.hidden_states, **call.given, paged_step=step) is None


def test_a_layer_whose_attention_does_not_know_its_index_is_left_alone() -> None:
    model = model_of("llama")
    for layer in model.model.layers:
        del layer.self_attn.layer_idx
    native(model, num_layers=0)


@torch.inference_mode()
def test_hidden_states_can_be_asked_for_of_a_model_that_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = model_of("llama"), torch.arange(12)[None]
    other = copy.deepcopy(model)
    other.set_attn_implementation("sdpa")
    expected = other(tokens, output_hidden_states=True)
    native(model).set_attn_implementation("sdpa")
    with counting("decoder_layer", monkeypatch) as calls:
        found = model(tokens, output_hidden_states=True)
    assert not calls
    check_same(found.hidden_states, expected.hidden_states)
    check_same(found.logits, expected.logits)


def test_engines_compute_layers_natively_where_weights_are_packed() -> None:
    model = small_model("llama")

    def num_native() -> int:
        return sum(isinstance(layer, NativeLayer) for layer in model.model.layers)

    Engine(model, config=EngineConfig(num_blocks=20, packed_weights=True))
    assert num_native() == len(model.model.layers) > 1
    Engine(model, config=EngineConfig(num_blocks=20, packed_weights=True, attention_backend="torch"))
    assert not any(isinstance(module, NativeModule) for module in model.modules())
    engine = Engine(model, config=EngineConfig(num_blocks=20, packed_weights=True))
    unpack_linear_layers(model)
    engine.weights_changed()
    assert num_native() == len(model.model.layers)
    Engine(model, config=EngineConfig(num_blocks=20, packed_weights=False))
    assert num_native() == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_engines_decode_by_one_call_a_layer(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no model hands its layers anything that keeps them from it."""
    model, prompts = small_model(architecture), random_prompts([40, 70], shared=40)
    expected = generated_by_transformers(model, prompts, 6)
    engine = Engine(model, config=EngineConfig(num_blocks=200, packed_weights=True))
    with counting("decoder_layer", monkeypatch) as calls:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=6, temperature=0))
    assert [output.token_ids for output in outputs] == expected
    assert len(calls) == 5 * len(model.model.layers)  # all steps but the first, in which the prompts are computed
