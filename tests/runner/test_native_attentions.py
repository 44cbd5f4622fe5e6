"""Attention by the native kernel: the module's own result wherever the kernel serves, else the module's own way."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from runner import Engine, EngineConfig, hf_attention, native_attentions, native_norms, packed_products
from runner.attention import AttentionBackend
from runner.attention.base import AttentionLayer
from runner.batch import GroupBatch
from runner.hf_attention import BoundLayer, PagedStep
from runner.native.kernels import Kernels
from runner.native_attentions import NORMS, PROJECTIONS, use_native_attentions
from runner.native_modules import NativeModule, restore_modules
from runner.native_norms import use_native_norms
from runner.packed_linear import pack_linear_layers, unpack_linear_layers
from runner.packed_products import MOST_NATIVE_ROWS
from tests.runner.native_checks import ARCHITECTURES, WIDTHS, counting, paged_model, use_kernels
from tests.runner.small_models import small_model

SIZE, HEAD_SIZE = 44, 10  # neither a multiple of a vector's floats, 8 or 16
SIZES = {"hidden_size": SIZE, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": HEAD_SIZE}


@pytest.fixture(autouse=True, params=WIDTHS)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(request.param, monkeypatch, native_attentions, native_norms, packed_products)


class NotingBackend(AttentionBackend):
    """Takes note of what attention gets, and gives back something that all of it goes into. For one key head."""

    name = "noting"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def check(self, layers: Sequence[AttentionLayer], *, device: torch.device, dtype: torch.dtype) -> None:
        pass

    def plan(self, batch: GroupBatch) -> None:
        pass

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: None,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls.append(
            {"query": query, "key": key, "value": value, "scale": scale, "softcap": softcap, "sinks": sinks}
        )
        return query + 2 * key - value


def model_of(architecture: str) -> PreTrainedModel:
    return paged_model(architecture, **SIZES)


def attentions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


def native(model: nn.Module) -> nn.Module:
    """The model, packed, its norms and attention native."""
    pack_linear_layers(model, whatever_it_takes=True)
    use_native_norms(model)
    assert use_native_attentions(model) == len(attentions(model))
    return model


def arguments(num_rows: int) -> dict[str, Any]:
    """What a layer hands to its attention module, as far as the module looks at it."""
    rows, angles = torch.randn(1, num_rows, SIZE), torch.randn(1, num_rows, HEAD_SIZE)
    return {"hidden_states": rows, "position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}


def call(module: nn.Module, arguments: dict[str, Any]) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """The module's output in a step, and what attention was called with."""
    backend = NotingBackend()
    step = PagedStep(backend, [None], {module.layer_idx: BoundLayer(0, torch.empty(0))})
    output, weights = module(**arguments, paged_step=step)
    assert weights is None
    return output, backend.calls


