"""A replay gives the manager's answers, and its bound is one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import ConfigError, CountError, Request
from kvcore.errors import FileFormatError
from kvcore.eviction import LRU, POLICIES
from kvcore.replay import OUTPUTS, replay, replay_all_knowing, summarize
from kvcore.replay_formats import LineParser
from kvcore.replay_results import Histogram
from kvcore.replay_trace import TraceRequest, read_trace
from kvcore.testing import admit, make_manager, make_request
from tests.kvcore.traces import KINDS, make_trace


def through_the_manager(requests: Sequence[TraceRequest], num_blocks: int, policy: str) -> tuple[int, int, int]:
    """Blocks found, requests that found one, and those refused, with real tokens: two a block."""
    manager = make_manager(num_blocks + 1, 2, eviction_policy=policy)
    num_hit = num_requests_hit = num_refused = 0
    for i, traced in enumerate(requests):
        request = make_request(
            str(i),
            [*chain.from_iterable(zip(traced.hash_ids, traced.hash_ids, strict=True)), 0],
            manager,
            priority=traced.priority,
        )
        if len(traced.hash_ids) + 1 > num_blocks:
            num_refused += 1
            continue
        hits = admit(manager, request)
        num_hit += hits // 2
        num_requests_hit += hits > 0
        manager.free(request)
    manager.check_invariants()
    return num_hit, num_requests_hit, num_refused


@st.composite
def traces(draw: st.DrawFn, max_size: int = 30, depth: int = 5) -> list[TraceRequest]:
    """Prompts that share prefixes: paths in a tree, with an id for each node."""
    paths = draw(st.lists(st.lists(st.integers(0, 1), max_size=depth), max_size=max_size))
    priorities = draw(st.lists(st.integers(-1, 1), min_size=len(paths), max_size=len(paths)))
    nodes: dict[tuple[int, ...], int] = {}
    return [
        TraceRequest(
            [nodes.setdefault(tuple(path[: i + 1]), len(nodes) + 1) for i in range(len(path))], priority=priority
        )
        for path, priority in zip(paths, priorities, strict=True)
    ]


@pytest.mark.parametrize("policy", POLICIES)
@given(requests=traces(), num_blocks=st.integers(1, 20))
def test_a_replay_finds_what_the_manager_finds(policy: str, requests: list[TraceRequest], num_blocks: int) -> None:
    result = replay(requests, num_blocks, policy)
    found = result.num_blocks_hit, result.num_requests_hit, result.num_refused
    assert found == through_the_manager(requests, num_blocks, policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["conversations", "few_shot_tree", "scans"])
def test_a_replay_of_real_size_finds_what_the_manager_finds(policy: str, kind: str) -> None:
    requests = make_trace(kind, 3, 400)
    result = replay(requests, 300, policy)
    assert result.num_blocks_hit
    found = result.num_blocks_hit, result.num_requests_hit, result.num_refused
    assert found == through_the_manager(requests, 300, policy)


@given(requests=traces(), num_blocks=st.integers(1, 20))
def test_no_policy_finds_more_than_the_all_knowing_one(requests: list[TraceRequest], num_blocks: int) -> None:
    bound = replay_all_knowing(requests, num_blocks).num_blocks_hit
    assert all(replay(requests, num_blocks, policy).num_blocks_hit <= bound for policy in POLICIES)
    assert bound <= summarize(requests).num_blocks - summarize(requests).num_distinct


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_nothing_is_lost_in_a_pool_that_holds_everything(kind: str) -> None:
    requests = make_trace(kind, 1, 300)
    summary = summarize(requests)
    num_blocks = summary.num_distinct + 1
    for result in (replay(requests, num_blocks), replay_all_knowing(requests, num_blocks)):
        assert result.block_hit_rate == summary.best_hit_rate
        assert result.num_evictions == result.age_at_eviction.total == 0


def most_hits(requests: Sequence[TraceRequest], num_blocks: int, cached: frozenset[int] = frozenset()) -> int:
    """What the best of all choices of what to keep finds."""
    if not requests:
        return 0
    ids = requests[0].hash_ids
    if len(ids) + 1 > num_blocks:
        return most_hits(requests[1:], num_blocks, cached)
    hits = next((i for i, hash_id in enumerate(ids) if hash_id not in cached), len(ids))
    candidates = cached.union(ids)
    kept = combinations(candidates, min(num_blocks, len(candidates)))
    return hits + max(most_hits(requests[1:], num_blocks, frozenset(choice)) for choice in kept)


@given(requests=traces(max_size=5, depth=3), num_blocks=st.integers(1, 4))
def test_the_bound_is_what_the_best_of_all_choices_finds(requests: list[TraceRequest], num_blocks: int) -> None:
    assert replay_all_knowing(requests, num_blocks).num_blocks_hit == most_hits(requests, num_blocks)


def test_counts_in_tokens_blocks_and_requests() -> None:
    requests = [TraceRequest([1, 2, 3]), TraceRequest([1, 2, 4]), TraceRequest([*range(10, 30)]), TraceRequest([])]
    result = replay(requests, 8, block_size=16)
    assert (result.num_requests, result.num_refused, result.num_requests_hit) == (4, 1, 1)
    assert (result.num_blocks_asked, result.num_blocks_hit, result.num_tokens_saved) == (26, 2, 32)
    assert result.num_tokens == 26 * 16 + 4
    assert result.block_hit_rate == 2 / 26
    assert result.token_hit_rate == 32 / 420
    assert result.request_hit_rate == 1 / 4
    assert json.loads(json.dumps(result.as_dict()))["block_hit_rate"] == 2 / 26


def test_ages_at_eviction_count_the_blocks_asked_for_since() -> None:
    requests = [TraceRequest([1, 2]), TraceRequest([3, 4]), TraceRequest([5, 6]), TraceRequest([7, 8])]
    result = replay(requests, 5)
    # The third finds one block that holds nothing: it overwrites 2 and 1, the fourth overwrites 4 and 3.
    assert result.num_evictions == 4
    assert result.age_at_eviction == Histogram({2: 4})
    assert result.age_at_eviction.as_dict() == {"2": 4}


def test_reuse_distances_count_the_blocks_asked_for_in_between() -> None:
    requests = [TraceRequest([1, 2]), TraceRequest([1, 3, 4]), TraceRequest([1, 2])]
    summary = summarize(requests)
    assert summary.reuse_distance == Histogram({0: 2, 2: 1})
    assert (summary.num_requests, summary.num_blocks, summary.num_distinct, summary.longest) == (3, 7, 4, 3)
    assert summary.as_dict()["reuse_distance"] == {"0": 2, "2": 1}


def test_a_quantile_is_above_that_share_of_all() -> None:
    histogram = Histogram.of([0, 5, 4, 1])
    assert [histogram.quantile(share) for share in (0.5, 0.9, 1.0)] == [2, 4, 8]
    assert Histogram({}).quantile(0.5) == 0


def test_a_policy_of_ones_own_replays_under_its_name() -> None:
    requests = make_trace("scans", 1, 100)

    class Mine(LRU):
        pass

    assert replay(requests, 100, Mine).policy == "Mine"
    assert replay(requests, 100, LRU).policy == "lru"
    assert replay(requests, 100, LRU()).num_blocks_hit == replay(requests, 100).num_blocks_hit
    assert replay(requests, 100, LRU, name="mine").policy == "mine"


def test_requests_are_read_one_by_one() -> None:
    def requests():  # type: ignore[no-untyped-def]
        yield TraceRequest([1])
        raise RuntimeError("the second was asked for")

    with pytest.raises(RuntimeError, match="the second"):
        replay(requests(), 10)


@pytest.mark.parametrize("num_blocks", [0, -1, 2.5])
def test_a_pool_needs_a_block(num_blocks: int) -> None:
    with pytest.raises(CountError, match="at least one block"):
        replay([], num_blocks)
    with pytest.raises(CountError, match="at least one block"):
        replay_all_knowing([], num_blocks)


GOOD = '{"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [0, 7]}'


def test_a_trace_in_mooncakes_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{GOOD}\n\n{{"hash_ids": [], "priority": -2}}\n')
    assert [*read_trace(path)] == [TraceRequest([0, 7], 5, 700, 3), TraceRequest([], priority=-2)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ("{}", "hash_ids must be a list .* got None"),
        ('{"hash_ids": [1, "2"]}', "hash_ids must be a list of whole numbers"),
        ('{"hash_ids": [true]}', "hash_ids must be"),
        ('{"hash_ids": [-1]}', "hash_ids must be"),
        (f'{{"hash_ids": [1], "timestamp": "{"long" * 40}"}}', r"timestamp must be .* got 'longlong.*\.\.\."),
        ('{"hash_ids": [1], "timestamp": NaN}', "timestamp must be"),
        ('{"hash_ids": [1], "input_length": -4}', "input_length must be .* got -4"),
        ('{"hash_ids": [1], "priority": 0.5}', "priority must be a whole number"),
    ],
)
def test_a_bad_line_is_reported_with_its_number_and_passed_over_as_asked(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    requests = read_trace(path)
    assert next(requests).hash_ids == [0, 7]
    with pytest.raises(FileFormatError, match=f"trace.jsonl, line 2: {message}"):
        next(requests)
    errors: list[FileFormatError] = []
    assert len([*read_trace(path, on_bad_line=errors.append)]) == 2
    assert len(errors) == 1


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"cannot read the trace .*missing.jsonl: No such file"):
        next(read_trace(tmp_path / "missing.jsonl"))


@st.composite
def timed_traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Conversations of tokens, two a block, whose prompts may repeat earlier ones with their answers."""
    sequences: list[list[int]] = [[]]
    parse = LineParser(2)
    requests = []
    now = 0
    for _ in range(draw(st.integers(0, 25))):
        now += draw(st.integers(0, 3))
        start = draw(st.sampled_from(sequences))
        prompt = start[: draw(st.integers(0, len(start)))] + draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
        answer = draw(st.lists(st.integers(0, 1), max_size=6))
        sequences.append(prompt + answer)
        line = {"timestamp": now, "prompt_token_ids": prompt, "output_token_ids": answer}
        requests.append(parse(json.dumps(line | {"priority": draw(st.integers(-1, 1))})))
        TOKENS[id(requests[-1])] = (requests[-1], prompt, answer)
    return requests


