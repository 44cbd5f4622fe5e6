"""MLPs by the native kernel: the module's own result, wherever the kernel serves, and else the module's own way."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from runner import Engine, EngineConfig, native_mlps, packed_products
from runner.native_mlps import use_native_mlps
from runner.native_modules import NativeModule, restore_modules
from runner.packed_linear import pack_linear_layers, unpack_linear_layers
from runner.packed_products import MOST_NATIVE_ROWS
from tests.runner.native_checks import WIDTHS, counting, use_kernels
from tests.runner.small_models import small_model

SIZE, INNER = 40, 56  # neither a multiple of a vector's 16 floats

LAYERS = ["gate_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True, params=WIDTHS)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(request.param, monkeypatch, native_mlps, packed_products)


def llama_mlp(activation: str = "silu", *, bias: bool = False, mlp_class: type[LlamaMLP] = LlamaMLP) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": SIZE, "intermediate_size": INNER, "num_attention_heads": 4}
    with torch.inference_mode(False):
        return mlp_class(LlamaConfig(**sizes, hidden_act=activation, mlp_bias=bias)).eval()


def gemma_mlp() -> nn.Module:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        return Gemma3MLP(Gemma3TextConfig(hidden_size=SIZE, intermediate_size=INNER)).eval()


MLPS = {"silu": llama_mlp, "gelu_tanh": gemma_mlp}


def native(mlp: nn.Module) -> nn.Module:
    """The module, packed and native."""
    pack_linear_layers(mlp, whatever_it_takes=True)
    assert use_native_mlps(mlp) == 1
    return mlp


@torch.inference_mode()
@pytest.mark.parametrize("activation", MLPS)
@pytest.mark.parametrize(
    "shape", [(), (1,), (3,), (1, 12), (1, 13), (2, 8), (17,), (2, 3, 7), (MOST_NATIVE_ROWS,), (0,)]
)
def test_the_kernel_gives_what_the_module_gives(
    activation: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp = MLPS[activation]()
    own_class = type(mlp)
    rows = 3 * torch.randn(*shape, SIZE)
    expected = mlp(rows)
    native(mlp)
    with counting("gated_mlp", monkeypatch) as calls:
        torch.testing.assert_close(mlp(rows), expected, rtol=1e-5, atol=1e-5)
        if len(shape) > 1:
            swapped = mlp(rows.transpose(0, -2))
            torch.testing.assert_close(swapped, expected.transpose(0, -2), rtol=1e-5, atol=1e-5)
    assert len(calls) == 1 + (len(shape) > 1)
    restore_modules(mlp)
    assert type(mlp) is own_class
    assert "_found" not in vars(mlp)


@torch.inference_mode()
@pytest.mark.parametrize("activation", MLPS)
def test_activations_are_those_of_torch_from_the_smallest_to_the_largest(activation: str) -> None:
    """With the gate as it comes in, and 1 beside it."""
    mlp = MLPS[activation]()
    for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        layer.weight.zero_().fill_diagonal_(1)
    mlp.up_proj.weight.zero_()[:, -1] = 1
    native(mlp)
    values = torch.tensor([0.0, 1e-30, 1e-6, 0.5, 1, 3, 9, 20, 80, 88, 90, 110, 1e4, 1e30, 3e38])
    rows = torch.zeros(2 * len(values), SIZE)
    rows[:, 0] = torch.cat([values, -values])
    rows[:, -1] = 1
    expected = mlp.act_fn(rows[:, 0].double())
    torch.testing.assert_close(mlp(rows)[:, 0].double(), expected, rtol=1e-6, atol=1e-7)


@torch.inference_mode()
@pytest.mark.parametrize("activation", MLPS)
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_spoils_no_other(activation: str, odd: float) -> None:
    mlp = MLPS[activation]()
    rows = torch.randn(16, SIZE)
    rows[3, 5] = odd
    expected = mlp(rows)
    output = native(mlp)(rows)
    assert not output[3].isfinite().any()
    others = torch.arange(16) != 3
    torch.testing.assert_close(output[others], expected[others], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("how", ["written to", "replaced", "another parameter"])
def test_a_weight_that_is_written_to_or_replaced_counts_at_once(
    layer: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp, rows = native(llama_mlp()), torch.randn(3, SIZE)
    part = getattr(mlp, layer)
    with torch.inference_mode(False), torch.no_grad():
        if how == "written to":
            part.weight.mul_(2)
        elif how == "replaced":
            part.weight.data = 2 * part.weight.data
        else:
            part.weight = nn.Parameter(2 * part.weight)
        plain = copy.deepcopy(mlp)
    with counting("gated_mlp", monkeypatch) as calls:
        torch.testing.assert_close(mlp(rows), plain(rows))
        assert not calls
    unpack_linear_layers(mlp)
    torch.testing.assert_close(native(mlp)(rows), plain(rows))


@torch.inference_mode()
@pytest.mark.parametrize("layer", [*LAYERS, "act_fn"])
@pytest.mark.parametrize(
    "how", ["replaced", "deleted", "given a forward", "hooked", "hooked before", "hooked with all"]
)
def test_a_part_that_is_replaced_or_hooked_into_is_called(
    layer: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp, rows, seen, hooks = native(llama_mlp()), torch.randn(3, SIZE), [], []
    part = getattr(mlp, layer)

    def halved(input: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return type(part).forward(part, input) / 2

    def hook(module: nn.Module, *_: object) -> None:
        seen.extend([1] * (module is part))

    if how == "replaced":
        setattr(mlp, layer, nn.Sequential(part))
        part.register_forward_hook(hook)
    elif how == "deleted":
        delattr(mlp, layer)
        setattr(mlp, layer, halved)
    elif how == "given a forward":
        part.forward = halved
    elif how == "hooked with all":
        hooks.append(nn.modules.module.register_module_forward_hook(hook))
    else:
        (part.register_forward_hook if how == "hooked" else part.register_forward_pre_hook)(hook)
    try:
        expected = LlamaMLP.forward(mlp, rows)
        seen.clear()
        with counting("gated_mlp", monkeypatch) as calls:
            torch.testing.assert_close(mlp(rows), expected)
        assert seen
        assert not calls
    finally:
        for handle in hooks:
            handle.remove()


class DroppingMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, training=self.training)


@pytest.mark.parametrize(
    "case", ["with gradients", "under autocast", "compiled", "counted", "more rows", "another size", "trained"]
)
def test_where_the_kernel_does_not_serve_the_module_computes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, mlp, rows = llama_mlp(), native(llama_mlp(mlp_class=DroppingMLP)), torch.randn(3, SIZE)
    with counting("gated_mlp", monkeypatch) as calls:
        if case == "with gradients":
            mlp(rows).sum().backward()
            assert mlp.gate_proj.weight.grad is not None
        with torch.no_grad():
            if case == "under autocast":
                with torch.autocast("cpu"):
                    assert mlp(rows).dtype == torch.bfloat16
            elif case == "compiled":
                compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
                torch.testing.assert_close(compiled(rows), plain(rows))
            elif case == "counted":
                with FlopCounterMode(display=False) as counter:
                    mlp(rows)
                assert counter.get_total_flops() == 3 * 2 * len(rows) * SIZE * INNER
            elif case == "trained":
                assert (mlp.train()(rows) == 0).any()
            elif case == "more rows":
                many = torch.randn(MOST_NATIVE_ROWS + 1, SIZE)
                torch.testing.assert_close(mlp(many), plain(many))
            elif case == "another size":
                with pytest.raises(RuntimeError, match="shape"):
                    mlp(rows[:, :7])
    assert not calls


def test_a_module_that_computes_something_else_or_has_no_packed_weights_is_left_alone() -> None:
    class CappedMLP(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(-10, 10)

    zero = llama_mlp("relu")  # as every other while its last weight is zero
    nn.init.zeros_(zero.down_proj.weight)
    others = nn.Sequential(llama_mlp("relu"), llama_mlp(bias=True), llama_mlp(mlp_class=CappedMLP), zero)
    pack_linear_layers(others, whatever_it_takes=True)
    assert use_native_mlps(nn.Sequential(others, llama_mlp())) == 0
    assert [type(module) for module in others] == [LlamaMLP, LlamaMLP, CappedMLP, LlamaMLP]


def test_copies_and_pickles_are_of_the_class_that_everyone_knows() -> None:
    mlp = native(llama_mlp())
    for other in (copy.copy(mlp), copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert type(other) is LlamaMLP
        assert torch.equal(other.up_proj.weight, mlp.up_proj.weight)
    mlp.itself = mlp.forward  # as some keep it to wrap it
    other = copy.deepcopy(mlp)
    assert other.itself.__self__ is other


@torch.no_grad()
def test_a_method_that_somebody_has_kept_computes_when_all_is_given_back() -> None:
    mlp, rows = native(llama_mlp()), torch.randn(3, SIZE)
    kept = [module.forward for module in (mlp, mlp.gate_proj)]
    expected = [forward(rows) for forward in kept]
    restore_modules(mlp)
    unpack_linear_layers(mlp)
    for forward, before in zip(kept, expected, strict=True):
        torch.testing.assert_close(forward(rows), before)


@pytest.mark.parametrize("name", ["llama", "gemma3-hybrid"])
def test_engines_compute_mlps_natively_where_weights_are_packed(name: str) -> None:
    model = small_model(name)
    num_mlps = sum(type(module).__name__.endswith("MLP") for module in model.modules())

    def num_native() -> int:
        modules = [module for module in model.modules() if isinstance(module, NativeModule)]
        return sum(type(module).__name__.endswith("MLP") for module in modules)

    Engine(model, config=EngineConfig(num_blocks=20, packed_weights=True))
    assert num_native() == num_mlps > 1
    Engine(model, config=EngineConfig(num_blocks=20, packed_weights=True, attention_backend="torch"))
    assert num_native() == 0
    Engine(model, config=EngineConfig(num_blocks=20, packed_weights=True))
    Engine(model, config=EngineConfig(num_blocks=20, packed_weights=False))
    assert num_native() == 0
