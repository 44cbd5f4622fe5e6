"""What a cache layout holds: tokens, requests of a given length, and the bytes it wastes.

The arithmetic is that of admission. A request of ``n`` tokens holds at most
``min(ceil(n / block_size), spec.max_blocks_per_request(...))`` blocks in each group, and all groups draw on the same
``num_blocks - 1`` usable blocks. A number of requests that "fit" can all reach their full length together, whatever
the order and the chunks in which their tokens come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcore.errors import ConfigError
from kvcore.planning_text import ranges, share, size, table
from kvcore.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
    cdiv,
)


@dataclass(frozen=True)
class GroupCapacity:
    """One group, seen from the pool.

    Args:
        layer_names: The layers that share the group's block table.
        kv_cache_spec: What each of them caches.
        bytes_per_block: Bytes a block of the pool takes, in all tensors.
        padded_layers: Tensors that this group has no layer for.
        max_blocks_per_request: Most blocks one request of ``max_model_len`` tokens holds here at once.
    """

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec
    bytes_per_block: int
    padded_layers: int
    max_blocks_per_request: int

    @property
    def attention(self) -> str:
        """The kind of attention, in words."""
        match self.kv_cache_spec:
            case FullAttentionSpec():
                return "full"
            case SlidingWindowSpec(sliding_window=window):
                return f"window {window:,}"
            case ChunkedLocalAttentionSpec(attention_chunk_size=chunk):
                return f"chunks of {chunk:,}"
        return type(self.kv_cache_spec).__name__

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in the layers of this group, while it is held."""
        return len(self.layer_names) * self.kv_cache_spec.bytes_per_token

    @property
    def padded_bytes_per_block(self) -> int:
        """Bytes of a block that hold nothing when this group has it: missing layers and the padded ends of pages."""
        return self.bytes_per_block - len(self.layer_names) * self.kv_cache_spec.page_size_bytes


@dataclass(frozen=True)
class LengthCapacity:
    """What requests of one length cost.

    Args:
        num_tokens: Tokens per request.
        blocks_per_request: Most blocks one of them holds at once, in all groups together.
        padded_bytes_per_request: Bytes of those blocks that hold nothing because of padding.
        max_requests: Requests of this length that fit together.
    """

    num_tokens: int
    blocks_per_request: int
    padded_bytes_per_request: int
    max_requests: int

    @property
    def total_tokens(self) -> int:
        """Tokens in the cache when that many requests are at full length."""
        return self.num_tokens * self.max_requests


@dataclass(frozen=True)
class CapacityReport:
    """What a config holds; ``str()`` of it is a table for a terminal.

    Args:
        num_blocks: Blocks in the pool, the null block included.
        bytes_per_block: Bytes a block takes, in all tensors.
        groups: One entry per group of the config.
        max_model_len: Longest request, in tokens.
        max_in_flight_tokens: Most tokens of one request in one step; None: a whole request may come in one.
        tokens_per_request: Longest request that fits alone, ``max_model_len`` at most; 0 when not even one token does.
        total_tokens: Tokens in the cache when it is filled with the longest requests, the last one as long as still
            fits.
        lengths: One entry per length asked for.
    """

    num_blocks: int
    bytes_per_block: int
    groups: tuple[GroupCapacity, ...]
    max_model_len: int
    max_in_flight_tokens: int | None
    tokens_per_request: int
    total_tokens: int
    lengths: tuple[LengthCapacity, ...]

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        return self.num_blocks * self.bytes_per_block

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes in all layers, while every window still reads it."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_old_token(self) -> int:
        """Bytes a token still takes once every window and chunk has left it: the full-attention layers."""
        return sum(g.bytes_per_token for g in self.groups if isinstance(g.kv_cache_spec, FullAttentionSpec))

    def __str__(self) -> str:
        return "\n\n".join((self._summary(), self._group_table(), self._length_table()))

    def _summary(self) -> str:
        in_flight = self.max_in_flight_tokens
        rows = [
            ("memory", f"{self.num_blocks:,} blocks x {size(self.bytes_per_block)} = {size(self.total_bytes)}"),
            ("usable", f"{self.usable_blocks:,} blocks (block 0 is the null block)"),
            ("a token takes", self._token_cost()),
            ("one request", f"up to {self.tokens_per_request:,} of {self.max_model_len:,} tokens (max_model_len)"),
            ("all requests", f"{self.total_tokens:,} tokens, when they are as long as they can be"),
            ("in one step", "a whole request" if in_flight is None else f"up to {in_flight:,} tokens of a request"),
        ]
        return "\n".join(f"{name:<14} {value}" for name, value in rows)

    def _token_cost(self) -> str:
        cost = size(self.bytes_per_token)
        if self.bytes_per_old_token < self.bytes_per_token:
            cost += f", {size(self.bytes_per_old_token)} once no window reads it"
        return cost

    def _group_table(self) -> str:
        header = ("group", "attention", "layers", "block size", "page", "padding/block", "bytes/token", "max blocks")
        rows: dict[tuple[str, ...], list[int]] = {}
        for index, group in enumerate(self.groups):
            row = (
                group.attention,
                str(len(group.layer_names)),
                f"{group.kv_cache_spec.block_size:,}",
                size(group.kv_cache_spec.page_size_bytes),
                share(group.padded_bytes_per_block, self.bytes_per_block),
                f"{group.bytes_per_token:,}",
                f"{group.max_blocks_per_request:,}",
            )
            rows.setdefault(row, []).append(index)
        return table(header, [(ranges(indices), *row) for row, indices in rows.items()], left={1})

    def _length_table(self) -> str:
        header = ("request length", "blocks", "memory", "padding", "requests", "tokens in all")
        rows = []
        for length in self.lengths:
            request_bytes = length.blocks_per_request * self.bytes_per_block
            rows.append(
                (
                    f"{length.num_tokens:,}",
                    f"{length.blocks_per_request:,}",
                    size(request_bytes),
                    share(length.padded_bytes_per_request, request_bytes),
                    f"{length.max_requests:,}",
                    f"{length.total_tokens:,}",
                )
            )
        return table(header, rows)


