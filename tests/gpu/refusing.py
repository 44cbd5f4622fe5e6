"""What a backend refuses is no failure of a measurement."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from runner.errors import EngineConfigError, UnsupportedModelError
from tests.gpu.work import Record


def refusing(measure: Callable[..., Record]) -> Callable[..., Record]:
    """A measurement whose backend may refuse it: the record then says so."""

    @wraps(measure)
    def measured(*args: Any) -> Record:
        try:
            return measure(*args)
        except (UnsupportedModelError, EngineConfigError) as refusal:
            return {"status": "refused", "note": str(refusal)}

    return measured
