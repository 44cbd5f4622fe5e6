"""What a report was measured on: card, driver, processor, versions."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from typing import Any

import torch

import kvcore
from tests.bench import report

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-3", "flash-attn-4")


def machine(device: str) -> dict[str, Any]:
    """Processor and, if the device is one, the card.

    Raises:
        SystemExit: There is no CUDA device.
    """
    found = report.machine()
    if device == "cpu":
        return found
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device; without one: --device cpu --backend triton,torch --tiny")
    card = torch.cuda.get_device_properties(0)
    return found | {
        "card": card.name,
        "memory": card.total_memory,
        "multiprocessors": card.multi_processor_count,
        "driver": _driver(),
    }


def _driver() -> str | None:
    """Its version; None if nobody says."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.split() or [None])[0]


def versions() -> dict[str, str]:
    """Of Python and of the packages that take part, as far as they are installed."""
    found = {"python": platform.python_version(), "kvcore": kvcore.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    return found
