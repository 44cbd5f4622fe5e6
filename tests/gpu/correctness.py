"""Backends against attention in float64, on random steps whose unused cache is NaN, or huge where that is excused."""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from kvcore.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from runner.attention import make_backend
from runner.attention.base import AttentionBackend, AttentionLayer
from runner.attention.flash_backend import FlashAttentionBackend
from runner.batch import GroupBatch, SequenceSlice
from runner.errors import UnsupportedModelError
from runner.step_inputs import StepInputs, make_batch
from tests.gpu.exact import BOUNDS, Error, exact_attention
from tests.gpu.timing import captured
from tests.gpu.work import Measurement, Record, Settings
from tests.runner.paged_reference import RandomStep, blocks_of, random_step, reference_attention

Lengths = tuple[tuple[int, int], ...]
"""For each sequence its tokens in the cache, and those of the step."""

MIXED: Lengths = (
    (0, 1), (0, 17), (300, 1), (170, 90), (15, 1), (16, 1), (255, 1), (64, 64), (1023, 1), (0, 300), (1200, 130),
)  # fmt: skip
DECODES: Lengths = tuple((past, 1) for past in (0, 14, 15, 16, 126, 127, 255, 256, 999, 1024, 2048, 3001))
LONG: Lengths = ((32_766, 1), (5, 1), (20_000, 1))
LONG_CHUNK: Lengths = ((12_000, 300), (8_191, 1))

SMALL_MIXED: Lengths = ((0, 1), (0, 17), (30, 1), (17, 9), (15, 1), (16, 1))
SMALL_DECODES: Lengths = tuple((past, 1) for past in (0, 15, 16, 33))
SMALL_LONG: Lengths = ((300, 1), (5, 1))
SMALL_LONG_CHUNK: Lengths = ((200, 5), (40, 1))


@dataclass(frozen=True)
class Case:
    """One step and one kind of layer.

    Args:
        lengths: What the step computes.
        kind: "full", "sliding" or "chunked".
        reach: Tokens of the window or chunk.
        page: Tokens of a page; None: what the backend takes by default.
        num_kv_heads: Hkv.
        group_size: Query heads per key head.
        head_size: D.
        softcap: As for :meth:`runner.attention.AttentionBackend.forward`.
        has_sinks: Each query head has a sink.
        is_padded: Decodes only: as in a step of a captured graph, with padding, and on a CUDA device in one.
    """

    lengths: Lengths
    kind: str = "full"
    reach: int = 0
    page: int | None = None
    num_kv_heads: int = 2
    group_size: int = 4
    head_size: int = 128
    softcap: float | None = None
    has_sinks: bool = False
    is_padded: bool = False

    def spec(self, page: int, dtype: str) -> KVCacheSpec:
        """What such a layer caches."""
        shape = (page, self.num_kv_heads, self.head_size, dtype)
        if self.kind == "sliding":
            return SlidingWindowSpec(*shape, self.reach)
        if self.kind == "chunked":
            return ChunkedLocalAttentionSpec(*shape, self.reach)
        return FullAttentionSpec(*shape)


def families(*, tiny: bool) -> dict[str, list[Case]]:
    """Cases by what varies in them."""
    mixed, decodes = (SMALL_MIXED, SMALL_DECODES) if tiny else (MIXED, DECODES)
    long, long_chunk = (SMALL_LONG, SMALL_LONG_CHUNK) if tiny else (LONG, LONG_CHUNK)
    groups, pages, sizes = ((1, 3), (16, 64), (32, 80)) if tiny else (range(1, 9), (16, 64, 256), (64, 80, 128, 256))
    windows, chunks = ((1, 15, 128), (24,)) if tiny else ((1, 15, 128, 1024), (128, 1000))
    windowed = Case(mixed, "sliding", windows[-1])
    one = {"num_kv_heads": 1, "group_size": 2, "head_size": 32} if tiny else {}
    found = {
        "query heads per key head": [Case(steps, group_size=g) for g in groups for steps in (mixed, decodes)],
        "pages": [replace(case, page=page) for page in pages for case in (Case(mixed), Case(decodes), windowed)],
        "head sizes": [Case(steps, head_size=size) for size in sizes for steps in (mixed, decodes)],
        "windows": [Case(steps, "sliding", reach) for reach in windows for steps in (mixed, decodes, long)],
        "chunks": [Case(steps, "chunked", reach) for reach in chunks for steps in (mixed, decodes)],
        "softcap and sinks": [
            replace(case, softcap=softcap, has_sinks=has_sinks)
            for case in (Case(mixed), Case(decodes), windowed)
            for softcap, has_sinks in ((20.0, False), (None, True), (20.0, True))
        ],
        "long contexts": [
            Case(long), Case(long, num_kv_heads=8, group_size=1), Case(long, has_sinks=True), Case(long, softcap=20.0),
            Case(long_chunk), Case(long_chunk, "sliding", windows[-1]),
        ],
        "padded and captured": [
            Case(steps, kind, reach, is_padded=True)
            for kind, reach in (("full", 0), ("sliding", windows[-1]))
            for steps in (decodes, long)
        ],
    }  # fmt: skip
    if not tiny:
        return found
    small = {name: [replace(case, **one) for case in cases] for name, cases in found.items()}
    small["query heads per key head"] = [replace(case, head_size=32) for case in found["query heads per key head"]]
    small["head sizes"] = [replace(case, num_kv_heads=1, group_size=2) for case in found["head sizes"]]
    return small


