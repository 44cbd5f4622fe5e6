"""What the machine has, and where this package may keep things on it."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container's limit stands: in version 2 of Linux' control groups, and in version 1."""


def machine_memory() -> int | None:
    """Bytes of memory that this process can have at most: the machine's, or its container's if that has less.

    None where the system does not say.
    """
    if not hasattr(os, "sysconf"):
        return None
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text("ascii")))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits)


def cache_folder() -> Path:
    """Where converted models and compiled kernels are kept: ``kvcore`` in ``XDG_CACHE_HOME``, else in ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvcore"
