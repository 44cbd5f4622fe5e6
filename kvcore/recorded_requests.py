"""Requests in a recording: what the manager can see of them, written as it changes and read back."""

from __future__ import annotations

import hashlib
import operator
import os
import weakref
from array import array
from types import SimpleNamespace
from typing import Any

from kvcore.contents import PrefixContents
from kvcore.errors import FileFormatError
from kvcore.extra_keys import ExtraKeys, LoRAAdapter, MultiModalItem

_MISSING = object()
_ATTRIBUTES = (
    "request_id",
    "num_tokens",
    "num_computed_tokens",
    "block_hashes",
    "block_contents",
    "token_ids",
    "extra_keys",
)
"""What the manager reads, beside the optional ``block_hasher`` and ``priority``."""


def plain(value: Any) -> Any:
    """The value if JSON has it, else its ``repr`` under a mark of its own."""
    if value is None or isinstance(value, (bool, int, str)) or type(value) is float:
        return value
    return {"repr": repr(value)[:200]}


class _Seen:
    """What of a request is in the recording already."""

    def __init__(self, number: int, request: Any) -> None:
        self.number = number
        self.request: Any = request  # a weak reference where the class allows it
        self.described = False
        self.num_hashes = self.num_tokens = 0
        self.last_hash = b""
        self.priority: Any = 0


class RequestWriter:
    """Describes requests by what is new about them.

    A request is known as an object, as the manager knows it: two objects with one id are two requests.

    Args:
        tokens: Write tokens, extra keys and hashes as they are; else names for hashes, made with a key that only this
            object knows.
    """

    def __init__(self, *, tokens: bool) -> None:
        self._tokens = tokens
        self._key = os.urandom(16)
        self._seen: dict[int, _Seen] = {}
        self._count = 0

    def describe(self, request: Any) -> dict[str, Any]:
        """The request as it is now. O(new hashes)."""
        seen = self._find(request)
        try:
            return self._describe(request, seen)
        except Exception as error:  # an object that is no request: the manager will say so, or not look at it
            seen.described, seen.num_hashes, seen.num_tokens, seen.priority = False, 0, 0, None
            return {"r": seen.number, "unreadable": f"{type(error).__name__}: {error}"}

    def _describe(self, request: Any, seen: _Seen) -> dict[str, Any]:
        line: dict[str, Any] = {"r": seen.number}
        values = {name: _read(request, name) for name in _ATTRIBUTES}
        missing = [name for name, value in values.items() if value is _MISSING]
        if missing:
            line["missing"] = missing
        if not seen.described:
            seen.described = True
            line |= {"id": plain(values["request_id"]), "hasher": _hasher_of(request)}
            if self._tokens:
                line["extra"] = _extra_of(request)
                line["verify"] = values["block_contents"] not in (None, _MISSING)
        try:
            line["n"] = operator.index(values["num_tokens"])
        except TypeError:
            line["n"] = plain(values["num_tokens"])
        line["c"] = plain(values["num_computed_tokens"])
        priority = getattr(request, "priority", 0)
        if priority != seen.priority:
            line["p"] = plain(priority)
            seen.priority = priority
        self._add_hashes(line, seen, values["block_hashes"])
        if self._tokens and values["token_ids"] is not _MISSING:
            new = [int(token) for token in values["token_ids"][seen.num_tokens :]]
            if new:
                line["t"] = [seen.num_tokens, new]
                seen.num_tokens += len(new)
        return line

    def _find(self, request: Any) -> _Seen:
        seen = self._seen.get(id(request))
        if seen is None:
            number = self._count
            self._count += 1
            seen = self._seen[id(request)] = _Seen(number, request)
            try:
                address = id(request)
                seen.request = weakref.ref(request, lambda _: self._seen.pop(address, None))
            except TypeError:
                pass  # no weak references: then it is kept, so that no other gets its address
        return seen

    def _add_hashes(self, line: dict[str, Any], seen: _Seen, hashes: Any) -> None:
        if hashes is _MISSING:
            return
        count = len(hashes)
        known = seen.num_hashes
        if known > count or (known and hashes[known - 1] != seen.last_hash):
            known = 0  # a class of the caller's own that changes its hashes
        if known == count == seen.num_hashes:
            return
        new = hashes[known:count]
        names = [h.hex() if self._tokens else self._name(h) for h in new]
        line["h"] = [known, names]
        seen.num_hashes = count
        seen.last_hash = hashes[count - 1] if count else b""

    def _name(self, block_hash: bytes) -> str:
        """64 bits: enough to tell the prefixes of one recording apart."""
        return hashlib.blake2b(block_hash, digest_size=8, key=self._key).hexdigest()