def measurements(settings: Settings) -> list[Measurement]:
    """The reference against the slow one, then one for each backend, element type and family."""
    dtypes = ("bfloat16", "float16") if settings.is_timed else ("float32",)
    return [
        Measurement("the reference against a slower one", partial(_check_reference, settings)),
        *(
            Measurement(f"{backend}, {dtype}: {name}", partial(_check_family, settings, backend, dtype, cases))
            for backend in settings.backends
            for dtype in dtypes
            for name, cases in families(tiny=settings.tiny).items()
        ),
    ]


def _check_reference(settings: Settings) -> Record:
    worst = 0.0
    for kind in ("full", "sliding", "chunked"):
        case = Case(SMALL_MIXED, kind, 11, head_size=32)
        step = _step(case, case.spec(16, "float32"), settings.device)
        kwargs = {"scale": 0.2, "softcap": 5.0, "sinks": torch.linspace(-2, 2, 8, device=settings.device)}
        slow = reference_attention(step, case.spec(16, "float32"), **kwargs)
        error = Error.of(exact_attention(step, case.spec(16, "float32"), **kwargs), slow)
        worst = max(worst, error.vector) if error.vector == error.vector else error.vector
    return {"status": "ok" if worst < 1e-12 else "failed", "note": f"they differ by {worst:.1e}"}


def _check_family(settings: Settings, name: str, dtype: str, cases: Sequence[Case]) -> Record:
    backend = make_backend(name, settings.device)
    bound = BOUNDS[dtype]
    errors: list[Error] = []
    refusals: list[str] = []
    failures: list[str] = []
    crashes: list[str] = []
    for case in cases:
        try:
            error = check_case(case, backend, dtype, settings.device)
        except (UnsupportedModelError, NotImplementedError) as refusal:
            refusals.append(str(refusal))
            continue
        except Exception as crash:
            if settings.device != "cpu":
                torch.cuda.synchronize()  # raises where CUDA is lost to this process, and all cases with it
            failures.append(f"{case}: {type(crash).__name__}: {crash}")
            crashes.append(traceback.format_exc())
            continue
        errors.append(error)
        if not error.is_within(bound):
            failures.append(f"{case}: {asdict(error)}, allowed {asdict(bound)}")
    record: Record = {
        "backend": name,
        "dtype": dtype,
        "allowed": asdict(bound),
        "cases": len(errors) + len(crashes),
        "refused": len(refusals),
        "refusals": sorted(set(refusals)),
        "failures": failures,
        "status": "failed" if failures else "ok" if errors else "refused",
    }
    if crashes:
        record["traceback"] = crashes[0]
    if errors:
        # max() of Python passes over NaN; a NaN is among the failures.
        record |= {key: max(getattr(error, key) for error in errors) for key in ("whole", "vector", "largest")}
        record["note"] = f"{len(errors)} cases, largest relative error {record['whole']:.1e}"
    if failures:
        record["note"] = f"{len(failures)} of {record['cases']} cases are wrong; {failures[0]}"
    elif not errors and refusals:
        record["note"] = refusals[0]
    return record


