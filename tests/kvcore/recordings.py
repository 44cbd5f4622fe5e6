"""Replays a recording of vLLM's manager (``tests/golden/README.md``) and yields where we differ."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcore import (
    AllBlocksCleared,
    BlockHasher,
    BlockRemoved,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheEvent,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    Request,
    SlidingWindowSpec,
)

GOLDEN = Path(__file__).parent.parent / "golden"


def load(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        return json.load(file)  # type: ignore[no-any-return]


def make_spec(group: dict[str, Any]) -> KVCacheSpec:
    sizes = (group["block_size"], 1, 1, "float32")
    if group["type"] == "full":
        return FullAttentionSpec(*sizes)
    if group["type"] == "sliding_window":
        return SlidingWindowSpec(*sizes, group["window"])
    return ChunkedLocalAttentionSpec(*sizes, group["window"])


class Replay:
    """The manager under test, driven by the operations of one recording."""

    def __init__(self, config: dict[str, Any], algorithm: str = "sha256_cbor") -> None:
        groups = [KVCacheGroupSpec([f"layer{i}"], make_spec(group)) for i, group in enumerate(config["groups"])]
        self.manager = KVCacheManager(
            KVCacheConfig(config["num_blocks"], groups),
            config["max_model_len"],
            enable_caching=config["enable_caching"],
            enable_kv_cache_events=True,
        )
        self.hasher = BlockHasher(config["groups"][0]["block_size"], algorithm, seed="0")
        self.requests: dict[str, Request] = {}
        self.live: set[str] = set()
        self.lookups: dict[str, KVCacheBlocks] = {}

    def run(self, op: dict[str, Any]) -> Any:
        """Makes the recorded call; answers in the form of the recorded result."""
        return getattr(self, "_" + op["op"])(op)

    def _new(self, op: dict[str, Any]) -> None:
        self.requests[op["id"]] = Request(op["id"], op["tokens"], block_hasher=self.hasher, cache_salt=op["salt"])

    def _lookup(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.requests[op["id"]]
        request.num_computed_tokens = 0
        blocks, hit = self.manager.get_computed_blocks(request)
        self.lookups[op["id"]] = blocks
        return {"hit": hit, "blocks": list(blocks.get_block_ids())}

    def _admit(self, op: dict[str, Any]) -> list[list[int]] | None:
        request = self.requests[op["id"]]
        new = self.manager.allocate_slots(
            request,
            op["num_new"],
            op["hit"],
            self.lookups[op["id"]],
            num_lookahead_tokens=op["lookahead"],
            full_sequence_must_fit=op["full_fit"],
        )
        if new is None:
            return None
        self.live.add(op["id"])
        request.num_computed_tokens = op["hit"] + op["num_new"]
        return list(new.get_block_ids())

    def _step(self, op: dict[str, Any]) -> list[list[int]] | None:
        request = self.requests[op["id"]]
        new = self.manager.allocate_slots(request, op["num_new"], num_lookahead_tokens=op["lookahead"])
        if new is None:
            return None
        request.num_computed_tokens += op["num_new"]
        return list(new.get_block_ids())

    def _append(self, op: dict[str, Any]) -> None:
        self.requests[op["id"]].append_output_token_ids(op["tokens"])

    def _free(self, op: dict[str, Any]) -> None:
        request = self.requests[op["id"]]
        self.manager.free(request)
        self.live.remove(op["id"])
        request.num_computed_tokens = 0

    def _evict(self, op: dict[str, Any]) -> None:
        self.manager.evict_blocks(set(op["blocks"]))

    def _reset(self, op: dict[str, Any]) -> bool:
        return self.manager.reset_prefix_cache()

    def state(self) -> dict[str, Any]:
        """The books, in the form of the recorded state."""
        order = [block.block_id for block in self.manager.block_pool.free_block_queue.get_all_free_blocks()]
        return {
            "num_free": self.manager.block_pool.get_num_free_blocks(),
            "free_order": hashlib.sha256(json.dumps(order).encode()).hexdigest()[:16],
            "head": order[:8],
            "usage": round(self.manager.usage, 6),
            "tables": {request_id: list(self.manager.get_block_ids(request_id)) for request_id in self.live},
        }


def event_row(event: KVCacheEvent) -> list[Any]:
    if isinstance(event, AllBlocksCleared):
        return ["cleared"]
    hashes = [prefix_hash.hex()[:16] for prefix_hash in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return ["removed", event.group_idx, hashes]
    parent = event.parent_block_hash.hex()[:16] if event.parent_block_hash else None
    return ["stored", event.group_idx, hashes, parent, len(event.token_ids), event.block_size]


def replay(recording: dict[str, Any], algorithm: str = "sha256_cbor") -> Iterator[tuple[int, str, Any, Any]]:
    """Yields (operation, what, ours, recorded) wherever we differ; checks the invariants after every operation."""
    run = Replay(recording["config"], algorithm)
    for number, op in enumerate(recording["ops"]):
        result = run.run(op)
        run.manager.check_invariants()
        if result != op["result"]:
            yield number, "result", result, op["result"]
        state = run.state()
        if state != op["state"]:
            yield number, "state", state, op["state"]
        events = [event_row(event) for event in run.manager.take_events()]
        if algorithm == "sha256_cbor" and events != op["events"]:
            yield number, "events", events, op["events"]
