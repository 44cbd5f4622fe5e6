"""An OpenAI-compatible server over AsyncEngine: chat and completions, streamed or whole. For a trusted network.

    pip install fastapi uvicorn            (and prometheus-client, for /metrics)
    python examples/serve.py --port 8000

A request whose client goes away is aborted. More requests than may queue are refused with 429. What the server does not
know is refused with 400 by name, rather than ignored. Fields that are not given have the defaults of SamplingParams:
128 tokens, greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from kvcore.errors import KVCacheError
from runner import RequestOutput, RunnerError, SamplingParams
from runner.async_engine import AsyncEngine, EngineClosedError, EngineFullError, EngineStepError, OutputStream
from runner.cli import add_engine_arguments, load_engine
from runner.loader import default_model_file
from runner.outputs import TokenLogprobs

T = TypeVar("T")

# -- what comes in ----------------------------------------------------------------------------------------------------


class Model(BaseModel):
    """Refuses what it does not know; null is the same as not given."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class Sampling(Model):
    """Fields of SamplingParams, under the names they have there."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None


class StreamOptions(Model):
    include_usage: bool = False


class Body(Sampling):
    """What both endpoints take. The last three are taken and not used."""

    model: str
    n: int = Field(1, ge=1, le=16)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: str | None = Field(None, min_length=1)
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("text has half of a surrogate pair, which is no character") from error
        return data

    def extra(self) -> dict[str, int]:
        """Fields of SamplingParams that have other names here."""
        return {}

    def sampling_params(self, choice: int) -> SamplingParams:
        """For one of the n answers to a prompt; each has a seed of its own."""
        given = {name: value for name in Sampling.model_fields if (value := getattr(self, name)) is not None}
        given |= self.extra()
        if "seed" in given:
            given["seed"] += choice
        try:
            return SamplingParams(**given)
        except RunnerError as error:
            raise APIError(400, str(error), param=next((name for name in given if name in str(error)), None)) from error


class CompletionBody(Body):
    prompt: str | list[int] | list[str] | list[list[int]] = Field(min_length=1)
    logprobs: int | None = Field(None, ge=0, le=20)

    def extra(self) -> dict[str, int]:
        return {} if self.logprobs is None else {"logprobs": self.logprobs}


class TextPart(Model):
    type: Literal["text"]
    text: str


class Message(Model):
    role: str
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": self.role, "content": "".join(parts)}


class ChatBody(Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    def extra(self) -> dict[str, int]:
        extra = {"logprobs": self.top_logprobs} if self.logprobs else {}
        return extra | ({"max_tokens": limit} if (limit := self.max_completion_tokens) is not None else {})


# -- what goes out ----------------------------------------------------------------------------------------------------


class APIError(Exception):
    """An error in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(status, "invalid_request_error")
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status == 429 else None
        return JSONResponse(self.content, status_code=self.status, headers=headers)

    @classmethod
    def of(cls, error: Exception) -> APIError:
        """What the engine raised, by whose fault it was."""
        status = {EngineFullError: 429, EngineClosedError: 503, EngineStepError: 500}.get(type(error), 400)
        code = "engine_full" if status == 429 else None
        return cls(status, str(error), code=code)


