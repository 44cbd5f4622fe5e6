"""What can go wrong in the runner, one class a mistake. The books' own errors are in :mod:`kvcore.errors`."""

from __future__ import annotations


class RunnerError(Exception):
    """Base of every error the runner raises on purpose."""


class UnsupportedModelError(RunnerError, ValueError):
    """A model whose layers the runner cannot serve; the message names the layer and why. Raised at load."""


class ModelNotFoundError(RunnerError, LookupError):
    """No model at that path or under that name."""


class EngineConfigError(RunnerError, ValueError):
    """An engine setting that cannot work."""


class SamplingParamsError(RunnerError, ValueError):
    """A sampling parameter that is out of range, or not supported yet."""


class RequestRefusedError(RunnerError, ValueError):
    """A request that could never run here, however long it waited; the message has the arithmetic."""
