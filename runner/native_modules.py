"""Modules of a model that compute by a native kernel where it serves, and else as they always did.

Which ones is not read from a list of models: a module is taken for what the kernel computes if it computes the same of
random rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from runner.native.build import NativeUnavailableError
from runner.native.kernels import native_kernels

FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""What random rows are made of, whatever torch's defaults are."""

NUM_ROWS = 8
"""Random rows that tell what a module computes."""

ERROR = 64 * torch.finfo(torch.float32).eps
"""Most that a row of a kernel's may differ from the module's own, as a share of its largest value."""


class NativeModule:
    """Stands before the class of a module: the kernel is asked first."""

    _own_class: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own result."""
        if not isinstance(self, NativeModule):  # somebody has kept this method, and the module is what it was
            return type(self).forward(self, *args, **kwargs)
        found = self._as_found()
        output = None if found is None else self.natively(found, *args, **kwargs)
        return super().forward(*args, **kwargs) if output is None else output  # type: ignore[misc]

    def undisturbed(self) -> Any:
        """What ``recognized`` of :func:`make_native` has said of the module, for a kernel that computes more than it.

        None where the module is not as it was then, or something hooks into it.
        """
        return self._as_found() if only_computes(self) else None  # type: ignore[arg-type]

    def _as_found(self) -> Any:
        own = vars(self)
        recognized = own.get("_found")  # gone while another thread gives the module back
        if recognized is None or recognized.counts != _counts_of(own):
            return None
        try:
            return recognized.found if recognized.settings.items() <= own.items() else None
        except Exception:  # an array has come where a number was, and does not compare
            return None

    def natively(self, found: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What the kernel makes of a call's arguments; None where it does not serve.

        It is asked while the module's own numbers and switches are what they were when it was recognised, and nothing
        was added to it.

        Args:
            found: What ``recognized`` of :func:`make_native` has said of the module.
            args: As the module was called.
            kwargs: Of that call too.
        """
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies are of the class that everyone knows."""
        # Objects have that method from Python 3.11 on.
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != "_found"}
        return _new, (self._own_class,), state


def make_native(model: nn.Module, kind: type[NativeModule], recognized: Callable[[nn.Module], Any]) -> int:
    """Put a kind of native module before the classes of a model's modules; before how many, 0 without kernels.

    Those that were of that kind before are looked at anew. Those with a ``forward`` of their own are left alone.

    Args:
        model: Whose modules are looked at.
        kind: What computes.
        recognized: What it has to know of a module; None: the module is nothing of the kind.
    """
    restore_modules(model, kind)
    try:
        native_kernels()
    except NativeUnavailableError:
        return 0
    taken = 0
    for module in list(model.modules()):
        found = None if "forward" in vars(module) else recognized(module)
        if found is not None:
            own = vars(module)
            settings = _settings_of(own)
            own["_found"] = None  # so that it is counted
            own["_found"] = _Recognized(found, settings, _counts_of(own))
            module.__class__ = _class_of(kind, type(module))
            taken += 1
    return taken


def restore_modules(model: nn.Module, kind: type[NativeModule] = NativeModule) -> None:
    """Make native modules, those of a kind or all, what they were."""
    for module in model.modules():
        if isinstance(module, kind) and "_own_class" in vars(type(module)):  # torch makes subclasses of it too
            module.__class__ = module._own_class
            module.__dict__.pop("_found", None)


def only_computes(module: nn.Module) -> bool:
    """Whether a call of the module does what its class says, and nobody hooks into it.

    Who has asked a model of transformers for hidden states has left hooks on it that do nothing until asked again.
    """
    hooks = module._forward_hooks
    return not (
        (hooks and any(hook.__module__ != "transformers.utils.output_capturing" for hook in hooks.values()))
        or module._forward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or "forward" in module.__dict__
    )


def has_tensors(module: nn.Module) -> bool:
    """Whether it has parameters or buffers of its own, beside those of its parts, or places for some."""
    return bool(module._parameters or module._buffers)


def random_rows(size: int) -> torch.Tensor:
    """``[NUM_ROWS, size]``, always the same.

    Some are small and some large: what is large may be cut off, and models have elements of thousands.
    """
    rows = torch.randn(NUM_ROWS, size, generator=torch.Generator().manual_seed(0), **FLOAT32)
    return rows * torch.logspace(-3, 4, NUM_ROWS, **FLOAT32)[:, None]


def rows_agree(found: torch.Tensor, expected: torch.Tensor, error: float = ERROR) -> bool:
    """Whether they are the same but for rounding, each of :data:`NUM_ROWS` rows by itself.

    Rows of zeros never agree: a layer whose weights are zeros gives them whatever it computes.

    Args:
        found: What a kernel computes; its first dimensions have that many rows.
        expected: What a module does.
        error: Most that they may differ, as a share of the largest value of a row.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    largest = expected.reshape(NUM_ROWS, -1).abs().amax(-1)
    difference = (found - expected).reshape(NUM_ROWS, -1).abs().amax(-1)
    return bool((largest > 0).all() and (difference <= error * largest).all())


def output_of(module: nn.Module, rows: torch.Tensor) -> torch.Tensor | None:
    """What a module makes of rows, to be compared with what a kernel does; None where it is nothing of the kind.

    Hooks into the module do not hear of them.
    """
    try:
        output = type(module).forward(module, rows)
    except Exception:  # whatever it is: who calls the module in earnest will hear of it
        return None
    if not isinstance(output, torch.Tensor) or output.shape != rows.shape or output.dtype != rows.dtype:
        return None
    return output


class _Recognized(NamedTuple):
    """What a module has turned out to compute, and what it was then."""

    found: Any
    settings: dict[str, Any]
    counts: tuple[int, ...]


def _counts_of(own: dict[str, Any]) -> tuple[int, ...]:
    """How many attributes, parts, parameters and buffers a module has, by its ``__dict__``."""
    return len(own), len(own["_modules"]), len(own["_parameters"]), len(own["_buffers"])


def _settings_of(own: dict[str, Any]) -> dict[str, Any]:
    """A module's numbers and switches, which it may read at each call: ``scaling``, ``training``, an epsilon."""
    kinds = (bool, int, float, str, type(None))
    return {name: value for name, value in own.items() if isinstance(value, kinds)}


@cache
def _class_of(kind: type[NativeModule], own_class: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": own_class.__module__, "_own_class": own_class}
    return type(own_class.__name__, (kind, own_class), names)


def _new(own_class: type[nn.Module]) -> nn.Module:
    return own_class.__new__(own_class)