def check_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("num_rows", [1, 3, 12, 13, 17, 40, MOST_NATIVE_ROWS])
def test_the_kernel_gives_what_the_module_gives(
    architecture: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = model_of(architecture), arguments(num_rows)
    expected = [call(module, given) for module in attentions(model)]
    own_classes = [type(module) for module in attentions(model)]
    native(model)
    with counting("qkv", monkeypatch) as calls:
        for module, result in zip(attentions(model), expected, strict=True):
            check_same(call(module, given), result)
    assert len(calls) == len(expected)
    restore_modules(model)
    assert [type(module) for module in attentions(model)] == own_classes
    assert not any("_found" in vars(module) for module in model.modules())


def some_attention(architecture: str = "llama") -> nn.Module:
    return attentions(native(model_of(architecture)))[0]


@torch.inference_mode()
@pytest.mark.parametrize("part", [*PROJECTIONS, *NORMS, "o_proj"])
@pytest.mark.parametrize("how", ["written to", "replaced", "another parameter"])
def test_a_weight_that_is_written_to_or_replaced_counts_at_once(part: str, how: str) -> None:
    module, given = some_attention("qwen3"), arguments(3)
    before = call(module, given)
    layer = getattr(module, part)
    factors = torch.linspace(1, 2, layer.weight.shape[0]).view(-1, *[1] * (layer.weight.ndim - 1))
    with torch.inference_mode(False), torch.no_grad():
        if how == "written to":
            layer.weight.mul_(factors)
        elif how == "replaced":
            layer.weight.data = factors * layer.weight.data
        else:
            layer.weight = nn.Parameter(factors * layer.weight)
        plain = copy.deepcopy(module)
    expected = call(plain, given)
    check_same(call(module, given), expected)
    assert (before[0] - expected[0]).abs().max() > 0.01


@torch.inference_mode()
@pytest.mark.parametrize("part", [*PROJECTIONS, *NORMS, "o_proj"])
@pytest.mark.parametrize("how", ["replaced", "deleted", "given a forward", "hooked", "hooked before"])
def test_a_part_that_is_replaced_or_hooked_into_is_called(part: str, how: str) -> None:
    module, given, seen = some_attention("qwen3"), arguments(3), []
    layer = getattr(module, part)

    def halved(input: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return type(layer).forward(layer, input) / 2

    def hook(*_: object) -> None:
        seen.append(1)

    if how == "replaced":
        setattr(module, part, nn.Sequential(layer))
        layer.register_forward_hook(hook)
    elif how == "deleted":
        delattr(module, part)
        setattr(module, part, halved)
    elif how == "given a forward":
        layer.forward = halved
    else:
        (layer.register_forward_hook if how == "hooked" else layer.register_forward_pre_hook)(hook)
    found = call(module, given)
    assert seen
    restore_modules(module)
    check_same(found, call(module, given))


@pytest.mark.parametrize(
    "case",
    [
        "with gradients",
        "under autocast",
        "in training",
        "more rows",
        "a mask",
        "a bound of the caller's",
        "another scale",
        "by place",
        "two sequences",
    ],
)
def test_where_the_kernel_does_not_serve_the_module_computes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = some_attention(), arguments(MOST_NATIVE_ROWS + 1 if case == "more rows" else 3)
    if case == "a mask":
        given["attention_mask"] = torch.zeros(1, 1, 3, 3)
    elif case == "a bound of the caller's":
        given["softcap"] = 3.0
    elif case == "another scale":
        module.scaling = 3.0
    elif case == "in training":
        module.train()
    elif case == "two sequences":
        given["hidden_states"] = given["hidden_states"].repeat(2, 1, 1)
    with counting("qkv", monkeypatch) as calls, torch.set_grad_enabled(case == "with gradients"):
        if case == "by place":
            step = PagedStep(NotingBackend(), [None], {0: BoundLayer(0, torch.empty(0))})
            found = module(given["hidden_states"], given["position_embeddings"], paged_step=step)[0]
            expected = LlamaAttention.forward(module, **given, paged_step=step)[0]
        elif case == "two sequences":
            with pytest.raises(RuntimeError, match="shape"):
                call(module, given)
            return
        else:
            with torch.autocast("cpu", enabled=case == "under autocast"):
                found, noted = call(module, given)
                restore_modules(module)
                expected, expected_noted = call(module, given)
                check_same(noted, expected_noted)
    assert not calls
    check_same(found, expected)
    assert found.requires_grad == (case == "with gradients")


def test_a_module_that_is_told_not_to_give_more_than_its_output_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As models with experts tell it."""
    module, given = some_attention(), arguments(3)
    with counting("qkv", monkeypatch) as calls, torch.inference_mode():
        expected = call(module, given)
        found = call(module, {**given, "output_router_logits": False, "output_attentions": None})
    assert len(calls) == 2
    check_same(found, expected)


class ScaledAttention(LlamaAttention):
    """Whose queries are larger from position 500 on."""

    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor, **given: Any) -> Any:
        scale = torch.where(position_ids < 500, 1.0, 1.5)[..., None]
        return super().forward(hidden_states * scale, **given)


class GatedAttention(LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, **given: Any) -> Any:
        output, weights = super().forward(hidden_states, **given)
        return output * hidden_states.sigmoid(), weights


class ClippingAttention(LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, **given: Any) -> Any:
        return super().forward(hidden_states.clamp(-30, 30), **given)


class GainingAttention(LlamaAttention):
    """With a weight of its own that does nothing yet."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> Any:
        return super().forward(self.gain * hidden_states, **given)


@pytest.mark.parametrize("attention_class", [ScaledAttention, GatedAttention, ClippingAttention, GainingAttention])
def test_a_module_that_computes_something_else_is_left_alone(attention_class: type[nn.Module]) -> None:
    model = model_of("llama")
    for layer in model.model.layers:
        layer.self_attn = attention_class(model.config, layer.self_attn.layer_idx).eval()
    pack_linear_layers(model, whatever_it_takes=True)
    assert use_native_attentions(model) == 0
    assert {type(module) for module in attentions(model)} == {attention_class}


@pytest.mark.parametrize(
    "case", ["not packed", "not paged", "norms not native", "nothing comes out", "hooked behind attention"]
)
def test_a_module_of_which_too_little_is_known_is_left_alone(case: str) -> None:
    model, heard = model_of("qwen3"), []
    for module in attentions(model) if case == "hooked behind attention" else ():
        module.o_proj.register_forward_pre_hook(lambda *_: heard.append(1))
    if case == "nothing comes out":
        for module in attentions(model):
            nn.init.zeros_(module.k_proj.weight)
    if case != "not packed":
        pack_linear_layers(model, whatever_it_takes=True)
    if case != "norms not native":
        use_native_norms(model)
    if case == "not paged":
        model.set_attn_implementation("sdpa")
    assert use_native_attentions(model) == 0
    assert not heard


@torch.inference_mode()
def test_hooks_do_not_hear_that_a_module_is_looked_at_and_do_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they change is not taken for the module's own doing."""
    model, given, heard = model_of("llama"), arguments(3), []

    def rotate_nothing(module: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        heard.append(1)
        cosines, sines = given["position_embeddings"]
        return args, {**given, "position_embeddings": (torch.ones_like(cosines), torch.zeros_like(sines))}

    module = attentions(model)[0]
    plain = call(module, given)
    handle = module.register_forward_pre_hook(rotate_nothing, with_kwargs=True)
    hooked = call(module, given)
    heard.clear()
    native(model)
    assert not heard
    with counting("qkv", monkeypatch) as calls:
        check_same(call(module, given), hooked)
        handle.remove()
        check_same(call(module, given), plain)
    assert len(calls) == 2


@torch.inference_mode()
@pytest.mark.parametrize("change", ["a name", "an array for a number", "a part", "a parameter"])
def test_what_is_added_to_a_module_may_count(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = some_attention(), arguments(3)
    expected = call(module, given)
    if change == "a name":
        module.steered_by = 3.0
    elif change == "an array for a number":
        module.scaling = torch.full((5,), module.scaling)
    elif change == "a part":
        module.steering = nn.Identity()
    else:
        module.steered_by = nn.Parameter(torch.ones(()))
    with counting("qkv", monkeypatch) as calls:
        found = call(module, given)
    assert not calls
    check_same(found[0], expected[0])


def test_packed_weights_stay_while_the_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may let go of them meanwhile."""
    model, given = native(model_of("llama")), arguments(3)
    module, qkv, alive = attentions(model)[0], Kernels.qkv, []

    def let_go(*args: Any) -> Any:
        packed = [ref(getattr(module, name).packed) for name in PROJECTIONS]
        unpack_linear_layers(model)
        gc.collect()
        alive.extend(reference() is not None for reference in packed)
        return qkv(*args)

    monkeypatch.setattr(Kernels, "qkv", let_go)
    with torch.inference_mode():
        call(module, given)
    assert alive == [True] * 3


@torch.inference_mode()
def test_a_model_that_is_given_back_computes_by_itself_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    tokens = torch.arange(12)[None]
    model.set_attn_implementation("sdpa")
    expected = model(tokens).logits
    model.set_attn_implementation(hf_attention.ATTENTION_NAME)
    native(model).set_attn_implementation("sdpa")
    with counting("qkv", monkeypatch) as calls:
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert not calls


@torch.inference_mode()
def test_a_method_that_somebody_has_kept_computes_when_all_is_given_back() -> None:
    module, given = some_attention(), arguments(3)
    kept = module.forward
    expected = call(module, given)
    restore_modules(module)
    module.forward = kept
    check_same(call(module, given), expected)


def test_a_module_given_back_while_it_is_called_computes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be anywhere in between."""
    module, given = some_attention(), arguments(3)
    del module.__dict__["_found"]
    with counting("qkv", monkeypatch) as calls:
        found = call(module, given)
    restore_modules(module)
    assert type(module) is LlamaAttention
    check_same(found, call(module, given))
    assert not calls


@torch.inference_mode()
def test_a_module_with_a_parametrization_since_can_be_copied() -> None:
    module, given = some_attention(), arguments(3)
    with torch.inference_mode(False):
        module.gain = nn.Parameter(torch.ones(3))
        parametrize.register_parametrization(module, "gain", nn.Identity())
    check_same(call(copy.deepcopy(module), given), call(module, given))


def test_copies_and_pickles_are_of_the_class_that_everyone_knows() -> None:
    module = some_attention()
    for other in (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is LlamaAttention
        assert torch.equal(other.q_proj.weight, module.q_proj.weight)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_engines_compute_what_attention_begins_with_natively_where_weights_are_packed(architecture: str) -> None:
    model = small_model(architecture)

    def num_native() -> int:
        return sum(isinstance(module, NativeModule) for module in attentions(model))

    Engine(model, config=EngineConfig(num_blocks=20, packed_weights=True))
    assert num_native() == len(attentions(model)) > 1
    Engine(model, config=EngineConfig(num_blocks=20, packed_weights=True, attention_backend="torch"))
    assert num_native() == 0
    engine = Engine(model, config=EngineConfig(num_blocks=20, packed_weights=True))
    unpack_linear_layers(model)
    engine.weights_changed()
    assert num_native() == len(attentions(model))
    Engine(model, config=EngineConfig(num_blocks=20, packed_weights=False))
    assert num_native() == 0
