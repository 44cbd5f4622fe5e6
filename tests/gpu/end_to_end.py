"""Random models through the engine beside transformers: the same greedy tokens in float32, as exact in bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from transformers import PreTrainedModel

from runner import Engine, EngineConfig, RequestOutput, SamplingParams
from runner.attention import make_backend
from tests.gpu.refusing import refusing
from tests.gpu.work import Measurement, Record, Settings
from tests.runner.small_models import VOCABULARY, generated_by_transformers, random_prompts, small_model

ARCHITECTURES = ("llama", "gemma3-hybrid", "gemma2-softcap", "gpt-oss-sinks")
SMALL_ARCHITECTURES = ("llama", "gemma3-hybrid")
"""Full attention first, then hybrids with windows."""

HEAD_SIZE = 64

TIMES_AS_FAR = 2.0
"""The engine in bfloat16 may be this many times as far from float32 as transformers in bfloat16 is."""


@dataclass(frozen=True)
class Size:
    """How much is generated.

    Args:
        prompts: Lengths of the prompts in tokens, the first ones of which they share.
        shared: So many.
        max_tokens: New tokens of each.
    """

    prompts: tuple[int, ...]
    shared: int
    max_tokens: int


SIZE = Size((3, 24, 57, 130, 131, 600), 40, 24)
SMALL_SIZE = Size((3, 27), 20, 3)


Check = Callable[[Settings, str, str, bool], Record]
"""What is compared: of an architecture, with a backend, without CUDA graphs or with them."""


def size_of(settings: Settings) -> Size:
    """How much to generate."""
    return SMALL_SIZE if settings.tiny else SIZE


def measurements(settings: Settings) -> list[Measurement]:
    """For each model, backend and element type, without CUDA graphs and, where the backend can, with them."""
    found = []
    for architecture in SMALL_ARCHITECTURES if settings.tiny else ARCHITECTURES:
        for name in settings.backends:
            for dtype, check in (("float32", _check_tokens), ("bfloat16", _check_likelihoods)):
                if not settings.is_timed and name == "triton" and dtype == "bfloat16":
                    continue  # the interpreter's bfloat16 product is wrong
                for with_graphs in (False, True):
                    if with_graphs and not (settings.is_timed and make_backend(name, "cuda").supports_graphs):
                        continue
                    title = f"{architecture}, {dtype}, {name}{', CUDA graphs' if with_graphs else ''}"
                    found.append(
                        Measurement(title, partial(_measure, settings, architecture, name, with_graphs, check))
                    )
    return found


@refusing
def _measure(settings: Settings, architecture: str, name: str, with_graphs: bool, check: Check) -> Record:
    record = {"model": architecture, "backend": name, "graphs": with_graphs}
    return record | check(settings, architecture, name, with_graphs)


def _check_tokens(settings: Settings, architecture: str, name: str, with_graphs: bool) -> Record:
    """Greedy tokens in float32, one prompt after another and all at once."""
    expected = _expected(architecture, size_of(settings))
    outputs, graphs = _generate(settings, _model(architecture), name, with_graphs)
    same = sum(output.token_ids == tokens for output, tokens in zip(outputs, expected, strict=True))
    return {
        "dtype": "float32",
        "status": "ok" if same == len(expected) else "failed",
        "same": same,
        "of": len(expected),
        "note": f"{same} of {len(expected)} outputs have the same tokens{graphs}",
    }


def _check_likelihoods(settings: Settings, architecture: str, name: str, with_graphs: bool) -> Record:
    """Log-probabilities of all tokens after each generated one, in bfloat16.

    Those of transformers in float32 with the same weights, for the same tokens, are what they should be; those of
    transformers in bfloat16 say what rounding costs.
    """
    model = _model(architecture).bfloat16()
    outputs, graphs = _generate(settings, model, name, with_graphs)
    likelihoods = torch.cat([_likelihoods(output) for output in outputs])  # [N, vocabulary]
    sequences = [(output.prompt_token_ids, output.token_ids) for output in outputs]
    exact = _by_transformers(copy.deepcopy(model).float().to("cpu"), sequences)
    rounded = _by_transformers(model, sequences)
    own, theirs = (float((found - exact).norm() / exact.norm()) for found in (likelihoods, rounded))
    return {
        "dtype": "bfloat16",
        "status": "ok" if own <= TIMES_AS_FAR * theirs else "failed",
        "error": own,
        "error_of_transformers": theirs,
        "note": f"log-probabilities are {own:.1e} from float32, those of transformers {theirs:.1e}{graphs}",
    }


def _model(architecture: str) -> PreTrainedModel:
    return small_model(architecture, head_dim=HEAD_SIZE)


@cache
def _expected(architecture: str, size: Size) -> list[list[int]]:
    """What transformers generates, on the CPU."""
    return generated_by_transformers(_model(architecture), _prompts(size), size.max_tokens)


def _prompts(size: Size) -> list[list[int]]:
    return random_prompts(list(size.prompts), shared=size.shared)


def _generate(
    settings: Settings, model: PreTrainedModel, name: str, with_graphs: bool
) -> tuple[list[RequestOutput], str]:
    """What the engine generates for all prompts at once, and what it says of CUDA graphs if they were asked for."""
    size = size_of(settings)
    engine = Engine(
        model.to(settings.device),
        None,
        EngineConfig(
            attention_backend=name,
            cuda_graphs=None if with_graphs else False,
            # Room for all, with the longest pages, and few sizes to capture.
            kv_cache_memory=64 << 20,
            max_model_len=1024,
            max_num_batched_tokens=256,
            max_num_seqs=8,
        ),
    )
    params = SamplingParams(max_tokens=size.max_tokens, ignore_eos=True, logprobs=VOCABULARY)
    outputs = engine.generate(_prompts(size), params)
    if with_graphs and engine.model_runner.graphs is None:
        return outputs, f"; without graphs: {engine.model_runner.no_graphs_because}"
    return outputs, ""


def _likelihoods(output: RequestOutput) -> torch.Tensor:
    """``[tokens, vocabulary]``, in float64."""
    assert output.logprobs is not None
    return torch.tensor(
        [[entry.likeliest[token] for token in range(VOCABULARY)] for entry in output.logprobs], dtype=torch.float64
    )


@torch.inference_mode()
def _by_transformers(model: PreTrainedModel, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> torch.Tensor:
    """``[N, vocabulary]``, in float64 on the CPU: the same for prompts and what followed them, in one forward each."""
    model.set_attn_implementation("eager")
    found = []
    for prompt, tokens in sequences:
        ids = torch.tensor([[*prompt, *tokens]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]  # [tokens, vocabulary]
        found.append(logits.double().cpu().log_softmax(-1))
    return torch.cat(found)