def capacity_report(
    config: KVCacheConfig,
    *,
    max_model_len: int,
    request_lengths: Iterable[int] = (),
    max_in_flight_tokens: int | None = None,
) -> CapacityReport:
    """How many tokens and requests a config holds. O(groups x (lengths + log max_model_len)).

    Args:
        config: Any config; :func:`~kvcore.planning.plan_kv_cache` makes one.
        max_model_len: Longest request, in tokens, as the manager gets it.
        request_lengths: Lengths to report on, in tokens; by default ``max_model_len`` alone.
        max_in_flight_tokens: Most tokens of one request in one step, as the manager gets it. None: a whole request may
            come in one step, so that a window frees nothing before it is over.

    Raises:
        ConfigError: A length or limit that is no whole number of at least 1, or a length above ``max_model_len``.
    """
    _check_count("max_model_len", max_model_len)
    if max_in_flight_tokens is not None:
        _check_count("max_in_flight_tokens", max_in_flight_tokens)
    lengths = tuple(request_lengths) or (max_model_len,)
    for length in lengths:
        _check_count("a request length", length)
        if length > max_model_len:
            raise ConfigError(
                f"a request of {length:,} tokens is longer than max_model_len={max_model_len:,}: raise max_model_len "
                "or leave that length out"
            )

    groups = _group_capacities(config, max_model_len, max_in_flight_tokens)
    usable = config.num_blocks - 1
    longest = _longest_request(groups, usable, max_model_len)
    total = longest
    if longest == max_model_len:
        full_length, left_over = divmod(usable, sum(_blocks(groups, max_model_len)))
        total = full_length * max_model_len + _longest_request(groups, left_over, max_model_len)
    return CapacityReport(
        num_blocks=config.num_blocks,
        bytes_per_block=groups[0].bytes_per_block,
        groups=groups,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        tokens_per_request=longest,
        total_tokens=total,
        lengths=tuple(_length_capacity(groups, usable, length) for length in lengths),
    )


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")


def _group_capacities(
    config: KVCacheConfig, max_model_len: int, max_in_flight_tokens: int | None
) -> tuple[GroupCapacity, ...]:
    groups = config.kv_cache_groups
    # A config written by hand may have no tensors; the books do not need them.
    num_tensors = len(config.kv_cache_tensors) or max(len(group.layer_names) for group in groups)
    if config.kv_cache_tensors:
        bytes_per_block = sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
    else:
        bytes_per_block = num_tensors * max(group.kv_cache_spec.page_size_bytes for group in groups)
    return tuple(
        GroupCapacity(
            layer_names=tuple(group.layer_names),
            kv_cache_spec=group.kv_cache_spec,
            bytes_per_block=bytes_per_block,
            padded_layers=num_tensors - len(group.layer_names),
            max_blocks_per_request=min(
                cdiv(max_model_len, group.kv_cache_spec.block_size),
                group.kv_cache_spec.max_blocks_per_request(max_model_len, max_in_flight_tokens),
            ),
        )
        for group in groups
    )


def _blocks(groups: Sequence[GroupCapacity], num_tokens: int) -> list[int]:
    """Most blocks a request of this length holds at once, per group."""
    return [min(cdiv(num_tokens, group.kv_cache_spec.block_size), group.max_blocks_per_request) for group in groups]


def _longest_request(groups: Sequence[GroupCapacity], free_blocks: int, max_model_len: int) -> int:
    """Tokens of the longest request for which these blocks suffice. Bisection: blocks never shrink with length."""
    fits, too_long = 0, max_model_len + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if sum(_blocks(groups, middle)) <= free_blocks:
            fits = middle
        else:
            too_long = middle
    return fits


def _length_capacity(groups: Sequence[GroupCapacity], usable_blocks: int, num_tokens: int) -> LengthCapacity:
    blocks = _blocks(groups, num_tokens)
    return LengthCapacity(
        num_tokens=num_tokens,
        blocks_per_request=sum(blocks),
        padded_bytes_per_request=sum(n * group.padded_bytes_per_block for n, group in zip(blocks, groups, strict=True)),
        max_requests=usable_blocks // sum(blocks),
    )
