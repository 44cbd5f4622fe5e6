"""The example server, asked by OpenAI's own client over loopback. One small model serves all tests."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import Engine
from runner.async_engine import AsyncEngine
from tests.runner.byte_model import byte_engine
from tests.runner.byte_tokenizer import byte_tokenizer

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODEL = "tiny"
LONG = 400
QUESTION: list[Any] = [{"role": "user", "content": "What is a block? " * 4}]
MAX_QUEUED = 34


sys.path.insert(0, str(EXAMPLES))  # as it is where the example is run
serve = importlib.import_module("serve")


class Server:
    """The example in a thread, on a free port."""

    def __init__(self) -> None:
        self.engine = byte_engine(num_blocks=1000, block_size=8, max_num_seqs=8)
        self.served = AsyncEngine(self.engine, max_queued_requests=MAX_QUEUED)
        app = serve.make_app(self.served, MODEL)
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=5))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def wait_until_idle(self) -> None:
        wait_until(lambda: self.served.stats.running + self.served.stats.waiting == 0)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()
    # Shutting down has ended the worker, so that the books may be looked at.
    assert server.engine.manager.usage == 0
    server.engine.manager.check_invariants()
    assert not server.engine.has_unfinished_requests


@pytest.fixture(autouse=True)
def _nothing_is_left_after_each_test(server: Server) -> Iterator[None]:
    yield
    server.wait_until_idle()
    assert server.served.stats.usage == 0


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", timeout=60, **body)


def test_chat_and_its_streamed_deltas_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=20)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 20

    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_completion_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == whole.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert not last.choices
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 20)


def test_completions_and_their_streamed_deltas_say_the_same_for_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["one", "two, which is longer"]
    whole = client.completions.create(model=MODEL, prompt=prompts, max_tokens=10, n=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in whole.choices]
    for prompt, text in zip(prompts, texts[::2], strict=True):
        alone = client.completions.create(model=MODEL, prompt=list(prompt.encode()), max_tokens=10)
        assert len(alone.choices[0].text) > 0
        assert client.completions.create(model=MODEL, prompt=prompt, max_tokens=10).choices[0].text == text
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (sum(map(len, prompts)), 40)
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(model=MODEL, prompt=prompts, max_tokens=10, n=2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert chunk.usage is None
    assert streamed == texts


def test_a_prompt_is_found_the_second_time_unless_it_has_another_salt(client: openai.OpenAI) -> None:
    def cached(**extra: str) -> int:
        completion = client.completions.create(
            model=MODEL, prompt="An unheard-of prompt. " * 4, max_tokens=2, extra_body=extra
        )
        assert completion.usage is not None
        assert completion.usage.prompt_tokens_details is not None
        return completion.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a")] == [0, 80, 0, 80]


def test_thirty_two_streams_at_once_each_get_their_own_answer(server: Server, client: openai.OpenAI) -> None:
    prompts = [f"A shared beginning for everyone. {i}" for i in range(32)]

    async def collect(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(collect(client, prompt) for prompt in prompts))

    texts = asyncio.run(run())
    expected = client.completions.create(model=MODEL, prompt=prompts, max_tokens=12)
    assert texts == [choice.text for choice in expected.choices]


def test_clients_that_leave_in_mid_stream_abort_their_requests_only(server: Server, client: openai.OpenAI) -> None:
    finished = server.served.stats.num_finished_requests

    async def leave(client: openai.AsyncOpenAI, number: int) -> None:
        stream = await client.completions.create(model=MODEL, prompt=f"left {number}", max_tokens=LONG, stream=True)
        async for _ in stream:
            await stream.close()
            return

    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stays = asyncio.create_task(client.completions.create(model=MODEL, prompt="stays", max_tokens=30))
            await asyncio.gather(*(leave(client, number) for number in range(16)))
            return (await stays).choices[0].text

    text = asyncio.run(run())
    server.wait_until_idle()
    assert server.served.stats.num_finished_requests == finished + 1
    assert text == client.completions.create(model=MODEL, prompt="stays", max_tokens=30).choices[0].text


def test_a_client_that_does_not_wait_for_a_whole_answer_aborts_it(server: Server, client: openai.OpenAI) -> None:
    finished = server.served.stats.num_finished_requests
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model=MODEL, prompt="slow", max_tokens=900, n=4, timeout=0.3)
    server.wait_until_idle()
    assert server.served.stats.num_finished_requests == finished


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"tools": []}, "tools", "tools is not supported by this server"),
        ({"max_tokens": "many"}, "max_tokens", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 5000}, None, "more than max_model_len"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hello"}, "messages", "valid list"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        ({"stream": "perhaps"}, "stream", "valid boolean"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
        ({"logprobs": 5}, "logprobs", "valid boolean"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "greater than or equal to 0"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "is more than max_tokens=5"),
        ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100"),
        ({"stop": ""}, "stop", "none of them empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"stop": ["a", 5]}, "stop.1", "valid string"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "whole numbers of at least 0"),
        ({"priority": "high"}, "priority", "valid integer"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "messages.0.content.0.type",
            "should be 'text'",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "required"),
        ({"n": 100}, "n", "less than or equal to 16"),
        ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ],
)
def test_a_malformed_chat_is_refused_in_openais_shape(
    server: Server, changes: dict[str, Any], param: str | None, message: str
) -> None:
    response = post(server, "/v1/chat/completions", json={"model": MODEL, "messages": QUESTION} | changes)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("prompt", ["", [], [5, 100_000], [-1], [["nested"]], [["a"]], [[]], ["fine", ""], 7, None])
def test_a_prompt_that_is_none_is_refused_before_it_can_hurt_others(server: Server, prompt: Any) -> None:
    for stream in (False, True):
        response = post(server, "/v1/completions", json={"model": MODEL, "prompt": prompt, "stream": stream})
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_what_is_no_json_an_unknown_path_and_an_unknown_model_have_openais_shape(
    server: Server, client: openai.OpenAI
) -> None:
    lone_surrogate = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "cache_salt": "\\ud800"}'
    too_deep = b'{"model": "tiny", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    too_large = b'{"model": "tiny", "seed": ' + b"9" * 10_000 + b"}"
    for content in (b"{not json", b"", b"[1]", b"\xff\xfe", lone_surrogate, too_deep, too_large):
        response = post(server, "/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    response = post(server, "/v1/completions", data={"model": MODEL, "prompt": "a form"})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405
    assert post(server, "/v1/embeddings", json={}).json()["error"]["message"] == "Not Found"
    with pytest.raises(openai.NotFoundError, match="only 'tiny'") as caught:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert caught.value.code == "model_not_found"


def test_a_chat_template_that_refuses_a_conversation_is_the_clients_error(
    server: Server, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", template)
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        client.chat.completions.create(model=MODEL, messages=QUESTION)


def test_a_full_queue_is_a_429_with_the_reason(server: Server, client: openai.OpenAI) -> None:
    prompts = [f"{i}" for i in range(MAX_QUEUED + 8)]
    stream = client.completions.create(model=MODEL, prompt=prompts, max_tokens=LONG, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError, match=f"max_queued_requests={MAX_QUEUED} may queue") as caught:
        client.chat.completions.create(model=MODEL, messages=QUESTION)
    assert caught.value.response.headers["retry-after"] == "1"
    assert caught.value.code == "engine_full"
    stream.close()
    server.wait_until_idle()
    assert client.completions.create(model=MODEL, prompt="again", max_tokens=2).choices[0].finish_reason == "length"


def test_a_step_that_fails_is_a_500_or_an_error_in_the_stream_and_the_server_goes_on(
    server: Server, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise MemoryError("no room")

    stream = iter(client.completions.create(model=MODEL, prompt="a", max_tokens=LONG, stream=True))
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(server.engine.model_runner, "execute", fail)
        with pytest.raises(openai.APIError, match="a step failed"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="MemoryError: no room"):
            client.completions.create(model=MODEL, prompt="a")
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=2).choices[0].text is not None


def test_models_health_and_metrics_are_there(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    pytest.importorskip("prometheus_client")
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    values = {name: float(value) for name, _, value in (line.partition(" ") for line in lines if line[0] != "#")}
    stats = server.served.stats
    assert values["runner_requests_running"] == 0
    assert values["runner_prompt_tokens_total"] == stats.num_prompt_tokens
    assert values["runner_cached_tokens_total"] == stats.num_cached_tokens


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e-300},
    {"temperature": 1e300},
    {"temperature": 1, "top_k": 10**9},
    {"temperature": 1, "top_p": 1e-300},
    {"temperature": 1, "min_p": 1},
    {"temperature": 1, "seed": -1},
    {"temperature": 1, "seed": 10**30},
    {"temperature": 1, "repetition_penalty": 1e300},
    {"temperature": 1, "repetition_penalty": 1e-300},
    {"stop_token_ids": [10**12], "min_tokens": 1},
]


@pytest.mark.parametrize("fields", EXTREMES, ids=str)
def test_extreme_sampling_is_answered_or_refused_and_hurts_nobody_else(
    server: Server, client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    other = iter(client.completions.create(model=MODEL, prompt="other", max_tokens=30, stream=True))
    next(other)
    response = post(server, "/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 3} | fields)
    assert response.status_code in (200, 400), response.text
    assert list(other)[-1].choices[0].finish_reason == "length"


def test_sampling_fields_reach_the_engine(client: openai.OpenAI) -> None:
    def text(**fields: Any) -> str:
        extra = {name: fields.pop(name) for name in ("top_k", "min_tokens", "stop_token_ids") if name in fields}
        completion = client.completions.create(model=MODEL, prompt="a", max_tokens=16, **fields, extra_body=extra)
        assert fields.get("stop") is None or completion.choices[0].finish_reason == "stop"
        return completion.choices[0].text

    greedy = text()
    assert text(temperature=0, top_p=1, presence_penalty=0) == greedy
    assert text(stop=[greedy[3:5]]) == greedy[: greedy.index(greedy[3:5])]
    assert text(temperature=1.5, seed=1) == text(temperature=1.5, seed=1)
    assert text(temperature=1.5, seed=1) != greedy
    assert text(temperature=1.5, seed=1, top_k=1) == greedy


def test_answers_to_one_prompt_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    def texts(seed: int, n: int) -> list[str | None]:
        chat = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=2, seed=seed, n=n)
        return [choice.message.content for choice in chat.choices]

    both = texts(seed=7, n=2)
    assert both == [*texts(seed=7, n=1), *texts(seed=8, n=1)]
    assert both[0] != both[1]


def test_several_answers_stream_as_they_come_and_each_has_a_beginning_and_an_end(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 2, "seed": 7, "n": 3, "max_tokens": 9}
    whole = client.chat.completions.create(**asked)
    texts, roles, ends = ["", "", ""], [0, 0, 0], [0, 0, 0]
    usages = []
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            ends[choice.index] += choice.finish_reason == "length"
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ends == [1, 1, 1]
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1] is not None
    assert whole.usage is not None
    # Three answers to one prompt: it counts once.
    assert (usages[-1].prompt_tokens, usages[-1].completion_tokens) == (whole.usage.prompt_tokens, 27)
    assert usages[-1].prompt_tokens < 100


def test_what_is_more_urgent_waits_in_front(server: Server, client: openai.OpenAI) -> None:
    blockers = client.completions.create(model=MODEL, prompt=["in the way"] * 8, max_tokens=LONG, stream=True)
    next(iter(blockers))

    async def run() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asking = [
                asyncio.create_task(
                    client.completions.create(
                        model=MODEL, prompt="waits", max_tokens=2, extra_body={"priority": priority}
                    )
                )
                for priority in (9, -3, 0)
            ]
            while server.served.stats.waiting < 3:
                await asyncio.sleep(0.01)
            waiting = [request.priority for request in server.engine.scheduler.waiting]
            blockers.close()
            await asyncio.gather(*asking)
            return waiting

    assert asyncio.run(run()) == [-3, 0, 9]


def test_log_probabilities_come_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert len(whole.content) == 8
    for token in whole.content:  # greedy: each is the likeliest
        assert len(token.top_logprobs) == 2
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, token.top_logprobs[0].logprob)
        assert 0 > token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    streamed = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**asked, stream=True)]
    assert [token for piece in streamed if piece for token in piece.content or []] == whole.content
    completion = client.completions.create(model=MODEL, prompt="a", max_tokens=4, logprobs=1).choices[0].logprobs
    assert completion is not None
    assert completion.tokens is not None
    assert len(completion.tokens) == 4
    with pytest.raises(openai.BadRequestError, match="logprobs: Input should be a valid integer"):
        client.completions.create(model=MODEL, prompt="a", logprobs=True)  # type: ignore[call-overload]
    many = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=3, logprobs=0, stream=True)
    pieces = [(chunk.choices[0].index, chunk.choices[0].logprobs) for chunk in many]
    for index in range(4):
        logprobs = [piece.token_logprobs or [] for i, piece in pieces if i == index and piece]
        assert sum(map(len, logprobs)) == 3


def test_the_programs_on_the_serving_page_run(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    (embedding,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.setattr(Engine, "from_pretrained", lambda: byte_engine(num_blocks=100))
    exec(embedding, {})
    assert "num_finished_requests=3" in capsys.readouterr().out
    (client_program,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    exec(client_program.replace("http://127.0.0.1:8000", server.url), {})
    cached = [int(line.rsplit(maxsplit=1)[-1]) for line in capsys.readouterr().out.splitlines() if line[-1:].isdigit()]
    assert cached[0] == 0 < cached[-1]


def test_the_command_serves_the_model_it_is_given_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "my-model-2.5"
    byte_engine(num_blocks=2).model_runner.model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    served = []

    def run(app: Any, **settings: Any) -> None:
        async def live() -> None:
            async with app.router.lifespan_context(app):
                served.append(settings["port"])

        asyncio.run(live())

    monkeypatch.setattr(serve.uvicorn, "run", run)
    command = ["serve.py", "--port", "1234", "--kv-cache-memory", "4MiB", "--block-size", "32", "--model"]
    monkeypatch.setattr(sys, "argv", [*command, str(folder)])
    assert serve.main() == 0
    assert served == [1234]
    printed = capsys.readouterr().err
    assert "serving 'my-model-2.5'" in printed
    assert "prefix hits    multiples of 32 tokens" in printed
    monkeypatch.setattr(sys, "argv", [*command, str(tmp_path / "nothing")])
    assert serve.main() == 2
    assert "serve.py: error: no model at" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command, str(folder), "--max-queued-requests", "-1"])
    assert serve.main() == 2
    assert "serve.py: error: max_queued_requests must be" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["serve.py", "--port", "99999"])
    with pytest.raises(SystemExit):
        serve.main()
    assert "--port goes from 0 to 65535, got 99999" in capsys.readouterr().err
