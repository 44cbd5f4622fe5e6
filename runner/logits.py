"""From logits to the next token, for one request at a time.

Every function takes a row ``[V]`` of logits, V the size of the vocabulary, and gives a new one; what must not be chosen
has -inf in it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from runner.outputs import TokenLogprobs
from runner.sampling import SamplingParams

LIKELIEST = 1024
"""Where :func:`keep_top_p` looks first. Nearly always enough, and found several times faster than a whole vocabulary is
sorted."""


def repeat_less(row: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """The repetition penalty, as in CTRL (arXiv:1909.05858) and transformers; ``seen``: ``[V]``, bool."""
    return torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row)


def penalize_output(row: torch.Tensor, counts: torch.Tensor, *, presence: float, frequency: float) -> torch.Tensor:
    """OpenAI's two penalties; ``counts``: ``[V]``, how often each token is in the output."""
    return row - frequency * counts - presence * (counts > 0)


def keep_top_k(row: torch.Tensor, k: int) -> torch.Tensor:
    """The k likeliest, and what is as likely as the last of them."""
    if k >= len(row):
        return row
    return row.masked_fill(row < row.topk(k).values[-1], -torch.inf)


def keep_top_p(row: torch.Tensor, p: float) -> torch.Tensor:
    """The fewest likeliest tokens that have probability p together."""
    probabilities = row.softmax(-1)
    for size in (min(LIKELIEST, len(row)), len(row)):
        largest, tokens = probabilities.topk(size)  # [size], descending
        before = largest.cumsum(-1) - largest  # [size], what is likelier than each
        kept = int((before < p).sum())
        if kept < size:
            break
    return torch.full_like(row, -torch.inf).index_copy_(0, tokens[:kept], row[tokens[:kept]])


def keep_min_p(row: torch.Tensor, p: float) -> torch.Tensor:
    """Tokens with at least p times the likeliest one's probability."""
    probabilities = row.softmax(-1)
    return row.masked_fill(probabilities < p * probabilities.max(), -torch.inf)


def draw(row: torch.Tensor, uniform: float) -> torch.Tensor:
    """The token ``[]`` at that place, from 0 to below 1, of the distribution function, in the order of token ids."""
    cumulative = row.double().softmax(-1).cumsum(-1)
    # right: a token of probability 0 ends where the one before it does, and is never the first beyond a place.
    return torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)


class Sampled(NamedTuple):
    """A token that was chosen, and its log-probabilities if they were asked for."""

    token: int
    logprobs: TokenLogprobs | None


class TokenSampler:
    """Chooses the tokens of one request.

    Has a random number generator of its own and takes one number from it per token, so that nothing another request
    does, and no preemption, changes what is drawn.

    Args:
        params: What the request wants.
        prompt_token_ids: Its prompt.
        eos_token_ids: The model's own stop tokens.
    """

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], eos_token_ids: Collection[int] = ()
    ) -> None:
        self.params = params
        # As text: of a whole number, Random forgets the sign.
        self._random = random.Random(None if params.seed is None else str(params.seed))
        self._prompt_token_ids = prompt_token_ids
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self._stop_token_ids = sorted(stops)
        self._num_tokens = 0
        self._counts_output = bool(params.presence_penalty or params.frequency_penalty)
        self._remembers = params.repetition_penalty != 1
        self._seen: torch.Tensor | None = None  # [V], bool: in prompt or output
        self._counts: torch.Tensor | None = None  # [V]: in the output

    @property
    def takes_the_likeliest(self) -> bool:
        """The next token is the likeliest of the logits as they are."""
        return not (
            self.params.temperature or self._remembers or self._counts_output or self._num_tokens < self._min_tokens
        )

    def choose(self, row: torch.Tensor) -> torch.Tensor:
        """The next token, ``[]``, on the device of the logits. O(V), O(V log V) with ``top_p`` at worst."""
        row = self.penalized(row)
        if not self.params.temperature:
            return row.argmax()
        return draw(self.warped(row), self._random.random())

    def note(self, token: int) -> None:
        """The request has a new token. O(1)."""
        self._num_tokens += 1
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1

    def penalized(self, row: torch.Tensor) -> torch.Tensor:
        """What depends on the tokens so far."""
        params = self.params
        if self._num_tokens < self._min_tokens:
            stops = [token for token in self._stop_token_ids if token < len(row)]
            row = row.index_fill(0, torch.tensor(stops, dtype=torch.long, device=row.device), -torch.inf)
        if self._remembers:
            if self._seen is None:
                self._seen = torch.zeros(len(row), dtype=torch.bool, device=row.device)
                self._seen[torch.tensor(self._prompt_token_ids, device=row.device)] = True
            row = repeat_less(row, self._seen, params.repetition_penalty)
        if self._counts_output:
            if self._counts is None:
                self._counts = torch.zeros(len(row), device=row.device)
            row = penalize_output(
                row, self._counts, presence=params.presence_penalty, frequency=params.frequency_penalty
            )
        return row

    def warped(self, row: torch.Tensor) -> torch.Tensor:
        """What shapes the distribution that is drawn from; float64."""
        params = self.params
        row = row.double()
        # The likeliest is at 0, so that even the smallest temperature makes no infinity of it.
        row = (row - row.max()) / params.temperature
        if params.top_k:
            row = keep_top_k(row, params.top_k)
        if params.top_p < 1:
            row = keep_top_p(row, params.top_p)
        if params.min_p > 0:
            row = keep_min_p(row, params.min_p)
        return row

    @property
    def _min_tokens(self) -> int:
        return self.params.min_tokens if self._stop_token_ids else 0


def sample(logits: torch.Tensor, samplers: Iterable[TokenSampler]) -> list[Sampled]:
    """The next token of each sequence.

    Args:
        logits: ``[S, V]``, float32.
        samplers: Of the S sequences.
    """
    samplers = list(samplers)
    chosen = logits.max(-1).indices  # [S]; on a CPU, argmax takes three times as long
    for i, sampler in enumerate(samplers):
        if not sampler.takes_the_likeliest:
            chosen[i] = sampler.choose(logits[i])
    sampled = []
    for i, (sampler, token) in enumerate(zip(samplers, chosen.tolist(), strict=True)):
        sampler.note(token)
        wanted = sampler.params.logprobs
        sampled.append(Sampled(token, None if wanted is None else token_logprobs(logits[i], token, wanted)))
    return sampled


def token_logprobs(row: torch.Tensor, token: int, num_likeliest: int) -> TokenLogprobs:
    """The log-probabilities of a token and of the likeliest ones. O(V)."""
    logprobs = row.log_softmax(-1)
    values, tokens = logprobs.topk(min(num_likeliest, len(row)))
    return TokenLogprobs(
        token_id=token,
        logprob=float(logprobs[token]),
        rank=int((logprobs > logprobs[token]).sum()) + 1,
        likeliest=dict(zip(tokens.tolist(), values.tolist(), strict=True)),
    )
