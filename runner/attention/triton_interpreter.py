"""Triton's interpreter with a numpy that it was not written for."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def mend_loop_bounds() -> None:
    """Let scalars bound a loop. Any number of times.

    The interpreter keeps a scalar as an array of one element and takes ``int()`` of it, which numpy refuses from 2.4 on
    unless the array has no dimensions. It says so anew at each launch, so what is mended is the function that says it.
    """
    patch = interpreter._patch_lang_tensor
    if getattr(patch, "mended", False):
        return

    def patch_and_mend(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        if scope:  # from Triton 3.6 on: takes the attributes back after the launch
            scope[0].set_attr(tensor, "__index__", _index)
        else:
            tensor.__index__ = _index

    patch_and_mend.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch_and_mend


def _index(scalar: Any) -> int:
    return int(scalar.handle.data.item())
