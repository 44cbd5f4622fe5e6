"""How the native kernels come to be, and what they refuse. What they compute: the tests of those."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvcore.spec import FullAttentionSpec
from runner import Engine, EngineConfig, SamplingParams
from runner.attention import AttentionLayer, make_backend
from runner.attention.native_backend import NativeBackend
from runner.errors import EngineConfigError, RunnerError, UnsupportedModelError
from runner.native import build, kernels
from runner.native.build import NativeUnavailableError, compiled_kernels
from runner.native.kernels import SUFFIXES, Kernels, native_kernels
from tests.runner.small_models import random_prompts, small_model


@pytest.fixture(scope="module")
def native() -> Kernels:
    try:
        return native_kernels()
    except NativeUnavailableError as error:
        pytest.skip(f"no native kernels: {error}")


def tokens_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(prompts, SamplingParams(max_tokens=8))]


@pytest.fixture
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has asked for no kernels yet."""
    monkeypatch.setattr(kernels, "_load", kernels._load.__wrapped__)


def test_kernels_are_compiled_once_for_the_same_sources_compiler_and_cpu(
    native: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled_kernels(folder=tmp_path)
    written = first.stat().st_mtime_ns
    assert compiled_kernels(folder=tmp_path) == first
    assert first.stat().st_mtime_ns == written
    monkeypatch.setattr(build, "_cpu_flags", lambda: "flags: of another CPU")
    assert compiled_kernels(folder=tmp_path) != first
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} -DANYTHING")
    compiled_kernels(folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3  # nothing is left of their making


@pytest.mark.parametrize("length", [0, 100, 20_000])
def test_a_library_cut_short_is_made_anew(native: Kernels, length: int, tmp_path: Path) -> None:
    library = compiled_kernels(folder=tmp_path)
    os.truncate(library, length)
    assert compiled_kernels(folder=tmp_path).stat().st_size > 20_000
    Kernels(compiled_kernels(folder=tmp_path))


def test_room_that_could_not_be_had_is_asked_for_again(native: Kernels) -> None:
    room = kernels._Room()
    room.address_of(10)
    with pytest.raises(RuntimeError):
        room.address_of(10**15)
    address = room.address_of(1000)
    assert len(room.floats) >= 1000
    assert address == room.floats.data_ptr()


@pytest.mark.parametrize("compiler", ["", "  "])
def test_a_blank_cc_is_none(native: Kernels, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    expected = compiled_kernels(folder=tmp_path)
    monkeypatch.setenv("CC", compiler)
    assert compiled_kernels(folder=tmp_path) == expected


def test_openmp_is_that_of_torch_and_not_a_second_one(native: Kernels, tmp_path: Path) -> None:
    code = (
        "from runner.native.kernels import native_kernels; native_kernels()\n"
        "print(*{line.split(maxsplit=5)[5] for line in open('/proc/self/maps') if 'omp' in line}, sep='')"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    libraries = done.stdout.split()
    assert len(libraries) == 1, libraries
    assert libraries[0].startswith(str(Path(torch.__file__).parent))


def test_processes_that_start_together_all_load_whole_kernels(native: Kernels, tmp_path: Path) -> None:
    code = "from runner.native.kernels import native_kernels; native_kernels()"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(list((tmp_path / "kvcore" / "native").iterdir())) == 1


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "there is no C compiler no-such-compiler: install one"),
        ("false", r"false cannot compile them \(exit code 1\)"),
        ("true", "true says that it has compiled them, and has not"),
        ("cc -include no-such-header.h", r"cc cannot compile them \(.*no-such-header.h.*\)"),
        ("'cc", r"""CC="'cc" is no command \(No closing quotation\)"""),
    ],
)
@pytest.mark.usefixtures("_nothing_loaded")
def test_without_a_compiler_that_works_torch_computes_and_says_why(
    compiler: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform != "linux":
        pytest.skip("the kernels are for Linux")
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NativeUnavailableError, match=reason):
        native_kernels()
    assert not [*tmp_path.rglob("*.so"), *tmp_path.rglob(".making-*")]
    engine = Engine(small_model("llama"), config=EngineConfig(num_blocks=20))
    assert engine.model_runner.backend.name == "torch"
    assert "attention: torch (no native kernels: " in engine.describe()
    assert engine.packing.product in ("", "MKL")
    with pytest.raises(EngineConfigError, match=f"attention_backend='native' has no kernels here: {reason}"):
        make_backend("native")


