"""Runs the workloads on vLLM's KV cache manager, in an environment made by setup_peer.sh; prints one JSON object."""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Sequence
from typing import Any

from tests.bench import suite
from tests.bench.workloads import BLOCK_SIZE, WINDOW, Groups

MAX_MODEL_LEN = 1 << 21

LEFT_OUT = frozenset({"uvloop", "xgrammar"})
"""Packages that vLLM imports on the way to its KV cache manager, which makes no use of them."""


class HollowModule(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        hollow = type(name, (), {})
        setattr(self, name, hollow)
        return hollow


class HollowImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the packages of :data:`LEFT_OUT`, wherever they are not installed, as hollow modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in LEFT_OUT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return HollowModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class VllmAdapter:
    """vLLM's manager with the given hash.

    Args:
        hash_algorithm: A name that vLLM's ``prefix_caching_hash_algo`` knows.
    """

    name = "vLLM"
    compiled = False

    def __init__(self, hash_algorithm: str = "sha256") -> None:
        sys.meta_path.append(HollowImporter())
        logging.disable(logging.WARNING)
        import torch
        import vllm
        from vllm.sampling_params import SamplingParams
        from vllm.utils import hashing
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.request import Request

        self.version = vllm.__version__
        self.hash_algorithm = hash_algorithm
        hash_function = getattr(hashing, hash_algorithm)
        kv_cache_utils.init_none_hash(hash_function)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, hash_function)
        self._sampling_params = SamplingParams(max_tokens=MAX_MODEL_LEN)
        self._spec = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        self._interface = kv_cache_interface
        self._manager_class = KVCacheManager
        self._request_class = Request

    def make_manager(self, groups: Groups, num_blocks: int) -> Any:
        interface = self._interface
        full = interface.FullAttentionSpec(**self._spec)
        window = interface.SlidingWindowSpec(**self._spec, sliding_window=WINDOW)
        specs = [full] * groups.num_full + [window] * groups.num_windows
        config = interface.KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec([f"layer-{i}"], spec) for i, spec in enumerate(specs)],
        )
        return self._manager_class(
            config, max_model_len=MAX_MODEL_LEN, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE
        )

    def make_request(self, request_id: str, token_ids: list[int]) -> Any:
        return self._request_class(request_id, token_ids, self._sampling_params, None, block_hasher=self._hasher)

    def look_up(self, manager: Any, request: Any) -> tuple[Any, int]:
        blocks, num_hit_tokens, *_ = manager.get_computed_blocks(request)
        return blocks, num_hit_tokens


def make_adapter(args: argparse.Namespace) -> VllmAdapter:
    return VllmAdapter(args.hash)


def main() -> None:
    parser = suite.argument_parser(__doc__)
    algorithms = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
    parser.add_argument("--hash", choices=algorithms, default="sha256", help="hash algorithm; sha256 is vLLM's default")
    suite.run(parser.parse_args(), make_adapter)


if __name__ == "__main__":
    main()
