"""What every eviction policy has to keep to, as a test of a policy of your own. Needs no test framework::

def test_my_policy_is_a_policy() -> None:
    check_eviction_policy(MyPolicy)
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvcore.block_pool import BlockPool
from kvcore.blocks import KVCacheBlock
from kvcore.errors import ConfigError
from kvcore.eviction import EvictionPolicy
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.manager import KVCacheManager
from kvcore.request import Request
from kvcore.testing import admit, make_manager, make_request

__all__ = ["check_eviction_policy", "watched"]


def check_eviction_policy(
    make_policy: Callable[[], EvictionPolicy],
    *,
    num_blocks: Sequence[int] = (1, 2, 7, 30),
    num_steps: int = 300,
    seed: int = 0,
    prefixes: bool = True,
) -> None:
    """Runs a policy through its contract (:class:`kvcore.eviction.EvictionPolicy`) and through a manager's life.

    Args:
        make_policy: Makes a new policy: its class.
        num_blocks: Sizes of the pools to try.
        num_steps: Random steps in each.
        seed: Of the steps.
        prefixes: Also require that no block outlasts those before it in its prefix, where all are free.

    Raises:
        AssertionError: What the policy did wrong, and after which steps.
        ConfigError: This makes no policies.
    """
    if not callable(make_policy):
        raise ConfigError(f"check_eviction_policy takes a class of policies, which it calls; got {make_policy!r}")
    for size in num_blocks:
        _check_contract(make_policy, size)
        orders = [
            _check_random_steps(make_policy, size, num_steps, random.Random(seed), prefixes=prefixes) for _ in range(2)
        ]
        if orders[0] != orders[1]:
            raise AssertionError(
                f"in a pool of {size} blocks, the same steps led to two different orders: {orders[0]} and {orders[1]}; "
                "a policy may use no clock, and no random numbers without a fixed seed"
            )


def watched(policy: EvictionPolicy) -> Watched:
    """The policy, with every call checked against what blocks it can hold.

    Raises:
        AssertionError: From then on, if it gives away a block that it was not given, loses one or counts wrongly.
    """
    return Watched(policy)


class Watched:
    """See :func:`watched`."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._name = type(policy).__name__
        self._free: dict[KVCacheBlock, bool] = {}  # with whether it had a hash when it came
        if (serve := getattr(policy, "serve", None)) is not None:
            self.serve = serve

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """As the policy's."""
        before = Counter([*unhashed, *hashed])
        self.policy.release(unhashed, hashed)
        self._free |= dict.fromkeys(unhashed, False) | dict.fromkeys(hashed, True)
        self._require(before == Counter([*unhashed, *hashed]), "changed the lists that release was given")
        self._check("release")

    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        """As the policy's."""
        before = [*blocks]
        self.policy.reuse(blocks)
        self._require(before == [*blocks], "changed the list that reuse was given")
        for block in blocks:
            del self._free[block]
        self._check("reuse")

    def take(self, n: int) -> list[KVCacheBlock]:
        """As the policy's."""
        expected = [*self.policy][:n]
        hashes = [block.prefix_hash for block in expected]
        taken = self.policy.take(n)
        self._require(isinstance(taken, list) and len(taken) == n, f"gave {taken!r} when asked for {n} blocks")
        for block in taken:
            self._require(block in self._free, f"gave away {block!r}, which is in use or was given away twice")
            del self._free[block]
        self._require(taken == expected, f"took {taken} after its order said {expected}")
        self._require(hashes == [block.prefix_hash for block in taken], f"changed the hashes of blocks: {taken}")
        self._check(f"take({n})")
        return taken

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self.policy)

    def __len__(self) -> int:
        return len(self.policy)

    def _check(self, call: str) -> None:
        order = [*self.policy]
        self._require(order == [*self.policy], f"gave two orders when iterated twice after {call}")
        missing = self._free.keys() - order
        stray = [block for block in order if block not in self._free]
        self._require(not missing, f"lost {[*missing]} after {call}")
        self._require(not stray, f"has {stray} in its order after {call}, which are in use")
        self._require(len(order) == len(set(order)), f"has a block in its order twice after {call}: {order}")
        self._require(len(self.policy) == len(order), f"counts {len(self.policy)} of {len(order)} blocks after {call}")
        kinds = [self._free[block] for block in order]
        self._require(kinds == sorted(kinds), f"has a hashed block before one that cannot be hit after {call}: {order}")

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise AssertionError(f"{self._name} {message}")


