"""The page in a real browser: it shows what the snapshots say, by keyboard and to screen readers, and loads nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcore import KVCacheManager, Request
from kvcore.snapshot import Snapshot
from kvcore.snapshot_html import snapshots_to_html
from kvcore.testing import admit, make_manager, make_request
from tests.kvcore.browser import find_chromium, go_to_step, launch, screenshot, walk_through
from tests.test_examples import load

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("playwright", reason="playwright is not installed")
pytestmark = [
    pytest.mark.slow,  # a second or two each
    pytest.mark.skipif(find_chromium() is None, reason="no chromium found"),
]

ARTIFACTS = Path(__file__).parents[2] / "artifacts"

Show = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launch() as browser:
        yield browser


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Show]:
    """Opens a page; what it asks for from outside, or complains of, fails the test in the end."""
    complaints: list[str] = []
    contexts = []

    def open_page(html: str, **options: Any) -> Page:
        file = tmp_path / "page.html"
        file.write_text(html, "utf-8")
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: complaints.append(f"request: {request.url}") if request.url != file.as_uri() else None,
        )
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def status(page: Page) -> str:
    return page.inner_text("#status")


def labels(page: Page) -> list[str]:
    """What a screen reader says of each cell."""
    return page.eval_on_selector_all("[role=gridcell]", "cells => cells.map(cell => cell.getAttribute('aria-label'))")


def some_steps() -> list[Snapshot]:
    """Two groups, one of them a window; shared, cached, pinned, evicted and copied blocks."""
    manager = make_manager(24, groups=["full", "sliding:6"], max_model_len=200)
    steps: list[Snapshot] = []

    def look(label: str) -> None:
        steps.append(manager.snapshot(label, previous=steps[-1] if steps else None))

    look("new")
    first, second, twin = (make_request(name, range(18), manager) for name in ("first", "second", "twin"))
    admit(manager, first)
    look("first")
    admit(manager, second)
    look("second")
    manager.allocate_slots(twin, 9)  # without a lookup: equal blocks, twice
    look("twin")
    pin = manager.residency.pin(first)
    manager.free(first)
    manager.free(twin)
    look("pinned")
    manager.residency.unpin(pin)
    manager.free(second)
    look("all free")
    manager.evict_blocks([1])
    admit(manager, make_request("other", range(100, 130), manager))
    look("other")
    return steps


def key_of(steps: list[Snapshot]) -> dict[str, str]:
    """The letter of each request."""
    names = dict.fromkeys(request.request_id for step in steps for request in step.requests)
    return {name: f"{chr(65 + number)} ({name})" for number, name in enumerate(names)}


def expected_label(step: Snapshot, block_id: int, seen: set[int], keys: dict[str, str]) -> str:
    """The beginning of what a cell says, found out anew from the snapshot."""
    block = step.blocks[block_id]
    holders = [keys[name] for name in step.holders.get(block_id, ())]
    if block.state == "null":
        words = "null block, a placeholder"
    elif block.state == "shared":
        words = f"shared by {' and '.join(holders) if len(holders) > 1 else f'{block.ref_cnt} holders'}"
    elif block.state == "used":
        words = f"in use by {holders[0]}" if holders else "held, though it is in no block table"
    elif block.state == "cached":
        words = "cached and evictable"
    else:
        words = "free, empty again" if block_id in seen else "never used"
    words += "; pinned" if block.num_pins else ""
    if block_id in step.queue:
        words += f"; place {step.queue.index(block_id) + 1} of {len(step.queue)} in the queue"
    if block.prefix_hash is not None:
        assert block.position is not None
        assert block.group_id is not None
        size = step.groups[block.group_id].block_size
        words += f"; holds tokens {block.position * size} to {(block.position + 1) * size - 1}"
    return f"Block {block_id}: {words}"


@pytest.mark.parametrize("make_steps", [lambda: load("watch_the_pool").watch(), some_steps], ids=["example", "groups"])
def test_every_cell_of_every_step_says_what_the_snapshot_says(show: Show, make_steps: Callable[[], Any]) -> None:
    steps = make_steps()
    page = show(snapshots_to_html(steps))
    keys = key_of(steps)
    seen: set[int] = set()
    for number, step in enumerate(steps, 1):
        go_to_step(page, number)
        seen |= {block.block_id for block in step.blocks if block.ref_cnt or block.prefix_hash}
        for block_id, label in enumerate(labels(page)):
            assert label.startswith(expected_label(step, block_id, seen, keys)), f"step {number}"
        assert status(page).startswith(f"Step {number} of {len(steps)}: {step.label}. ")
        tables = page.inner_text("#tables")
        for request in step.requests:
            assert f"{keys[request.request_id]}" in tables
        queue = page.inner_text("#queue")
        assert all(str(block_id) in queue for block_id in step.queue[:1])


def test_the_slider_is_moved_by_keyboard_and_says_where_it_is(show: Show) -> None:
    page = show(walk_through())
    slider = page.locator("#step")
    first = labels(page)
    assert slider.get_attribute("aria-valuetext") == f"Step 1 of 9: {status(page).split(': ')[1].split('.')[0]}: " + (
        "nothing is held, nothing is cached"
    )
    page.keyboard.press("Tab")  # the first button is off in the first step
    assert page.evaluate("document.activeElement.id") == "step"
    page.keyboard.press("ArrowRight")
    assert labels(page) != first
    assert labels(page)[1] == "Block 1: in use by A (first); holds tokens 0 to 3; can be hit; changed in this step"
    assert status(page).endswith("4 of 10 blocks in use. Blocks changed: 1–4.")
    page.keyboard.press("End")
    assert str(slider.get_attribute("aria-valuetext")).startswith("Step 9 of 9: ")
    page.keyboard.press("Home")
    assert labels(page) == first


def test_the_buttons_go_one_step_and_stop_at_the_ends(show: Show) -> None:
    page = show(walk_through())
    back, on = page.get_by_role("button", name="Previous step"), page.get_by_role("button", name="Next step")
    assert back.is_disabled()
    on.click()
    assert status(page).startswith("Step 2 of 9")
    back.click()
    assert status(page).startswith("Step 1 of 9")
    for _ in range(8):
        on.click()
    assert on.is_disabled()


def test_the_grid_is_walked_with_the_arrow_keys_and_is_one_stop_of_the_tab_key(show: Show) -> None:
    page = show(walk_through())
    columns = int(str(page.locator("[role=grid]").get_attribute("aria-colcount")))

    def focused() -> str:
        return str(page.evaluate("document.activeElement.querySelector('b')?.textContent"))

    page.focus("[role=gridcell] >> nth=0")
    for key, block in [
        ("ArrowRight", 1),
        ("ArrowDown", 1 + columns),
        ("Home", columns),
        ("ArrowUp", 0),
        ("ArrowUp", 0),
    ]:
        page.keyboard.press(key)
        assert focused() == str(block)
    page.keyboard.press("Control+End")
    assert focused() == "10"
    assert page.inner_text("#details") == "Block 10: never used; place 10 of 10 in the queue"
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    assert focused() == "10"


def test_the_tree_shows_which_blocks_follow_which(show: Show) -> None:
    page = show(walk_through())
    go_to_step(page, 5)
    assert page.locator("#tree").aria_snapshot().splitlines() == [
        "- list:",
        "  - listitem:",
        '    - text: "tokens 0 to 7: blocks 1, 2, in use by A (first) and B (second)"',
        "    - list:",
        '      - listitem: "tokens 8 to 11: block 3, in use by A (first)"',
        '      - listitem: "tokens 8 to 11: block 5, in use by B (second)"',
    ]


def test_prefixes_whose_beginning_was_evicted_and_copies_are_named_as_such(show: Show) -> None:
    page = show(snapshots_to_html(some_steps()))
    go_to_step(page, 4)
    assert "(and copies" in page.inner_text("#tree")
    go_to_step(page, 7)
    assert "what comes before it is not cached any more" in page.inner_text("#tree")


def test_without_an_earlier_snapshot_nobody_knows_the_prefixes_of_requests_that_are_gone(show: Show) -> None:
    manager = make_manager(10)
    request = make_request("gone", range(9), manager)
    admit(manager, request)
    manager.free(request)
    page = show(manager.snapshot().to_html())
    assert page.inner_text("#tree") == "Of prefixes that no request here has: 2 blocks 1, 2."
    assert labels(page)[1].endswith("holds a prefix of unknown length")
    assert page.locator("#steps").is_hidden()


# For everyone


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(show: Show, scheme: str) -> None:
    page = show(snapshots_to_html(some_steps()), color_scheme=scheme)
    for number in range(1, 8):
        go_to_step(page, number)
        assert page.evaluate(FIND_FAINT_TEXT) == []


FIND_FAINT_TEXT = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest("script,style,noscript") || element.disabled) continue;
    let behind = element;
    while (behind && (numbers(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
    const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind ?? document.body).backgroundColor]
      .map((colour) => luminance(numbers(colour)));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push(`${walker.currentNode.data}: ${contrast.toFixed(2)}`);
  }
  return faint;
}"""


