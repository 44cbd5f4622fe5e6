"""Settings for tests that run models."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small models gain nothing from threads, and lose a lot where other test processes want the same cores."""
    torch.set_num_threads(1)
