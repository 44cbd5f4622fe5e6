"""What stands behind a hash: the proof that a hit is real, for hashes that are not collision-resistant.

A fast hash may give two prefixes one name. So every block registered under such a hash points to the :class:`TokenSpan`
that holds its tokens, and a hit counts only if that span, and all before it, hold the request's own. Blocks registered
together share a span, and requests that share a prefix share its spans, so that a warm prompt is proved by a few
comparisons of bytes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Any

from kvcore.errors import RequestProtocolError
from kvcore.extra_keys import BlockExtraKeys, ExtraKeys

MAX_SPAN_BLOCKS = 128
"""Longest span, in hash blocks. A span lives as long as any of its blocks is registered, and those before it live as
long: of a prefix that is overwritten from its end (rule 4), so much at most is kept for nothing."""

MAX_GROWN_BLOCKS = 32
"""Longest span that grows as a request decodes. Each time, its tokens are copied."""


class TokenSpan:
    """Tokens and extra keys of the hash blocks ``[start, stop)`` of a prefix, and what came before them.

    Attributes:
        parent: The span that holds hash block ``start - 1``; it may go on after it, with other tokens. None if
            ``start`` is 0.
        start: First hash block.
        stop: First hash block that is not in the span.
        tokens: The packed tokens of its blocks.
        extra_keys: Extra keys by hash block, for the blocks that have any.
    """

    __slots__ = ("extra_keys", "parent", "start", "stop", "tokens")

    def __init__(
        self, parent: TokenSpan | None, start: int, stop: int, tokens: bytes, extra_keys: dict[int, BlockExtraKeys]
    ) -> None:
        self.parent = parent
        self.start = start
        self.stop = stop
        self.tokens = tokens
        self.extra_keys = extra_keys


class PrefixContents:
    """The contents of one request's hash blocks, as spans.

    Args:
        token_ids: The request's packed tokens (:func:`kvcore.hashing.pack_tokens`), read when needed, as they grow.
        extra_keys: Its extra keys.
        block_size: Tokens per hash block.

    Raises:
        RequestProtocolError: Tokens or extra keys of another type.
    """

    __slots__ = ("_block_size", "_extra_keys", "_spans", "_token_ids")

    def __init__(self, token_ids: array[int], extra_keys: ExtraKeys, block_size: int) -> None:
        if not isinstance(token_ids, array) or token_ids.typecode != "I" or not isinstance(extra_keys, ExtraKeys):
            raise RequestProtocolError(
                "PrefixContents takes a request's tokens as an array('I'), which kvcore.hashing.pack_tokens makes, and "
                f"its ExtraKeys; got a {type(token_ids).__name__} and a {type(extra_keys).__name__}"
            )
        self._token_ids = token_ids
        self._extra_keys = extra_keys
        self._block_size = block_size
        # For each hash block, a span that holds it and, with its parents, the whole prefix before it. Own spans are
        # made when asked for; spans of others take their place once they are found to be equal.
        self._spans: list[TokenSpan] = []

    def __reduce__(self) -> tuple[type[PrefixContents], tuple[Any, ...]]:
        """For copies and pickles: the spans, which hang together with those of others, are made anew."""
        return PrefixContents, (self._token_ids, self._extra_keys, self._block_size)

    def span(self, index: int) -> TokenSpan:
        """The span of hash block ``index``. O(1) for a block that has one, and for the next.

        The next block of a request that decodes joins the span before it, so that the output of a long answer is
        proved by a few comparisons too.
        """
        spans = self._spans
        if index < len(spans):
            return spans[index]
        if index > len(spans):
            return self.spans(index + 1)[index]
        size = self._block_size  # as in _make_span, whose span would be made for its tokens to be taken out again
        tokens = self._token_ids[index * size : (index + 1) * size].tobytes()
        extra_keys = self._extra_keys.of_blocks(index, index + 1, size) if self._extra_keys else {}
        span = spans[-1] if spans else None
        if span is not None and _can_grow(span, index, index + 1):
            _grow(span, index + 1, tokens, extra_keys)
        else:
            span = TokenSpan(span, index, index + 1, tokens, extra_keys)
        spans.append(span)
        return span

    def spans(self, stop: int) -> list[TokenSpan]:
        """A span for each of the request's hash blocks, at least the first ``stop`` of them. O(new blocks)."""
        spans = self._spans
        while len(spans) < stop:
            start = len(spans)
            end = min(stop, start + MAX_SPAN_BLOCKS)
            span = self._make_span(start, end)
            last = span.parent
            if last is not None and _can_grow(last, start, end):
                # A few hash blocks, where a block of the group has several.
                _grow(last, end, span.tokens, span.extra_keys)
                span = last
            spans += [span] * (end - start)
        return spans

    def count_matching(self, found: list[TokenSpan], indices: range) -> int:
        """How many blocks in a row, from the first on, really hold this request's prefixes.

        O(blocks): 5 ns each where their spans are known to be equal already, 20 ns where they have to be compared.

        Args:
            found: The spans of the blocks.
            indices: The hash block that each of the blocks ends with.
        """
        num_found = len(found)
        if (
            indices
            and indices[-1] < len(self._spans)
            and found == self._spans[indices.start : indices.stop : indices.step]
        ):
            return num_found
        done = 0
        while done < num_found:
            span = found[done]
            if not span.start <= indices[done] < span.stop:
                return done
            # The blocks that this span can answer for, if it is the span of all of them; else one at a time.
            run = done + (span.stop - 1 - indices[done]) // indices.step + 1
            if run > num_found:
                run = num_found
            if found[done:run].count(span) != run - done:
                run = done + 1
            if not self.matches(indices[run - 1], span):
                return bisect_left(range(run), True, lo=done, key=lambda n: not self.matches(indices[n], span))
            done = run
        return num_found

    def matches(self, index: int, span: TokenSpan | None) -> bool:
        """Whether ``span`` holds this request's prefix up to hash block ``index``, that one included.

        O(1) if that is known already, else the tokens up to the last span that is known are compared. What is found
        equal is known from then on.
        """
        spans = self._spans
        stop = index + 1
        equal: list[tuple[TokenSpan, int]] = []
        while stop:
            if span is None or not span.start < stop <= span.stop:
                return False
            if stop <= len(spans) and spans[stop - 1] is span:
                break
            if not self._is_content(span, stop):
                return False
            if span.start == len(spans) and span.parent is (spans[-1] if spans else None):
                # The next after what is known, as nearly always.
                spans += [span] * (stop - span.start)
                break
            equal.append((span, stop))
            stop, span = span.start, span.parent
        for known, end in reversed(equal):
            assert known.start <= len(spans)
            spans[known.start : end] = [known] * (end - known.start)
        return True

    def _is_content(self, span: TokenSpan, stop: int) -> bool:
        """Whether the request has the span's tokens and extra keys, from its start to hash block ``stop``."""
        size = self._block_size
        if not span.tokens.startswith(memoryview(self._token_ids)[span.start * size : stop * size]):
            return False
        if not span.extra_keys and not self._extra_keys:
            return True
        extra_keys = self._extra_keys.of_blocks(span.start, stop, size)
        return {i: keys for i, keys in span.extra_keys.items() if i < stop} == extra_keys

    def _make_span(self, start: int, stop: int) -> TokenSpan:
        size = self._block_size
        tokens = memoryview(self._token_ids)[start * size : stop * size].tobytes()
        extra_keys = self._extra_keys.of_blocks(start, stop, size) if self._extra_keys else {}
        return TokenSpan(self._spans[-1] if self._spans else None, start, stop, tokens, extra_keys)


def _can_grow(span: TokenSpan, start: int, stop: int) -> bool:
    """Whether a request's last span can take in hash blocks ``[start, stop)``, the next. Where it ends behind them, it
    goes on with another request's tokens."""
    return span.stop == start and stop - span.start <= MAX_GROWN_BLOCKS


def _grow(span: TokenSpan, stop: int, tokens: bytes, extra_keys: dict[int, BlockExtraKeys]) -> None:
    span.tokens += tokens
    span.stop = stop
    if extra_keys:
        span.extra_keys.update(extra_keys)
