"""The pool at one moment, as plain data: to look at, to compare, to write to a file and read back.

A snapshot holds no reference to the manager it was taken of, and no token: prefixes are known by their hashes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvcore.errors import FileFormatError
from kvcore.id_runs import from_runs, to_runs

FORMAT = 1
"""Written into every snapshot; a reader refuses what it does not know."""

STATES = ("null", "shared", "used", "cached", "empty")
"""What a block can be: the null block; held by several requests; held by one; free and still hittable; free and of no
use to anyone."""


@dataclass(frozen=True)
class BlockSnapshot:
    """One block.

    Attributes:
        block_id: Its id.
        ref_cnt: How many requests and pins hold it.
        prefix_hash: Hash of the prefix that ends with it, in hex, while it can be hit; else None.
        group_id: KV cache group that it serves; None while it is free and cannot be hit.
        position: Which block of its prefix it is, counted from 0; None where nobody knows: no request that has this
            prefix was there to tell.
        parent_hash: Hash of the prefix before it; None for the first block, and where it is not known.
        duplicate: Another block was registered under the same hash before, and is the one that lookups find.
        num_pins: How many pins hold it (:mod:`kvcore.residency`).
    """

    block_id: int
    ref_cnt: int = 0
    prefix_hash: str | None = None
    group_id: int | None = None
    position: int | None = None
    parent_hash: str | None = None
    duplicate: bool = False
    num_pins: int = 0

    @property
    def state(self) -> str:
        """One of :data:`STATES`."""
        if self.block_id == 0:
            return "null"
        if self.ref_cnt:
            return "shared" if self.ref_cnt > 1 else "used"
        return "cached" if self.prefix_hash is not None else "empty"


_DEFAULTS = vars(BlockSnapshot(-1))
"""Left out when a block is written."""


@dataclass(frozen=True)
class GroupSnapshot:
    """One KV cache group.

    Attributes:
        kind: ``full_attention``, ``sliding_window`` or ``chunked_local_attention``.
        block_size: Tokens per block.
        span: Tokens of the window or of the chunk; None for full attention.
        layer_names: Its layers.
    """

    kind: str
    block_size: int
    span: int | None
    layer_names: tuple[str, ...]

    def __str__(self) -> str:
        name = {"full_attention": "full attention", "sliding_window": "window", "chunked_local_attention": "chunks"}
        span = "" if self.span is None else f" of {self.span:,}"
        return f"{name.get(self.kind, self.kind)}{span}, {self.block_size} tokens a block"


@dataclass(frozen=True)
class RequestSnapshot:
    """One request that holds blocks.

    Attributes:
        request_id: Its id.
        num_tokens: Tokens known so far.
        num_computed_tokens: Tokens whose keys and values are in the cache.
        tables: Its block table in each group; 0 where a window has left.
    """

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SharedPrefix:
    """Leading blocks that several requests hold.

    Attributes:
        group_id: In which group.
        block_ids: The blocks, from the first one on, null blocks of a window left out.
        num_tokens: Tokens from the start of the requests to the end of the last of these blocks.
        request_ids: Who holds them.
    """

    group_id: int
    block_ids: tuple[int, ...]
    num_tokens: int
    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Snapshot:
    """A pool and its block tables at one moment.

    Attributes:
        label: What had just happened, in the words of whoever took it.
        groups: The KV cache groups.
        blocks: Every block, at the index of its id.
        queue: Ids of the free blocks, the next one to be overwritten first.
        requests: The requests that hold blocks, in the order in which they were admitted.
        enable_caching: Whether full blocks are registered for prefix hits.
        hash_block_size: Tokens per hash.
    """

    label: str
    groups: tuple[GroupSnapshot, ...]
    blocks: tuple[BlockSnapshot, ...] = field(repr=False)
    queue: tuple[int, ...] = field(repr=False)
    requests: tuple[RequestSnapshot, ...]
    enable_caching: bool = True
    hash_block_size: int = 1

    @property
    def usage(self) -> float:
        """Share of the pool that is held, from 0 to 1, the null block left out."""
        return 1.0 - len(self.queue) / (len(self.blocks) - 1)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Blocks in each of :data:`STATES`."""
        counted = Counter(block.state for block in self.blocks)
        return {state: counted[state] for state in STATES}

    @cached_property
    def holders(self) -> Mapping[int, tuple[str, ...]]:
        """For each block in a table, the requests that hold it."""
        holders: dict[int, list[str]] = {}
        for request in self.requests:
            for block_id in dict.fromkeys(i for table in request.tables for i in table if i):
                holders.setdefault(block_id, []).append(request.request_id)
        return {block_id: tuple(names) for block_id, names in holders.items()}

    @cached_property
    def queue_places(self) -> Mapping[int, int]:
        """For each free block, its place in the queue; the one at 0 is overwritten next."""
        return {block_id: place for place, block_id in enumerate(self.queue)}

    def shared_prefixes(self) -> list[SharedPrefix]:
        """The leading blocks that more than one request holds, the most tokens first.

        One entry for each set of requests: as far as these, and no others, go together. O(blocks in tables).
        """
        found = []
        for group_id, group in enumerate(self.groups):
            tables = [request.tables[group_id] for request in self.requests]
            together = [(0, [*range(len(tables))])] if tables else []
            while together:
                depth, members = together.pop()
                table = tables[members[0]]
                while depth < len(table):
                    going_on = [i for i in members if depth < len(tables[i]) and tables[i][depth] == table[depth]]
                    if len(going_on) < len(members):
                        break
                    depth += 1
                block_ids = tuple(block_id for block_id in table[:depth] if block_id)
                if len(members) > 1 and block_ids:
                    names = tuple(self.requests[i].request_id for i in members)
                    found.append(SharedPrefix(group_id, block_ids, depth * group.block_size, names))
                parts: dict[int, list[int]] = {}
                for i in members:
                    if depth < len(tables[i]):
                        parts.setdefault(tables[i][depth], []).append(i)
                together += [(depth, part) for part in parts.values() if len(part) > 1 and len(part) < len(members)]
        return sorted(found, key=lambda prefix: -prefix.num_tokens)

    def to_html(self, *, title: str = "KV cache") -> str:
        """This moment as a web page. See :func:`kvcore.snapshot_html.snapshots_to_html`, which takes several."""
        from kvcore.snapshot_html import snapshots_to_html

        return snapshots_to_html([self], title=title)

    def to_json(self) -> str:
        """One line of JSON. Free blocks that cannot be hit are left out: the queue names them."""
        return json.dumps(
            {
                "kvcore_snapshot": FORMAT,
                "label": self.label,
                "num_blocks": len(self.blocks),
                "enable_caching": self.enable_caching,
                "hash_block_size": self.hash_block_size,
                "groups": [asdict(group) for group in self.groups],
                "queue": to_runs(self.queue),
                "requests": [
                    {
                        "request_id": request.request_id,
                        "num_tokens": request.num_tokens,
                        "num_computed_tokens": request.num_computed_tokens,
                        "tables": [to_runs(table) for table in request.tables],
                    }
                    for request in self.requests
                ],
                "blocks": [
                    {name: value for name, value in vars(block).items() if value != _DEFAULTS.get(name)}
                    for block in self.blocks
                    if block.state not in ("null", "empty")
                ],
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """What :meth:`to_json` wrote.

        Raises:
            FileFormatError: It is no snapshot, or one of another format.
        """
        try:
            values = json.loads(text)
            if not isinstance(values, dict) or "kvcore_snapshot" not in values:
                raise FileFormatError('this is no snapshot: JSON with "kvcore_snapshot" is expected (Snapshot.to_json)')
            if values["kvcore_snapshot"] != FORMAT:
                raise FileFormatError(
                    f"this snapshot has format {values['kvcore_snapshot']!r}, this version of kvcore reads {FORMAT}"
                )
            return cls._from_values(values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, FileFormatError):
                raise
            raise FileFormatError(f"this snapshot cannot be read: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_values(cls, values: dict[str, Any]) -> Snapshot:
        num_blocks = values["num_blocks"]
        if num_blocks < 2:
            raise FileFormatError(f"a pool has two blocks at least, this snapshot says {num_blocks}")
        blocks = {block["block_id"]: BlockSnapshot(**block) for block in values["blocks"]}
        return cls(
            label=values["label"],
            groups=tuple(
                GroupSnapshot(**{**group, "layer_names": tuple(group["layer_names"])}) for group in values["groups"]
            ),
            blocks=tuple(blocks.get(block_id) or BlockSnapshot(block_id) for block_id in range(num_blocks)),
            queue=tuple(from_runs(values["queue"], num_blocks)),
            requests=tuple(
                RequestSnapshot(
                    **{**request, "tables": tuple(tuple(from_runs(table, num_blocks)) for table in request["tables"])}
                )
                for request in values["requests"]
            ),
            enable_caching=values["enable_caching"],
            hash_block_size=values["hash_block_size"],
        )


def save_snapshots(path: str | Path, snapshots: Iterable[Snapshot]) -> None:
    """Writes snapshots to a file, one line each."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(snapshot.to_json() + "\n" for snapshot in snapshots)


def load_snapshots(path: str | Path) -> list[Snapshot]:
    """The snapshots of a file, one at least.

    Raises:
        FileFormatError: The file cannot be read, is empty, or a line is no snapshot; the message names the line.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"cannot read {str(path)!r}: {error}") from error
    snapshots = []
    for number, line in enumerate(lines, 1):
        try:
            snapshots.append(Snapshot.from_json(line))
        except FileFormatError as error:
            raise FileFormatError(f"{str(path)!r}, line {number}: {error}") from error
    if not snapshots:
        raise FileFormatError(f"{str(path)!r} holds no snapshot")
    return snapshots
