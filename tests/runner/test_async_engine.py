"""AsyncEngine's promises to the tasks that stream from it, on a small random model with a byte tokenizer."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from transformers import PreTrainedModel

from runner import (
    Engine,
    EngineConfigError,
    RequestRefusedError,
    RunnerError,
    SamplingParams,
    SamplingParamsError,
)
from runner.async_engine import AsyncEngine, EngineClosedError, EngineFullError, EngineStepError
from tests.runner.byte_model import byte_engine, byte_model
from tests.runner.byte_tokenizer import byte_tokenizer

LONG = SamplingParams(max_tokens=300)
SHORT = SamplingParams(max_tokens=12)


@pytest.fixture
def engine() -> Engine:
    return byte_engine(num_blocks=400, block_size=8, max_num_batched_tokens=256)


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
        assert stats.num_cached_tokens == 32 * 40  # five blocks of 8 each, from the call before

    serve(engine, scenario)


def test_generate_gives_the_finished_output_and_counts_cached_tokens(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        (first,) = await served.generate("x" * 40, SHORT)
        (second,) = await served.generate("x" * 40, SHORT)
        (salted,) = await served.generate("x" * 40, SHORT, cache_salt="mine")
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
        with pytest.raises(RequestRefusedError, match="go from 0 to 299, got 300"):
            await served.generate([1, 300])
        with pytest.raises(RequestRefusedError, match="more than max_model_len"):
            await served.stream("c", SamplingParams(max_tokens=5000)).start()
        assert len([output async for output in running][-1].token_ids) == 100

    serve(engine, scenario)


def test_weights_are_updated_between_steps_and_the_cache_forgets_the_old_ones(engine: Engine) -> None:
    def new_weights(model: PreTrainedModel) -> None:
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.data.neg_()

    other = byte_model()
    new_weights(other)
    other_engine = Engine(other, byte_tokenizer(), engine.config)
    (expected,) = other_engine.generate(["Once upon a time there was a model."], SHORT)
    threads = []

    def change() -> None:
        threads.append(threading.current_thread())
        new_weights(engine.model_runner.model)

    async def scenario(served: AsyncEngine) -> None:
        (before,) = await served.generate("Once upon a time there was a model.", SHORT)
        assert before.text != expected.text
        stream = served.stream("A long one", LONG, request_id="long")
        await anext(stream)
        with pytest.raises(RunnerError, match="1 requests are under way"):
            await served.update_weights(change)
        assert not threads
        await served.abort("long")
        await served.update_weights(change)
        (after,) = await served.generate("Once upon a time there was a model.", SHORT)
        assert (after.text, after.num_cached_tokens) == (expected.text, 0)

    serve(engine, scenario)
    assert [thread.name for thread in threads] == ["runner.AsyncEngine"]


def test_a_change_of_weights_that_fails_reaches_its_caller_and_forgets_all_the_same(engine: Engine) -> None:
    def change() -> None:
        raise ValueError("the file is torn")

    async def scenario(served: AsyncEngine) -> None:
        await served.generate("Once upon a time there was a model.", SHORT)
        with pytest.raises(ValueError, match="torn"):
            await served.update_weights(change)
        (again,) = await served.generate("Once upon a time there was a model.", SHORT)
        assert again.num_cached_tokens == 0

    serve(engine, scenario)


def test_a_full_queue_is_refused_with_the_numbers_and_has_room_again_later() -> None:
    engine = byte_engine(num_blocks=60, block_size=8, max_num_seqs=2)

    async def scenario(served: AsyncEngine) -> None:
        streams = [served.stream(f"{i}", LONG) for i in range(5)]
        for stream in streams[:4]:
            await stream.start()
        with pytest.raises(
            EngineFullError,
            match="max_queued_requests=2 may queue: no room for 1 more; try again later",
        ):
            await streams[4].start()
        streams[0].close()
        await until(lambda: served.stats.waiting < 2)
        assert (await served.generate("later", SHORT))[0].finish_reason == "length"
        for stream in streams:
            stream.close()

    serve(engine, scenario, max_queued_requests=2)


def test_where_nobody_may_queue_as_many_are_taken_as_can_start() -> None:
    engine = byte_engine(num_blocks=60, max_num_seqs=3)

    async def scenario(served: AsyncEngine) -> None:
        results = await asyncio.gather(*(served.generate("a", SHORT) for _ in range(5)), return_exceptions=True)
        assert [isinstance(result, EngineFullError) for result in results] == [False] * 3 + [True] * 2
        assert (await served.generate("a", SHORT))[0].finished

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
        assert (await served.generate("d", SHORT))[0].finish_reason == "length"

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
    texts = [asyncio.run(served.generate("again", SHORT))[0].text for _ in range(2)]
    asyncio.run(served.aclose())
    assert texts[0] == texts[1]


def test_what_is_more_urgent_runs_first() -> None:
    engine = byte_engine(num_blocks=60, block_size=8, max_num_seqs=1)

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


def test_several_prompts_with_several_answers_each_are_one_stream(engine: Engine) -> None:
    prompts = ["A shared beginning, then one", "A shared beginning, then another"]
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=4, n=3)
    expected = [(output.index, output.choice, output.text) for output in engine.generate(prompts, params)]

    async def scenario(served: AsyncEngine) -> None:
        texts: dict[tuple[int, int], str] = {}
        finished = []
        async for output in served.stream(prompts, params, request_id="mine"):
            place = (output.index, output.choice)
            texts[place] = texts.get(place, "") + output.delta
            assert texts[place] == output.text
            if output.finished:
                finished.append(output.request_id)
        assert sorted(finished) == [f"mine-{i}" for i in range(6)]
        assert [(*place, text) for place, text in sorted(texts.items())] == expected
        outputs = await served.generate(prompts, params)
        assert [(output.index, output.choice, output.text) for output in outputs] == expected
        assert await served.generate([]) == []

    serve(engine, scenario)


def test_of_several_prompts_all_are_queued_or_none(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        with pytest.raises(RequestRefusedError, match="prompt is empty"):
            await served.generate(["fine", "", "fine"], LONG)
        with pytest.raises(RequestRefusedError, match=r"66 requests at once are more than .* ask for 65 at most"):
            await served.stream(["fine"] * 66, LONG).start()
        await served.stream(["fine"] * 65, LONG, request_id="taken").start()  # and dropped
        first = served.stream("a", LONG, request_id="mine-1")
        await first.start()
        # Until it runs, it takes the one place in the queue, and others are refused for that.
        await until(lambda: (served.stats.running, served.stats.waiting) == (1, 0))
        with pytest.raises(RequestRefusedError, match="'mine-1' is in use"):
            await served.generate(["a", "b"], LONG, request_id="mine")
        with pytest.raises(EngineFullError, match=r"1 requests run and 0 wait, .* no room for 65 more"):
            await served.generate(["a"] * 65, LONG)
        assert (served.stats.running, served.stats.waiting) == (1, 0)
        first.close()

    serve(engine, scenario, max_queued_requests=1)


def test_one_of_several_requests_may_be_aborted_and_the_others_go_on(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        stream = served.stream(["a", "b"], SamplingParams(max_tokens=40), request_id="mine")
        await anext(stream)
        await served.abort("mine-0")
        reasons = {output.index: output.finish_reason async for output in stream if output.finished}
        assert reasons == {0: "abort", 1: "length"}

    serve(engine, scenario)


def test_closing_a_stream_wakes_a_task_that_waits_for_it(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        blocker = served.stream("in the way", LONG)
        await blocker.start()
        stream = served.stream("never begun", SHORT)
        await stream.start()
        waiting = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0)
        stream.close()
        stream.close()
        assert await waiting is None
        blocker.close()

    serve(byte_engine(num_blocks=60, block_size=8, max_num_seqs=1), scenario)


def test_two_tasks_may_share_a_stream_and_both_come_to_its_end(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        stream = served.stream("shared", SHORT)

        async def deltas() -> list[tuple[int, str]]:
            return [(len(output.token_ids), output.delta) async for output in stream]

        taken = [piece for pieces in await asyncio.gather(deltas(), deltas()) for piece in pieces]
        (alone,) = await served.generate("shared", SHORT)
        assert "".join(delta for _, delta in sorted(taken)) == alone.text

    serve(engine, scenario)


def test_an_error_in_a_consumer_aborts_its_own_request_only(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        async def consume(prompt: str, *, fails: bool) -> str:
            async for output in served.stream(prompt, SamplingParams(max_tokens=40)):
                if fails and output.token_ids:
                    raise ZeroDivisionError("in the consumer")
            return output.text

        results = await asyncio.gather(
            consume("a", fails=True), consume("b", fails=False), consume("c", fails=True), return_exceptions=True
        )
        assert [type(result) for result in results] == [ZeroDivisionError, str, ZeroDivisionError]
        await until(lambda: served.stats.running == 0)
        assert served.stats.num_finished_requests == 1

    serve(engine, scenario)


def test_requests_of_an_event_loop_that_has_ended_are_aborted(engine: Engine) -> None:
    served = AsyncEngine(engine)
    streams = [served.stream("left behind", LONG), served.stream(["left", "behind"], LONG)]

    async def begin() -> None:
        for stream in streams:
            await anext(stream)

    async def end() -> None:
        await until(lambda: served.stats.running == 0)
        assert served.stats.usage == 0
        await served.aclose()

    asyncio.run(begin())
    asyncio.run(asyncio.wait_for(end(), 60))
    assert served.stats.num_finished_requests == 0
    engine.manager.check_invariants()


def test_streams_that_are_started_closed_cancelled_and_aborted_at_random_leave_nothing(engine: Engine) -> None:
    rng = random.Random(0)
    ended: Counter[str] = Counter()

    async def one(served: AsyncEngine, number: int) -> None:
        name = f"r{number}"
        prompts = [f"Shared beginning {number % 3}, number {i}" for i in range(rng.randint(1, 3))]
        stream = served.stream(prompts, SamplingParams(max_tokens=rng.randint(1, 30), n=rng.randint(1, 2)))
        how = rng.choice(["read", "close", "abort", "drop", "fail"])
        try:
            for _ in range(rng.randint(0, 8)):
                output = await anext(stream, None)
                if output is None:
                    break
                name = output.request_id
            if how == "read":
                _ = [output async for output in stream]
            elif how == "close":
                stream.close()
            elif how == "abort":
                await asyncio.gather(served.abort(name), served.abort(name), return_exceptions=True)
            elif how == "fail":
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        ended[how] += 1

    async def scenario(served: AsyncEngine) -> None:
        tasks = [asyncio.create_task(one(served, number)) for number in range(60)]
        for task in rng.sample(tasks, 15):
            await asyncio.sleep(rng.random() / 50)
            task.cancel()
        await asyncio.wait(tasks)
        assert sum(not task.cancelled() for task in tasks) == ended.total()
        assert all(task.cancelled() or task.exception() is None for task in tasks)

    serve(engine, scenario)
    assert len(ended) == 5


def test_what_is_no_prompt_or_no_sampling_params_is_refused_and_hurts_nobody(engine: Engine) -> None:
    async def scenario(served: AsyncEngine) -> None:
        running = asyncio.create_task(served.generate("a", SamplingParams(max_tokens=60)))
        for prompt in (None, 7, {"role": "user"}, b"bytes", [None], [[1], [None]]):
            with pytest.raises(RunnerError, match="a prompt is text, whole numbers"):
                await served.generate(prompt)  # type: ignore[arg-type]
        with pytest.raises(SamplingParamsError, match=r"must be a SamplingParams, got \{'max_tokens': 5}"):
            await served.generate("a", {"max_tokens": 5})  # type: ignore[arg-type]
        with pytest.raises(RequestRefusedError, match="priority must be a whole number"):
            await served.generate("a", priority="high")  # type: ignore[arg-type]
        with pytest.raises(RequestRefusedError, match="request_id must be text"):
            await served.generate("a", request_id=5)  # type: ignore[arg-type]
        assert len((await running)[0].token_ids) == 60

    serve(engine, scenario)


@pytest.mark.parametrize("value", [-1, 1.5, "many"])
def test_a_queue_that_is_no_number_of_requests_is_refused(engine: Engine, value: Any) -> None:
    with pytest.raises(EngineConfigError, match="max_queued_requests must be a whole number of at least 0, got"):
        AsyncEngine(engine, max_queued_requests=value)
