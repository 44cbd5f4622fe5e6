"""Modules of a model that compute by a native kernel where it serves, and else as they always did.

Which ones is not read from a list of models: a module is taken for what the kernel computes if it computes the same of
random rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from runner.native.build import NativeUnavailableError
from runner.native.kernels import native_kernels


class NativeModule:
    """Stands before the class of a module. For one tensor and nothing else, the kernel is asked first."""

    _own_class: type[nn.Module]
    _found: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own result."""
        if not isinstance(self, NativeModule):  # somebody has kept this method, and the module is what it was
            return type(self).forward(self, *args, **kwargs)
        if len(args) == 1 and not kwargs:
            output = self.natively(args[0])
            if output is not None:
                return output
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def natively(self, input: torch.Tensor) -> torch.Tensor | None:
        """What the kernel makes of ``input``; None where it does not serve."""
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

    Those that were of that kind before are looked at anew.

    Args:
        model: Whose modules are looked at.
        kind: What computes.
        recognized: What it has to know of a module, ``self._found`` to it; None: the module is nothing of the kind.
    """
    restore_modules(model, kind)
    try:
        native_kernels()
    except NativeUnavailableError:
        return 0
    taken = 0
    for module in list(model.modules()):
        found = recognized(module)
        if found is not None:
            module.__class__ = _class_of(kind, type(module))
            module.__dict__["_found"] = found
            taken += 1
    return taken


def restore_modules(model: nn.Module, kind: type[NativeModule] = NativeModule) -> None:
    """Make native modules, those of a kind or all, what they were."""
    for module in model.modules():
        if isinstance(module, kind) and "_own_class" in vars(type(module)):  # torch makes subclasses of it too
            del module.__dict__["_found"]
            module.__class__ = module._own_class


def only_computes(module: nn.Module) -> bool:
    """Whether a call of the module does what its class says, and nobody hooks into it."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or "forward" in module.__dict__
    )


def output_of(module: nn.Module, rows: torch.Tensor) -> torch.Tensor | None:
    """What a module makes of rows, to be compared with what a kernel does; None where it is nothing of the kind."""
    try:
        output = module(rows)
    except Exception:  # whatever it is: who calls the module in earnest will hear of it
        return None
    if not isinstance(output, torch.Tensor) or output.shape != rows.shape or output.dtype != rows.dtype:
        return None
    return output


@cache
def _class_of(kind: type[NativeModule], own_class: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": own_class.__module__, "_own_class": own_class}
    return type(own_class.__name__, (kind, own_class), names)


def _new(own_class: type[nn.Module]) -> nn.Module:
    return own_class.__new__(own_class)
