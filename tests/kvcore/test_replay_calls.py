"""A recording, run again: the same answers, or the line where they part."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore import (
    BlockHasher,
    ForeignBlockError,
    Growth,
    HitHandoverError,
    KVCacheBlocks,
    KVCacheManager,
    LoRAAdapter,
    MultiModalItem,
    Request,
    RequestProtocolError,
    UnknownRequestError,
)
from kvcore.blocks import KVCacheBlock
from kvcore.cli import main
from kvcore.errors import FileFormatError, InvariantError, PinError
from kvcore.eviction import LRU, POLICIES
from kvcore.replay_calls import replay_calls
from kvcore.snapshot import load_snapshots
from kvcore.testing import admit, make_manager, make_request
from tests.kvcore.oracle import AnythingGoes, Cache, CacheMachine, run_machine, specs_of
from tests.kvcore.test_soak import Traffic

GROUPS = ["full", "sliding:6", "full sliding:6 chunked:8", "sliding:3/2 chunked:12/8 full/4"]


def record_traffic(path: Path, num_calls: int = 300, **options: Any) -> KVCacheManager:
    """What requests with shared prefixes do in a small pool, with preemptions and evictions."""
    manager = make_manager(40, groups=options.pop("groups", ["full"]), max_model_len=160, record=path, **options)
    Traffic(manager, seed=7).operate(num_calls)
    return manager


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("tokens", [True, False], ids=["with tokens", "with hashes only"])
def test_traffic_that_is_replayed_is_answered_the_same(tmp_path: Path, groups: str, tokens: bool) -> None:
    path = tmp_path / "calls.jsonl"
    manager = record_traffic(path, groups=specs_of(groups), record_tokens=tokens, log_stats=True)
    replayed = replay_calls(path, check_invariants=True, num_snapshots=1)
    assert replayed.difference is None
    assert replayed.torn is None
    assert replayed.num_calls == len(path.read_text().splitlines()) - 1 >= 300
    (end,) = replayed.snapshots
    assert end.queue == manager.snapshot().queue
    assert [block.state for block in end.blocks] == [block.state for block in manager.snapshot().blocks]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_eviction_policy_evicts_the_same_when_replayed_and_another_one_does_not(
    tmp_path: Path, policy: str
) -> None:
    path = tmp_path / "calls.jsonl"
    manager = make_manager(40, max_model_len=160, record=path, eviction_policy=policy)
    traffic = Traffic(manager, seed=7)
    for priority in range(30):
        traffic.operate(20)
        for request in traffic.running[-1:]:
            request.priority = priority % 3 - 1
    assert replay_calls(path).difference is None

    assert replay_calls(path, eviction_policy="fifo" if policy != "fifo" else "lru").difference is not None


def test_every_setting_of_the_manager_is_in_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    record_traffic(path, 1)
    header = json.loads(path.read_text().splitlines()[0])
    arguments = [*inspect.signature(KVCacheManager).parameters]
    assert sorted(header["settings"]) == sorted(set(arguments) - {"kv_cache_config", "record", "record_tokens"})


def replaying(machine: type[Any], folder: Path) -> Callable[[Cache], Any]:
    """The machine, which replays what it has recorded when it is done."""
    numbers = itertools.count()

    class Replaying(machine):  # type: ignore[misc]
        def __init__(self, cache: Cache) -> None:
            self.path = folder / f"{next(numbers)}.jsonl"
            options = {**cache.options, "record": self.path}
            super().__init__(dataclasses.replace(cache, options=options))

        def teardown(self) -> None:
            super().teardown()
            if self.path.exists():  # hypothesis also makes machines that it never runs
                replayed = replay_calls(self.path)
                assert replayed.difference is None, str(replayed.difference)
                assert replayed.torn is None
                self.path.unlink()

    return Replaying


MACHINES = [pytest.param(CacheMachine, id="a scheduler"), pytest.param(AnythingGoes, id="any call")]


@pytest.mark.parametrize("tokens", [True, False], ids=["with tokens", "with hashes only"])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_few_random_operations_are_answered_the_same_when_replayed(
    tmp_path: Path, machine: type[Any], tokens: bool
) -> None:
    cache = Cache("full sliding:6", (8, 16, 30), options={"record_tokens": tokens})
    run_machine(cache, thorough=False, machine=replaying(machine, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["full", "full sliding:6 chunked:8"])
@pytest.mark.parametrize("machine", MACHINES)
def test_many_random_operations_are_answered_the_same_when_replayed(
    tmp_path: Path, machine: type[Any], groups: str
) -> None:
    run_machine(Cache(groups, (8, 16, 30)), thorough=True, machine=replaying(machine, tmp_path))


def test_with_tokens_a_hit_that_was_found_to_be_a_collision_is_found_to_be_one_again(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    manager = make_manager(10, record=path, record_tokens=True)
    hasher = BlockHasher(4, "xxh3")
    first, second = (
        Request(name, range(start, start + 9), block_hasher=hasher) for name, start in (("a", 0), ("b", 50))
    )
    second.block_hashes[:] = first.block_hashes
    admit(manager, first)
    assert admit(manager, second) == 0  # the hashes are equal, the tokens are not
    assert replay_calls(path).difference is None


class MostRecent(LRU):
    """Overwrites what was released last before all else."""

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        super().release([*hashed[::-1], *unhashed], ())


class LatestFirst(KVCacheManager):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{**settings, "eviction_policy": MostRecent})


def test_a_manager_with_another_eviction_order_is_told_from_the_recorded_one_by_the_first_call_that_shows_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "calls.jsonl"
    manager = make_manager(10, record=path)
    first, second = make_request("first", range(9), manager), make_request("second", range(50, 59), manager)
    for request in (first, second):
        admit(manager, request)
    manager.free(first)
    admit(manager, make_request("third", range(9), manager))
    difference = replay_calls(path, make_manager=LatestFirst).difference
    assert difference is not None
    # The header, a lookup and an admission each, and then the call that frees.
    assert difference.line == 6
    assert str(difference).splitlines() == [
        "line 6: free('first' with 9 tokens, 9 computed)",
        "  recorded: returned None; then 6 blocks free, block 3 to be overwritten next",
        "  replayed: returned None; then 6 blocks free, block 1 to be overwritten next",
    ]


def tamper(path: Path, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes line ``number`` of a recording, counted from 1."""
    lines = path.read_text().splitlines()
    values = json.loads(lines[number - 1])
    change(values)
    lines[number - 1] = json.dumps(values)
    path.write_text("".join(line + "\n" for line in lines))


