"""How the Triton kernels are launched: what fits into a card's shared memory, and how much the splits leave for it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

# First: where there is no GPU, it makes Triton interpret.
from tests.runner.triton_steps import a_step, assert_close, attended, expected, spec_of

# isort: split
from kvcore.spec import FullAttentionSpec
from runner.attention.triton_launch import Launch, plan_launches
from runner.attention.triton_shapes import Card, TileShape, decode_shape, fitted, prefill_shape, shared_bytes

H200 = Card(num_processors=132, shared_bytes=232_448, major=9)
SMALLER = [Card(108, 166_912, 8), Card(58, 101_376, 8), Card(170, 101_376, 12)]


def default_shapes(group_size: int, head_size: int, element_size: int) -> list[TileShape]:
    return [
        *(decode_shape(group_size, head_size, element_size, programs) for programs in (0.5, 9)),
        *(prefill_shape(group_size, head_size, element_size, queries) for queries in (64 // group_size, 8192)),
    ]


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("head_size", [16, 32, 64, 80, 96, 112, 128, 192, 256])
def test_every_shape_fits_into_every_card_and_the_card_it_was_measured_on_keeps_it(
    head_size: int, element_size: int
) -> None:
    for group_size in (1, 2, 4, 8, 16, 32):
        for shape in default_shapes(group_size, head_size, element_size):
            assert fitted(shape, head_size, element_size, H200) == shape
            for card in SMALLER:
                smaller = fitted(shape, head_size, element_size, card)
                assert shared_bytes(smaller, head_size, element_size, card) <= card.shared_bytes
                assert smaller.num_stages >= 2, "loads would not overlap with anything"
                assert (smaller.block_m, smaller.num_warps) == (shape.block_m, shape.num_warps)


@pytest.mark.slow
def test_what_the_compiler_takes_is_never_more_than_was_computed(tmp_path: Path) -> None:
    """Compiling needs no GPU, but a process that does not interpret."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.runner.triton_compiled"],
        cwd=Path(__file__).parents[2],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["capability"] for row in rows} == {80, 89, 90, 120}
    assert not [row for row in rows if not row["compiled"] <= row["computed"] <= row["available"]]


def scratch(launch: Launch, num_kv_heads: int, head_size: int) -> int:
    """Bytes that a launch allocates: outputs and sums in float32."""
    if launch.num_splits == 1:
        return 0
    return launch.num_tiles * num_kv_heads * launch.num_splits * launch.shape.block_m * (head_size + 1) * 4


def test_the_scratch_of_any_step_is_bounded() -> None:
    rng = random.Random(1)
    for group_size, card in product((1, 4, 8, 32), (H200, *SMALLER)):
        spec = FullAttentionSpec(16, 32 // group_size, 128, "bfloat16")
        for _ in range(100):
            query_lens = [1] * rng.choice([0, 1, 8, 64, 256, 1000])
            query_lens += [rng.choice([2, 17, 40, 500, rng.randint(1, 4000)]) for _ in range(rng.choice([1, 2, 5]))]
            if rng.random() < 0.5:
                rng.shuffle(query_lens)
            context_lens = [n + rng.choice([0, 2000, 32_768, 131_072]) for n in query_lens]
            for launch in plan_launches(
                spec, query_lens, context_lens, group_size=group_size, element_size=2, card=card
            ):
                assert scratch(launch, spec.num_kv_heads, 128) <= 128 << 20


@pytest.mark.parametrize("num_decodes", [0, 4, 64, 256])
def test_a_long_chunk_is_cut_as_finely_beside_decodes_as_alone(num_decodes: int) -> None:
    spec = FullAttentionSpec(16, 8, 128, "bfloat16")
    for query_lens in ([1] * num_decodes + [20], [20] + [1] * num_decodes):
        context_lens = [2000 if n == 1 else 32_768 for n in query_lens]
        *_, chunk = plan_launches(spec, query_lens, context_lens, group_size=4, element_size=2, card=H200)
        assert chunk.num_tiles == 1
        assert chunk.num_splits * spec.num_kv_heads * 2 > H200.num_processors, "half of the card would have no work"


@pytest.mark.parametrize(
    "lengths",
    [
        [(300, 1), (20, 1), (600, 20), (0, 33)],
        [(0, 33), (300, 1), (20, 3), (600, 20), (20, 1)],
        [(700, 18), (300, 1)],
        [(3, 1), (700, 150), (300, 1), (5, 40)],
    ],
)
@pytest.mark.parametrize("num_processors", [1, 40])
def test_the_launches_of_a_step_serve_each_token_once(lengths: list[tuple[int, int]], num_processors: int) -> None:
    step = a_step(1, spec_of(num_kv_heads=1), lengths, group_size=4)
    group = step.batch.groups[0]
    launches = plan_launches(
        group.spec,
        group.query_lens,
        group.context_lens,
        group_size=4,
        element_size=4,
        card=Card(num_processors, 1 << 20, 9),
    )
    outputs = [attended(step, launch) for launch in launches]
    served = sum((~output.isnan()).int() for output in outputs)
    assert (served == 1).all()
    assert any(launch.num_splits > 1 for launch in launches) == (num_processors > 1)
    assert_close(torch.stack(outputs).nan_to_num().sum(0), expected(step))