def _read(request: Any, name: str) -> Any:
    return getattr(request, name, _MISSING)


def _hasher_of(request: Any) -> Any:
    """None: takes no part in caching. Else the block size of its hasher, where it says so."""
    hasher = getattr(request, "block_hasher", _MISSING)
    if hasher is _MISSING:
        return "unknown"
    return None if hasher is None else plain(getattr(hasher, "block_size", None))


def _extra_of(request: Any) -> dict[str, Any] | None:
    extra = getattr(request, "extra_keys", None)
    if not isinstance(extra, ExtraKeys):
        return None
    return {
        "lora": [extra.lora.name, extra.lora.path] if extra.lora else None,
        "mm": [[item.identifier, item.offset, item.length] for item in extra.mm_items],
        "salt": extra.cache_salt,
    }


class RecordedRequest:
    """A request of a recording: the manager reads of it what it read of the one that was recorded."""

    block_hashes: list[bytes]
    token_ids: array[int]

    def __init__(self, number: int) -> None:
        self.number = number
        self.request_id: Any = number
        self.num_tokens: Any = 0
        self.num_computed_tokens: Any = 0
        self.priority: Any = 0
        self.block_hashes = []
        self.block_contents: PrefixContents | None = None
        self.block_hasher: Any = None
        self.token_ids = array("I")
        self.extra_keys = ExtraKeys(None, (), None)

    def __repr__(self) -> str:
        return f"<request {getattr(self, 'request_id', '?')!r}, number {self.number} of the recording>"


class RequestReader:
    """The requests of a recording, brought up to date line by line.

    Args:
        hash_block_size: Tokens per hash.
    """

    def __init__(self, hash_block_size: int) -> None:
        self._hash_block_size = hash_block_size
        self.requests: dict[int, RecordedRequest] = {}

    def read(self, line: dict[str, Any]) -> RecordedRequest:
        """The request that a description stands for, as it was then.

        Raises:
            FileFormatError: It builds on something that is not there.
        """
        number = line["r"]
        if "unreadable" in line:
            return RecordedRequest(number)
        request = self.requests.get(number)
        if request is None:
            if "id" not in line:
                raise FileFormatError(f"request number {number} was never introduced: an earlier line is missing")
            request = self.requests[number] = RecordedRequest(number)
            self._introduce(request, line)
        request.num_tokens = as_value(line["n"])
        request.num_computed_tokens = as_value(line["c"])
        if "p" in line:
            request.priority = as_value(line["p"])
        if "h" in line:
            start, names = line["h"]
            _replace(request, "block_hashes", start, map(bytes.fromhex, names))
        if "t" in line:
            _replace(request, "token_ids", *line["t"])
        for name in line.get("missing", ()):
            if name in vars(request):
                delattr(request, name)
        return request

    def _introduce(self, request: RecordedRequest, line: dict[str, Any]) -> None:
        request.request_id = as_value(line["id"])
        hasher = line["hasher"]
        if hasher == "unknown":
            del request.block_hasher
        elif hasher is not None:
            request.block_hasher = SimpleNamespace(block_size=as_value(hasher))
        extra = line.get("extra")
        if extra:
            lora = LoRAAdapter(*extra["lora"]) if extra["lora"] else None
            request.extra_keys = ExtraKeys(lora, [MultiModalItem(*item) for item in extra["mm"]], extra["salt"])
        if line.get("verify"):
            request.block_contents = PrefixContents(request.token_ids, request.extra_keys, self._hash_block_size)


def _replace(request: RecordedRequest, name: str, start: int, values: Any) -> None:
    """Puts what is new behind the first ``start`` of a request's hashes or tokens, in place."""
    known = getattr(request, name)
    if start > len(known):
        raise FileFormatError(
            f"{name} of {request!r} go on from {start}, but only {len(known)} are known: an earlier line is missing"
        )
    del known[start:]
    known.extend(values)


class Unwritable:
    """Stands in for a value that JSON has no word for."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def as_value(written: Any) -> Any:
    """What :func:`plain` wrote."""
    return Unwritable(str(written["repr"])) if isinstance(written, dict) else written