class CompletionReply:
    """How /v1/completions words an answer."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def chunk(self, delta: str, *, first: bool) -> dict[str, Any]:
        return {"text": delta}

    def logprobs(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        return {
            "tokens": [self.text(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self.text(i): value for i, value in token.likeliest.items()} for token in tokens],
        }

    def text(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id]))


class ChatReply(CompletionReply):
    """How /v1/chat/completions words an answer."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def chunk(self, delta: str, *, first: bool) -> dict[str, Any]:
        return {"delta": ({"role": "assistant"} if first else {}) | {"content": delta}}

    def logprobs(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        def named(token_id: int, logprob: float) -> dict[str, Any]:
            text = self.text(token_id)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {
            "content": [
                named(token.token_id, token.logprob)
                | {"top_logprobs": [named(i, value) for i, value in token.likeliest.items()]}
                for token in tokens
            ]
        }


def choice_of(
    reply: CompletionReply, index: int, words: dict[str, Any], output: RequestOutput, *, since: int = 0
) -> dict[str, Any]:
    """One entry of ``choices``, with the log-probabilities of the tokens from ``since`` on if they were wanted."""
    logprobs = None if output.logprobs is None else reply.logprobs(output.logprobs[since:])
    return {"index": index, **words, "logprobs": logprobs, "finish_reason": output.finish_reason}


def usage(outputs: Iterable[RequestOutput], choices: int) -> dict[str, Any]:
    """Counts of tokens; a prompt with several choices counts once, as its first one found it."""
    outputs = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs[::choices])
    completion = sum(len(output.token_ids) for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs[::choices])},
    }


async def respond(engine: AsyncEngine, request: Request, body: Body, prompts: list[Any], reply: CompletionReply) -> Any:
    """Answer prompts, each with as many choices as wanted: choice c of prompt p has index p * n + c."""
    reply_id = f"{reply.prefix}-{uuid.uuid4().hex}"
    jobs = [(prompt, body.sampling_params(choice)) for prompt in prompts for choice in range(body.n)]
    streams = [
        engine.stream(prompt, params, request_id=f"{reply_id}-{index}", cache_salt=body.cache_salt)
        for index, (prompt, params) in enumerate(jobs)
    ]
    try:
        for stream in streams:  # a refusal is answered before the first byte is
            await stream.start()
        head = {"id": reply_id, "created": int(time.time()), "model": body.model}
        if body.stream:
            # From here on, closing the streams is the response's part; dropped before it began, they close themselves.
            events = sse_events(streams, head, body, reply)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        outputs = await unless_disconnected(request, asyncio.gather(*map(last_of, streams)))
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    if outputs is None:
        return Response(status_code=499)  # nobody reads it; a name that proxies' logs have for this
    choices = [choice_of(reply, index, reply.whole(output.text), output) for index, output in enumerate(outputs)]
    return {**head, "object": reply.whole_object, "choices": choices, "usage": usage(outputs, body.n)}


async def sse_events(
    streams: list[OutputStream], head: dict[str, Any], body: Body, reply: CompletionReply
) -> AsyncIterator[str]:
    """The answers as server-sent events, whichever comes first; left early, it aborts what is left."""
    latest: dict[int, RequestOutput] = {}
    with_usage = body.stream_options.include_usage

    def event(choices: list[dict[str, Any]], counts: dict[str, Any] | None = None) -> str:
        chunk = {**head, "object": reply.chunk_object, "choices": choices}
        return f"data: {json.dumps(chunk | ({'usage': counts} if with_usage else {}), ensure_ascii=False)}\n\n"

    try:
        async for index, output in merged(streams):
            before = latest.get(index)
            latest[index] = output
            if before is None or output.delta or output.finished or output.logprobs:
                words = reply.chunk(output.delta, first=before is None)
                yield event([choice_of(reply, index, words, output, since=len(before.token_ids) if before else 0)])
        if with_usage:
            yield event([], usage((latest[index] for index in range(len(streams))), body.n))
        yield "data: [DONE]\n\n"
    except RunnerError as error:
        yield f"data: {json.dumps(APIError.of(error).content)}\n\n"
    finally:
        for stream in streams:
            stream.close()


