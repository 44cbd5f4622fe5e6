"""A router that sends each prompt to the worker that holds the most of it, and knows that from KV events alone.

    pip install 'kvcore[events]'
    python examples/route_by_prefix.py

The workers of this example run in the same process and have no model. What the router sees of them is what it would
see of workers on other machines: two sockets each.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType

from kvcore import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVEventBatch,
    Request,
)
from kvcore.event_mirror import IndexMirror
from kvcore.event_publisher import EventPublisher
from kvcore.event_subscriber import EventSubscriber

BLOCK_SIZE = 16
HASHER = BlockHasher(BLOCK_SIZE, "sha256_cbor", seed="0")  # the router must hash as the workers do, seed included


class Worker:
    """Computes prompts one at a time, and tells of its cache."""

    def __init__(self, num_blocks: int) -> None:
        spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=8, head_size=64, dtype="bfloat16")
        config = KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layers.0"], spec)])
        self.manager = KVCacheManager(config, num_blocks * BLOCK_SIZE, enable_kv_cache_events=True)
        self.publisher = EventPublisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv")

    def compute(self, request: Request) -> int:
        """Computes a prompt; how many of its tokens were in the cache."""
        cached, hit = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, request.num_tokens - hit, hit, cached) is None:
            raise ValueError(f"{request.request_id} does not fit")
        request.num_computed_tokens = request.num_tokens
        self.manager.free(request)
        # Once in every step of an engine; it does not wait for anybody.
        self.publisher.publish(KVEventBatch(time.time(), self.manager.take_events()))
        return hit


class Router:
    """Follows the events of workers and says who holds what.

    Args:
        workers: Addresses of each worker's PUB and ROUTER sockets, by its name.
    """

    def __init__(self, workers: Mapping[str, tuple[str, str | None]]) -> None:
        self.mirrors = {name: IndexMirror() for name in workers}
        self._sockets = ExitStack()
        self._subscribers = [
            self._sockets.enter_context(EventSubscriber(self.mirrors[name], events, replay_endpoint=replays))
            for name, (events, replays) in workers.items()
        ]

    def __enter__(self) -> Router:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._sockets.close()

    def update(self) -> None:
        """Takes in all that the workers have told. Most routers do with ``update``, which looks at what has come;
        ``catch_up`` asks for the rest, so that the answers do not depend on how fast the network is."""
        for subscriber in self._subscribers:
            subscriber.update()
            subscriber.catch_up()

    def held_by(self, prompt: Request) -> dict[str, int]:
        """How many tokens of a prompt each worker holds."""
        return {name: mirror.longest_prefix(prompt) for name, mirror in self.mirrors.items()}


def make_prompt(name: str, tokens: Iterable[int]) -> Request:
    return Request(name, tokens, block_hasher=HASHER)


def main() -> None:
    workers = {name: Worker(num_blocks=20) for name in ("ann", "bob")}
    with ExitStack() as stack:
        for worker in workers.values():
            stack.enter_context(worker.publisher)
        addresses = {name: (w.publisher.endpoint, w.publisher.replay_endpoint) for name, w in workers.items()}
        router = stack.enter_context(Router(addresses))
        systems = {"poems": range(1000, 1100), "taxes": range(2000, 2150)}
        for number, topic in enumerate(["poems", "taxes", "poems", "taxes", "taxes", "poems"]):
            prompt = make_prompt(f"{topic}-{number}", [*systems[topic], *range(3000 + 10 * number, 3010 + 10 * number)])
            router.update()
            held = router.held_by(prompt)
            # The one that holds most; where none holds anything, the one that holds least of other prompts.
            name = max(held, key=lambda name: (held[name], -len(router.mirrors[name])))
            hit = workers[name].compute(prompt)
            print(f"{prompt.request_id}: {held} -> {name}, which found {hit} of {prompt.num_tokens} tokens")


if __name__ == "__main__":
    main()
