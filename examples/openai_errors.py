"""Errors in OpenAI's shape, for serve.py."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvcore.errors import KVCacheError
from runner import EngineClosedError, EngineFullError, EngineStepError, RunnerError


class APIError(Exception):
    """What a client is told.

    Args:
        status: Of the HTTP response.
        message: For a person.
        param: The field that is wrong.
        code: For a program.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(status, "invalid_request_error")
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @classmethod
    def of(cls, error: Exception) -> APIError:
        """What the engine raised, by whose fault it was."""
        statuses: dict[type, int] = {EngineFullError: 429, EngineClosedError: 503, EngineStepError: 500}
        status = statuses.get(type(error), 400)
        return cls(status, str(error), code="engine_full" if status == 429 else None)

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status == 429 else None
        return JSONResponse(self.content, status_code=self.status, headers=headers)


def add_error_handlers(app: FastAPI) -> None:
    """Every error of an application in OpenAI's shape."""

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
        # What may be text or a list has an error for either: the one that says most is deepest, and not about the type.
        worst = max(error.errors(), key=lambda found: (len(found["loc"]), not found["type"].endswith("_type")))
        if worst["type"] == "json_invalid":
            return APIError(400, f"the body is not JSON: {worst['ctx']['error']}").response()
        place = ".".join(str(part) for part in worst["loc"][1:] if is_place(part))
        if worst["type"] == "extra_forbidden":
            message = f"{place} is not supported by this server"
        else:
            message = f"{place or 'the body'}: {worst['msg'].removeprefix('Value error, ')}"
        return APIError(400, message, param=place or None).response()

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return APIError(error.status_code, str(error.detail)).response()


def is_place(part: str | int) -> bool:
    """Whether this part of a place names a field or an item, rather than one of the types that a field may have."""
    return isinstance(part, int) or (part.isidentifier() and part != "str")
