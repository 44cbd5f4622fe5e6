"""Makes Markdown of what our docstrings have in common with reStructuredText.

Roles (``:class:`BlockPool```) become links of the reference, and a ``::`` before an indented block becomes a colon.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([\w.]+)`")
LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)


class CrossReferences(griffe.Extension):
    """Loaded by mkdocs.yml; runs once a package has been read."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self._rewrite(pkg)

    def _rewrite(self, obj: griffe.Object) -> None:
        if obj.docstring is not None:
            text = LITERAL_BLOCK.sub(":", obj.docstring.value)
            obj.docstring.value = ROLE.sub(lambda match: self._link(obj, match[1]), text)
        for member in obj.members.values():
            if not member.is_alias:
                self._rewrite(member)

    def _link(self, obj: griffe.Object, name: str) -> str:
        try:
            return f"[`{name}`][{obj.resolve(name)}]"
        except griffe.NameResolutionError:
            return f"`{name}`"
