"""Packed weights: the same product, from the same weight, for as long as that is the weight."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from runner import Engine, EngineConfig, SamplingParams, packed_linear, packed_products
from runner.errors import EngineConfigError, RunnerError
from runner.native.build import NativeUnavailableError
from runner.native.kernels import Kernels
from runner.packed_linear import PackedLinear, Packing, pack_linear_layers, unpack_linear_layers
from tests.runner.byte_model import byte_model
from tests.runner.native_checks import WrappedTensor
from tests.runner.small_models import random_prompts, small_model

FORMS = {"native": torch.float32, "MKL": torch.float32, "oneDNN": torch.bfloat16}
"""Whose product, and the element type that it is taken for."""


@pytest.fixture(params=FORMS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """The type, where that product is the one to be taken."""
    if request.param == "MKL":
        without_native_kernels(monkeypatch)
    form = packed_products.packed_form(FORMS[request.param], [])
    if isinstance(form, str) or form.name != request.param:
        pytest.skip(f"there is no {request.param} product here: {form if isinstance(form, str) else 'no compiler'}")
    return FORMS[request.param]


def without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def native_kernels() -> Kernels:
        raise NativeUnavailableError("there is no C compiler")

    monkeypatch.setattr(packed_products, "native_kernels", native_kernels)


def linear(dtype: torch.dtype = torch.float32, *, num_in: int = 40, num_out: int = 56, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        return nn.Linear(num_in, num_out, bias=bias, dtype=dtype)


def packed(layer: nn.Linear) -> nn.Linear:
    """The layer, packed; skips the test where torch cannot."""
    packing = pack_linear_layers(layer)
    if not packing.num_bytes:
        pytest.skip(f"nothing is packed here: {packing.because}")
    return layer


def reads_packed_weight(layer: nn.Linear) -> bool:
    """Whether what comes out depends on the packed weight: another one's is put in its place for a moment."""
    own = layer.packed
    assert own is not None
    with torch.inference_mode(False):
        double = packed(nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=layer.weight.dtype))
    layer.packed = replace(own, weight=double.packed.weight)
    rows = torch.ones(2, layer.in_features, dtype=layer.weight.dtype)
    try:
        return not torch.allclose(layer(rows), nn.functional.linear(rows, layer.weight, layer.bias), rtol=1e-2)
    finally:
        layer.packed = own


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (3,), (1, 16), (2, 3, 5), (128,), (1, 129), (300,), (0,)])
def test_the_product_is_that_of_the_plain_layer(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    layer = linear(dtype, bias=bias)
    rows = torch.randn(*shape, 40).to(dtype)
    expected = layer(rows)
    output = packed(layer)(rows)
    assert output.shape == expected.shape
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected)


@torch.inference_mode()
def test_rows_need_not_lie_one_after_the_other(dtype: torch.dtype) -> None:
    layer = linear(dtype)
    rows = torch.randn(40, 7).to(dtype).T
    expected = layer(rows)
    torch.testing.assert_close(packed(layer)(rows), expected)


@torch.inference_mode()
def test_weights_packed_with_one_number_of_threads_serve_another() -> None:
    num_threads = torch.get_num_threads()
    rows, layer = torch.randn(16, 400), linear(num_in=400, num_out=1000)
    expected = layer(rows)
    try:
        for packing, computing in ((1, 2), (2, 1)):
            torch.set_num_threads(packing)
            unpack_linear_layers(layer)
            packed(layer)
            torch.set_num_threads(computing)
            torch.testing.assert_close(layer(rows), expected)
    finally:
        torch.set_num_threads(num_threads)


def test_packing_leaves_parameters_and_modules_where_they_are() -> None:
    model = byte_model()
    before = {name: (id(module), list(module.state_dict())) for name, module in model.named_modules()}
    weights = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    packed(model)
    assert {name: (id(module), list(module.state_dict())) for name, module in model.named_modules()} == before
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == weights
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    unpack_linear_layers(model)
    assert not any(isinstance(module, PackedLinear) or "packed" in vars(module) for module in model.modules())


@torch.no_grad()
def test_packing_again_takes_the_weights_as_they_are_then() -> None:
    layer = packed(linear())
    layer.weight.data.mul_(2)  # which torch does not count as a change
    assert pack_linear_layers(layer).num_bytes == 4 * 40 * 56
    assert reads_packed_weight(layer)
    rows = torch.randn(3, 40)
    torch.testing.assert_close(layer(rows), nn.functional.linear(rows, layer.weight, layer.bias))


@torch.no_grad()
@pytest.mark.parametrize("change", ["written to", "replaced"])
def test_a_weight_that_changes_is_read_itself(change: str) -> None:
    layer = packed(linear())
    assert reads_packed_weight(layer)
    if change == "written to":
        layer.weight.mul_(2)
    else:
        layer.weight.data = 2 * layer.weight.data
    rows = torch.randn(3, 40)
    torch.testing.assert_close(layer(rows), nn.functional.linear(rows, layer.weight, layer.bias))
    assert not reads_packed_weight(layer)


