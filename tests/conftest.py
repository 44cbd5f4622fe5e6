"""Settings every test shares: how hard hypothesis tries, and what to do where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# dev: quick, new examples each time. ci: more of them, and the same ones each time, so that a red run can be repeated.
# repeat: as few as in dev, the same ones each time; for what ci has tried before on the same code not compiled.
settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", settings.get_profile("dev"), max_examples=200, derandomize=True, database=None, print_blob=True
)
settings.register_profile("repeat", settings.get_profile("ci"), max_examples=50)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


# Triton's kernels then run in its interpreter. It has to be told before anything imports it, and transformers does.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` on a machine without one. torch is imported only if such a test was collected."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
