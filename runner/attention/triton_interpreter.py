"""Triton's interpreter with a numpy that it was not written for."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def mend_loop_bounds() -> None:
    """Let scalars bound a loop. Any number of times.

    The interpreter (3.6) keeps a scalar as an array of one element and takes ``int()`` of it, which numpy refuses from
    2.4 on unless the array has no dimensions.
    """
    patch = interpreter._patch_lang_tensor
    if getattr(patch, "mended", False):
        return

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch_and_mend.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch_and_mend
