"""What the tests of native modules share: kernels for both widths of vectors, models, and who calls what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from runner import hf_attention
from runner.native.build import NativeUnavailableError, compiled_kernels
from runner.native.kernels import Kernels
from tests.runner.small_models import small_model

WIDTHS = {"": None, "narrow": "cc -mno-avx512f"}
"""Values of the environment variable CC: for the vectors of this CPU, and for vectors of 8 floats, as on CPUs without
AVX-512, where the compiler knows of AVX-512 at all."""

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma2-softcap", "gemma3-hybrid", "smollm3-no-rope"]
"""Plain; with biases; norms of heads; bounded scores and norms behind; all these norms; a layer without rotation."""


def paged_model(architecture: str, **sizes: int) -> PreTrainedModel:
    """A small one as an engine takes it over, with biases and norms that are not what they begin with."""
    with torch.inference_mode(False):
        model = small_model(architecture, **sizes)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm.weight" in name:
                nn.init.normal_(parameter)
    hf_attention.register()
    model.set_attn_implementation(hf_attention.ATTENTION_NAME)
    return model


def use_kernels(width: str, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Have modules compute with kernels of that width, a key of :data:`WIDTHS`; skips the test where there are none."""
    compiler = WIDTHS[width]
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    try:
        kernels = Kernels(compiled_kernels())
    except NativeUnavailableError as error:
        pytest.skip(f"no native kernels: {error}")
    for module in modules:
        monkeypatch.setattr(module, "native_kernels", lambda: kernels)


@contextmanager
def counting(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Gets an entry for each call of a method of the kernels."""
    calls: list[int] = []
    method = getattr(Kernels, name)
    with monkeypatch.context() as patch:
        patch.setattr(Kernels, name, lambda *args, **kwargs: calls.append(1) or method(*args, **kwargs))
        yield calls


class WrappedTensor(torch.Tensor):
    """Has no memory of its own, as some quantized and distributed tensors have none. What it goes into is plain."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> WrappedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].inner)
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.inner, (args, kwargs or {}))
        return function(*args, **kwargs)
