"""Every call of a manager, written to a file as it is made: ``KVCacheManager(record=path)``.

The file is JSON lines. The first is the configuration; each line after it is a call: the requests it was made with, its
arguments, and what the manager answered or raised. A line is begun before the call and ended after it, and flushed both
times, so that a process that dies leaves the call that it died in. :mod:`kvcore.replay_calls` runs a recording again.

Of tokens nothing is written unless it is asked for: block hashes decide every answer, and they are written under names
made with a key that is thrown away, so that nobody can find out from a recording what a prompt was, nor whether it was
one that they guess.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvcore.errors import ConfigError, KVCacheError
from kvcore.growth import Growth
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.recorded_requests import RequestWriter, plain
from kvcore.residency import Pin, as_request

if TYPE_CHECKING:
    from kvcore.manager import KVCacheManager

FORMAT = 1
"""Written into every recording; a reader refuses what it does not know."""

CALLS = (
    "get_computed_blocks",
    "allocate_slots",
    "grow",
    "free",
    "cache_blocks",
    "evict_blocks",
    "reset_prefix_cache",
    "residency.pin",
    "residency.unpin",
    "residency.expect",
)
"""What is recorded: the calls that change the books or that they depend on."""

_logger = logging.getLogger("kvcore.recording")


def start_recording(
    manager: KVCacheManager, path: str | os.PathLike[str], *, tokens: bool, settings: Mapping[str, Any]
) -> None:
    """Records every call of a new manager from now on.

    The manager's methods are replaced on this one instance, so that nobody else's are slower for it.

    Args:
        manager: One that was just made.
        path: The file; it must not exist, since what is there may be the record of a crash.
        tokens: Write token ids, extra keys and the hashes as they are.
        settings: The manager's arguments, beside its ``kv_cache_config``.

    Raises:
        ConfigError: The file exists or cannot be written.
    """
    try:
        # Not for others to read: with tokens, a recording holds what people wrote.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    except FileExistsError:
        raise ConfigError(
            f"record={os.fspath(path)!r} exists already: name a file of its own for every manager, for example with "
            "the time and the process id in it"
        ) from None
    except OSError as error:
        raise ConfigError(f"record={os.fspath(path)!r} cannot be written: {error}") from error
    weakref.finalize(manager, os.close, descriptor)
    recorder = _Recorder(manager, descriptor, tokens=tokens)
    recorder.write(json.dumps(_header(manager, tokens=tokens, settings=settings), separators=(",", ":")) + "\n")
    for name in CALLS:
        owner, method = find_call(manager, name)
        setattr(owner, method, recorder.recorded(name, getattr(owner, method)))


def find_call(manager: KVCacheManager, name: str) -> tuple[Any, str]:
    """The object that has a call of :data:`CALLS`, and the method's name."""
    part, dot, method = name.rpartition(".")
    return (getattr(manager, part) if dot else manager), method


def _header(manager: KVCacheManager, *, tokens: bool, settings: Mapping[str, Any]) -> dict[str, Any]:
    from kvcore import __version__

    config = manager.kv_cache_config
    return {
        "kvcore_recording": FORMAT,
        "kvcore": __version__,
        "tokens": tokens,
        "num_blocks": config.num_blocks,
        "groups": [
            {
                "layer_names": list(group.layer_names),
                "kind": group.kv_cache_spec.kind,
                "spec": asdict(group.kv_cache_spec),
            }
            for group in config.kv_cache_groups
        ],
        "settings": {name: plain(value) for name, value in settings.items()},
    }


