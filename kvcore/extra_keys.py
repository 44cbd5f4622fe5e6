"""What beside its tokens decides a block's keys and values, and so must enter its hash.

Keys are tagged tuples, so that no value of one kind can pass for another (rule 12):
``("lora", name, path)``, ``("mm", identifier, offset in block)``, ``("cache_salt", salt)``, in this order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcore.errors import CountError, ExtraKeyError

ExtraKey = tuple[str, str] | tuple[str, str, str] | tuple[str, str, int]
BlockExtraKeys = tuple[ExtraKey, ...]


@dataclass(frozen=True)
class LoRAAdapter:
    """An adapter in use for a whole request.

    Args:
        name: What the request calls it.
        path: Where its weights come from: a name pointed at other weights must not hit what the old ones left.
    """

    name: str
    path: str


@dataclass(frozen=True)
class MultiModalItem:
    """An image, a clip, ...: it takes up ``length`` placeholder tokens from ``offset`` on.

    Args:
        identifier: Hash or name of the content: equal identifiers mean equal content.
        offset: First token of it in the prompt.
        length: Tokens, 1 at least.

    Raises:
        CountError: A negative offset, or a length below 1.
    """

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        whole = isinstance(self.offset, int) and isinstance(self.length, int)
        if not whole or self.offset < 0 or self.length < 1:
            raise CountError(
                f"multi-modal item {self.identifier!r} needs offset >= 0 and length >= 1, "
                f"got offset={self.offset}, length={self.length}"
            )


class ExtraKeys:
    """The extra keys of one request's blocks.

    Args:
        lora: Enters every block.
        mm_items: Each enters the blocks that it overlaps.
        cache_salt: Enters the first block, and through the chain all after it; None or "" for none.

    Raises:
        ExtraKeyError: A name that is not text, or that UTF-8 cannot encode.
    """

    __slots__ = ("cache_salt", "lora", "mm_items")

    def __init__(self, lora: LoRAAdapter | None, mm_items: Iterable[MultiModalItem], cache_salt: str | None) -> None:
        self.lora = lora
        self.mm_items = tuple(sorted(mm_items, key=lambda item: item.offset))
        self.cache_salt = cache_salt
        # Checked here, not when a block fills up in the middle of decoding.
        names = [cache_salt, *((lora.name, lora.path) if lora else ()), *(item.identifier for item in self.mm_items)]
        for name in names:
            if name is not None and not _encodes(name):
                raise ExtraKeyError(f"adapter names and paths, item identifiers and salts must be text, got {name!r}")

    def __bool__(self) -> bool:
        return bool(self.lora or self.mm_items or self.cache_salt)

    def of_blocks(self, first: int, stop: int, block_size: int) -> dict[int, BlockExtraKeys]:
        """The keys of those blocks of ``[first, stop)`` that have any, by block index."""
        keys: dict[int, list[ExtraKey]] = {}
        if self.lora:
            for i in range(first, stop):
                keys[i] = [("lora", self.lora.name, self.lora.path)]
        for item in self.mm_items:
            last = (item.offset + item.length - 1) // block_size
            for i in range(max(first, item.offset // block_size), min(stop, last + 1)):
                keys.setdefault(i, []).append(("mm", item.identifier, item.offset - i * block_size))
        if self.cache_salt and first == 0 < stop:
            keys.setdefault(0, []).append(("cache_salt", self.cache_salt))
        return {i: tuple(of_block) for i, of_block in keys.items()}


def _encodes(name: object) -> bool:
    try:
        return isinstance(name, str) and name.encode() is not None
    except UnicodeEncodeError:
        return False


def untagged(keys: BlockExtraKeys) -> tuple[object, ...]:
    """The form in which KV events carry extra keys: a name, a salt, or an (identifier, offset) pair, without tags."""
    return tuple(key[1:] if key[0] == "mm" else key[1] for key in keys)