def _check_contract(make_policy: Callable[[], EvictionPolicy], num_blocks: int) -> None:
    """The first calls that any pool makes."""
    policy = make_policy()
    if not isinstance(policy, EvictionPolicy):
        raise AssertionError(f"{policy!r} needs release, reuse, take, __iter__ and __len__")
    if len(policy) or [*policy]:
        raise AssertionError(f"a new policy holds no blocks, {policy!r} has {[*policy]}")
    watcher = watched(policy)
    blocks = [KVCacheBlock(block_id) for block_id in range(1, num_blocks + 1)]
    watcher.release(blocks, ())
    if [*policy] != blocks:
        raise AssertionError(f"the first blocks have to be taken in the order they come, {blocks}, not {[*policy]}")
    watcher.take(0)
    watcher.reuse([])
    taken = watcher.take(num_blocks)
    watcher.release([], [])
    watcher.release(taken[::-1], [])
    if [*policy] != taken[::-1]:
        raise AssertionError(f"released {taken[::-1]} with no hashes, and the order became {[*policy]}")
    try:
        make_manager(num_blocks + 1, eviction_policy=policy)
    except ConfigError:
        return
    raise AssertionError(f"{policy!r} has to count the blocks it holds, so that no second pool takes it")


def _check_random_steps(
    make_policy: Callable[[], EvictionPolicy], num_blocks: int, num_steps: int, rng: random.Random, *, prefixes: bool
) -> list[int]:
    """Requests come, grow, share prefixes, end; blocks are evicted by id, the cache is reset. Returns the last order.

    Raises:
        AssertionError: The policy broke a rule.
    """
    manager = make_manager(num_blocks + 1, eviction_policy=watched(make_policy()))
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 12)) for _ in range(4)] for _ in range(12)]
    running: list[Request] = []
    for step in range(num_steps):
        action = rng.random()
        if action < 0.45:
            prompt = rng.choice(prompts)
            tokens = [*prompt[: rng.choice((len(prompt), rng.randint(1, len(prompt))))], 9]
            request = make_request(f"request {step}", tokens, manager, priority=rng.randrange(-1, 2))
            if -(-request.num_tokens // 4) <= manager.block_pool.get_num_free_blocks():
                admit(manager, request)
                running.append(request)
        elif action < 0.6 and running:
            _grow(manager, rng.choice(running), rng.randrange(3))
        elif action < 0.97 and running:
            manager.free(running.pop(rng.randrange(len(running))))
        elif action < 0.99:
            manager.evict_blocks([rng.randint(1, num_blocks)])
        else:
            manager.reset_prefix_cache()
        manager.check_invariants()
    if prefixes:
        _check_prefixes(make_policy, num_blocks, num_steps, rng)
    return [block.block_id for block in manager.block_pool.policy]


def _grow(manager: KVCacheManager, request: Request, token: int) -> KVCacheBlocks | None:
    blocks = manager.allocate_slots(request, 1)
    if blocks is not None:
        request.append_output_token_ids(token)
        request.num_computed_tokens = request.num_tokens - 1
    return blocks


def _check_prefixes(
    make_policy: Callable[[], EvictionPolicy], num_blocks: int, num_steps: int, rng: random.Random
) -> None:
    """Requests run one after another, so that all blocks are free in between, and the policy has every choice."""
    manager = make_manager(num_blocks + 1, eviction_policy=make_policy())
    pool: BlockPool = manager.block_pool
    parents: dict[bytes, bytes] = {}
    for step in range(num_steps):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 9)) for _ in range(4)]
        request = make_request(f"request {step}", [*prompt, 9], manager, priority=rng.randrange(-1, 2))
        if len(prompt) // 4 + 1 > num_blocks:
            continue
        parents.update(zip(request.block_hashes[1:], request.block_hashes, strict=False))
        admit(manager, request)
        manager.free(request)
        order = [block.prefix_hash for block in pool.policy if block.prefix_hash is not None]
        position = {prefix_hash: index for index, prefix_hash in enumerate(order)}
        for prefix_hash, index in position.items():
            parent = parents.get(prefix_hash)
            if parent is not None and position.get(parent, -1) < index:
                where = "overwritten already" if parent not in position else f"number {position[parent]}"
                raise AssertionError(
                    f"{type(pool.policy).__name__} in a pool of {num_blocks} blocks, after {step + 1} requests: "
                    f"a block is number {index} to go, and the one before it in its prefix is {where}; "
                    "without it, it cannot be hit"
                )
