"""Tokens packed, and the chain of their blocks hashed, in a loop of C (``kvcore/c/packed_blocks.c``).

There only where kvcore was compiled (``make compiled``). ``kvcore.hashing`` does the same without it.
"""

from array import array

def pack_into(packed: array[int], tokens: list[int], /) -> bool:
    """Writes the tokens as unsigned 32-bit integers, in the machine's byte order, over ``packed``. 3 ns a token.

    False, so that the caller finds out what it is, if one of them is not an ``int`` of this very type from 0 to at
    least 2**15 - 1 (2**30 - 1 in all but 32-bit builds of Python), when ``packed`` has those before it; or if there are
    not as many as ``packed`` has room for, since another thread changed the list.

    Raises:
        TypeError: ``tokens`` is no list, or nobody may write to ``packed``.
    """

def hash_chain(parent: bytes, tokens: array[int] | bytes, block_length: int, start: int, stop: int, /) -> list[bytes]:
    """The XXH3-128 of each block from ``start`` to ``stop``, of ``block_length`` bytes, with the hash before it as its
    parent. 35 ns a block of 64 bytes.

    Raises:
        ValueError: ``parent`` has not 16 bytes, or ``tokens`` has no such blocks.
    """
