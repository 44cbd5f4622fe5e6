"""Compiles ``kvcore/c`` into the wheel where build hooks are enabled (``make compiled``). The rest is mypyc's."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileC(BuildHookInterface):  # type: ignore[type-arg]
    """The wheel's build hook. hatchling finds it by its base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # Asked for in pyproject.toml, and there only once hatchling runs the hook.
        from setuptools import Distribution, Extension
        from setuptools.command.build_ext import build_ext

        self.out = TemporaryDirectory()
        sources = Path(self.root) / "kvcore" / "c"
        extension = Extension(
            "kvcore.packed_blocks", [str(sources / "packed_blocks.c")], depends=[str(sources / "xxh3.h")]
        )
        command = build_ext(Distribution({"ext_modules": [extension]}))
        command.build_lib, command.build_temp = f"{self.out.name}/lib", f"{self.out.name}/temp"
        command.ensure_finalized()
        command.run()
        for path in map(Path, command.get_outputs()):
            build_data["force_include"][str(path)] = f"kvcore/{path.name}"
        build_data["infer_tag"] = True
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.out.cleanup()
