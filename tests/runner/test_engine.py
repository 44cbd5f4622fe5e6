"""The engine's promises about outputs, streams, aborts and refusals, on a small random model with a byte tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from runner import (
    Engine,
    EngineConfig,
    EngineConfigError,
    RequestRefusedError,
    RunnerError,
    SamplingParams,
    SamplingParamsError,
)
from tests.runner.byte_model import byte_engine, byte_model
from tests.runner.byte_tokenizer import byte_tokenizer

TEXTS = ["What is a cache?", "Naïve café — 日本語 🎉", "What is a block?"]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return byte_model()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = byte_engine(num_blocks=100, block_size=8, max_num_batched_tokens=64)
    yield engine
    engine.manager.check_invariants()
    assert engine.manager.usage == 0
    assert not engine.has_unfinished_requests


def test_outputs_say_how_they_ended_and_what_was_found(engine: Engine) -> None:
    (first,) = engine.generate("x" * 40, SamplingParams(max_tokens=5))
    (second,) = engine.generate("x" * 40, SamplingParams(max_tokens=7))
    assert (first.finish_reason, len(first.token_ids), first.num_cached_tokens) == ("length", 5, 0)
    assert (second.finish_reason, len(second.token_ids), second.num_cached_tokens) == ("length", 7, 32)
    assert second.token_ids[:5] == first.token_ids
    assert second.finished
    assert second.metrics.time_to_first_token is not None
    assert second.metrics.seconds is not None
    assert 0 < second.metrics.time_to_first_token < second.metrics.seconds
    assert engine.num_computed_tokens == (40 + 4) + (8 + 6)


def test_text_token_ids_and_conversations_are_all_prompts(engine: Engine) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    prompts = ["<user>Hi<assistant>", engine.encode("<user>Hi<assistant>"), conversation]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=8))
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == 1
    assert len({output.text for output in outputs}) == 1
    for prompt in prompts:
        (alone,) = engine.generate(prompt, SamplingParams(max_tokens=8))
        assert alone.text == outputs[0].text


NO_PROMPTS: list[Any] = [None, 7, b"bytes", {"role": "user", "content": "Hi"}, [1, "two"], [None], [[1], {2: 3}],
                         torch.tensor(1), torch.tensor([1, 2])]  # fmt: skip


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=str)
def test_what_is_no_prompt_is_refused(engine: Engine, prompt: Any) -> None:
    for call in (engine.generate, engine.add_requests, engine.add_request):
        with pytest.raises(RunnerError, match="a prompt is text, whole numbers"):
            call(prompt)


def test_numbers_of_numpy_are_token_ids(engine: Engine) -> None:
    prompt = np.array([1, 2, 3])
    (one,) = engine.generate(prompt, SamplingParams(max_tokens=2))  # type: ignore[arg-type]
    (same,) = engine.generate([1, 2, 3], SamplingParams(max_tokens=2))
    assert (one.prompt_token_ids, one.token_ids) == ([1, 2, 3], same.token_ids)


def test_a_chat_template_that_fails_in_any_way_refuses_the_conversation(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for template in (
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content.nope() }}",
    ):
        monkeypatch.setattr(engine.tokenizer, "chat_template", template)
        with pytest.raises(RunnerError, match="chat template does not take this conversation"):
            engine.generate([{"role": "user", "content": "Hi"}])


def test_settings_for_sampling_have_a_class_of_their_own(engine: Engine) -> None:
    for call in (engine.generate, engine.add_requests, engine.add_request):
        with pytest.raises(SamplingParamsError, match=r"must be a SamplingParams, got \{'max_tokens': 5\}"):
            call("a", {"max_tokens": 5})


def test_generate_shows_a_bar_on_stderr_and_gives_the_same(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = engine.generate(TEXTS, SamplingParams(max_tokens=5, n=2, seed=1))
    assert capsys.readouterr() == ("", "")
    shown = engine.generate(TEXTS, SamplingParams(max_tokens=5, n=2, seed=1), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Answering" in err
    assert "100%" in err
    assert [output.token_ids for output in shown] == [output.token_ids for output in quiet]


def test_streamed_deltas_join_to_the_text_and_never_split_a_character(engine: Engine) -> None:
    params = SamplingParams(max_tokens=40)
    deltas = ["", "", ""]
    tokens_seen = [0, 0, 0]
    final = {}
    for output in engine.stream(TEXTS, params):
        deltas[output.index] += output.delta
        assert deltas[output.index] == output.text
        assert len(output.token_ids) == tokens_seen[output.index] + 1
        tokens_seen[output.index] += 1
        if output.finished:
            final[output.index] = output
    generated = engine.generate(TEXTS, params)
    for index, output in enumerate(generated):
        assert output.text == final[index].text == engine.tokenizer.decode(output.token_ids)
        # These are random bytes: not one of them may be lost or come twice.
        assert output.token_ids == final[index].token_ids


def test_a_stop_token_ends_the_output_and_is_not_part_of_its_text(engine: Engine) -> None:
    (free,) = engine.generate(TEXTS[0], SamplingParams(max_tokens=12))
    stop = free.token_ids[6]
    length = free.token_ids.index(stop) + 1
    (stopped,) = engine.generate(TEXTS[0], SamplingParams(max_tokens=12, stop_token_ids=[stop]))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[:length]
    assert stopped.text == engine.tokenizer.decode(free.token_ids[: length - 1])


def test_the_models_own_end_of_sequence_ends_the_output_unless_ignored(model: PreTrainedModel) -> None:
    model = copy.deepcopy(model)
    (free,) = Engine(model, config=EngineConfig(num_blocks=50)).generate([[1, 2, 3]], SamplingParams(max_tokens=12))
    model.generation_config.eos_token_id = [299, free.token_ids[4]]
    engine = Engine(model, config=EngineConfig(num_blocks=50))
    length = free.token_ids.index(free.token_ids[4]) + 1
    (ended,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=12))
    assert (ended.token_ids, ended.finish_reason) == (free.token_ids[:length], "stop")
    (ignoring,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert (ignoring.token_ids, ignoring.finish_reason) == (free.token_ids, "length")


def test_stop_strings_end_the_text_before_them_and_no_delta_goes_too_far(engine: Engine) -> None:
    (free,) = engine.generate(TEXTS[0], SamplingParams(max_tokens=40))
    # Two characters from the middle; they may come sooner, too.
    stop = next(free.text[i : i + 2] for i in range(8, 30) if "\ufffd" not in free.text[i : i + 2])
    expected = free.text[: free.text.index(stop)]
    params = SamplingParams(max_tokens=40, stop=["never there", stop])
    text = ""
    for output in engine.stream(TEXTS[0], params):
        text += output.delta
        assert output.text == text
        assert expected.startswith(text)
    assert text == expected
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == free.token_ids[: len(output.token_ids)]
    assert stop in engine.tokenizer.decode(output.token_ids)
    later = SamplingParams(max_tokens=40, stop=stop, min_tokens=len(output.token_ids) + 1)
    (late,) = engine.generate(TEXTS[0], later)
    assert late.text.startswith(expected + stop)


def test_an_end_of_sequence_comes_no_sooner_than_after_the_fewest_tokens(model: PreTrainedModel) -> None:
    model = copy.deepcopy(model)
    (free,) = Engine(model, config=EngineConfig(num_blocks=50)).generate([[1, 2, 3]], SamplingParams(max_tokens=12))
    model.generation_config.eos_token_id = free.token_ids[0]
    engine = Engine(model, config=EngineConfig(num_blocks=50))
    (soon,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=12))
    assert (soon.token_ids, soon.stop_reason) == (free.token_ids[:1], free.token_ids[0])
    (late,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=12, min_tokens=5))
    assert len(late.token_ids) >= 6 or late.finish_reason == "length"
    assert free.token_ids[0] not in late.token_ids[:5]


def test_a_seed_gives_the_same_answer_alone_in_any_batch_in_chunks_and_when_preempted(model: PreTrainedModel) -> None:
    prompts = [list(range(first, first + length)) for first, length in ((0, 20), (50, 33), (90, 41), (120, 7))]
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=11, presence_penalty=0.5)
    large = Engine(copy.deepcopy(model), config=EngineConfig(num_blocks=100))
    alone = [large.generate([prompt], params)[0].token_ids for prompt in prompts]
    assert len({tuple(tokens) for tokens in alone}) == len(prompts)
    assert [output.token_ids for output in large.generate(prompts, params)] == alone
    small = Engine(
        copy.deepcopy(model),
        config=EngineConfig(num_blocks=27, block_size=4, max_num_batched_tokens=16, max_num_seqs=8, growth_tokens=0),
    )
    assert [output.token_ids for output in small.generate(prompts, params)] == alone
    assert small.scheduler.num_preemptions > 0
    # Beside others that draw without a seed.
    small.add_request(prompts[1], SamplingParams(max_tokens=24, temperature=1.0), request_id="other")
    small.add_request(prompts[0], params, request_id="this")
    found = {}
    while small.has_unfinished_requests:
        found.update({output.request_id: output.token_ids for output in small.step() if output.finished})
    assert found["this"] == alone[0]


def test_several_answers_to_a_prompt_share_its_blocks_and_come_in_order(engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=4, n=3)
    outputs = engine.generate(["x" * 100, "y" * 70], params)
    assert [(output.index, output.choice) for output in outputs] == [(i, j) for i in range(2) for j in range(3)]
    assert len({tuple(output.token_ids) for output in outputs}) == 6
    assert [output.num_cached_tokens for output in outputs] == [0, 96, 96, 0, 64, 64]
    for choice in range(3):
        (alone,) = engine.generate("x" * 100, SamplingParams(max_tokens=10, temperature=1.0, seed=4 + choice))
        assert alone.token_ids == outputs[choice].token_ids


def test_log_probabilities_are_those_of_the_model(engine: Engine) -> None:
    (output,) = engine.generate(TEXTS[0], SamplingParams(max_tokens=8, logprobs=2))
    assert output.logprobs is not None
    plain = copy.deepcopy(engine.model_runner.model)
    plain.set_attn_implementation("eager")
    tokens = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
    with torch.inference_mode():
        expected = plain(tokens).logits[0, len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
    assert len(output.logprobs) == len(output.token_ids)
    for found, token, row in zip(output.logprobs, output.token_ids, expected, strict=True):
        assert (found.token_id, found.rank, len(found.likeliest)) == (token, 1, 2)
        assert found.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert list(found.likeliest.values()) == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
    (without,) = engine.generate(TEXTS[0], SamplingParams(max_tokens=8))
    assert without.logprobs is None


def test_the_most_urgent_request_runs_first(model: PreTrainedModel) -> None:
    engine = Engine(copy.deepcopy(model), config=EngineConfig(num_blocks=50, max_num_seqs=1))
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0)):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=3), request_id=name, priority=priority)
    finished = []
    while engine.has_unfinished_requests:
        finished += [output for output in engine.step() if output.finished]
    assert [output.request_id for output in finished] == ["c", "a", "d", "b"]
    waited = [output.metrics.time_waited for output in finished]
    assert None not in waited
    assert all(output.metrics.time_waited < output.metrics.time_to_first_token for output in finished)


def test_what_a_request_cannot_have_is_refused(model: PreTrainedModel) -> None:
    engine = Engine(copy.deepcopy(model), config=EngineConfig(num_blocks=50))
    with pytest.raises(RequestRefusedError, match="stop strings need a tokenizer"):
        engine.generate([[1, 2]], SamplingParams(stop="."))
    with pytest.raises(RequestRefusedError, match="a request has one answer, and n is 2: use add_requests"):
        engine.add_request([1, 2], SamplingParams(n=2))
    with pytest.raises(RequestRefusedError, match="priority must be a whole number, got 'high'"):
        engine.add_request([1, 2], priority="high")  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests


def test_an_aborted_request_gives_its_blocks_back_and_leaves_the_others_alone(engine: Engine) -> None:
    params = SamplingParams(max_tokens=10)
    expected = [output.token_ids for output in engine.generate(TEXTS, params)]
    ids = [engine.add_request(text, params) for text in TEXTS]
    for _ in range(3):
        engine.step()
    aborted = engine.abort(ids[1])
    assert (aborted.finish_reason, aborted.token_ids) == ("abort", expected[1][:3])
    late = engine.add_request(TEXTS[1], params)
    finished = {}
    while engine.has_unfinished_requests:
        finished.update({output.request_id: output.token_ids for output in engine.step() if output.finished})
    assert finished == {ids[0]: expected[0], ids[2]: expected[2], late: expected[1]}
    with pytest.raises(RunnerError, match="no unfinished request"):
        engine.abort(ids[1])


def test_a_request_may_be_aborted_before_it_was_ever_computed(engine: Engine) -> None:
    output = engine.abort(engine.add_request("never mind"))
    assert (output.finish_reason, output.token_ids, output.num_cached_tokens) == ("abort", [], 0)
    assert engine.step() == []


def test_leaving_a_stream_early_ends_all_of_its_requests(engine: Engine) -> None:
    for output in engine.stream(TEXTS, SamplingParams(max_tokens=30)):
        if len(output.token_ids) == 2:
            break
    assert not engine.has_unfinished_requests
    assert engine.manager.usage == 0


def test_generate_and_stream_want_the_engine_to_themselves(engine: Engine) -> None:
    request_id = engine.add_request("busy")
    with pytest.raises(RunnerError, match="1 requests are under way"):
        engine.generate("me too")
    engine.abort(request_id)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "the prompt is empty"),
        ([1] * 1000, 25, r"1,000 prompt tokens \+ 25 tokens of output = 1,025 tokens, more than max_model_len = 1,024"),
        ([1] * 900, 100, r"can need 125 of 8 tokens = 125 blocks, and the cache has 59"),
    ],
)
def test_what_can_never_run_is_refused_before_anything_starts(
    model: PreTrainedModel, prompt: list[int], max_tokens: int, message: str
) -> None:
    engine = Engine(copy.deepcopy(model), config=EngineConfig(num_blocks=60, block_size=8))
    with pytest.raises(RequestRefusedError, match=message):
        engine.generate([[1, 2, 3], prompt], SamplingParams(max_tokens=max_tokens))
    with pytest.raises(RequestRefusedError, match=message):
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens))
    assert not engine.has_unfinished_requests


def test_while_one_stream_is_read_nothing_else_is_begun(engine: Engine) -> None:
    first, second = (engine.stream(text, SamplingParams(max_tokens=5)) for text in TEXTS[:2])
    next(first)
    with pytest.raises(RunnerError, match="1 requests are under way"):
        next(second)
    with pytest.raises(RunnerError, match="generate or stream has the engine"):
        engine.add_request("me too")
    assert [output.index for output in first] == [0] * 4
    engine.abort(engine.add_request("now"))


def test_of_several_requests_all_are_added_or_none(engine: Engine) -> None:
    ids = engine.add_requests(["a", "b"], SamplingParams(n=2), request_id="mine")
    assert ids == ["mine-0", "mine-1", "mine-2", "mine-3"]
    for prompts, name in ((["c", ""], None), (["c", "d", "e"], "mine")):
        with pytest.raises(RequestRefusedError):
            engine.add_requests(prompts, request_id=name)
    for request_id in ids:
        engine.abort(request_id)
    assert not engine.has_unfinished_requests
    assert engine.add_requests("one", request_id="mine") == ["mine"]
    engine.abort("mine")


def test_a_request_id_may_be_used_again_but_not_twice_at_once(engine: Engine) -> None:
    engine.add_request("a", request_id="mine")
    with pytest.raises(RequestRefusedError, match="'mine' is in use"):
        engine.add_request("b", request_id="mine")
    engine.abort("mine")
    assert engine.add_request("c", request_id="mine") == "mine"
    engine.abort("mine")


def test_only_requests_with_the_same_salt_share_blocks(engine: Engine) -> None:
    found = []
    for salt in ["red", "blue", "red", None, None]:
        engine.add_request("y" * 40, SamplingParams(max_tokens=1), cache_salt=salt)
        (output,) = engine.step()
        found.append(output.num_cached_tokens)
    assert found == [0, 0, 32, 0, 32]


def test_after_a_step_that_failed_the_books_are_in_order_and_no_half_computed_block_is_ever_found(
    engine: Engine, model: PreTrainedModel
) -> None:
    params = SamplingParams(max_tokens=6)
    expected = [output.token_ids for output in engine.generate(TEXTS, params)]
    layer = engine.model_runner.model.model.layers[2]

    def fail(*args: object) -> None:
        raise MemoryError("on purpose")

    for text in TEXTS:
        engine.add_request(text, params)
    engine.step()
    hook = layer.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError, match="on purpose"):
        engine.step()
    hook.remove()
    assert not engine.has_unfinished_requests
    outputs = engine.generate(TEXTS, params)
    assert [output.token_ids for output in outputs] == expected
    assert outputs[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    "failing", ["schedule", "_schedule_running", "_enter", "take_released", "complete", "forget", "execute"]
)
@pytest.mark.parametrize("pinned", [False, True], ids=["nothing pinned", "a prefix pinned"])
def test_whatever_part_of_a_step_is_interrupted_nothing_is_leaked_or_found_that_was_not_computed(
    monkeypatch: pytest.MonkeyPatch, failing: str, pinned: bool
) -> None:
    engine = byte_engine()
    params = SamplingParams(max_tokens=4)
    expected = [output.token_ids for output in engine.generate(TEXTS, params)]
    # No more than come again: whatever keeps something of the interrupted ones has no room for them.
    engine = byte_engine(max_num_seqs=len(TEXTS))
    engine.generate("another prompt, that stays", params)
    pins = []
    if pinned:
        pins.append(
            engine.manager.residency.pin(engine.encode("another prompt, that stays"), block_hasher=engine.hasher)
        )
        assert pins[0].num_tokens

    def interrupted(*args: Any, **settings: Any) -> None:
        original(*args, **settings)
        raise KeyboardInterrupt

    for text in TEXTS:
        engine.add_request(text, params)
    with monkeypatch.context() as patch:
        owner = engine.scheduler if hasattr(engine.scheduler, failing) else engine.model_runner
        original = getattr(owner, failing)
        patch.setattr(owner, failing, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not engine.has_unfinished_requests
    engine.manager.check_invariants()
    outputs = engine.generate(TEXTS, params)
    assert [output.token_ids for output in outputs] == expected
    assert outputs[0].num_cached_tokens == 0
    for pin in pins:
        engine.manager.residency.unpin(pin)
    assert engine.manager.usage == 0


def test_a_tokenizer_that_fails_in_the_middle_leaves_the_books_in_order(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = engine.generate(TEXTS[0], SamplingParams(max_tokens=6))

    def fail(*args: object, **settings: object) -> str:
        raise OverflowError("on purpose")

    with monkeypatch.context() as patch:
        for text in TEXTS:
            engine.add_request(text, SamplingParams(max_tokens=6))
        patch.setattr(engine.tokenizer, "decode", fail)
        with pytest.raises(OverflowError, match="on purpose"):
            engine.step()
    assert not engine.has_unfinished_requests
    assert engine.generate(TEXTS[0], SamplingParams(max_tokens=6))[0].text == expected.text


def test_two_engines_share_one_model(model: PreTrainedModel) -> None:
    shared = copy.deepcopy(model)
    engines = [Engine(shared, config=EngineConfig(num_blocks=50, enable_caching=caching)) for caching in (False, True)]
    params = SamplingParams(max_tokens=8)
    (expected,) = engines[0].generate([[5, 6, 7]], params)
    for engine in engines:
        engine.add_request([5, 6, 7], params, request_id="r")
    outputs = [[], []]
    while any(engine.has_unfinished_requests for engine in engines):
        for engine, found in zip(engines, outputs, strict=True):
            found += [output.token_ids[-1] for output in engine.step()]
    assert outputs == [expected.token_ids, expected.token_ids]


def test_text_needs_a_tokenizer_and_token_ids_do_not(model: PreTrainedModel) -> None:
    engine = Engine(copy.deepcopy(model), config=EngineConfig(num_blocks=50))
    with pytest.raises(RunnerError, match="no tokenizer"):
        engine.generate("text")
    (output,) = engine.generate([1, 2, 3], SamplingParams(max_tokens=2))
    assert len(output.token_ids) == 2
    assert output.text == ""


def test_bfloat16_runs_and_keeps_its_cache_in_bfloat16(model: PreTrainedModel) -> None:
    engine = Engine(copy.deepcopy(model).bfloat16(), byte_tokenizer(), EngineConfig(num_blocks=100))
    assert {cache.dtype for cache in engine.model_runner.kv_caches.values()} == {torch.bfloat16}
    cold = engine.generate(TEXTS, SamplingParams(max_tokens=10))
    warm = engine.generate(TEXTS, SamplingParams(max_tokens=10))
    assert [output.token_ids for output in cold] == [output.token_ids for output in warm]
    assert engine.manager.usage == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size must be a whole number of at least 1, got 0"),
        ({"cuda_graphs": 0}, "cuda_graphs must be True, False or None, got 0"),
        ({"max_num_seqs": 3000}, "max_num_batched_tokens=2048 is less than max_num_seqs=3000"),
        ({"max_overtakes": -1}, "max_overtakes must be a whole number of at least 0, got -1"),
        ({"growth_tokens": 1.5}, "growth_tokens must be a whole number of at least 0, got 1.5"),
        ({"watermark": 1}, "watermark must be a share from 0 to below 1, got 1"),
        ({"num_blocks": 10, "kv_cache_memory": 10**9}, "either kv_cache_memory or num_blocks"),
        ({"max_model_len": 1025, "num_blocks": 10}, "max_model_len=1,025 is more than the 1,024 tokens"),
        ({"attention_backend": "magic", "num_blocks": 10}, "attention_backend must be one of torch"),
        (
            {"num_blocks": 10**12, "block_size": 8},
            r"the cache takes 7,4.* TiB and this machine has .* lower kv_cache_",
        ),
        ({"dtype": "float3"}, "dtype must be one of float32, bfloat16, float16, float64, or None; got 'float3'"),
        ({"eviction_policy": "lfuu"}, "eviction_policy must be one of adaptive, .* got 'lfuu'"),
        ({"window_retention": "tails"}, "window_retention must be one of ends, all; got 'tails'"),
        ({"attention_backend": ["torch"]}, r"attention_backend must be a name or None, got \['torch'\]"),
        ({"dtype": 16}, "dtype must be one of float32, bfloat16, float16, float64, or None; got 16"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    model: PreTrainedModel, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(EngineConfigError, match=message):
        Engine(copy.deepcopy(model), config=EngineConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["abacus", "cuda:99", "meta", 5.5])
def test_a_device_that_cannot_be_used_is_named_before_anything_is_loaded(device: Any) -> None:
    with pytest.raises(EngineConfigError, match=f"device {device!r} cannot be used"):
        Engine.from_pretrained("/nowhere", device=device)


@pytest.mark.parametrize(("backend", "message"), [("magic", "must be one of torch"), ("flash", "needs a CUDA device")])
def test_a_backend_that_cannot_be_had_is_named_before_anything_is_loaded(backend: str, message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        Engine.from_pretrained("/nowhere", device="cpu", attention_backend=backend)


def test_a_token_outside_the_vocabulary_is_refused_and_the_others_go_on(engine: Engine) -> None:
    vocabulary = engine.model_runner.model.get_input_embeddings().num_embeddings
    with pytest.raises(RequestRefusedError, match=f"from 0 to {vocabulary - 1:,}, got {vocabulary:,}"):
        engine.generate([[1, 2, 3], [1, vocabulary]])
    (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.token_ids) == 2
    assert engine.manager.usage == 0
