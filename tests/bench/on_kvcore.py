"""Runs the workloads on kvcore; prints one JSON object."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import kvcore
from kvcore import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
    SlidingWindowSpec,
)
from kvcore.hashing import ALGORITHMS
from tests.bench import suite
from tests.bench.workloads import (
    BLOCK_SIZE,
    DECODING_REQUESTS,
    DECODING_STEPS,
    WINDOW,
    Adapter,
    Groups,
    Workload,
    start_decoding,
)

MAX_MODEL_LEN = 1 << 21


class KvcoreAdapter:
    """kvcore with the given hash.

    Args:
        hash_algorithm: A name that ``BlockHasher`` knows.
        verify_hits: Compare tokens on hits; None: as the algorithm needs it.
    """

    name = "kvcore"
    version = kvcore.__version__
    compiled = kvcore.COMPILED

    def __init__(self, hash_algorithm: str = "xxh3", *, verify_hits: bool | None = None) -> None:
        self.hash_algorithm = hash_algorithm
        self.hasher = BlockHasher(BLOCK_SIZE, hash_algorithm, seed="0", verify_hits=verify_hits)

    def make_manager(self, groups: Groups, num_blocks: int) -> KVCacheManager:
        full = FullAttentionSpec(BLOCK_SIZE, 1, 1, "float32")
        window = SlidingWindowSpec(BLOCK_SIZE, 1, 1, "float32", WINDOW)
        specs = [full] * groups.num_full + [window] * groups.num_windows
        config = KVCacheConfig(num_blocks, [KVCacheGroupSpec([f"layer-{i}"], spec) for i, spec in enumerate(specs)])
        return KVCacheManager(config, MAX_MODEL_LEN)

    def make_request(self, request_id: str, token_ids: list[int]) -> Request:
        return Request(request_id, token_ids, block_hasher=self.hasher)

    def look_up(self, manager: KVCacheManager, request: Request) -> tuple[Any, int]:
        return manager.get_computed_blocks(request)


def decode_at_once(adapter: Adapter, groups: Groups) -> Callable[[], None]:
    manager, requests = start_decoding(adapter, groups)
    assert isinstance(manager, KVCacheManager)

    def run() -> None:
        for step in range(DECODING_STEPS):
            manager.grow(requests)
            for request in requests:
                request.num_computed_tokens += 1
                request.append_output_token_ids(7 + step)

    return run


def grow(adapter: Adapter, groups: Groups) -> Callable[[], None]:
    manager, requests = start_decoding(adapter, groups)
    assert isinstance(manager, KVCacheManager)
    for request in requests:
        for step in range(DECODING_STEPS):
            request.append_output_token_ids(7 + step)

    def run() -> None:
        for _ in range(DECODING_STEPS):
            manager.grow(requests)
            for request in requests:
                request.num_computed_tokens += 1

    return run


_REQUEST_STEPS = DECODING_STEPS * DECODING_REQUESTS

BATCHED = (
    Workload("decode_at_once", "decode through grow", "us", 1e-6, _REQUEST_STEPS, decode_at_once),
    Workload("grow", "the same, output tokens known beforehand", "us", 1e-6, _REQUEST_STEPS, grow),
)
"""The decode workload with one call a step; only kvcore has that."""


def main() -> None:
    parser = suite.argument_parser(__doc__)
    parser.add_argument("--hash", choices=list(ALGORITHMS), default="xxh3", help="hash algorithm")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="compare tokens on hits; the default is to do so for hashes that are not collision-resistant",
    )
    suite.run(parser.parse_args(), lambda args: KvcoreAdapter(args.hash, verify_hits=args.verify), BATCHED)


if __name__ == "__main__":
    main()
