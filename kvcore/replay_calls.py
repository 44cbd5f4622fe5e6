"""Runs a recording of a manager's calls again, and finds the first answer that is not the same.

What ``KVCacheManager(record=path)`` wrote is read line by line: a new manager with the recorded configuration gets the
recorded calls. Equal answers, block for block, mean that the books went the same way; the first difference is where
they, or the code, parted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.blocks import KVCacheBlock
from kvcore.errors import FileFormatError, KVCacheError
from kvcore.eviction import POLICIES, PolicyChoice
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.manager import KVCacheManager
from kvcore.recorded_requests import RequestReader, as_value
from kvcore.recording import CALLS, FORMAT, describe_answer, find_call, state_after
from kvcore.residency import Pin
from kvcore.snapshot import Snapshot
from kvcore.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

_SPECS: dict[str, type[KVCacheSpec]] = {
    spec.kind: spec for spec in (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
}


@dataclass(frozen=True)
class Difference:
    """The first call that was answered otherwise.

    Attributes:
        line: Its line in the file.
        call: The call in words.
        recorded: What the recording says.
        replayed: What the manager said now.
    """

    line: int
    call: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.call}\n  recorded: {self.recorded}\n  replayed: {self.replayed}"


@dataclass(frozen=True)
class ReplayedCalls:
    """How a replay went.

    Attributes:
        num_calls: Calls that were made again, up to the first difference.
        num_raised: How many of them raised, as recorded.
        num_skipped: Calls that raised and whose arguments could not be written down: they are not made again.
        difference: The first difference, None if there is none.
        torn: What is known of a last line that was not finished; None if the last line is whole.
        last_line: Number of the last line that was run.
        snapshots: The pool after the last calls, if they were asked for.
    """

    num_calls: int
    num_raised: int
    num_skipped: int
    difference: Difference | None
    torn: str | None
    last_line: int
    snapshots: tuple[Snapshot, ...]


def replay_calls(
    path: str | os.PathLike[str],
    *,
    make_manager: Callable[..., KVCacheManager] = KVCacheManager,
    eviction_policy: PolicyChoice | None = None,
    num_snapshots: int = 0,
    check_invariants: bool = False,
) -> ReplayedCalls:
    """Makes the recorded calls on a new manager, up to the first difference.

    Answers are compared as block ids, hit lengths and the kind of an error, not its words. So are the number of free
    blocks and the next one to be overwritten after each call, so that a difference shows early.

    Args:
        path: What ``KVCacheManager(record=path)`` wrote.
        make_manager: Called as the class is: to try a change of your own on a recording.
        eviction_policy: In place of the recorded one: a policy of your own, which a file cannot hold.
        num_snapshots: Keep snapshots after that many calls, the last ones.
        check_invariants: Check the manager's books after every call. O(pool) each.

    Raises:
        FileFormatError: The file is no recording, or a line in it is broken; the message names the line.
        InvariantError: With ``check_invariants``, the first that does not agree.
    """
    snapshots_from = sys.maxsize
    if num_snapshots:
        # A snapshot costs as much as many calls: a first run tells where the last ones begin.
        end = replay_calls(path, make_manager=make_manager, eviction_policy=eviction_policy).last_line
        snapshots_from = end - num_snapshots + 1
    last_line = 1
    lines = _lines(path)
    _, first, is_whole = next(lines, (1, "", False))
    try:
        header = json.loads(first) if is_whole else None
        if not isinstance(header, dict) or "kvcore_recording" not in header:
            raise FileFormatError('its first line is none of a recording: "kvcore_recording" is expected')
        if header["kvcore_recording"] != FORMAT:
            raise FileFormatError(
                f"it has format {header['kvcore_recording']!r}, this version of kvcore replays {FORMAT}"
            )
        manager = _make_manager(header, make_manager, eviction_policy)
        replay = _Replay(manager, check_invariants=check_invariants)
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{os.fspath(path)!r} cannot be replayed: {_say(error)}") from error
    difference = torn = None
    snapshots: list[Snapshot] = []
    for number, text, is_whole in lines:
        if not is_whole:
            torn = replay.describe_torn(number, text)
            break
        try:
            difference = replay.run(number, text)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise FileFormatError(f"{os.fspath(path)!r}, line {number} is broken: {_say(error)}") from error
        last_line = number
        if number >= snapshots_from:
            snapshots.append(replay.snapshot(f"Line {number}: {replay.last_call}"))
        if difference is not None:
            break
    return ReplayedCalls(
        replay.num_calls, replay.num_raised, replay.num_skipped, difference, torn, last_line, tuple(snapshots)
    )


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str, bool]]:
    """Number, text, and whether the line has its end."""
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                yield number, line.decode("utf-8", "surrogatepass"), line.endswith(b"\n")
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"cannot read {os.fspath(path)!r}: {error}") from error


def _say(error: Exception) -> str:
    return str(error) if isinstance(error, KVCacheError) else f"{type(error).__name__}: {error}"


def _make_manager(
    header: dict[str, Any], make_manager: Callable[..., KVCacheManager], eviction_policy: PolicyChoice | None
) -> KVCacheManager:
    groups = [
        KVCacheGroupSpec(group["layer_names"], _SPECS[group["kind"]](**group["spec"])) for group in header["groups"]
    ]
    settings = dict(header["settings"])
    if eviction_policy is not None:
        settings["eviction_policy"] = eviction_policy
    elif (policy := settings["eviction_policy"]) not in POLICIES:
        raise FileFormatError(
            f"the manager was made with the policy {policy!r}, which a file cannot hold: pass it as eviction_policy, "
            "or on the command line as --policy module:Class"
        )
    for name, value in settings.items():
        if isinstance(value, dict):
            raise FileFormatError(
                f"the manager was made with {name}={value.get('repr')}, which a file cannot hold: "
                "pass a make_manager that puts its own in place of it"
            )
    return make_manager(KVCacheConfig(header["num_blocks"], groups), **settings)


class _Replay:
    """A manager and the requests of a recording, call by call."""

    def __init__(self, manager: KVCacheManager, *, check_invariants: bool) -> None:
        self._manager = manager
        self._check_invariants = check_invariants
        self._requests = RequestReader(manager.coordinator.hash_block_size)
        self._last_lookup: KVCacheBlocks | None = None
        self._pins: list[Pin] = []
        self.num_calls = self.num_raised = self.num_skipped = 0
        self.last_call = ""

    def snapshot(self, label: str) -> Snapshot:
        return self._manager.snapshot(label, known_requests=self._requests.requests.values())

    def run(self, number: int, text: str) -> Difference | None:
        """Makes the call of one line."""
        line = json.loads(text)
        recorded = line["answer"]
        if line["call"] not in CALLS:
            raise FileFormatError(f"there is no call {line['call']!r}")
        self.last_call = self._in_words(line)
        arguments = {name: as_value(value) for name, value in line["args"].items()}
        if "request" in line:
            key = "prefix" if line["call"] == "residency.pin" else "request"
            arguments[key] = self._requests.read(line["request"])
        if "requests" in line:
            arguments["requests"] = [self._requests.read(request) for request in line["requests"]]
        if "new_computed_blocks" in arguments:
            arguments["new_computed_blocks"] = self._hits(line["args"]["new_computed_blocks"])
        if "block_ids" in arguments:
            arguments["block_ids"] = [as_value(block_id) for block_id in arguments["block_ids"]]
        if isinstance(arguments.get("pin"), int):
            arguments["pin"] = self._pins[arguments["pin"]]
        if "raises" in recorded and _is_unwritable(line):
            self.num_skipped += 1  # it changed nothing, as no call that raises does
            return None
        replayed = self._call(line["call"], arguments)
        self.num_calls += 1
        if self._check_invariants:
            self._manager.check_invariants()
        # By way of JSON, as the recorded one went: tuples and lists are the same there.
        comparable = json.loads(json.dumps({name: value for name, value in replayed.items() if name != "message"}))
        if comparable == {name: value for name, value in recorded.items() if name != "message"}:
            self.num_raised += "raises" in recorded
            return None
        return Difference(number, self.last_call, _answer_in_words(recorded), _answer_in_words(replayed))

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            owner, method = find_call(self._manager, name)
            answer = getattr(owner, method)(**arguments)
        except Exception as error:
            described = {"raises": type(error).__name__, "message": str(error)}
        else:
            if name == "get_computed_blocks":
                self._last_lookup = answer[0]
            elif isinstance(answer, Pin):
                self._pins.append(answer)
            described = describe_answer(answer)
        self._manager.take_events()  # nobody else does
        return described | state_after(self._manager)

    def describe_torn(self, number: int, text: str) -> str:
        """What a last line says that has no end: the call, if its answer is all that is missing."""
        try:
            call = self._in_words(json.loads(text + "}"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"line {number}, the last one, is torn: the process ended while it was written"
        return f"line {number}, the last one, is torn: the process ended in this call, and no answer came: {call}"

    def _in_words(self, line: dict[str, Any]) -> str:
        parts = []
        if "request" in line:
            request = line["request"]
            parts.append(f"{self._name(request)} with {request.get('n')} tokens, {request.get('c')} computed")
        if "requests" in line:
            parts.append(f"[{', '.join(map(self._name, line['requests']))}]")
        parts += [f"{name}={value!r}" for name, value in line["args"].items()]
        return f"{line['call']}({', '.join(parts)})"

    def _name(self, request: dict[str, Any]) -> str:
        known = self._requests.requests.get(request["r"])
        name = request.get("id", known and getattr(known, "request_id", None))
        return f"request {request['r']}" if name is None else repr(name)

    def _hits(self, written: Any) -> Any:
        if written is None:
            return None
        if isinstance(written, str):
            return self._last_lookup
        if isinstance(written, dict):
            return as_value(written)
        own = self._manager.block_pool.blocks
        foreign = KVCacheBlock(0)
        return KVCacheBlocks(
            tuple([foreign if block_id is None else own[block_id] for block_id in group] for group in written)
        )


def _is_unwritable(line: dict[str, Any]) -> bool:
    """Whether a value of the call is not what it was."""
    requests = [*line.get("requests", ()), *([line["request"]] if "request" in line else ())]
    values = [value for request in requests for value in request.values()] + list(line["args"].values())
    values += line["args"].get("block_ids", ())
    return any("unreadable" in request for request in requests) or any(
        isinstance(v, dict) and "repr" in v for v in values
    )


def _answer_in_words(answer: dict[str, Any]) -> str:
    if "raises" in answer:
        words = f"{answer['raises']}: {answer['message']}"
    elif "hit" in answer:
        words = f"{answer['hit']} tokens hit, blocks {answer['blocks']}"
    elif "pinned" in answer:
        words = f"{answer['pinned']} tokens pinned, blocks {answer['blocks']}"
    elif "num_grown" in answer:
        words = f"{answer['num_grown']} grown, new blocks {answer['new_blocks']}"
    elif "blocks" in answer:
        words = f"new blocks {answer['blocks']}"
    else:
        words = f"returned {answer.get('returned')}"
    return f"{words}; then {answer.get('free')} blocks free, block {answer.get('next')} to be overwritten next"