def check_case(case: Case, backend: AttentionBackend, dtype: str, device: str) -> Error:
    """How far the backend is from the reference.

    Raises:
        UnsupportedModelError: The backend refuses such a layer.
        NotImplementedError: It cannot run in a captured step.
    """
    spec = case.spec(case.page or backend.default_block_size, dtype)
    num_query_heads = case.num_kv_heads * case.group_size
    layer = AttentionLayer("layer", spec, num_query_heads, case.softcap, case.has_sinks)
    backend.check([layer], device=torch.device(device), dtype=getattr(torch, dtype))
    step = _step(case, spec, device)
    if isinstance(backend, FlashAttentionBackend) and not backend.clears_what_it_skips(spec):
        step.kv_cache.nan_to_num_(nan=3e4)
    sinks = torch.linspace(-2, 2, num_query_heads, device=device).to(step.query.dtype) if case.has_sinks else None
    settings = {"scale": spec.head_size**-0.5, "softcap": case.softcap, "sinks": sinks}
    if case.is_padded:
        if not backend.supports_graphs:
            raise NotImplementedError(f"{backend.name} does not run in captured steps")
        output = _in_a_captured_step(step, spec, backend, settings)
    else:
        output = backend.forward(
            step.query, step.key, step.value, step.kv_cache, backend.plan(step.batch.groups[0]), **settings
        )
    return Error.of(output, exact_attention(step, spec, **settings))


def _step(case: Case, spec: KVCacheSpec, device: str) -> RandomStep:
    """A step whose queries and keys are views such as models give, head by head.

    Made on the CPU, where filling a cache token by token is quickest, and brought to the device as a whole.
    """
    step = random_step(
        random.Random(repr(case)),
        spec,
        list(case.lengths),
        num_query_heads=case.num_kv_heads * case.group_size,
        dtype=getattr(torch, spec.dtype),
    )
    config = KVCacheConfig(step.kv_cache.shape[0], [KVCacheGroupSpec(["layer"], spec)])
    return RandomStep(
        batch=make_batch(_sequences(step.batch.groups[0]), config, device),
        kv_cache=step.kv_cache.to(device),
        query=step.query.to(device).transpose(0, 1).contiguous().transpose(0, 1),
        key=step.key.to(device).transpose(0, 1).contiguous().transpose(0, 1),
        value=step.value.to(device),
        keys=[keys.to(device) for keys in step.keys],
        values=[values.to(device) for values in step.values],
    )


def _sequences(group: GroupBatch) -> list[SequenceSlice]:
    """Those of a step, in their first step."""
    lengths = zip(group.query_lens, group.context_lens, group.block_ids, strict=True)
    return [
        SequenceSlice(f"sequence-{i}", [7] * query_len, context_len - query_len, blocks_of(table), samples=True)
        for i, (query_len, context_len, table) in enumerate(lengths)
    ]


def _in_a_captured_step(
    step: RandomStep, spec: KVCacheSpec, backend: AttentionBackend, settings: dict[str, object]
) -> torch.Tensor:
    """The output of decodes laid out with padding; on a CUDA device, captured while all was padding, then replayed.

    Rows of padding that are not finite make all of it NaN.
    """
    group = step.batch.groups[0]
    num_sequences = len(group.query_lens)
    size = num_sequences + 3
    sequences = _sequences(group)
    inputs = StepInputs(
        KVCacheConfig(step.kv_cache.shape[0], [KVCacheGroupSpec(["layer"], spec)]),
        max_num_batched_tokens=size,
        max_num_seqs=size,
        # Longer than anything here: lengths are bounds, and tables wider than used.
        max_model_len=2 * max(group.context_lens),
        device=group.device,
    )

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        extra = torch.full_like(tensor[:1], float("nan")).expand(size - num_sequences, -1, -1)
        return torch.cat((tensor, extra))

    query, key, value = padded(step.query), padded(step.key), padded(step.value)
    query[num_sequences:] = 1.0  # a model computes something for padding, too
    outputs: list[torch.Tensor] = []

    def run(batch_group: GroupBatch) -> None:
        plan = backend.plan(replace(batch_group))
        outputs[:] = [backend.forward(query, key, value, step.kv_cache, plan, **settings)]

    if group.device.type == "cuda":
        empty = inputs.lay_out_padded([], size).groups[0]
        replay = captured(lambda: run(empty), lambda: run(empty))
        inputs.lay_out_padded(sequences, size)
        outputs[0].fill_(float("nan"))
        replay()
    else:
        run(inputs.lay_out_padded(sequences, size).groups[0])
    output = outputs[0]
    if not output[num_sequences:].isfinite().all():
        return torch.full_like(output[:num_sequences], float("nan"))
    return output[:num_sequences]