def test_everything_that_can_be_operated_has_a_name_and_the_page_is_well_formed(show: Show) -> None:
    page = show(walk_through())
    go_to_step(page, 4)
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles: dict[str, list[str]] = {}
    for node in nodes:
        if not node.get("ignored"):
            roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("button", "slider", "grid", "gridcell", "region", "table", "columnheader", "rowheader"):
        assert roles[role], role
        assert all(roles[role]), f"a {role} without a name: {roles[role]}"
    assert roles["slider"] == ["Step"]
    assert len(roles["gridcell"]) == 11
    assert len(roles["main"]) == len(roles["banner"]) == len(roles["status"]) == 1
    levels = page.eval_on_selector_all("h1,h2,h3", "all => all.map(heading => Number(heading.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert page.get_attribute("html", "lang") == "en"
    ids = page.eval_on_selector_all("[id]", "all => all.map(element => element.id)")
    assert len(ids) == len(set(ids))
    named = page.eval_on_selector_all(
        "[aria-labelledby],[aria-describedby]",
        "all => all.flatMap(e => [e.getAttribute('aria-labelledby'), e.getAttribute('aria-describedby')])",
    )
    assert {name for name in named if name} <= set(ids)
    assert page.locator("[tabindex]").evaluate_all("all => all.every(element => element.tabIndex <= 0)")


def test_every_state_has_a_sign_and_a_border_of_its_own(show: Show) -> None:
    page = show(walk_through())
    samples = page.eval_on_selector_all(
        ".sample", "all => all.map(s => [s.textContent, getComputedStyle(s).border.replace(/rgb.*/, '')])"
    )
    assert len({sign for sign, _ in samples}) == len(samples) == 6
    assert len({border for _, border in samples}) >= 5  # only the two empty ones may look alike in black and white


@pytest.mark.parametrize("width", [320, 1400])
def test_only_the_grid_and_the_tables_scroll_sideways(show: Show, width: int) -> None:
    page = show(walk_through(), viewport={"width": width, "height": 800})
    go_to_step(page, 7)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


# Names of others


HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "'\"><svg onload=window.hacked=1>",
    "{script}{data}",
    "\u2028\u2029\x00\x1b[31m",
    "\ud800 alone",
    "a" * 300,
]


