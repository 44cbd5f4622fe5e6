"""Extra keys: what beside its tokens decides a block's keys and values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import BlockHasher, CountError, LoRAAdapter, MultiModalItem, Request
from kvcore.extra_keys import ExtraKeys, untagged
from kvcore.hashing import ALGORITHMS

ADAPTER = LoRAAdapter("french", "/adapters/french")


def test_a_request_without_any_has_none() -> None:
    keys = ExtraKeys(None, (), None)
    assert not keys
    assert keys.of_blocks(0, 10, 4) == {}


def test_an_empty_salt_is_no_salt() -> None:
    keys = ExtraKeys(None, (), "")
    assert not keys
    assert keys.of_blocks(0, 10, 4) == {}


def test_an_adapter_enters_every_block_by_name_and_path() -> None:
    keys = ExtraKeys(ADAPTER, (), None)
    assert keys
    assert keys.of_blocks(3, 5, 4) == dict.fromkeys((3, 4), (("lora", "french", "/adapters/french"),))


def test_a_salt_enters_the_first_block() -> None:
    keys = ExtraKeys(None, (), "tenant")
    assert keys
    assert keys.of_blocks(0, 3, 4) == {0: (("cache_salt", "tenant"),)}
    assert keys.of_blocks(1, 3, 4) == {}
    assert keys.of_blocks(0, 0, 4) == {}


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        (0, 1, {0: 0}),
        (3, 1, {0: 3}),
        (4, 4, {1: 0}),
        (3, 2, {0: 3, 1: -1}),
        (2, 10, {0: 2, 1: -2, 2: -6}),
        (11, 100, {2: 3}),
        (12, 1, {}),
    ],
)
def test_an_image_enters_the_blocks_it_overlaps_with_its_offset_in_each(
    offset: int, length: int, expected: dict[int, int]
) -> None:
    keys = ExtraKeys(None, [MultiModalItem("image", offset, length)], None)
    assert keys.of_blocks(0, 3, 4) == {i: (("mm", "image", at),) for i, at in expected.items()}


def test_blocks_asked_for_in_parts_have_the_same_keys() -> None:
    keys = ExtraKeys(ADAPTER, [MultiModalItem("a", 2, 7), MultiModalItem("b", 9, 20)], "tenant")
    parts: dict[int, object] = {}
    for first, stop in ((0, 1), (1, 4), (4, 4), (4, 9)):
        parts |= keys.of_blocks(first, stop, 4)
    assert parts == keys.of_blocks(0, 9, 4)


def test_they_come_in_the_order_adapter_images_by_offset_salt() -> None:
    images = [MultiModalItem("second", 2, 1), MultiModalItem("first", 0, 1)]
    keys = ExtraKeys(ADAPTER, images, "tenant")
    assert keys.of_blocks(0, 1, 4) == {
        0: (
            ("lora", "french", "/adapters/french"),
            ("mm", "first", 0),
            ("mm", "second", 2),
            ("cache_salt", "tenant"),
        )
    }


def test_events_carry_them_without_tags() -> None:
    keys = ExtraKeys(ADAPTER, [MultiModalItem("image", 2, 1)], "tenant").of_blocks(0, 1, 4)[0]
    assert untagged(keys) == ("french", ("image", 2), "tenant")


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 0), (3, -2)])
def test_an_image_needs_a_place_and_a_length(offset: int, length: int) -> None:
    with pytest.raises(CountError, match="'image' needs offset >= 0 and length >= 1"):
        MultiModalItem("image", offset, length)


NAMES = st.text("ab\0é", min_size=1, max_size=3)
CONTEXTS = st.fixed_dictionaries(
    {},
    optional={
        "cache_salt": NAMES,
        "lora": st.builds(LoRAAdapter, NAMES, NAMES),
        "mm_items": st.lists(st.builds(MultiModalItem, NAMES, st.integers(0, 3), st.integers(1, 4)), max_size=2),
    },
)


def what_decides_the_first_block(context: dict[str, object]) -> object:
    """Independent of the code under test: two contexts with the same answer may share a first block of 4 tokens."""
    images = sorted(context.get("mm_items", ()), key=lambda item: item.offset)  # type: ignore[call-overload, attr-defined]
    adapter = context.get("lora")
    return (
        context.get("cache_salt"),
        (adapter.name, adapter.path) if isinstance(adapter, LoRAAdapter) else None,
        tuple((item.identifier, item.offset) for item in images),
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(one=CONTEXTS, other=CONTEXTS)
def test_two_first_blocks_of_equal_tokens_have_one_hash_exactly_if_all_else_is_equal_too(
    algorithm: str, one: dict[str, object], other: dict[str, object]
) -> None:
    hasher = BlockHasher(4, algorithm, seed=0)
    hashes = [Request("r", range(4), block_hasher=hasher, **context).block_hashes for context in (one, other)]  # type: ignore[arg-type]
    same = what_decides_the_first_block(one) == what_decides_the_first_block(other)
    assert (hashes[0] == hashes[1]) == same


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_value_of_one_kind_passes_for_another(algorithm: str) -> None:
    hasher = BlockHasher(4, algorithm, seed=0)
    contexts: list[dict[str, object]] = [
        {},
        {"cache_salt": "x"},
        {"lora": LoRAAdapter("x", "x")},
        {"lora": LoRAAdapter("x", "")},
        {"lora": LoRAAdapter("", "x")},
        {"lora": LoRAAdapter("cache_salt", "x")},
        {"mm_items": [MultiModalItem("x", 0, 1)]},
        {"mm_items": [MultiModalItem("x", 1, 1)]},
        {"mm_items": [MultiModalItem("x", 0, 1), MultiModalItem("x", 1, 1)]},
        {"cache_salt": "lora"},
        {"cache_salt": "mm"},
        {"lora": LoRAAdapter("x", "x"), "cache_salt": "x"},
        {"mm_items": [MultiModalItem("cache_salt", 0, 1)], "cache_salt": "x"},
    ]
    hashes = [Request("r", range(4), block_hasher=hasher, **context).block_hashes[0] for context in contexts]  # type: ignore[arg-type]
    assert len(set(hashes)) == len(contexts)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_salt_separates_all_blocks_after_the_first_too(algorithm: str) -> None:
    hasher = BlockHasher(4, algorithm, seed=0)
    plain = Request("r", range(16), block_hasher=hasher).block_hashes
    salted = Request("r", range(16), block_hasher=hasher, cache_salt="tenant").block_hashes
    assert len({*plain, *salted}) == 8


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_image_changes_its_block_and_all_after_it_and_none_before(algorithm: str) -> None:
    hasher = BlockHasher(4, algorithm, seed=0)
    plain = Request("r", range(16), block_hasher=hasher).block_hashes
    cat, dog = (
        Request("r", range(16), block_hasher=hasher, mm_items=[MultiModalItem(name, 5, 2)]).block_hashes
        for name in ("cat", "dog")
    )
    assert plain[0] == cat[0] == dog[0]
    assert len({*plain[1:], *cat[1:], *dog[1:]}) == 9


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_does_not_matter_whether_equal_names_are_one_object(algorithm: str) -> None:
    hasher = BlockHasher(4, algorithm, seed=0)
    name = "name"
    same, other = name, name[:2] + name[2:]
    assert other is not name
    hashes = [
        Request("r", range(4), block_hasher=hasher, cache_salt=salt, lora=LoRAAdapter(name, same)).block_hashes
        for salt in (same, other)
    ]
    assert hashes[0] == hashes[1]