class _Recorder:
    """Writes the calls of one manager."""

    def __init__(self, manager: KVCacheManager, descriptor: int, *, tokens: bool) -> None:
        self._manager = weakref.ref(manager)
        self._descriptor = descriptor
        self._requests = RequestWriter(tokens=tokens)
        self._last_lookup: KVCacheBlocks | None = None
        self._pins: weakref.WeakKeyDictionary[Pin, int] = weakref.WeakKeyDictionary()
        self._num_pins = 0
        self._inside = False
        self._has_failed = False

    def write(self, text: str) -> None:
        """To the operating system, which keeps it if this process dies."""
        data = text.encode("utf-8", "surrogatepass")
        while data:
            data = data[os.write(self._descriptor, data) :]

    def recorded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with a record of it."""
        signature = inspect.signature(call)

        @functools.wraps(call)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # one recorded call made by another is part of it
                return call(*args, **kwargs)
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return call(*args, **kwargs)  # no call of this method at all: Python says what is wrong with it
            try:
                arguments = _settled(arguments)
            except (TypeError, KVCacheError):
                return call(*args, **kwargs)  # raises, and says what is wrong
            self._inside = True
            try:
                return self._run(name, call, arguments)
            finally:
                self._inside = False

        return recorded

    def _run(self, name: str, call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        self._try_to_write(lambda: self._begin(name, arguments))
        try:
            answer = call(**arguments)
        except BaseException as error:
            raised = {"raises": type(error).__name__, "message": _without_hashes(str(error))}
            self._try_to_write(lambda: self._end(raised))
            raise
        if name == "get_computed_blocks":
            self._last_lookup = answer[0]
        elif isinstance(answer, Pin):
            self._pins[answer] = self._num_pins
            self._num_pins += 1
        self._try_to_write(lambda: self._end(describe_answer(answer)))
        return answer

    def _try_to_write(self, text: Callable[[], str]) -> None:
        """Serving goes on without a recording, never the other way round."""
        if self._has_failed:
            return
        try:
            self.write(text())
        except Exception:
            self._has_failed = True
            _logger.exception("recording stopped: it could not be written; the manager goes on without")
            manager = self._manager()
            assert manager is not None
            for name in CALLS:
                owner, method = find_call(manager, name)
                vars(owner).pop(method, None)

    def _begin(self, name: str, arguments: dict[str, Any]) -> str:
        line: dict[str, Any] = {"call": name}
        args = {}
        for key, value in arguments.items():
            if key in ("request", "prefix"):
                line["request"] = self._requests.describe(value)
            elif key == "requests":
                line["requests"] = [self._requests.describe(request) for request in value]
            elif key == "new_computed_blocks":
                args[key] = self._describe_hits(value)
            elif key == "pin":
                args[key] = self._pins.get(value, plain(value)) if isinstance(value, Pin) else plain(value)
            elif key == "block_ids":
                args[key] = [plain(block_id) for block_id in value]
            else:
                args[key] = plain(value)
        line["args"] = args
        return json.dumps(line, separators=(",", ":"))[:-1]  # left open: the answer follows

    def _end(self, answer: dict[str, Any]) -> str:
        manager = self._manager()
        assert manager is not None  # one of its methods is running
        return f',"answer":{json.dumps(answer | state_after(manager), separators=(",", ":"))}}}\n'

    def _describe_hits(self, hits: Any) -> Any:
        """Hits by their ids, unless they are the very object that the last lookup returned; None for foreign blocks."""
        if hits is None:
            return None
        if hits is self._last_lookup:
            return "of the last lookup"
        manager = self._manager()
        assert manager is not None
        own = manager.block_pool.blocks
        try:
            return [
                [block.block_id if own[block.block_id] is block else None for block in group] for group in hits.blocks
            ]
        except Exception:
            return plain(hits)


def _settled(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, so that they can be looked at before the call: iterators as lists, token ids as a request.

    Raises:
        TypeError: What should be iterable is not.
        KVCacheError: Token ids that make no request.
    """
    for name in ("requests", "block_ids"):
        if name in arguments:
            arguments[name] = list(arguments[name])
    if isinstance(arguments.get("prefix"), Sequence):
        arguments["prefix"] = as_request(arguments["prefix"], arguments.get("block_hasher"))
    arguments.pop("block_hasher", None)  # a request has been hashed
    return arguments


def describe_answer(answer: Any) -> dict[str, Any]:
    """What a call returned, for comparing."""
    if isinstance(answer, tuple):  # get_computed_blocks
        return {"hit": answer[1], "blocks": list(answer[0].get_block_ids())}
    if isinstance(answer, Growth):
        new_blocks = {str(index): list(blocks.get_block_ids()) for index, blocks in answer.new_blocks.items()}
        return {"num_grown": answer.num_grown, "new_blocks": new_blocks}
    if isinstance(answer, KVCacheBlocks):
        return {"blocks": list(answer.get_block_ids())}
    if isinstance(answer, Pin):
        return {"pinned": answer.num_tokens, "blocks": list(answer.blocks.get_block_ids())}
    return {"returned": answer}  # None, a count, or whether the cache was reset


def state_after(manager: KVCacheManager) -> dict[str, Any]:
    """What shows soon, in whatever call, that two managers have gone apart: the free blocks, and the next victim."""
    pool = manager.block_pool
    victim = next(iter(pool.policy), None)
    return {"free": pool.get_num_free_blocks(), "next": None if victim is None else victim.block_id}


def _without_hashes(message: str) -> str:
    """An error message as it was, but for the hash of a block."""
    return re.sub(r"hash=[0-9a-f]+", "hash=...", message)
