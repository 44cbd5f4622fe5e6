"""How much memory there is: the machine's, or the container's."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from runner import machine
from runner.config import check_memory
from runner.errors import EngineConfigError


@pytest.fixture
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "CGROUP_LIMITS", (tmp_path / "missing", path))
    return path


@pytest.mark.parametrize("text", ["max\n", "", f"{2**62}\n"])
def test_it_is_what_the_machine_has_where_no_container_sets_less(limit: Path, text: str) -> None:
    limit.write_text(text)
    assert machine.machine_memory() == psutil.virtual_memory().total


def test_a_container_may_set_less_and_a_cache_that_is_larger_is_refused(limit: Path) -> None:
    limit.write_text(f"{2**20}\n")
    assert machine.machine_memory() == 2**20
    check_memory(2**20, torch.device("cpu"))
    with pytest.raises(EngineConfigError, match=r"this machine has 1\.00 MiB of memory"):
        check_memory(2**20 + 1, torch.device("cpu"))
