"""What can go wrong, one class a mistake.

Every class derives from :class:`KVCacheError`, so that an engine can catch the whole family, and from the built-in
exception a caller would expect (``ValueError``, ``KeyError``, ...). A call that raises one of these has changed
nothing, except :class:`InvariantError`, which reports damage that was already there. "Does not fit now" is no error:
the facade answers it with ``None``.
"""

from __future__ import annotations


class KVCacheError(Exception):
    """Base of every error this package raises on purpose."""

    __str__ = Exception.__str__  # KeyError would show its message in quotes


def shown(value: object) -> str:
    """A value for a message; a whole number of another type, as numpy's are, with what to do about it."""
    return f"{value!r}: make it an int()" if hasattr(value, "__index__") and not isinstance(value, int) else repr(value)


class ConfigError(KVCacheError, ValueError):
    """A configuration that cannot work: no groups, a block size of zero, a window of zero, too little memory."""


class CountError(KVCacheError, ValueError):
    """A count of tokens or blocks that is negative, zero where something must happen, or not a whole number."""


class ComputedTokensError(KVCacheError, ValueError):
    """More tokens claimed as computed than the request has, or than its hit blocks hold."""


class TokenRangeError(KVCacheError, ValueError):
    """A token id that the block hash cannot encode."""


class ExtraKeyError(KVCacheError, ValueError):
    """An adapter, a multi-modal item or a salt that cannot enter a block hash."""


class UnknownRequestError(KVCacheError, KeyError):
    """The request holds no blocks here: it was never admitted, or it has been freed already."""


class RequestProtocolError(KVCacheError, TypeError):
    """A request object of the caller's own class lacks something that the manager reads."""


class DuplicateRequestError(KVCacheError, ValueError):
    """The request id is in use by another request."""


class HitHandoverError(KVCacheError, ValueError):
    """Blocks offered to a request that cannot take them: it is running, it has no hashes, caching is off, or they are
    not those of a cache with these groups."""


class StaleHitError(KVCacheError, ValueError):
    """A hit block no longer holds what the lookup found: it was evicted between the lookup and the allocation."""


class PinError(KVCacheError, ValueError):
    """A prefix that cannot be pinned, or is not pinned."""


class ForeignBlockError(KVCacheError, ValueError):
    """A block, or a block id, that is not of this pool."""


class DoubleFreeError(KVCacheError, ValueError):
    """A block released more often than it was taken."""


class DuplicateBlockError(KVCacheError, ValueError):
    """A block registered for prefix hits a second time."""


class OutOfBlocksError(KVCacheError, ValueError):
    """More blocks asked of the pool than are free. The facade never lets it come to this; it answers ``None``."""


class QueueError(KVCacheError, ValueError):
    """A block put into the free queue twice, or taken out while not in it."""


class FileFormatError(KVCacheError, ValueError):
    """A file, a snapshot or a recording, that cannot be read; the message names the line."""


class InvariantError(KVCacheError, AssertionError):
    """The books do not agree with themselves; the message names the first rule found broken."""