def test_whichever_answer_is_tampered_with_its_line_is_named(tmp_path: Path) -> None:
    original = tmp_path / "calls.jsonl"
    record_traffic(original, 200)
    lines = original.read_text().splitlines()
    for number in random.Random(3).sample(range(2, len(lines) + 1), 25):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(original.read_text())
        answers = json.loads(lines[number - 1])["answer"]
        name = random.Random(number).choice(sorted(answers))
        tamper(path, number, lambda line, name=name: line["answer"].update({name: "changed"}))
        difference = replay_calls(path).difference
        assert difference is not None
        assert difference.line == number
        assert "changed" in difference.recorded


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line.pop("answer"), "KeyError: 'answer'"),
        (lambda line: line.update(call="free_everything"), "no call 'free_everything'"),
        (lambda line: line["request"].pop("id"), "an earlier line is missing"),
        (lambda line: line["request"].update(h=[7, ["00"]]), "an earlier line is missing"),
        (lambda line: line["request"].update(h=[0, ["no hash"]]), "line 2 is broken"),
        (lambda line: line["request"].pop("n"), "line 2 is broken"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = tmp_path / "calls.jsonl"
    record_traffic(path, 5)
    tamper(path, 2, change)
    with pytest.raises(FileFormatError, match="line 2 is broken") as raised:
        replay_calls(path)
    assert message in str(raised.value)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    record_traffic(path, 20)
    lines = path.read_text().splitlines()
    lines[8] = lines[8][:-4]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(FileFormatError, match="line 9 is broken"):
        replay_calls(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line is none of a recording"),
        ("[1, 2]\n", "first line is none of a recording"),
        ("certainly no JSON\n", "cannot be replayed"),
        ('{"kvcore_recording": 99}\n', "format 99, this version of kvcore replays 1"),
        ('{"kvcore_recording": 1}\n', "cannot be replayed"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=message):
        replay_calls(path)
    with pytest.raises(FileFormatError, match="cannot read"):
        replay_calls(tmp_path / "missing.jsonl")


def test_a_setting_that_a_file_cannot_hold_is_named(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    record_traffic(path, 5)
    tamper(path, 1, lambda header: header["settings"].update(eviction_policy="Mine"))
    with pytest.raises(FileFormatError, match=r"the policy 'Mine'.*--policy module:Class"):
        replay_calls(path)
    tamper(path, 1, lambda header: header["settings"].update(eviction_policy="lru", watermark={"repr": "<mine>"}))
    with pytest.raises(FileFormatError, match=r"watermark=<mine>.*make_manager"):
        replay_calls(path)


def test_a_recording_cut_anywhere_in_its_last_line_replays_up_to_there_and_says_so(tmp_path: Path) -> None:
    whole = tmp_path / "calls.jsonl"
    record_traffic(whole, 30)
    data = whole.read_bytes()
    begin = data[:-1].rindex(b"\n") + 1
    num_calls = data.count(b"\n") - 1
    path = tmp_path / "torn.jsonl"
    for end in range(begin, len(data)):
        path.write_bytes(data[:end])
        replayed = replay_calls(path)
        assert replayed.num_calls == num_calls - 1
        assert replayed.difference is None
        assert (replayed.torn is None) == (end == begin)
        if replayed.torn:
            assert f"line {num_calls + 1}, the last one, is torn" in replayed.torn
    # Cut before the answer, the call can still be told.
    path.write_bytes(data[: data.index(b',"answer"', begin)])
    torn = replay_calls(path).torn
    assert torn is not None
    assert json.loads(data[begin:])["call"] + "(" in torn


def test_a_call_with_an_argument_that_cannot_be_written_is_left_out_if_it_raised(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    manager = make_manager(10, record=path)
    request = make_request("a", range(9), manager)
    with pytest.raises(ValueError, match="num_computed_tokens"):
        manager.cache_blocks(request, object()) if not admit(manager, request) else None  # type: ignore[arg-type]
    manager.free(request)
    replayed = replay_calls(path)
    assert (replayed.num_calls, replayed.num_skipped, replayed.difference) == (3, 1, None)


def replay_of(path: Path) -> tuple[int, int, int]:
    """How many calls were made again, raised and were left out in a replay without a difference."""
    replayed = replay_calls(path)
    assert replayed.difference is None, str(replayed.difference)
    return replayed.num_calls, replayed.num_raised, replayed.num_skipped


class OfMyOwn:
    """What RequestLike lists, and no more."""

    def __init__(self, name: str, hashes: list[bytes], num_tokens: int) -> None:
        self.request_id = name
        self.num_tokens = num_tokens
        self.num_computed_tokens = 0
        self.block_hashes = hashes
        self.block_contents = None


@pytest.mark.parametrize("events", [False, True])
def test_requests_of_the_callers_own_class_are_replayed_with_what_they_lack(tmp_path: Path, events: bool) -> None:
    path = tmp_path / "calls.jsonl"
    manager = make_manager(10, record=path, enable_kv_cache_events=events)
    hashes = BlockHasher(4, "sha256").hash_tokens(range(9))
    first, second = OfMyOwn("a", hashes, 9), OfMyOwn("b", hashes, 9)
    if events:  # they have no tokens to tell of
        with pytest.raises(RequestProtocolError, match="token_ids"):
            manager.get_computed_blocks(first)
        assert replay_of(path) == (1, 1, 0)
        return
    admit(manager, first)  # type: ignore[arg-type]
    assert admit(manager, second) == 8  # type: ignore[arg-type]
    second.block_hashes = BlockHasher(4, "sha256").hash_tokens(range(50, 62))  # all of them others
    second.num_tokens = 12
    manager.allocate_slots(second, 3)
    del second.block_hashes
    with pytest.raises(RequestProtocolError, match="block_hashes"):
        manager.get_computed_blocks(second)
    assert replay_of(path) == (6, 1, 0)


def test_adapters_images_and_salts_are_replayed_with_tokens(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    manager = make_manager(20, record=path, record_tokens=True, enable_kv_cache_events=True)
    options: dict[str, Any] = {
        "lora": LoRAAdapter("mine", "/adapters/mine"),
        "mm_items": [MultiModalItem("image", 2, 5)],
        "cache_salt": "tenant",
        "block_hasher": BlockHasher(4),
    }
    for name in ("a", "b"):
        assert admit(manager, make_request(name, range(9), manager, **options)) == (8 if name == "b" else 0)
    options["cache_salt"] = "another"
    assert admit(manager, make_request("c", range(9), manager, **options)) == 0
    assert replay_of(path) == (6, 0, 0)


def test_hits_that_are_none_and_blocks_of_another_pool_are_refused_again(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    manager, other = make_manager(10, record=path), make_manager(10)
    request = make_request("a", range(9), manager)
    foreign = KVCacheBlocks((other.block_pool.blocks[1:2],))
    with pytest.raises(ForeignBlockError):
        manager.allocate_slots(request, 4, 4, foreign)
    with pytest.raises(HitHandoverError):
        manager.allocate_slots(request, 4, 4, [[1]])  # type: ignore[arg-type]
    with pytest.raises(PinError):
        manager.residency.unpin(other.residency.pin(request))
    assert replay_of(path) == (1, 1, 2)


def test_token_ids_that_are_pinned_are_replayed_as_a_request(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    manager = make_manager(10, record=path)
    hasher = BlockHasher(4, "sha256")
    request = make_request("a", range(9), manager, block_hasher=hasher)
    admit(manager, request)
    pin = manager.residency.pin([*range(8)], block_hasher=hasher)
    assert pin.num_tokens == 8
    with pytest.raises(PinError, match="block_hasher"):
        manager.residency.pin([*range(8)])
    manager.free(request)
    manager.residency.unpin(pin)
    with pytest.raises(PinError):
        manager.residency.unpin(pin)
    assert replay_of(path) == (6, 1, 0)


def test_an_object_that_is_no_request_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    manager = make_manager(10, record=path)
    strange: Any = OfMyOwn("a", [], 9)
    strange.block_hashes = None
    with pytest.raises(TypeError):
        manager.get_computed_blocks(strange)
    strange.block_hashes = []
    for number in ("nine", object()):
        strange.num_tokens = number
        with pytest.raises(TypeError):
            manager.get_computed_blocks(strange)
    # Text can be written, and raises again.
    assert replay_of(path) == (1, 1, 2)


class OneByOne(KVCacheManager):
    """Grows by its own other calls."""

    def grow(self, requests: Any, num_new_tokens: int = 1, *, num_lookahead_tokens: int = 0) -> Growth:
        for request in requests:
            self.allocate_slots(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens)
        return Growth(len(requests), {})


def test_a_call_that_a_recorded_call_makes_is_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    plain = make_manager(10)
    manager = OneByOne(plain.kv_cache_config, 100, record=path)
    request = make_request("a", range(8), manager)
    admit(manager, request)
    request.append_output_token_ids(8)
    manager.grow([request])
    assert len(path.read_text().splitlines()) == 4
    difference = replay_calls(path).difference
    assert difference is not None
    assert difference.recorded.startswith("1 grown, new blocks {}")
    assert difference.replayed.startswith("1 grown, new blocks {'0': [[3]]}")
    assert replay_calls(path, make_manager=OneByOne).difference is None


@pytest.mark.parametrize(
    ("number", "name", "words"),
    [
        (2, "hit", "99 tokens hit"),
        (3, "blocks", "new blocks 99"),
        (4, "pinned", "99 tokens pinned"),
        (5, "num_grown", "99 grown"),
        (6, "raises", "99: block ids of this pool"),
    ],
)
def test_each_kind_of_answer_is_shown_in_words(tmp_path: Path, number: int, name: str, words: str) -> None:
    path = tmp_path / "calls.jsonl"
    manager = make_manager(10, record=path)
    request = make_request("a", range(9), manager)
    admit(manager, request)
    manager.residency.pin(request)
    manager.grow([])
    with pytest.raises(ForeignBlockError):
        manager.evict_blocks([99])
    tamper(path, number, lambda line: line["answer"].update({name: 99}))
    difference = replay_calls(path).difference
    assert difference is not None
    assert difference.line == number
    assert difference.recorded.startswith(words)


def test_errors_are_replayed_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    manager = make_manager(10, record=path)
    request = make_request("a", range(9), manager)
    with pytest.raises(UnknownRequestError):
        manager.free(request)
    with pytest.raises(ValueError, match="block ids"):
        manager.evict_blocks([10])
    replayed = replay_calls(path)
    assert (replayed.num_calls, replayed.num_raised, replayed.difference) == (2, 2, None)


class Corrupting(KVCacheManager):
    """Answers rightly, and loses count."""

    def free(self, request: Any) -> None:
        super().free(request)
        self.block_pool.null_block.num_holders = 1


def test_corrupt_books_are_found_if_they_are_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    manager = make_manager(10, record=path)
    request = make_request("a", range(9), manager)
    admit(manager, request)
    manager.free(request)
    assert replay_calls(path, make_manager=Corrupting).difference is None
    with pytest.raises(InvariantError):
        replay_calls(path, make_manager=Corrupting, check_invariants=True)


def test_snapshots_of_a_replay_know_the_prefixes_of_requests_that_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    manager = make_manager(10, record=path)
    request = make_request("a", range(9), manager)
    admit(manager, request)
    manager.free(request)
    manager.get_computed_blocks(make_request("b", range(9), manager))
    (end,) = replay_calls(path, num_snapshots=1).snapshots
    assert end.label == "Line 5: get_computed_blocks('b' with 9 tokens, 0 computed)"
    assert [(block.block_id, block.position) for block in end.blocks if block.prefix_hash] == [(1, 0), (2, 1)]


# On the command line


def test_the_command_says_that_all_is_the_same_and_makes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page, snapshots = tmp_path / "calls.jsonl", tmp_path / "calls.html", tmp_path / "pool.jsonl"
    record_traffic(path, 30)
    num_calls = len(path.read_text().splitlines()) - 1
    arguments = ["--check", "--html", str(page), "--snapshots", str(snapshots), "--last", "5"]
    assert main(["replay-calls", str(path), *arguments]) == 0
    said = capsys.readouterr().out
    assert f"{num_calls} calls" in said
    assert "all answered as recorded" in said
    assert page.read_text().startswith("<!doctype html>")
    assert len(load_snapshots(snapshots)) == 5
    assert main(["replay-calls", str(path), "--snapshots", str(tmp_path / "missing" / "pool.jsonl")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_the_command_replays_a_recording_made_with_a_policy_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_policies.py").write_text("from kvcore.eviction import FIFO\nclass Mine(FIFO): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    mine = importlib.import_module("my_policies").Mine
    record_traffic(Path("calls.jsonl"), 30, eviction_policy=mine)
    assert main(["replay-calls", "calls.jsonl"]) == 2
    assert "--policy module:Class" in capsys.readouterr().err
    assert main(["replay-calls", "calls.jsonl", "--policy", "my_policies:Mine"]) == 0
    assert "all answered as recorded" in capsys.readouterr().out
    assert main(["replay-calls", "calls.jsonl", "--policy", "no_such:Policy"]) == 2
    assert "there is no policy 'no_such:Policy'" in capsys.readouterr().err


def test_the_command_shows_the_first_difference_and_ends_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calls.jsonl"
    record_traffic(path, 30)
    tamper(path, 12, lambda line: line["answer"].update(free=-1))
    with pytest.raises(SystemExit) as ended:
        main(["replay-calls", str(path)])
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert "the last one answered otherwise" in printed.out
    assert "the answers differ from line 12: " in printed.err
    assert "then -1 blocks free" in printed.err


def test_the_command_refuses_what_is_no_recording_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text("hello\n")
    assert main(["replay-calls", str(path)]) == 2
    assert capsys.readouterr().err.startswith("kvcore replay-calls: error: ")


def test_the_command_tells_of_a_torn_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "calls.jsonl"
    record_traffic(path, 30)
    path.write_bytes(path.read_bytes()[:-5])
    assert main(["replay-calls", str(path)]) == 0
    assert "the last one, is torn" in capsys.readouterr().out