def test_whatever_a_request_is_called_it_is_text(show: Show) -> None:
    manager = make_manager(100)
    for number, name in enumerate(HOSTILE):
        admit(manager, make_request(name, range(number, number + 9), manager))
    page = show(manager.snapshot(HOSTILE[0]).to_html(title=HOSTILE[1]), viewport={"width": 800, "height": 800})
    assert page.evaluate("window.hacked") is None
    assert page.title() == HOSTILE[1]
    assert HOSTILE[0] in status(page)
    names = page.eval_on_selector_all("#tables tbody th", "all => all.map(name => name.textContent)")
    assert names == [f"{chr(65 + number)} ({name})" for number, name in enumerate(HOSTILE)]
    assert page.evaluate("document.documentElement.scrollWidth") <= 800


def test_the_policy_of_the_page_lets_no_other_script_run(show: Show, tmp_path: Path) -> None:
    html = walk_through().replace("<main>", "<main><script>window.hacked = 1</script>")
    page = show("<!doctype html><title>empty</title>")
    (tmp_path / "page.html").write_text(html, "utf-8")
    messages: list[str] = []
    other = page.context.new_page()
    other.on("console", lambda message: messages.append(message.text))
    other.goto((tmp_path / "page.html").as_uri())
    assert other.evaluate("window.hacked") is None
    assert any("Content Security Policy" in message for message in messages)


# Sizes


def fill(manager: KVCacheManager, num_requests: int, num_tokens: int) -> list[Request]:
    requests = [make_request(f"r{i}", range(i, i + num_tokens), manager) for i in range(num_requests)]
    for request in requests:
        admit(manager, request)
    return requests


def test_a_pool_of_100000_blocks_is_shown_as_at_most_1024_cells_that_add_up(show: Show) -> None:
    manager = make_manager(100_000, max_model_len=100_000)
    steps = [manager.snapshot("new")]
    requests = fill(manager, 40, 4_000)
    steps.append(manager.snapshot("40 requests", previous=steps[-1]))
    for request in requests[::2]:
        manager.free(request)
    steps.append(manager.snapshot("half of them gone", previous=steps[-1]))
    page = show(snapshots_to_html(steps))
    go_to_step(page, 3)
    said = labels(page)
    assert len(said) <= 1024

    def total(words: str) -> int:
        return sum(int(number) for label in said for number in re.findall(rf"(\d+) {words}", label))

    assert total("in use") == 20 * 1_000
    assert total("cached and evictable") == 20 * 1_000
    assert total("never used") == 100_000 - 1 - 40_000
    page.focus("[role=gridcell] >> nth=1")
    page.click("#details summary")
    listed = page.locator("#details li").all_inner_texts()
    first, last = map(int, re.findall(r"\d+", said[1])[:2])
    assert len(listed) == last - first + 1
    assert listed[0].startswith(f"Block {first}: ")


def test_the_screenshot_of_the_walk_through_is_kept(browser: Browser, tmp_path: Path) -> None:
    target = ARTIFACTS / "watch-the-pool.png"
    screenshot(browser, tmp_path, target)
    assert target.read_bytes().startswith(b"\x89PNG")