@pytest.mark.usefixtures("_nothing_loaded")
def test_a_cache_folder_that_cannot_be_made_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("the kernels are for Linux")
    (tmp_path / "kvcore").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NativeUnavailableError, match=r"there is no folder to keep them in .* XDG_CACHE_HOME"):
        native_kernels()
    assert make_backend(None).name == "torch"


@pytest.mark.parametrize(
    ("head_size", "dtype", "device", "reason"),
    [
        (257, "float32", "cpu", "takes heads of up to 256 elements; this one has 257"),
        (64, "float16", "cpu", "computes in float32, bfloat16; the model is in float16"),
        (64, "float64", "cpu", "computes in float32, bfloat16; the model is in float64"),
        (64, "float32", "cuda", "computes on a CPU; the model is on cuda"),
    ],
)
def test_what_the_backend_cannot_compute_it_refuses_and_names_one_that_can(
    head_size: int, dtype: str, device: str, reason: str
) -> None:
    layer = AttentionLayer("layers.3", FullAttentionSpec(16, 2, head_size, dtype), 4)
    message = f"layer layers.3: the native backend {reason}. Use attention_backend='torch'"
    with pytest.raises(UnsupportedModelError, match=message):
        NativeBackend().check([layer], device=torch.device(device), dtype=getattr(torch, dtype))


def test_a_model_it_does_not_take_is_computed_by_torch_where_nobody_asked_for_it(native: Kernels) -> None:
    engine = Engine(small_model("llama").half(), config=EngineConfig(num_blocks=20))
    assert engine.model_runner.backend.name == "torch"
    assert "the native backend computes in float32, bfloat16; the model is in float16" in engine.describe()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torch_s_default_type_changes_nothing(native: Kernels, dtype: torch.dtype) -> None:
    model, prompts = small_model("qwen2"), random_prompts([3, 40, 90])
    expected = tokens_of(Engine(model, config=EngineConfig(num_blocks=100)), prompts)
    try:
        torch.set_default_dtype(dtype)
        assert tokens_of(Engine(model, config=EngineConfig(num_blocks=100)), prompts) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_under_autocast_the_step_is_refused_and_the_engine_goes_on(native: Kernels) -> None:
    model, prompts = small_model("llama"), random_prompts([3, 40])
    engine = Engine(model, config=EngineConfig(num_blocks=100))
    expected = tokens_of(engine, prompts)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RunnerError, match=r"outside of torch\.autocast"):
        tokens_of(engine, prompts)
    assert tokens_of(engine, prompts) == expected


@pytest.mark.parametrize("dtype", SUFFIXES)
def test_keys_and_values_go_to_their_slots_and_nowhere_else(native: Kernels, dtype: torch.dtype) -> None:
    num_tokens, num_heads, head_size, block_size = 5, 3, 7, 4
    # [T, heads, D] in the two orders in which models give them.
    key = torch.randn(num_heads, num_tokens, head_size).to(dtype).transpose(0, 1)
    value = torch.randn(num_tokens, num_heads, head_size).to(dtype)
    cache = torch.full((4, 2, block_size, num_heads, head_size), 5.0, dtype=dtype)
    expected = cache.clone()
    slots = torch.tensor([13, 4, -1, 7, 0])
    native.store(key, value, cache, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, 0, slot % block_size] = key[token]
            expected[slot // block_size, 1, slot % block_size] = value[token]
    assert torch.equal(cache, expected)
