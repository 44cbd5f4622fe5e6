"""A model, its cache, and what runs a step through both."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from kvcore.spec import KVCacheConfig, KVCacheSpec
from runner.attention.base import AttentionBackend
from runner.batch import SequenceSlice, make_batch
from runner.hf_attention import BoundLayer, PagedStep
from runner.kv_cache import allocate_kv_cache
from runner.layers import attention_layers


class ModelRunner:
    """Runs steps.

    Args:
        model: Loaded with ``attn_implementation="kvcore_paged"``, in inference mode, on its device.
        specs: What each of its layers caches, by name.
        kv_cache_config: Where, planned for these specs.
        backend: What computes attention.

    Attributes:
        kv_caches: Each layer's cache, by name.

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
    ) -> None:
        self.model = model
        self.kv_cache_config = kv_cache_config
        self.backend = backend
        layers = attention_layers(model, specs)
        backend.check(list(layers.values()), device=model.device, dtype=model.dtype)
        self.kv_caches = allocate_kv_cache(kv_cache_config, model.device)
        group_of = {name: i for i, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
        self._layers = {
            layer_idx: BoundLayer(group_of[layer.name], self.kv_caches[layer.name])
            for layer_idx, layer in layers.items()
        }
        self._model_selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def execute(self, sequences: Sequence[SequenceSlice]) -> torch.Tensor:
        """Compute a step: the cache then holds the keys and values of all its tokens.

        Returns:
            ``[S, vocabulary]``, float32, on the model's device: the logits after the last token of each of the S
            sequences that sample, in their order.
        """
        batch = make_batch(sequences, self.kv_cache_config.kv_cache_groups, self.model.device)
        step = PagedStep(self.backend, [self.backend.plan(group) for group in batch.groups], self._layers)
        selection = {"logits_to_keep": batch.logits_indices} if self._model_selects_logits else {}
        logits = self.model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, paged_step=step, **selection
        ).logits[0]  # [S or T, vocabulary]
        return (logits if self._model_selects_logits else logits[batch.logits_indices]).float()