async def merged(streams: list[OutputStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of all streams as they come, with the number of their stream."""
    tasks = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, output = tasks.pop(task), task.result()
                if not output.finished:
                    tasks[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, output
    finally:
        for task in tasks:
            task.cancel()


async def last_of(stream: OutputStream) -> RequestOutput:
    return [output async for output in stream][-1]


async def unless_disconnected(request: Request, work: asyncio.Future[T]) -> T | None:
    """What the work comes to; None, and the work cancelled, if the client goes away before."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        gone.cancel()
        work.cancel()


# -- the application --------------------------------------------------------------------------------------------------


def make_app(engine: AsyncEngine, model: str) -> FastAPI:
    """The server's application; it closes the engine when it shuts down.

    Args:
        engine: What answers.
        model: The name that clients call it by.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(title="runner", lifespan=lifespan)
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "runner"}

    def check_model(name: str) -> None:
        if name != model:
            message = f"no model {name!r} here, only {model!r}"
            raise APIError(404, message, param="model", code="model_not_found")

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Any:
        check_model(body.model)
        messages = [message.for_template() for message in body.messages]
        return await respond(engine, request, body, [messages], ChatReply(engine.engine.tokenizer))

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Any:
        check_model(body.model)
        one = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
        prompts = [body.prompt] if one else list(body.prompt)
        return await respond(engine, request, body, prompts, CompletionReply(engine.engine.tokenizer))

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Any:
        check_model(name)
        return card

    @app.get("/health")
    async def health() -> Any:
        if engine.closed_because is not None:
            raise APIError(503, engine.closed_because)
        return {"status": "ok"}

    @app.exception_handler(APIError)
    async def api_error(_: Request, error: APIError) -> Response:
        return error.response()

    @app.exception_handler(RunnerError)
    @app.exception_handler(KVCacheError)
    async def engine_error(_: Request, error: Exception) -> Response:
        return APIError.of(error).response()

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> Response:
        return APIError(500, f"internal error: {type(error).__name__}").response()  # the log has the rest

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return APIError(400, f"the body is not JSON: {first['ctx']['error']}").response()
        place = ".".join(str(part) for part in first["loc"][1:])
        unknown = first["type"] == "extra_forbidden"
        message = f"{place} is not supported by this server" if unknown else f"{place or 'the body'}: {first['msg']}"
        return APIError(400, message, param=place or None).response()

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return APIError(error.status_code, str(error.detail)).response()

    add_metrics(app, engine)
    return app


def add_metrics(app: FastAPI, engine: AsyncEngine) -> None:
    """/metrics for Prometheus, if prometheus-client is installed."""
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
        from prometheus_client.registry import Collector
    except ImportError:
        return

    class StatsCollector(Collector):
        def collect(self) -> Iterable[Metric]:
            now = engine.stats
            yield GaugeMetricFamily("runner_requests_running", "Requests that hold blocks", now.running)
            yield GaugeMetricFamily("runner_requests_waiting", "Requests that wait for blocks", now.waiting)
            yield GaugeMetricFamily("runner_kv_cache_usage_ratio", "Share of the blocks in use", now.usage)
            yield CounterMetricFamily("runner_prompt_tokens", "Tokens of prompts", now.num_prompt_tokens)
            yield CounterMetricFamily("runner_cached_tokens", "Of those, found in the cache", now.num_cached_tokens)
            yield CounterMetricFamily("runner_generated_tokens", "Tokens of outputs", now.num_generated_tokens)
            yield CounterMetricFamily("runner_requests_finished", "Requests that ended", now.num_finished_requests)

    registry = CollectorRegistry()
    registry.register(StatsCollector())

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--max-queued-requests", type=int, default=256, metavar="N", help="default: %(default)s")
    add_engine_arguments(parser)
    args = parser.parse_args()
    try:
        engine = AsyncEngine(load_engine(args), max_queued_requests=args.max_queued_requests)
    except (RunnerError, KVCacheError) as error:
        print(f"serve.py: error: {error}", file=sys.stderr)
        return 2
    path = default_model_file() if args.model is None else Path(args.model)
    name = path.name.removesuffix(".gguf") if path.exists() else args.model
    print(f"serving {name!r}; its name is also at http://{args.host}:{args.port}/v1/models", file=sys.stderr)
    # Long answers must not keep the server from ending.
    uvicorn.run(make_app(engine, name), host=args.host, port=args.port, timeout_graceful_shutdown=5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
