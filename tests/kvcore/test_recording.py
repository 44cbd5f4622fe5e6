"""What ``KVCacheManager(record=path)`` writes, and that it never gets in the way."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcore import BlockHasher, ConfigError, CountError, KVCacheManager, Request, UnknownRequestError
from kvcore.recording import CALLS
from kvcore.testing import admit, make_manager, make_request

PROMPT = [31337, 31338, 31339, 31340, 31341, 31342, 31343, 31344, 31345]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calls.jsonl"


def test_every_call_is_a_line_with_its_arguments_and_its_answer(path: Path) -> None:
    manager = make_manager(10, record=path)
    request = make_request("a", PROMPT, manager)
    hits, num_hit = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 9, num_hit, hits, num_lookahead_tokens=2, delay_cache_blocks=True)
    request.num_computed_tokens = 9
    manager.cache_blocks(request, 9)
    request.append_output_token_ids(1)
    manager.grow([request])
    manager.evict_blocks(iter([1]))
    pin = manager.residency.pin(request)
    manager.residency.unpin(pin)
    manager.residency.expect(request)
    manager.free(request)
    manager.reset_prefix_cache()
    header, *calls = lines_of(path)
    assert header["num_blocks"] == 10
    assert header["settings"]["max_model_len"] == 4096
    assert [call["call"] for call in calls] == [
        "get_computed_blocks",
        "allocate_slots",
        "cache_blocks",
        "grow",
        "evict_blocks",
        "residency.pin",
        "residency.unpin",
        "residency.expect",
        "free",
        "reset_prefix_cache",
    ]
    assert {call["call"] for call in calls} == set(CALLS)
    allocated = calls[1]
    assert allocated["args"]["num_new_tokens"] == 9
    assert allocated["args"]["num_lookahead_tokens"] == 2
    assert allocated["args"]["delay_cache_blocks"] is True
    assert allocated["answer"] == {"blocks": [[1, 2, 3]], "free": 6, "next": 4}
    assert calls[4]["args"]["block_ids"] == [1]
    assert calls[-1]["answer"]["returned"] is True


def test_a_call_that_raises_is_written_with_its_error_and_raises_all_the_same(path: Path) -> None:
    manager = make_manager(10, record=path)
    request = make_request("a", PROMPT, manager)
    with pytest.raises(UnknownRequestError, match="holds no blocks"):
        manager.free(request)
    with pytest.raises(CountError):
        manager.allocate_slots(request, -1)
    answers = [line["answer"] for line in lines_of(path)[1:]]
    assert [answer["raises"] for answer in answers] == ["UnknownRequestError", "CountError"]
    assert "holds no blocks" in answers[0]["message"]


def test_a_call_with_the_wrong_arguments_is_pythons_own_error_and_no_line(path: Path) -> None:
    manager = make_manager(10, record=path)
    with pytest.raises(TypeError, match="request"):
        manager.free()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="not iterable"):
        manager.evict_blocks(3)  # type: ignore[arg-type]
    assert len(lines_of(path)) == 1


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3"])
def test_without_tokens_neither_they_nor_the_hashes_nor_the_salt_are_in_the_file(path: Path, algorithm: str) -> None:
    manager = make_manager(10, record=path)
    hasher = BlockHasher(4, algorithm)
    first = Request("a", PROMPT, block_hasher=hasher, cache_salt="tenant-7")
    admit(manager, first)
    manager.free(first)
    second = Request("b", PROMPT, block_hasher=hasher, cache_salt="tenant-7")
    hits, num_hit = manager.get_computed_blocks(second)
    with pytest.raises(UnknownRequestError):
        manager.free(second)
    manager.evict_blocks([2])
    with pytest.raises(ValueError, match="no longer holds"):
        manager.allocate_slots(second, 1, num_hit, hits)
    text = path.read_text()
    assert "no longer holds" in text
    for secret in [*map(str, PROMPT), "tenant-7", *(h.hex()[:8] for h in first.block_hashes)]:
        assert secret not in text


def test_hash_names_of_two_recordings_have_nothing_in_common(tmp_path: Path) -> None:
    names = []
    for run in ("first", "second"):
        manager = make_manager(10, record=tmp_path / run)
        admit(manager, make_request("a", PROMPT, manager))
        names.append(lines_of(tmp_path / run)[1]["request"]["h"][1])
    assert len(names[0]) == len(names[1]) == 2
    assert not set(names[0]) & set(names[1])


def test_with_tokens_they_are_written_once_as_they_come(path: Path) -> None:
    manager = make_manager(10, record=path, record_tokens=True)
    request = make_request("a", PROMPT, manager, cache_salt="tenant-7")
    admit(manager, request)
    request.append_output_token_ids([7, 8])
    manager.allocate_slots(request, 2)
    described = [line["request"] for line in lines_of(path)[1:]]
    assert [line.get("t") for line in described] == [[0, PROMPT], None, [9, [7, 8]]]
    assert described[0]["extra"]["salt"] == "tenant-7"
    assert described[0]["h"][1] == [h.hex() for h in request.block_hashes]


def test_two_objects_with_one_id_are_two_requests_and_one_object_stays_one(path: Path) -> None:
    manager = make_manager(10, record=path)
    first, second = make_request("a", PROMPT, manager), make_request("a", PROMPT, manager)
    for request in (first, second, first):
        manager.get_computed_blocks(request)
    assert [line["request"]["r"] for line in lines_of(path)[1:]] == [0, 1, 0]


def test_a_request_that_is_gone_leaves_its_place_in_memory_to_others(path: Path) -> None:
    manager = make_manager(10, record=path)
    for _ in range(5):
        manager.get_computed_blocks(make_request("a", PROMPT, manager))
    assert [line["request"]["r"] for line in lines_of(path)[1:]] == [0, 1, 2, 3, 4]


class Slotted:
    """A caller's own class of requests that allows no weak references."""

    __slots__ = ("block_contents", "block_hashes", "num_computed_tokens", "num_tokens", "request_id")

    def __init__(self, request: Request) -> None:
        self.request_id = request.request_id
        self.num_tokens = request.num_tokens
        self.num_computed_tokens = 0
        self.block_hashes = request.block_hashes
        self.block_contents = None


