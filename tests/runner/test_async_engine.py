"""AsyncEngine's promises to the tasks that stream from it, on a small random model with a byte tokenizer."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from transformers import PreTrainedModel

from runner import (
    Engine,
    EngineConfig,
    EngineConfigError,
    RequestRefusedError,
    RunnerError,
    SamplingParams,
)
from runner.async_engine import AsyncEngine, EngineClosedError, EngineFullError, EngineStepError
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.small_models import small_model

LONG = SamplingParams(max_tokens=300)
SHORT = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = small_model("llama", seed=3, vocab_size=300)
    # Only bytes come out, no end of sequence.
    model.get_output_embeddings().weight.data[256:] = 0
    return model


@pytest.fixture
def engine(model: PreTrainedModel) -> Engine:
    return Engine(copy.deepcopy(model), byte_tokenizer(), EngineConfig(num_blocks=400, max_num_batched_tokens=256))


def serve(
    engine: Engine, scenario: Callable[[AsyncEngine], Coroutine[Any, Any, None]], *, max_queued_requests: int = 256
) -> None:
    """Run a scenario; after it nothing may be left, whatever it did with its streams."""

    async def run() -> None:
        async with AsyncEngine(engine, max_queued_requests=max_queued_requests) as served:
            await scenario(served)
            await until(lambda: served.stats.running + served.stats.waiting == 0)
        assert served.stats.usage == 0

    asyncio.run(asyncio.wait_for(run(), 60))
    engine.manager.check_invariants()
    assert engine.manager.usage == 0
    assert not engine.has_unfinished_requests


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_many_streams_at_once_say_what_the_engine_says_alone(engine: Engine) -> None:
    prompts = [f"Shared beginning of all prompts. Number {i}" for i in range(32)]
    expected = [output.text for output in engine.generate(prompts, SHORT)]

    async def scenario(served: AsyncEngine) -> None:
        async def collect(prompt: str) -> str:
            text = ""
            async for output in served.stream(prompt, SHORT):
                text += output.delta
                assert text == output.text
            assert output.finish_reason == "length"
            return text

        assert await asyncio.gather(*map(collect, prompts)) == expected
        stats = served.stats
        assert (stats.num_finished_requests, stats.num_generated_tokens) == (32, 32 * 12)
        assert stats.num_prompt_tokens == sum(len(prompt) for prompt in prompts)
        assert stats.num_cached_tokens == 32 * 32  # two blocks each, from the call before

    serve(engine, scenario)


def test_generate_gives_the_finished_output_and_counts_cached_tokens(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        first = await served.generate("x" * 40, SHORT)
        second = await served.generate("x" * 40, SHORT)
        salted = await served.generate("x" * 40, SHORT, cache_salt="mine")
        assert [output.num_cached_tokens for output in (first, second, salted)] == [0, 32, 0]
        assert first.text == second.text == salted.text
        assert first.finished

    serve(engine, scenario)


def test_a_loop_left_early_a_closed_stream_and_a_cancelled_task_abort_their_requests(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        async for output in served.stream("left early", LONG):
            if output.token_ids:
                break
        async with aclosing(served.stream("closed", LONG)) as stream:
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

        async def consume(pause: float) -> None:
            async for _ in served.stream("cancelled", LONG):
                await asyncio.sleep(pause)

        for pause in (0, 1000):  # cancelled while it waits for the engine; while it does something else
            task = asyncio.create_task(consume(pause))
            await until(lambda: served.stats.running == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: served.stats.running == 0)
        assert served.stats.num_finished_requests == 0

    serve(engine, scenario)


def test_a_task_cancelled_while_its_request_is_being_added_leaves_nothing(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        for turns in range(4):
            task = asyncio.create_task(served.generate("too late", LONG))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

    serve(engine, scenario)


def test_abort_ends_a_stream_with_the_output_it_returns(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        stream = served.stream("a", LONG, request_id="mine")
        await anext(stream)
        aborted = await served.abort("mine")
        outputs = [output async for output in stream]
        assert (outputs[-1].finish_reason, outputs[-1].token_ids) == ("abort", aborted.token_ids)
        with pytest.raises(RunnerError, match="no unfinished request 'mine'"):
            await served.abort("mine")

    serve(engine, scenario)


def test_a_refusal_reaches_its_own_caller_and_no_other(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        running = served.stream("a", SamplingParams(max_tokens=100), request_id="mine")
        await running.start()
        with pytest.raises(RequestRefusedError, match="in use by an unfinished request"):
            await served.generate("b", request_id="mine")
        with pytest.raises(RequestRefusedError, match="prompt is empty"):
            await served.generate("")
        with pytest.raises(RequestRefusedError, match="token 300; the model knows 0 to 299"):
            await served.generate([1, 300])
        with pytest.raises(RequestRefusedError, match="more than max_model_len"):
            await served.stream("c", SamplingParams(max_tokens=5000)).start()
        assert len([output async for output in running][-1].token_ids) == 100

    serve(engine, scenario)


def test_a_full_queue_is_refused_with_the_numbers_and_has_room_again_later(model: PreTrainedModel) -> None:
    engine = Engine(copy.deepcopy(model), byte_tokenizer(), EngineConfig(num_blocks=60, max_num_seqs=2))

    async def scenario(served: AsyncEngine) -> None:
        streams = [served.stream(f"{i}", LONG) for i in range(5)]
        for stream in streams[:4]:
            await stream.start()
        with pytest.raises(EngineFullError, match=r"max_queued_requests=2 may queue; try again later"):
            await streams[4].start()
        streams[0].close()
        await until(lambda: served.stats.waiting < 2)
        assert (await served.generate("later", SHORT)).finish_reason == "length"
        for stream in streams:
            stream.close()

    serve(engine, scenario, max_queued_requests=2)


def test_where_nobody_may_queue_as_many_are_taken_as_can_start(model: PreTrainedModel) -> None:
    engine = Engine(copy.deepcopy(model), byte_tokenizer(), EngineConfig(num_blocks=60, max_num_seqs=3))

    async def scenario(served: AsyncEngine) -> None:
        results = await asyncio.gather(*(served.generate("a", SHORT) for _ in range(5)), return_exceptions=True)
        assert [isinstance(result, EngineFullError) for result in results] == [False] * 3 + [True] * 2
        assert (await served.generate("a", SHORT)).finished

    serve(engine, scenario, max_queued_requests=0)


def test_a_step_that_fails_fails_every_stream_and_the_next_request_is_served(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(served: AsyncEngine) -> None:
        streams = [served.stream(text, LONG) for text in "abc"]
        for stream in streams:
            await stream.start()

        def fail(_: object) -> None:
            raise MemoryError("no room for activations")

        with monkeypatch.context() as patch:
            patch.setattr(engine.model_runner, "execute", fail)
            for stream in streams:
                with pytest.raises(EngineStepError, match=r"ended all 3 .* MemoryError: no room for act") as caught:
                    _ = [output async for output in stream]
                assert isinstance(caught.value.__cause__, MemoryError)
        assert (await served.generate("d", SHORT)).finish_reason == "length"

    serve(engine, scenario)


def test_an_engine_that_cannot_be_mended_says_so_to_everybody_and_still_closes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("books")

    async def run() -> None:
        async with AsyncEngine(engine) as served:
            stream = served.stream("a", LONG)
            await anext(stream)
            monkeypatch.setattr(engine.manager, "allocate_slots", fail)
            monkeypatch.setattr(engine.manager, "grow", fail)
            monkeypatch.setattr(engine, "abort", fail)
            with pytest.raises(EngineStepError, match="books"):
                _ = [output async for output in stream]
            assert served.closed_because is not None
            with pytest.raises(EngineClosedError, match="letting go of them failed too"):
                await served.generate("b")

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_slow_consumer_holds_up_nobody_and_misses_no_text(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        slow = served.stream("slow", SamplingParams(max_tokens=60))
        first = await anext(slow)
        await until(lambda: served.stats.num_finished_requests == 1)
        rest = [output async for output in slow]
        assert len(rest) == 1  # what was not taken has become one output
        assert first.delta + rest[0].delta == rest[0].text
        assert len(rest[0].token_ids) == 60

    serve(engine, scenario)


def test_closing_ends_what_is_under_way_and_refuses_what_comes_later(engine: Engine) -> None:
    async def run() -> None:
        served = AsyncEngine(engine)
        stream = served.stream("a", LONG)
        await anext(stream)
        await asyncio.gather(served.aclose(), served.aclose())
        assert [output async for output in stream][-1].finish_reason == "abort"
        with pytest.raises(EngineClosedError, match="it was closed"):
            await served.generate("b")
        with pytest.raises(EngineClosedError, match="it was closed"):
            await served.abort("a")
        await served.aclose()
        assert not served._worker.thread.is_alive()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert engine.manager.usage == 0


def test_an_idle_engine_uses_no_processor_time(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        await served.generate("a", SHORT)
        before = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - before < 0.1

    serve(engine, scenario)


def test_one_engine_serves_several_event_loops_one_after_the_other(engine: Engine) -> None:
    served = AsyncEngine(engine)
    texts = [asyncio.run(served.generate("again", SHORT)).text for _ in range(2)]
    asyncio.run(served.aclose())
    assert texts[0] == texts[1]


def test_what_is_more_urgent_runs_first(model: PreTrainedModel) -> None:
    engine = Engine(copy.deepcopy(model), byte_tokenizer(), EngineConfig(num_blocks=60, max_num_seqs=1))

    async def scenario(served: AsyncEngine) -> None:
        blocker = served.stream("in the way", LONG)
        await anext(blocker)
        streams = {priority: served.stream("waiting", SHORT, priority=priority) for priority in (5, 0, -1)}
        for stream in streams.values():
            await stream.start()
        blocker.close()
        ended = []

        async def finish(priority: int) -> None:
            outputs = [output async for output in streams[priority]]
            ended.append((outputs[-1].metrics.last_token, priority))

        await asyncio.gather(*map(finish, streams))
        assert [priority for _, priority in sorted(ended)] == [-1, 0, 5]

    serve(engine, scenario)


def test_a_stream_is_one_answer(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        with pytest.raises(RunnerError, match="n is 3"):
            await served.generate("a", SamplingParams(n=3))

    serve(engine, scenario)


def test_a_negative_queue_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineConfigError, match="max_queued_requests must be at least 0, got -1"):
        AsyncEngine(engine, max_queued_requests=-1)
