"""runner: transformers models served from the books of :mod:`kvcore`.

>>> from runner import Engine, SamplingParams
>>> engine = Engine.from_pretrained()
>>> question = [{"role": "user", "content": "What is the capital of France?"}]
>>> for output in engine.stream(question, SamplingParams(max_tokens=50)):
...     print(output.delta, end="", flush=True)
The capital of France is Paris.
"""

from runner.async_engine import (
    AsyncEngine,
    AsyncEngineStats,
    EngineClosedError,
    EngineFullError,
    EngineStepError,
    OutputStream,
)
from runner.config import EngineConfig
from runner.engine import Engine
from runner.errors import (
    EngineConfigError,
    ModelNotFoundError,
    RequestRefusedError,
    RunnerError,
    SamplingParamsError,
    UnsupportedModelError,
)
from runner.outputs import RequestMetrics, RequestOutput, TokenLogprobs
from runner.prompts import Prompt
from runner.sampling import SamplingParams

__all__ = [
    "AsyncEngine",
    "AsyncEngineStats",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineConfigError",
    "EngineFullError",
    "EngineStepError",
    "ModelNotFoundError",
    "OutputStream",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "RequestRefusedError",
    "RunnerError",
    "SamplingParams",
    "SamplingParamsError",
    "TokenLogprobs",
    "UnsupportedModelError",
]