TOKENS: dict[int, tuple[TraceRequest, list[int], list[int]]] = {}
"""The tokens of the requests of :func:`timed_traces`, which are held here so that no other gets their number."""


def as_they_come(
    requests: Sequence[TraceRequest], num_blocks: int, policy: str, outputs: str, concurrency: int
) -> tuple[int, int, int, int]:
    """As :func:`through_the_manager`, with arrivals and answers: a step a millisecond, a millisecond a token."""
    manager = make_manager(num_blocks + 1, 2, eviction_policy=policy)
    queue: list[tuple[int, TraceRequest]] = []
    running: list[tuple[int, int, Request, list[int]]] = []
    num_hit = num_requests_hit = num_refused = num_waited = now = arrived = 0

    def end() -> None:
        for entry in sorted(running, key=lambda entry: entry[:2]):
            at, _, request, answer = entry
            if at <= now:
                running.remove(entry)
                if outputs == "cache" and answer:
                    request.append_output_token_ids(answer)
                    manager.cache_blocks(request, request.num_tokens - 1)
                manager.free(request)

    def start() -> bool:
        nonlocal num_hit, num_requests_hit, num_waited
        if not queue or len(running) == concurrency:
            return False
        number, traced = queue[0]
        _, prompt, answer = TOKENS[id(traced)]
        request = make_request(str(number), prompt, manager, priority=traced.priority)
        hits, num_hit_tokens = manager.get_computed_blocks(request)
        lookahead = max(0, len(answer) - 1) if outputs != "ignore" else 0
        new = len(prompt) - num_hit_tokens
        if manager.allocate_slots(request, new, num_hit_tokens, hits, num_lookahead_tokens=lookahead) is None:
            return False
        request.num_computed_tokens = len(prompt)
        num_hit += num_hit_tokens // 2
        num_requests_hit += num_hit_tokens > 0
        num_waited += now > traced.timestamp
        running.append((now + len(answer), number, request, answer))
        queue.pop(0)
        return True

    while arrived < len(requests) or queue or running:
        while arrived < len(requests) and requests[arrived].timestamp <= now:
            traced = requests[arrived]
            _, prompt, answer = TOKENS[id(traced)]
            num_tokens = len(prompt) + (max(0, len(answer) - 1) if outputs != "ignore" else 0)
            if -(-num_tokens // 2) > num_blocks:
                num_refused += 1
            else:
                queue.append((arrived, traced))
            arrived += 1
        end()
        while start():
            end()  # one without an answer ends as soon as it began
        now += 1
    manager.check_invariants()
    assert manager.usage == 0
    return num_hit, num_requests_hit, num_refused, num_waited


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    requests=timed_traces(),
    num_blocks=st.integers(1, 25),
    outputs=st.sampled_from(OUTPUTS),
    concurrency=st.integers(1, 4),
)
def test_requests_that_overlap_find_what_the_manager_finds(
    policy: str, requests: list[TraceRequest], num_blocks: int, outputs: str, concurrency: int
) -> None:
    options = {"block_size": 2, "outputs": outputs}
    result = replay(requests, num_blocks, policy, concurrency=concurrency, seconds_per_token=0.001, **options)
    expected = as_they_come(requests, num_blocks, policy, outputs, concurrency)
    found = result.num_blocks_hit, result.num_requests_hit, result.num_refused, result.num_waited
    assert found == expected
    assert result.num_blocks_hit <= replay_all_knowing(requests, num_blocks, **options).num_blocks_hit
    TOKENS.clear()


