"""Draws the queue of free blocks, by running what the pictures show: step by step, and under each policy.

python docs/eviction_picture.py        writes docs/assets/eviction_order.svg and docs/assets/eviction_policies.svg
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from kvcore import KVCacheManager, Request
from kvcore.eviction import PolicyChoice, TailAwareLRU
from kvcore.testing import admit, free_block_ids, make_manager, make_request, table

ASSETS = Path(__file__).parent / "assets"
PICTURE = ASSETS / "eviction_order.svg"
POLICIES_PICTURE = ASSETS / "eviction_policies.svg"

STYLE = """
    text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2933 }
    .id { font-weight: 600; text-anchor: middle }
    .owner { font-size: 11px; text-anchor: middle; fill: #52606d }
    .end { font-size: 12px; fill: #52606d }
    rect { stroke: #627d98; fill: #ffffff }
    .cached { fill: #d9e8f5 }
    .unhashed { stroke-dasharray: 4 3 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e4e7eb }
      .owner, .end { fill: #9fb3c8 }
      rect { stroke: #9fb3c8; fill: #0f1720 }
      .cached { fill: #23425c }
    }"""


@dataclass(frozen=True)
class Row:
    """The queue after a step.

    Args:
        what: What happened.
        blocks: The free blocks, next victim first: id, whose tokens it holds ("" for nobody's), whether it can be hit.
    """

    what: str
    blocks: list[tuple[int, str, bool]]


def rows() -> list[Row]:
    """The example, step by step."""
    manager = make_manager(7)
    last_owner: dict[int, str] = {}
    drawn = []

    def draw(what: str) -> None:
        blocks = manager.block_pool.blocks
        free = free_block_ids(manager)
        drawn.append(Row(what, [(i, last_owner.get(i, ""), blocks[i].block_hash is not None) for i in free]))

    def run(name: str, tokens: list[int]) -> Request:
        request = make_request(name, tokens, manager)
        hits = admit(manager, request)
        last_owner.update(dict.fromkeys(manager.get_block_ids(name)[0][hits // 4 :], name))
        return request

    draw("nothing has run")
    a = run("a", [*range(100, 116)])
    free(manager, a)
    draw("a, four full blocks, is freed")
    b = run("b", [*range(100, 112), 200, 201, 202, 203])
    draw("b runs: it hits three blocks, and takes 5")
    c = run("c", [*range(300, 308)])
    draw("c runs: it takes 6 and 4, the tail of a")
    free(manager, b, c)
    draw("b and c are freed")
    d = run("d", [*range(400, 406)])
    free(manager, d)
    draw("d, a full block and a partly filled one, is freed")
    return drawn


POLICIES_TITLE = "The queue of free blocks after the same requests, under each policy"
POLICIES: dict[str, PolicyChoice] = {
    "lru: b was released before a came again": "lru",
    "fifo: a was filled first": "fifo",
    "lfu: a was hit": "lfu",
    "slru: a was hit, hence protected": "slru",
    "priority: b is the urgent one": "priority",
    "tlru: the last block of each prompt first": lambda: TailAwareLRU(1),
    "adaptive: as lru, until others do better": "adaptive",
}


def policy_rows() -> list[Row]:
    """The queue after the same requests under each policy: a, b with a higher priority, a again, and c."""
    drawn = []
    for what, policy in POLICIES.items():
        manager = make_manager(9, eviction_policy=policy)
        owner: dict[int, str] = {}
        for name, tokens, priority in (
            ("a", [*range(8), 1], 0),
            ("b", [*range(50, 58)], -1),
            ("a", [*range(8), 1], 0),
            ("c", [*range(100, 112)], 0),
        ):
            request = make_request(name, tokens, manager, priority=priority)
            hits = admit(manager, request)
            owner.update(dict.fromkeys(table(manager, request)[hits // 4 :], name))
            manager.free(request)
        blocks = manager.block_pool.blocks
        free = free_block_ids(manager)
        drawn.append(Row(what, [(i, owner.get(i, ""), blocks[i].block_hash is not None) for i in free]))
    return drawn


def free(manager: KVCacheManager, *requests: Request) -> None:
    for request in requests:
        manager.free(request)


def svg(drawn: list[Row], title: str = "The queue of free blocks, step by step") -> str:
    """The rows as a picture, with a description for those who do not see it."""
    width = 352 + 68 * max(len(row.blocks) for row in drawn)
    described = "; ".join(f"{row.what}: {', '.join(str(block[0]) for block in row.blocks)}" for row in drawn)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {64 * len(drawn) + 40}" role="img" '
        'aria-labelledby="t d">',
        f'  <title id="t">{escape(title)}</title>',
        f'  <desc id="d">Free blocks, the next to be overwritten first. {escape(described)}.</desc>',
        f"  <style>{STYLE}\n  </style>",
        '  <text class="end" x="340" y="18">overwritten next</text>',
    ]
    for number, row in enumerate(drawn):
        top = 30 + 64 * number
        parts.append(f'  <text x="8" y="{top + 27}">{escape(row.what)}</text>')
        for place, (block_id, owner, is_cached) in enumerate(row.blocks):
            left = 340 + 68 * place
            kind = "cached" if is_cached else "unhashed"
            parts.append(f'  <rect class="{kind}" x="{left}" y="{top}" width="58" height="44" rx="5"/>')
            parts.append(f'  <text class="id" x="{left + 29}" y="{top + 20}">{block_id}</text>')
            label = f"of {owner}" if is_cached else "no hash"
            parts.append(f'  <text class="owner" x="{left + 29}" y="{top + 36}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(svg(rows()), "utf-8")
    POLICIES_PICTURE.write_text(svg(policy_rows(), POLICIES_TITLE), "utf-8")
