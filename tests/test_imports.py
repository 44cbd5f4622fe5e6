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


NEEDS = {
    "kvcore.block_table": ("numpy", "runner"),
    "kvcore.event_encoding": ("msgspec", "events"),
    "kvcore.event_publisher": ("zmq", "events"),
    "kvcore.event_subscriber": ("zmq", "events"),
    "kvcore.prometheus": ("prometheus_client", "metrics"),
}
"""Modules that need more than the package does: what, and the extra that brings it."""

OPTIONAL = {"torch", "numpy", "transformers", "msgspec", "zmq", "prometheus_client"}


def test_no_module_needs_more_than_the_package_but_those_that_say_so() -> None:
    import_the_others = "import importlib, pkgutil, kvcore\n" + (
        "for module in pkgutil.walk_packages(kvcore.__path__, 'kvcore.'):\n"
        f"    if module.name not in {['kvcore.__main__', *NEEDS]}:\n"
        "        importlib.import_module(module.name)"
    )
    assert modules_after(import_the_others).isdisjoint(OPTIONAL)
    for module in NEEDS:
        assert modules_after(f"import {module}").isdisjoint({"torch", "transformers"})


@pytest.mark.parametrize("module", [module for module, (_, extra) in NEEDS.items() if extra != "runner"])
def test_a_module_that_needs_what_is_not_installed_names_the_extra(module: str) -> None:
    package, extra = NEEDS[module]
    statement = f"import sys; sys.modules[{package!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"pip install 'kvcore[{extra}]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("package", ["kvcore", "runner"])
def test_a_package_is_marked_as_typed(package: str) -> None:
    spec = importlib.util.find_spec(package)  # found, not imported: the runner needs torch
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).with_name("py.typed").is_file()