def test_a_request_waits_for_a_place_and_for_blocks() -> None:
    requests = [TraceRequest([1, 2], 0, 0, 100), TraceRequest([3, 4], 1000, 0, 100), TraceRequest([5], 9000, 0, 1)]
    assert replay(requests, 6, concurrency=2).num_waited == 0
    assert replay(requests, 6, concurrency=1).num_waited == 1
    assert replay(requests, 5, concurrency=2).num_waited == 1
    assert replay(requests, 5, concurrency=2, seconds_per_token=0.001).num_waited == 0


def test_answers_that_are_not_known_take_blocks_and_are_never_found() -> None:
    requests = [TraceRequest([1, 2], output_length=1025), TraceRequest([3, 4, 5]), TraceRequest([1, 2])]
    for outputs in ("ignore", "hold"):
        result = replay(requests, 6, outputs=outputs)
        assert (result.num_blocks_hit, result.num_evictions) == (2, 0)
    cached = replay(requests, 6, outputs="cache")
    assert (cached.num_blocks_hit, cached.num_evictions) == (2, 2)
    assert replay(requests, 4, outputs="hold").num_refused == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"concurrency": 0}, CountError),
        ({"concurrency": 2, "seconds_per_token": -1}, CountError),
        ({"outputs": "keep"}, ConfigError),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        replay([], 10, **options)
