"""How long the manager's calls take, measured in a few steps out of many.

A call of decoding takes less than a microsecond, and to measure it takes as long again. So whole steps are
chosen at random, and every call in them is measured: all kinds of calls have the same chance to be seen, and in the
other steps none costs more.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvcore.errors import ConfigError
from kvcore.histogram import Histogram

if TYPE_CHECKING:
    from kvcore.manager import KVCacheManager

CALLS = {"lookup": "get_computed_blocks", "allocate": "allocate_slots", "grow": "grow", "free": "free"}
"""What is measured, by the name it is reported under."""

SECONDS = tuple(digit * 10.0**power for power in range(-7, 0) for digit in (1, 2, 5))
"""Bounds of the histograms: 100 ns to half a second."""


class CallTimes:
    """Measures the calls of one manager.

    In a step that is measured, the methods are replaced on this one manager; after it, they are what they were.

    Args:
        manager: Whose.
        step_sample_rate: Share of the steps to measure, above 0 and up to 1.
        seed: Chooses them; None: differently each time.

    Attributes:
        histograms: Seconds a call, by the names of :data:`CALLS`.

    Raises:
        ConfigError: The rate is no such share.
    """

    def __init__(self, manager: KVCacheManager, *, step_sample_rate: float = 0.002, seed: int | None = None) -> None:
        if not 0.0 < step_sample_rate <= 1.0:
            raise ConfigError(
                f"step_sample_rate is a share of the steps, above 0 and up to 1, got {step_sample_rate!r}"
            )
        self.histograms = {name: Histogram(SECONDS) for name in CALLS}
        self._manager = manager
        self._rate = step_sample_rate
        self._random = random.Random(seed).random
        self._replaced: dict[str, Any] = {}  # while a step is measured: the methods that were there, by name

    def __repr__(self) -> str:
        return f"CallTimes({self.histograms})"

    def next_step(self) -> None:
        """A step begins: decides whether it is measured. O(1)."""
        if self._random() < self._rate:
            if not self._replaced:
                self._replace()
        elif self._replaced:
            self._restore()

    def close(self) -> None:
        """Measures no longer; the histograms stay. Again: does nothing."""
        self._rate = 0.0
        self._restore()

    def _replace(self) -> None:
        for name, method in CALLS.items():
            call = self._replaced[method] = getattr(self._manager, method)
            setattr(self._manager, method, _timed(call, self.histograms[name].observe))

    def _restore(self) -> None:
        for method, call in self._replaced.items():
            # Set again, the class's own method would be looked up in the instance first: 3% of a call of decoding.
            if getattr(call, "__func__", None) is getattr(type(self._manager), method):
                delattr(self._manager, method)
            else:
                setattr(self._manager, method, call)
        self._replaced.clear()


def _timed(call: Callable[..., Any], observe: Callable[[float], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            observe(time.perf_counter() - start)

    return timed
