"""Snapshots as one web page: the pool as a grid, block tables, the queue, the prefix tree, and a slider over the steps.

The page is a file on its own. It loads nothing, and its security policy forbids it to: only its own script and style,
known by their hashes, are let run, so that nothing in a request id can. It can be used with the keyboard and with a
screen reader, in light and dark.

A pool of up to 1,024 blocks has a cell for each block. In a larger one a cell stands for several in a row (98 where
there are 100,000) and shows which share of them is held and cached; the blocks of the chosen cell are listed below the
grid. Block ids are written as runs, so that the page of a large pool stays small as long as its blocks lie in runs.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from kvcore.errors import ConfigError
from kvcore.id_runs import to_runs
from kvcore.snapshot import Snapshot

_SCRIPTS = ("decode.js", "pool.js", "lists.js", "main.js")
"""In the order in which they need each other."""

_NO_NODE = -1
_UNKNOWN = -2


def snapshots_to_html(snapshots: Sequence[Snapshot], *, title: str = "KV cache") -> str:
    """The page, as text to write to a file.

    Args:
        snapshots: Steps of one pool, oldest first; one at least. Taken with ``previous``, so that the tree knows the
            prefixes of requests that are gone.
        title: What the page is called.

    Raises:
        ConfigError: No snapshots, or of pools of different sizes.
    """
    if not snapshots:
        raise ConfigError("a page needs at least one snapshot: pass what manager.snapshot() returned")
    if len({(len(snapshot.blocks), snapshot.groups) for snapshot in snapshots}) > 1:
        raise ConfigError("the snapshots of a page must be of one pool: these differ in their blocks or groups")
    style = _asset("page.css")
    script = "\n".join(map(_asset, _SCRIPTS))
    policy = (
        f"default-src 'none'; style-src '{_source_hash(style)}'; script-src '{_source_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(title.encode("utf-8", "replace").decode()),
        "style": style,
        "data": _json_for_script(_page_data(snapshots)),
        "script": script,
    }
    # In one pass: what is put in is not looked at again, whatever it holds.
    return re.sub(r"\{(policy|title|style|data|script)\}", lambda match: parts[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (files("kvcore") / "page" / name).read_text("utf-8")


def _source_hash(text: str) -> str:
    """How a content security policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json_for_script(values: Any) -> str:
    """JSON that cannot end the element it stands in, whatever its strings hold."""
    text = json.dumps(values, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class _Numbers:
    """Numbers things in the order in which they are first met."""

    def __init__(self) -> None:
        self.of: dict[Any, int] = {}

    def __call__(self, thing: Any) -> int:
        return self.of.setdefault(thing, len(self.of))


def _page_data(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """What ``page/decode.js`` reads: requests and prefixes by number, lists of blocks as runs."""
    first = snapshots[0]
    request_number, node_number = _Numbers(), _Numbers()
    nodes: dict[int, tuple[int, int, tuple[int, str] | None]] = {}
    steps = []
    for snapshot in snapshots:
        registered = [block for block in snapshot.blocks if block.prefix_hash is not None]
        numbers = []
        for block in registered:
            number = node_number((block.group_id, block.prefix_hash))
            numbers.append(number)
            if number not in nodes or nodes[number][1] < 0:
                position = _UNKNOWN if block.position is None else block.position
                parent = None if block.parent_hash is None else (block.group_id or 0, block.parent_hash)
                nodes[number] = (block.group_id or 0, position, parent)
        in_tables = snapshot.holders
        steps.append(
            {
                "label": snapshot.label,
                "queue": to_runs(snapshot.queue),
                "registered": to_runs([block.block_id for block in registered]),
                "nodes": to_runs(numbers),
                "duplicates": to_runs([block.block_id for block in registered if block.duplicate]),
                "pinned": to_runs([block.block_id for block in snapshot.blocks if block.num_pins]),
                "references": [
                    [block.block_id, block.ref_cnt]
                    for block in snapshot.blocks
                    if block.ref_cnt != len(in_tables.get(block.block_id, ()))
                ],
                "requests": [
                    [
                        request_number(request.request_id),
                        request.num_tokens,
                        request.num_computed_tokens,
                        [to_runs(table) for table in request.tables],
                    ]
                    for request in snapshot.requests
                ],
            }
        )
    return {
        "num_blocks": len(first.blocks),
        "enable_caching": first.enable_caching,
        "groups": [{"block_size": group.block_size, "text": str(group)} for group in first.groups],
        "requests": list(request_number.of),
        "nodes": {
            "group": [nodes[number][0] for number in range(len(nodes))],
            "position": [nodes[number][1] for number in range(len(nodes))],
            "parent": [
                _NO_NODE if (parent := nodes[number][2]) is None else node_number.of.get(parent, _NO_NODE)
                for number in range(len(nodes))
            ],
        },
        "steps": steps,
    }
