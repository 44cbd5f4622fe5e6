"""Models are found by folder, file or name; a GGUF file is converted once, whoever else converts it at that time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner import Engine, ModelNotFoundError, SamplingParams
from runner.loader import cache_folder, converted_gguf, find_model
from tests.runner.small_models import small_model
from tests.runner.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_gguf_file_is_converted_once_and_kept_under_the_cache_home(gguf_file: Path, cache_home: Path) -> None:
    folder = converted_gguf(gguf_file)
    assert folder.parent == cache_home / "kvcore" == cache_folder()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert converted_gguf(gguf_file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert list(folder.parent.iterdir()) == [folder]


def test_a_changed_file_is_converted_anew(tmp_path: Path, cache_home: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    first = converted_gguf(file)
    write_tiny_gguf(file, pre_tokenizer="default")
    assert converted_gguf(file) != first


def test_a_converted_model_answers_like_the_file_in_transformers(gguf_file: Path, cache_home: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    engine = Engine.from_pretrained(gguf_file, num_blocks=50, device="cpu")
    prompt = engine.encode("ab and so on")
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=10, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :]
    assert output.token_ids == expected.tolist()
    assert engine.eos_token_ids == {2}


def test_digits_are_split_as_the_file_asks_and_the_chat_template_is_kept(gguf_file: Path, cache_home: Path) -> None:
    tokenizer = find_model(gguf_file).load_tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab\n\n12  3")["input_ids"]) == ["ab", "ĊĊ", "1", "2", "ĠĠ", "3"]
    assert tokenizer.eos_token == "<|im_end|>"
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>ab<|im_end|>"


@pytest.mark.slow
def test_two_processes_convert_one_file_at_once(gguf_file: Path, cache_home: Path) -> None:
    code = "import sys; from runner.loader import find_model; print(find_model(sys.argv[1]).path)"
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(gguf_file)],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    results = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    folders = {out.strip() for out, _ in results}
    assert len(folders) == 1
    assert [str(path) for path in cache_folder().iterdir()] == list(folders)


def test_a_folder_in_the_format_of_transformers_is_loaded_as_it_is(tmp_path: Path) -> None:
    model = small_model("qwen2")
    model.save_pretrained(tmp_path)
    source = find_model(tmp_path)
    assert source.path == str(tmp_path)
    assert source.config.model_type == "qwen2"


@pytest.mark.parametrize("name", ["/no/such/folder", "missing.gguf"])
def test_a_missing_model_is_said_to_be_missing(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no model at"):
        find_model(name)


def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"neither a folder with a config.json nor a name"):
        find_model(tmp_path)
