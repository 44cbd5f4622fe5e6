"""kvcore with its hot path compiled: what ``make test-compiled`` runs all tests of this folder against."""

from __future__ import annotations

import os
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvcore
from kvcore import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
    SlidingWindowSpec,
)

PYPROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
HOT_PATH = re.findall(r'^    "/kvcore/(\w+)(?:\.py|/)",$', PYPROJECT, re.MULTILINE)
"""Modules and packages that compile."""


def test_the_list_of_what_compiles_is_found() -> None:
    assert {"admission", "block_pool", "single_type"} <= set(HOT_PATH)


def test_these_tests_run_against_the_kvcore_that_was_asked_for() -> None:
    # Compiled modules left among the sources would be imported in their place, without a word.
    assert (os.environ.get("EXPECT_COMPILED") == "1") == kvcore.COMPILED, (
        f"compiled modules beside {kvcore.__file__}: make clean"
        if kvcore.COMPILED
        else f"{kvcore.__file__} is not compiled for this Python: make compiled"
    )


@pytest.mark.parametrize("name", HOT_PATH)
def test_the_hot_path_is_compiled_all_of_it_or_nothing(name: str) -> None:
    file = import_module(f"kvcore.{name}").__file__
    assert file is not None
    assert (Path(file).suffix != ".py") == kvcore.COMPILED


def test_so_are_the_loops_that_are_written_in_c() -> None:
    assert (find_spec("kvcore.packed_blocks") is not None) == kvcore.COMPILED


def test_the_facade_can_be_subclassed_and_its_methods_wrapped() -> None:
    # What is compiled takes neither from Python, so that the facade is not.
    class Counting(KVCacheManager):
        num_freed = 0

        def free(self, request: object) -> None:
            self.num_freed += 1
            super().free(request)  # type: ignore[arg-type]

    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(4, 1, 1, "float32")),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(4, 1, 1, "float32", 8)),
    ]
    manager = Counting(KVCacheConfig(16, groups), 100)
    calls = []
    lookup = manager.get_computed_blocks
    manager.get_computed_blocks = lambda request: calls.append(request) or lookup(request)  # type: ignore
    request = Request("a", range(10), block_hasher=BlockHasher(4))
    blocks, num_tokens = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 10, num_tokens, blocks)
    manager.free(request)
    assert calls == [request]
    assert manager.num_freed == 1
    manager.check_invariants()


def test_a_flag_may_be_anything_that_is_true_or_false() -> None:
    # Compiled code takes no number for a bool; the facade sees to it.
    group = KVCacheGroupSpec(["full"], FullAttentionSpec(4, 1, 1, "float32"))
    manager = KVCacheManager(
        KVCacheConfig(16, [group]),
        100,
        enable_caching=1,  # type: ignore[arg-type]
        enable_kv_cache_events=0,  # type: ignore[arg-type]
    )
    hasher = BlockHasher(4)
    request = Request("a", range(10), block_hasher=hasher)
    for _ in range(2):
        assert manager.allocate_slots(
            request,
            4,
            delay_cache_blocks=1,  # type: ignore[arg-type]
            full_sequence_must_fit=1,  # type: ignore[arg-type]
        )
        request.num_computed_tokens += 4
    assert manager.get_computed_blocks(Request("b", range(10), block_hasher=hasher))[1] == 0
    manager.cache_blocks(request, 8)
    assert manager.get_computed_blocks(Request("b", range(10), block_hasher=hasher))[1] == 8
