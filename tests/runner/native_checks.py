"""What the tests of native modules share: kernels for both widths of vectors, and how often one was called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from runner.native.build import NativeUnavailableError, compiled_kernels
from runner.native.kernels import Kernels

NARROW = "cc -mno-avx512f"
"""Compiles for vectors of 8 floats, as on CPUs without AVX-512, where the compiler knows of AVX-512 at all."""

WIDTHS = {"": None, "narrow": NARROW}
"""Values of the environment variable CC: for the vectors of this CPU, and for narrow ones."""


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
