"""Traces of many kinds of traffic, as lists of hash ids for each request, drawn from a random generator."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count, islice
from random import Random

from kvcore.replay_trace import TraceRequest

Chains = list[list[int]]


class Ids:
    """Hands out ids that were never used."""

    def __init__(self) -> None:
        self._next = count(1)

    def __call__(self, n: int) -> list[int]:
        return [*islice(self._next, n)]


def _zipf(n: int, exponent: float) -> list[float]:
    return [1 / (i + 1) ** exponent for i in range(n)]


def popular_prompts(rng: Random, n: int) -> Chains:
    """Prompts drawn by popularity, with tails of their own."""
    ids = Ids()
    prompts = [ids(rng.randint(4, 30)) for _ in range(600)]
    return [prompt + ids(rng.randint(0, 3)) for prompt in rng.choices(prompts, _zipf(600, 1.0), k=n)]


def conversations(rng: Random, n: int) -> Chains:
    """Forty users at a time, each of whom comes back within bounded time with a longer prompt."""
    ids = Ids()
    system = ids(2)
    sessions = [system + ids(5) for _ in range(40)]
    chains: Chains = []
    while len(chains) < n:
        rng.shuffle(sessions)
        for i in range(len(sessions)):
            sessions[i] = sessions[i] + ids(rng.randint(2, 10))
            chains.append(sessions[i])
            if rng.random() < 1 / 6:
                sessions[i] = system + ids(rng.randint(3, 10))
    return chains[:n]


def loop(rng: Random, n: int) -> Chains:
    """Sixty prompts in turns: 1,200 blocks."""
    ids = Ids()
    prompts = [ids(20) for _ in range(60)]
    return [prompts[i % 60] for i in range(n)]


def scans(rng: Random, n: int) -> Chains:
    """Thirty hot prompts, and many that come once."""
    ids = Ids()
    hot = [ids(15) for _ in range(30)]
    return [ids(rng.randint(5, 40)) if rng.random() < 0.7 else rng.choice(hot) + ids(2) for _ in range(n)]


def fashions(rng: Random, n: int) -> Chains:
    """Popularity that changes all at once, every 500 requests."""
    ids = Ids()
    prompts = [ids(rng.randint(4, 25)) for _ in range(400)]
    weights = _zipf(400, 1.1)
    chains: Chains = []
    while len(chains) < n:
        rng.shuffle(prompts)
        chains += [prompt + ids(1) for prompt in rng.choices(prompts, weights, k=500)]
    return chains[:n]


def equally_likely(rng: Random, n: int) -> Chains:
    """Two hundred prompts, none more popular than another."""
    ids = Ids()
    prompts = [ids(15) for _ in range(200)]
    return [rng.choice(prompts) + ids(1) for _ in range(n)]


def one_system_prompt(rng: Random, n: int) -> Chains:
    """All that requests share."""
    ids = Ids()
    system = ids(30)
    return [system + ids(rng.randint(2, 30)) for _ in range(n)]


def agents(rng: Random, n: int) -> Chains:
    """Five agents whose contexts grow step by step, a few steps at a time."""
    ids = Ids()
    contexts = [ids(5) for _ in range(5)]
    chains: Chains = []
    while len(chains) < n:
        i = rng.randrange(5)
        for _ in range(rng.randint(1, 6)):
            contexts[i] = contexts[i] + ids(rng.randint(1, 3))
            chains.append(contexts[i])
        if len(contexts[i]) > 90:
            contexts[i] = ids(5)
    return chains[:n]


def twice(rng: Random, n: int) -> Chains:
    """Each prompt comes twice, thirty others apart: what was hit is of no use any more."""
    ids = Ids()
    waiting: Chains = []
    chains: Chains = []
    while len(chains) < n:
        waiting.append(ids(12))
        chains.append(waiting[-1])
        if len(waiting) > 30:
            chains.append(waiting.pop(0))
    return chains[:n]


def bursts(rng: Random, n: int) -> Chains:
    """Each prompt comes five times in a while, then never again."""
    ids = Ids()
    active: list[list[list[int]]] = []
    chains: Chains = []
    while len(chains) < n:
        while len(active) < 25:
            prompt = ids(12)
            active.append([prompt + ids(1) for _ in range(5)])
        i = rng.randrange(25)
        chains.append(active[i].pop())
        if not active[i]:
            active.pop(i)
    return chains


def drifting(rng: Random, n: int) -> Chains:
    """Popularity that moves on slowly."""
    ids = Ids()
    prompts = [ids(12) for _ in range(n // 10 + 61)]
    return [prompts[i // 10 + min(60, int(rng.expovariate(1 / 15)))] + ids(1) for i in range(n)]


def short_lived(rng: Random, n: int) -> Chains:
    """Prompts that come back up to four times, soon, and grow by a block: recency counts, and hits mislead."""
    ids = Ids()
    waiting: list[tuple[int, float, list[int], int]] = []
    chains: Chains = []
    while len(chains) < n:
        now = len(chains)
        if waiting and waiting[0][0] <= now:
            *_, prompt, times = heapq.heappop(waiting)
        else:
            prompt, times = ids(14), rng.choice((1, 1, 2, 3, 4))
        chains.append(prompt)
        if times:
            heapq.heappush(waiting, (now + rng.randint(1, 60), rng.random(), prompt + ids(1), times - 1))
    return chains


def few_shot_tree(rng: Random, n: int) -> Chains:
    """Prompts put together from parts: branches of a tree."""
    ids = Ids()
    parts: dict[tuple[int, ...], list[int]] = {(): ids(8)}
    chains: Chains = []
    for _ in range(n):
        path: tuple[int, ...] = ()
        chain = [*parts[path]]
        for _ in range(4):
            path += (*rng.choices(range(6), _zipf(6, 0.8)),)
            chain += parts.setdefault(path, []) or parts[path].__iadd__(ids(5))
        chains.append(chain + ids(1))
    return chains


def waiting_sessions(rng: Random, n: int) -> Chains:
    """Conversations whose users think for exponentially distributed times, and leave after five turns on average."""
    ids = Ids()
    systems = [ids(3) for _ in range(4)]
    waiting: list[tuple[float, float, list[int]]] = []
    chains: Chains = []
    next_arrival = 0.0
    while len(chains) < n:
        if waiting and waiting[0][0] < next_arrival:
            now, _, prompt = heapq.heappop(waiting)
        else:
            now, prompt = next_arrival, rng.choice(systems) + ids(rng.randint(2, 15))
            next_arrival += rng.expovariate(1)
        chains.append(prompt)
        if rng.random() < 0.8:
            heapq.heappush(waiting, (now + rng.expovariate(1 / 60), rng.random(), prompt + ids(rng.randint(2, 12))))
    return chains


def nightly_batch(rng: Random, n: int) -> Chains:
    """Conversations by day; after every 500 requests, the same 250 documents: 8,000 blocks."""
    ids = Ids()
    instruction = ids(10)
    documents = [instruction + ids(rng.randint(5, 40)) for _ in range(250)]
    sessions = iter([[x + (1 << 40) for x in chain] for chain in waiting_sessions(rng, n)])
    chains: Chains = []
    while len(chains) < n:
        chains += [*islice(sessions, 500), *documents]
    return chains[:n]


def documents(rng: Random, n: int) -> Chains:
    """Answers from up to four documents, put into the prompt in the order of a search."""
    ids = Ids()
    system = ids(4)
    lengths = [rng.randint(8, 40) for _ in range(800)]
    popularity = _zipf(800, 0.8)
    parts: dict[tuple[int, ...], list[int]] = {}
    chains: Chains = []
    for _ in range(n):
        chain = system
        path: tuple[int, ...] = ()
        for document in rng.choices(range(800), popularity, k=rng.randint(1, 4)):
            path = (*path, document)
            chain = chain + parts.setdefault(path, ids(lengths[document]))
        chains.append(chain + ids(2))
    return chains


def one_after_another(rng: Random, n: int) -> Chains:
    """Several kinds of traffic, each for a while, all of them twice."""
    chains: Chains = []
    kinds = (popular_prompts, conversations, twice, loop, scans, agents) * 2
    for i, kind in enumerate(kinds):
        chains += [[x + (i << 24) for x in chain] for chain in kind(rng, n // len(kinds))]
    return chains


KINDS: dict[str, Callable[[Random, int], Chains]] = {
    kind.__name__: kind
    for kind in (
        agents, bursts, conversations, documents, drifting, equally_likely, fashions, few_shot_tree, loop,
        nightly_batch, one_after_another, one_system_prompt, popular_prompts, scans, short_lived, twice,
        waiting_sessions,
    )
}  # fmt: skip


def make_trace(kind: str, seed: int, n: int) -> list[TraceRequest]:
    """A trace of ``n`` requests."""
    return [TraceRequest(chain) for chain in KINDS[kind](Random(seed), n)]