@torch.no_grad()
def test_a_packed_layer_can_be_cast() -> None:
    layer = packed(linear()).double()
    rows = torch.randn(3, 40, dtype=torch.float64)
    assert torch.equal(layer(rows), nn.functional.linear(rows, layer.weight, layer.bias))


def test_gradients_go_through_the_weight_itself() -> None:
    layer = packed(linear())
    layer(torch.ones(2, 40)).sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.full((56, 40), 2.0))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_have_no_packed_weight_and_compute_with_their_own(make_copy) -> None:
    layer = packed(linear())
    other = make_copy(layer)
    assert layer.packed is not None
    assert other.packed is None
    with torch.no_grad():
        other.weight.zero_()
        assert torch.equal(other(torch.ones(1, 40)), other.bias[None])


@torch.inference_mode()
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_weights_that_are_more_than_their_memory_are_left_alone(name: str) -> None:
    with torch.inference_mode(False):
        layers = nn.Sequential(nn.Linear(56, 56), nn.Linear(56, 56))
        setattr(layers[0], name, nn.Parameter(WrappedTensor(getattr(layers[0], name).detach()), requires_grad=False))
    rows = torch.randn(3, 56)
    expected = layers(rows)
    pack_linear_layers(layers, whatever_it_takes=True)
    assert [type(layer) for layer in layers] == [nn.Linear, PackedLinear]
    torch.testing.assert_close(layers(rows), expected)


def test_other_classes_of_layers_are_left_alone() -> None:
    class Doubling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    layer = Doubling(8, 8)
    assert pack_linear_layers(layer) == Packing(because="it has no plain linear layers")
    assert type(layer) is Doubling


@pytest.mark.parametrize(
    ("layer", "because"),
    [
        (linear(torch.float64), "there is no packed form for float64"),
        (linear().to("meta"), "the model is on meta, not on a CPU"),
        (nn.Sequential(linear(), linear(torch.bfloat16)), "its linear layers differ in device or element type"),
    ],
)
def test_what_cannot_be_packed_says_why(layer: nn.Module, because: str) -> None:
    assert pack_linear_layers(layer) == Packing(because=because)


def test_packed_weights_take_no_more_than_their_share_of_memory_unless_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = linear()
    num_bytes = packed(layer).weight.nbytes
    unpack_linear_layers(layer)
    monkeypatch.setattr(packed_linear, "machine_memory", lambda: 4 * num_bytes - 1)
    packing = pack_linear_layers(layer)
    assert packing.num_bytes == 0
    assert "more than 25% of this machine's" in packing.because
    assert type(layer) is nn.Linear
    assert pack_linear_layers(layer, whatever_it_takes=True).num_bytes == num_bytes


@pytest.mark.parametrize("min_rows", [0, 100])
def test_a_packed_product_that_is_another_is_found_out(
    dtype: torch.dtype, min_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(linear(dtype), linear(dtype, num_in=56, num_out=64))
    packed(model)
    unpack_linear_layers(model)
    form = type(packed_products.packed_form(dtype, []))
    product = form.product

    def without_the_last_column(self, input, *others):
        output = product(self, input, *others)
        if len(input) > min_rows and input.shape[-1] == 56:
            output[..., -1] = 0
        return output

    monkeypatch.setattr(form, "product", without_the_last_column)
    assert pack_linear_layers(model) == Packing(
        because=f"the {form.name} product of a weight [64, 56] is not the plain one"
    )
    assert not any(isinstance(module, PackedLinear) for module in model)


def test_weights_that_torch_keeps_no_count_of_are_not_packed() -> None:
    with torch.inference_mode():
        layer = nn.Linear(40, 56)
    assert "torch.inference_mode" in pack_linear_layers(layer).because
    assert type(layer) is nn.Linear


def test_what_was_packed_is_let_go_of_where_it_cannot_be_packed_anew() -> None:
    layer = packed(linear())
    layer.double()
    assert pack_linear_layers(layer) == Packing(because="there is no packed form for float64")
    assert type(layer) is nn.Linear


@torch.inference_mode()
def test_a_weight_turned_round_in_its_own_memory_is_another(dtype: torch.dtype) -> None:
    layer = linear(dtype, num_in=40, num_out=40)
    packed(layer)
    with torch.inference_mode(False):
        layer.weight = nn.Parameter(layer.weight.detach().t())
    rows = torch.randn(3, 40).to(dtype)
    assert torch.equal(layer(rows), nn.functional.linear(rows, layer.weight, layer.bias))


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "watched",
    [
        torch.compile(lambda layer, rows: layer(rows), backend="aot_eager", fullgraph=True),
        lambda layer, rows: torch.jit.trace(layer, torch.zeros(3, 40))(rows),
        lambda layer, rows: torch.vmap(layer)(rows),
        lambda layer, rows: layer(torch._neg_view(-rows)),
    ],
    ids=["compiled", "traced", "vmapped", "negative"],
)
def test_the_product_is_right_for_whoever_watches(watched) -> None:
    layer, rows = linear(), torch.randn(3, 40)
    expected = layer(rows)
    torch.testing.assert_close(watched(packed(layer), rows), expected)


