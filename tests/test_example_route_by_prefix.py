"""The router of the example sends prompts where they are cached."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "route_by_prefix.py"


def test_each_prompt_goes_to_the_worker_that_holds_most_of_it_and_is_found_there_as_foretold() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], check=True, capture_output=True, text=True, timeout=60)
    rows = re.findall(r"^(\w+)-\d: \{'ann': (\d+), 'bob': (\d+)\} -> (\w+), which found (\d+) of", done.stdout, re.M)
    assert len(rows) == 6
    for _, ann, bob, chosen, found in rows:
        held = {"ann": int(ann), "bob": int(bob)}
        assert held[chosen] == max(held.values()) == int(found)
    # Each of the two system prompts has a worker of its own, and all but the first of each are hits.
    assert len({(topic, chosen) for topic, _, _, chosen, _ in rows}) == 2
    assert [int(found) > 0 for *_, found in rows] == [False, False, True, True, True, True]
