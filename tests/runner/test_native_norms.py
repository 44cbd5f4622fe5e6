"""Norms by the native kernel: the module's own result, wherever the kernel serves, and else the module's own way."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from runner import Engine, EngineConfig, native_norms
from runner.native_modules import restore_modules
from runner.native_norms import use_native_norms
from tests.runner.native_checks import WIDTHS, WrappedTensor, counting, use_kernels
from tests.runner.small_models import small_model

CLASSES = [LlamaRMSNorm, Gemma3RMSNorm]


@pytest.fixture(autouse=True, params=WIDTHS)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(request.param, monkeypatch, native_norms)


def norm_of(norm_class: type[nn.Module], size: int = 40) -> nn.Module:
    torch.manual_seed(0)
    norm = norm_class(size, eps=1e-5)
    nn.init.normal_(norm.weight)
    return norm


@torch.inference_mode()
@pytest.mark.parametrize("norm_class", CLASSES)
@pytest.mark.parametrize("shape", [(40,), (1, 16, 40), (2, 3, 7, 40), (3000, 40), (0, 40)])
def test_the_kernel_gives_what_the_module_gives(
    norm_class: type[nn.Module], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = norm_of(norm_class)
    rows = 3 * torch.randn(shape)
    expected = norm(rows)
    assert use_native_norms(norm) == 1
    with counting("rms_norm", monkeypatch) as calls:
        torch.testing.assert_close(norm(rows), expected)
        if len(shape) > 2:
            torch.testing.assert_close(norm(rows.transpose(0, -2)), expected.transpose(0, -2))
    assert len(calls) == 1 + (len(shape) > 2)
    restore_modules(norm)
    assert type(norm) is norm_class
    assert "_found" not in vars(norm)


@torch.no_grad()
def test_a_weight_that_changes_counts_at_once() -> None:
    norm, rows = norm_of(LlamaRMSNorm), torch.randn(3, 40)
    use_native_norms(norm)
    norm.weight.data.mul_(2)
    changed = copy.deepcopy(norm)
    assert type(changed) is LlamaRMSNorm
    torch.testing.assert_close(norm(rows), changed(rows))


@pytest.mark.parametrize("case", ["with gradients", "in bfloat16", "compiled", "another size"])
def test_where_the_kernel_does_not_serve_the_module_computes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, rows = norm_of(LlamaRMSNorm), torch.randn(3, 40)
    norm = copy.deepcopy(plain)
    use_native_norms(norm)
    with counting("rms_norm", monkeypatch) as calls:
        if case == "with gradients":
            norm(rows).sum().backward()
            assert norm.weight.grad is not None
        with torch.no_grad():
            if case == "in bfloat16":
                assert torch.equal(norm.bfloat16()(rows.bfloat16()), plain.bfloat16()(rows.bfloat16()))
            elif case == "compiled":
                torch.testing.assert_close(torch.compile(norm, backend="aot_eager", fullgraph=True)(rows), plain(rows))
            elif case == "another size":
                with pytest.raises(RuntimeError, match="size"):
                    norm(rows[:, :7])
    assert not calls


@torch.inference_mode()
def test_a_norm_may_be_called_as_its_class_may_be() -> None:
    norm, rows = nn.ModuleDict({"it": torch.nn.RMSNorm(40, eps=1e-6)}), torch.randn(3, 40)
    expected = norm["it"](rows)
    assert use_native_norms(norm) == 1
    torch.testing.assert_close(norm["it"](rows), expected)
    torch.testing.assert_close(norm["it"](x=rows), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torch_s_default_type_changes_nothing(dtype: torch.dtype) -> None:
    norm = norm_of(LlamaRMSNorm)
    try:
        torch.set_default_dtype(dtype)
        assert use_native_norms(norm) == 1
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_module_that_computes_something_else_is_left_alone() -> None:
    class HalvingRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) / 2

    norm = HalvingRMSNorm(40)
    assert use_native_norms(nn.Sequential(norm, nn.LayerNorm(40), norm_of(LlamaRMSNorm).double())) == 0
    assert type(norm) is HalvingRMSNorm


@torch.no_grad()
def test_an_epsilon_that_changes_counts_at_once() -> None:
    norm, rows = norm_of(LlamaRMSNorm), torch.randn(3, 40) / 10
    use_native_norms(norm)
    norm.variance_epsilon = 0.1
    torch.testing.assert_close(norm(rows), copy.deepcopy(norm)(rows))


@torch.inference_mode()
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_weight_that_is_more_than_its_memory_is_not_read_as_such(when: str) -> None:
    norm, rows = norm_of(LlamaRMSNorm), torch.randn(3, 40)
    expected = norm(rows)
    if when == "after":
        use_native_norms(norm)
    norm.weight = nn.Parameter(WrappedTensor(norm.weight.detach()), requires_grad=False)
    if when == "before":
        assert use_native_norms(norm) == 0
    torch.testing.assert_close(norm(rows), expected)


@torch.no_grad()
def test_hooks_do_not_hear_that_a_norm_is_looked_at_and_do_what_they_do() -> None:
    """What they change is not taken for the norm's own doing."""
    norm, heard, rows = norm_of(LlamaRMSNorm), [], torch.randn(3, 40)
    nn.init.ones_(norm.weight)
    expected = norm(rows)
    handle = norm.register_forward_hook(lambda module, given, output: heard.append(1) or 2 * output)
    assert use_native_norms(norm) == 1
    assert not heard
    torch.testing.assert_close(norm(rows), 2 * expected)
    handle.remove()
    torch.testing.assert_close(norm(rows), expected)


@torch.no_grad()
def test_a_norm_with_a_forward_of_its_own_is_left_alone() -> None:
    norm = norm_of(LlamaRMSNorm)
    norm.forward = lambda rows: 2 * LlamaRMSNorm.forward(norm, rows)
    assert use_native_norms(norm) == 0


def test_copies_and_pickles_are_of_the_class_that_everyone_knows() -> None:
    norm = norm_of(Gemma3RMSNorm)
    use_native_norms(norm)
    for other in (copy.copy(norm), copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert type(other) is Gemma3RMSNorm
        assert torch.equal(other.weight, norm.weight)


@torch.no_grad()
def test_a_norm_whose_weight_is_computed_since_computes_by_itself_and_stays_what_torch_made_it() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    norm, rows = norm_of(LlamaRMSNorm), torch.randn(3, 40)
    expected = 2 * norm(rows)
    use_native_norms(norm)
    nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
    torch.testing.assert_close(norm(rows), expected)
    restore_modules(norm)
    torch.testing.assert_close(norm(rows), expected)


def test_engines_change_norms_where_they_compute_natively_and_give_them_back_where_not() -> None:
    model = small_model("qwen3")
    plain = [type(module) for module in model.modules()]
    Engine(model, config=EngineConfig(num_blocks=20))
    assert sum(type(module) is not was for module, was in zip(model.modules(), plain, strict=True)) > 4
    Engine(model, config=EngineConfig(num_blocks=20, attention_backend="torch", packed_weights=False))
    assert [type(module) for module in model.modules()] == plain
