"""A part whose measurements fail in every way there is, for the tests of how parts are run."""

from __future__ import annotations

import os
import time

from tests.gpu.work import Measurement, Record, Settings


def measurements(settings: Settings) -> list[Measurement]:
    """In an order in which each comes after one that went wrong."""
    return [
        Measurement("fine", lambda: {"note": "here"}),
        Measurement("raises", _raise),
        Measurement("ends its process", lambda: os._exit(7)),
        Measurement("fine after all", lambda: {}),
        Measurement("never ends", _never_end),
        Measurement("never begins", lambda: {}),
    ]


def _raise() -> Record:
    raise ValueError("as it should")


def _never_end() -> Record:
    while True:
        time.sleep(1)