def test_requests_of_a_class_without_weak_references_are_told_apart(path: Path) -> None:
    manager = make_manager(10, record=path)
    for _ in range(5):
        manager.get_computed_blocks(Slotted(make_request("a", PROMPT, manager)))
    assert [line["request"]["r"] for line in lines_of(path)[1:]] == [0, 1, 2, 3, 4]


def test_an_object_that_is_no_request_is_noted_and_the_recording_goes_on(path: Path) -> None:
    manager = make_manager(10, record=path)
    strange: Any = Slotted(make_request("a", PROMPT, manager))
    strange.block_hashes = None
    with pytest.raises(TypeError):
        manager.get_computed_blocks(strange)
    manager.reset_prefix_cache()
    _, first, second = lines_of(path)
    assert "unreadable" in first["request"]
    assert second["call"] == "reset_prefix_cache"


def test_a_recording_is_never_written_over(path: Path) -> None:
    path.write_text("the record of a crash")
    with pytest.raises(ConfigError, match="exists already"):
        make_manager(10, record=path)
    assert path.read_text() == "the record of a crash"


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        make_manager(10, record=tmp_path / "nowhere" / "calls.jsonl")


@pytest.mark.skipif(os.name != "posix", reason="file modes are those of POSIX")
def test_a_recording_is_for_its_owner_only(path: Path) -> None:
    make_manager(10, record=path)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_where_the_disk_is_full_the_manager_goes_on_without_a_recording(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(10, record=path)
    descriptor = next(fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(path))
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), int(descriptor.name))
    request = make_request("a", PROMPT, manager)
    with caplog.at_level(logging.ERROR, "kvcore.recording"):
        assert admit(manager, request) == 0
    assert "recording stopped" in caplog.text
    assert not set(CALLS) & set(vars(manager))
    manager.free(request)
    manager.check_invariants()


def test_a_process_that_is_killed_in_a_call_leaves_that_call_in_the_file(path: Path) -> None:
    program = f"""
import os, signal
from kvcore.testing import admit, make_manager, make_request
manager = make_manager(10, record={str(path)!r})
request = make_request("a", range(9), manager)
admit(manager, request)
manager.coordinator.free = lambda request_id: os.kill(os.getpid(), signal.SIGKILL)
manager.free(request)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL
    *whole, last = path.read_text().splitlines()
    assert [json.loads(line).get("call") for line in whole] == [None, "get_computed_blocks", "allocate_slots"]
    assert json.loads(last + "}")["call"] == "free"


def test_a_manager_without_a_recording_has_the_methods_of_its_class() -> None:
    manager = make_manager(10)
    assert not set(CALLS) & set(vars(manager))
    assert manager.allocate_slots.__func__ is KVCacheManager.allocate_slots  # type: ignore[attr-defined]


def test_a_recording_manager_that_is_dropped_closes_its_file(path: Path) -> None:
    def open_files() -> int:
        return sum(fd.exists() and fd.samefile(path) for fd in Path("/proc/self/fd").iterdir())

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    manager = make_manager(10, record=path)
    assert open_files() == 1
    del manager
    gc.collect()
    assert open_files() == 0