@torch.inference_mode()
def test_an_input_that_is_elsewhere_is_refused_as_by_the_plain_layer() -> None:
    with pytest.raises(RuntimeError, match="device"):
        packed(linear())(torch.empty(3, 40, device="meta"))


@torch.no_grad()
@pytest.mark.parametrize("bias", [torch.randn(112)[::2], torch.randn(56), torch.zeros(1)])
def test_a_bias_put_in_place_of_another_is_the_one_that_counts(bias: torch.Tensor) -> None:
    layer, rows = packed(linear()), torch.randn(3, 40)
    layer.bias = nn.Parameter(bias)
    torch.testing.assert_close(layer(rows), nn.functional.linear(rows, layer.weight, bias))


@torch.inference_mode()
def test_under_autocast_the_output_is_of_its_type() -> None:
    layer = linear()
    packed(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 40)).dtype == torch.bfloat16


@torch.inference_mode()
def test_a_wrong_input_is_refused_as_by_the_plain_layer() -> None:
    layer = linear(torch.bfloat16)
    packed(layer)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(3, 41).bfloat16())


def test_an_engine_told_of_new_weights_computes_with_them_and_forgets_what_it_cached() -> None:
    model, other = small_model("qwen2", seed=1), small_model("qwen2", seed=2)
    prompts = random_prompts([3, 40, 90, 121], shared=33)
    engine = Engine(model, config=EngineConfig(num_blocks=100))
    old = [output.token_ids for output in engine.generate(prompts, SamplingParams(max_tokens=12))]
    for mine, new in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(new)
    engine.weights_changed()
    outputs = engine.generate(prompts, SamplingParams(max_tokens=12))
    expected = Engine(other, config=EngineConfig(num_blocks=100)).generate(prompts, SamplingParams(max_tokens=12))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected] != old
    assert [output.num_cached_tokens for output in outputs] == [output.num_cached_tokens for output in expected]


def test_weights_cannot_change_under_a_request() -> None:
    engine = Engine(small_model("qwen2"), config=EngineConfig(num_blocks=100))
    request_id = engine.add_request([1, 2, 3])
    with pytest.raises(RunnerError, match="1 requests are under way"):
        engine.weights_changed()
    engine.abort(request_id)
    engine.weights_changed()


def test_a_torch_that_cannot_pack_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such instructions\nat file.cpp")

    without_native_kernels(monkeypatch)
    monkeypatch.setattr(packed_products.MklForm, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(packed_products.MklForm, "pack", pack)
    layer = linear()
    because = "a weight [56, 40] cannot be packed for MKL (no such instructions)"
    assert pack_linear_layers(layer) == Packing(because=because)
    assert type(layer) is nn.Linear


def test_without_compiler_and_mkl_both_reasons_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    without_native_kernels(monkeypatch)
    monkeypatch.setattr(packed_products.MklForm, "is_available", staticmethod(lambda: False))
    because = "this torch has no packed product of MKL, and there is no C compiler"
    assert pack_linear_layers(linear()) == Packing(because=because)


def test_more_weights_than_there_is_address_space_for_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(packed_products.packed_form(torch.float32, []), packed_products.MklForm):
        pytest.skip("there are no native kernels here")
    monkeypatch.setattr(Kernels, "packed_size", lambda self, weight: 1 << 50)
    layer = linear()
    assert "there is no memory for" in pack_linear_layers(layer).because
    assert type(layer) is nn.Linear


def test_an_engine_packs_by_itself_says_so_and_its_tokens_are_those_of_one_that_does_not() -> None:
    model = small_model("qwen2")  # with biases
    prompts = random_prompts([3, 40, 90, 121], shared=33)
    outputs = {}
    for wanted in (None, False, True):
        engine = Engine(model, config=EngineConfig(num_blocks=100, packed_weights=wanted))
        has_packed = any(isinstance(module, PackedLinear) for module in model.modules())
        if wanted is None and not has_packed:
            pytest.skip(f"nothing is packed here: {engine.packing.because}")
        assert has_packed is (wanted is not False)
        line = next(line for line in engine.describe().splitlines() if line.startswith("packed weights"))
        assert line == (
            "packed weights none: not asked for"
            if wanted is False
            else f"packed weights {packed_linear.size(engine.packing.num_bytes)} besides, "
            f"for {engine.packing.product} products of linear layers"
        )
        outputs[wanted] = [out.token_ids for out in engine.generate(prompts, SamplingParams(max_tokens=20))]
    assert outputs[None] == outputs[False] == outputs[True]


def test_an_engine_that_must_pack_and_cannot_refuses() -> None:
    with pytest.raises(EngineConfigError, match="packed_weights=True, but there is no packed form for float64: leave"):
        Engine(byte_model().double(), config=EngineConfig(num_blocks=20, packed_weights=True))
