"""A model, its cache, and what runs a step through both."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcore.spec import KVCacheConfig, KVCacheSpec
from runner.attention.base import AttentionBackend
from runner.attention.torch_backend import TorchBackend
from runner.batch import Batch, SequenceSlice
from runner.decode_graphs import Capture, CudaCapture, DecodeGraphs, capture_sizes
from runner.errors import EngineConfigError, UnsupportedModelError
from runner.hf_attention import BoundLayer, PagedStep
from runner.kv_cache import allocate_kv_cache
from runner.layers import attention_layers
from runner.step_inputs import StepInputs


class ModelRunner:
    """Runs steps.

    Args:
        model: Loaded with ``attn_implementation="kvcore_paged"``, in inference mode, on its device.
        specs: What each of its layers caches, by name.
        kv_cache_config: Where, planned for these specs.
        backend: What computes attention.
        falls_back: Nobody asked for that backend: where it refuses the model, the torch backend computes.
        max_num_batched_tokens: Most tokens of a step.
        max_num_seqs: Most sequences of a step, and most requests that run.
        max_model_len: Longest sequence, in tokens.

    Attributes:
        backend: What computes attention.
        kv_caches: Each layer's cache, by name.
        graphs: Decode steps that are replayed; None: all steps are launched anew.
        no_graphs_because: Why ``graphs`` is None.

    Raises:
        UnsupportedModelError: A layer is not what its spec says, or the backend cannot compute it.
        EngineConfigError: The config has no tensors for a layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        specs: Mapping[str, KVCacheSpec],
        kv_cache_config: KVCacheConfig,
        backend: AttentionBackend,
        *,
        falls_back: bool = False,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.kv_cache_config = kv_cache_config
        layers = attention_layers(model, specs)
        try:
            backend.check(list(layers.values()), device=model.device, dtype=model.dtype)
        except UnsupportedModelError as refusal:
            if not falls_back:
                raise
            backend = TorchBackend(because=str(refusal))
        self.backend = backend
        self.kv_caches = allocate_kv_cache(kv_cache_config, model.device)
        group_of = {name: i for i, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
        self._layers = {
            layer_idx: BoundLayer(group_of[layer.name], self.kv_caches[layer.name])
            for layer_idx, layer in layers.items()
        }
        self._model_selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._max_num_seqs = max_num_seqs
        self._inputs = StepInputs(
            kv_cache_config,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            device=model.device,
        )
        self.graphs: DecodeGraphs | None = None
        self.no_graphs_because = "not asked for"

    def capture_graphs(self, *, required: bool = False, capture: Capture | None = None) -> None:
        """Capture decode steps in CUDA graphs, if model, backend and device let it; else note why not.

        Takes some tenths of a second a size, and memory for the largest step.

        Args:
            required: Whether they must.
            capture: What records them; None: CUDA graphs.

        Raises:
            EngineConfigError: They are required and cannot be had; says why.
        """
        if not self.backend.supports_graphs:
            self.no_graphs_because = f"what the {self.backend.name} backend does depends on the step"
        elif capture is None and self.model.device.type != "cuda":
            self.no_graphs_because = f"the model is on {self.model.device}, not on a CUDA device"
        else:
            capture = capture or CudaCapture(self.model.device)
            try:
                with self._on_device():
                    self.graphs = DecodeGraphs(self._inputs, self._forward, capture_sizes(self._max_num_seqs), capture)
                return
            except Exception as error:
                # A model that looks at values, memory that runs out, a kernel that does not compile: each says so in
                # its own way, and all of them run without.
                self.no_graphs_because = f"a decode step could not be captured ({type(error).__name__}: {error})"
        if required:
            raise EngineConfigError(f"cuda_graphs=True, but {self.no_graphs_because}: leave it out to run without")

    def forget(self, request_ids: Iterable[str]) -> None:
        """Let go of requests that run no more, finished or preempted. O(requests)."""
        self._inputs.forget(request_ids)

    def forget_all(self) -> None:
        """Let go of all requests. O(requests)."""
        self._inputs.forget_all()

    def execute(self, sequences: Sequence[SequenceSlice]) -> torch.Tensor:
        """Compute a step: the cache then holds the keys and values of all its tokens.

        Returns:
            ``[S, vocabulary]``, float32, on the model's device: the logits after the last token of each of the S
            sequences that sample, in their order; valid until the next step.
        """
        size = self.graphs.size_for(sequences) if self.graphs else None
        with self._on_device():
            if size is not None:
                return self.graphs.run(sequences, size)
            return self._forward(self._inputs.lay_out(sequences))

    def _on_device(self) -> AbstractContextManager[Any]:
        """Streams and events, and Triton's launches, are those of the current device, wherever the tensors are."""
        device = self.model.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    @torch.inference_mode()
    def _forward(self, batch: Batch) -> torch.Tensor:
        """The logits at ``batch.logits_indices``."""
        step = PagedStep(self.backend, [self.backend.plan(group) for group in batch.groups], self._layers)
        selection = {"logits_to_keep": batch.logits_indices} if self._model_selects_logits else {}
        logits = self.model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, paged_step=step, **selection
        ).logits[0]  # [S or T, vocabulary]
        return (logits if self._model_selects_logits else logits[batch.logits_indices]).float()
