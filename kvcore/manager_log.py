"""What a manager says through ``logging``, as ``kvcore.manager``: its layout, resets, and what did not fit.

All at INFO, so that an application that logs warnings only hears nothing. Nothing is said in a step that goes well.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcore.kv_cache_blocks import KVCacheBlocks
    from kvcore.manager import KVCacheManager
    from kvcore.request import RequestLike

SECONDS_BETWEEN_REFUSALS = 10.0
"""A full pool refuses something in every step: one line in so many seconds says so, and counts the others."""

_logger = logging.getLogger("kvcore.manager")


class ManagerLog:
    """The log lines of one manager.

    Args:
        manager: Whose.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._pool = manager.block_pool
        self._say_again_at = 0.0
        self._num_unsaid = 0
        if _logger.isEnabledFor(logging.INFO):
            groups = "; ".join(
                f"group {number}: {len(group.layer_names)} layers of {group.kv_cache_spec}"
                for number, group in enumerate(manager.kv_cache_config.kv_cache_groups)
            )
            _logger.info(
                "pool of %s blocks, the null block included; up to %s tokens a request; prefix caching %s, %s tokens a "
                "hash; free blocks by %s; %s",
                f"{len(self._pool.blocks):,}",
                f"{manager.max_model_len:,}",
                "on" if manager.enable_caching else "off",
                self._pool.hash_block_size,
                type(self._pool.policy).__name__,
                groups,
            )

    def refused(self, request: RequestLike) -> KVCacheBlocks | None:
        """Notes that a request did not fit. At most one line in :data:`SECONDS_BETWEEN_REFUSALS`.

        Returns:
            None, always: what a refusal answers.
        """
        if not _logger.isEnabledFor(logging.INFO):
            return None
        now = time.monotonic()
        if now < self._say_again_at:
            self._num_unsaid += 1
            return None
        others = f" (and {self._num_unsaid:,} more times since the last such line)" if self._num_unsaid else ""
        self._say_again_at = now + SECONDS_BETWEEN_REFUSALS
        self._num_unsaid = 0
        _logger.info(
            "request %r with %s tokens, %s of them computed, does not fit: %s of %s blocks are free%s",
            request.request_id,
            request.num_tokens,
            request.num_computed_tokens,
            f"{self._pool.get_num_free_blocks():,}",
            f"{len(self._pool.blocks) - 1:,}",
            others,
        )
        return None

    def reset(self, *, done: bool) -> None:
        """Notes that the prefix cache was reset, or could not be."""
        if done:
            _logger.info("the prefix cache was reset: nothing can be hit until requests have filled blocks again")
        else:
            held = len(self._pool.blocks) - 1 - self._pool.get_num_free_blocks()
            _logger.info("the prefix cache was not reset: requests and pins hold %s blocks", f"{held:,}")
