"""``import kvcore`` brings in two small packages and nothing else."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

LIST_TOP_LEVEL_MODULES = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


def modules_after(statement: str) -> set[str]:
    """Names of the top-level modules a fresh interpreter has loaded after ``statement``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{LIST_TOP_LEVEL_MODULES}"], check=True, capture_output=True, text=True
    )
    return set(json.loads(done.stdout))


def third_party(modules: set[str]) -> set[str]:
    return {name for name in modules if name not in sys.stdlib_module_names and not name.startswith("__")}


def test_importing_kvcore_loads_only_xxhash_and_cbor2_beside_the_standard_library() -> None:
    # What an empty interpreter loads (path hooks of editable installs, coverage) is not the package's doing.
    loaded = third_party(modules_after("import kvcore")) - modules_after("pass")
    assert "kvcore" in loaded
    # cbor2 keeps its compiled half in a module of its own.
    assert loaded - {"kvcore", "xxhash", "cbor2", "_cbor2"} == set()


def test_only_the_block_tables_for_runners_need_numpy_and_no_module_needs_torch_or_transformers() -> None:
    import_all_but_block_table = "import importlib, pkgutil, kvcore\n" + (
        "for module in pkgutil.walk_packages(kvcore.__path__, 'kvcore.'):\n"
        "    if module.name not in ('kvcore.__main__', 'kvcore.block_table'):\n"
        "        importlib.import_module(module.name)"
    )
    assert modules_after(import_all_but_block_table).isdisjoint({"torch", "numpy", "transformers"})
    assert modules_after("import kvcore.block_table").isdisjoint({"torch", "transformers"})


@pytest.mark.parametrize("package", ["kvcore", "runner"])
def test_a_package_is_marked_as_typed(package: str) -> None:
    spec = importlib.util.find_spec(package)  # found, not imported: the runner needs torch
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).with_name("py.typed").is_file()
