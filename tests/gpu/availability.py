"""Which attention backends can be used here, and why not the others."""

from __future__ import annotations

from functools import partial

import torch

from kvcore.spec import FullAttentionSpec
from runner.attention import make_backend
from runner.attention.base import AttentionLayer
from runner.errors import RunnerError
from tests.gpu.work import Measurement, Record, Settings


def measurements(settings: Settings) -> list[Measurement]:
    """One a backend."""
    return [Measurement(name, partial(_try, name, settings)) for name in settings.backends]


def _try(name: str, settings: Settings) -> Record:
    try:
        backend = make_backend(name, settings.device)
        page = backend.default_block_size
        dtype = "bfloat16" if settings.is_timed else "float32"
        layer = AttentionLayer("any layer", FullAttentionSpec(page, 2, 128, dtype), 4)
        backend.check([layer], device=torch.device(settings.device), dtype=getattr(torch, dtype))
    except (RunnerError, ImportError) as error:
        return {"status": "refused", "backend": name, "note": str(error)}
    return {
        "backend": name,
        "page": page,
        "graphs": backend.supports_graphs,
        "note": backend.describe(),
    }
