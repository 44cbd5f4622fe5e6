"""What a request may ask for, and how its tokens are chosen: checked against transformers and by counting."""

from __future__ import annotations

import copy
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runner.errors import SamplingParamsError
from runner.logits import TokenSampler, draw, keep_min_p, keep_top_k, keep_top_p, sample, token_logprobs
from runner.sampling import SamplingParams
from runner.stopping import OutputText, StopStrings, finish_reason
from tests.runner.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"min_tokens": -1}, "min_tokens must be a whole number of at least 0, got -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is more than max_tokens=4"),
        ({"temperature": -0.1}, "temperature must be a number of at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature must be a number of at least 0, got nan"),
        ({"temperature": math.inf}, "temperature must be a number of at least 0, got inf"),
        ({"temperature": "hot"}, "temperature must be a number of at least 0, got 'hot'"),
        ({"temperature": True}, "temperature must be a number of at least 0, got True"),
        ({"top_k": -1}, "top_k must be a whole number of at least 0; 0 draws from all tokens, got -1"),
        ({"top_k": 2.0}, "top_k must be a whole number"),
        ({"top_p": 0}, "top_p must be a number above 0 and up to 1, got 0"),
        ({"top_p": 1.1}, "top_p must be a number above 0 and up to 1, got 1.1"),
        ({"min_p": -0.1}, "min_p must be a number from 0 to 1, got -0.1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 0.01 to 100, got 0"),
        ({"presence_penalty": 2.1}, "presence_penalty must be a number from -2 to 2, got 2.1"),
        ({"frequency_penalty": None}, "frequency_penalty must be a number from -2 to 2, got None"),
        ({"seed": 1.5}, "seed must be a whole number or None, got 1.5"),
        ({"stop": ["a", ""]}, "stop must be text or several texts, none of them empty"),
        ({"stop": ""}, "stop must be text or several texts, none of them empty"),
        ({"stop": 3}, "stop must be text or several texts"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids must be whole numbers of at least 0"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be whole numbers of at least 0"),
        ({"stop_token_ids": 7}, "stop_token_ids must be whole numbers of at least 0, got 7"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"logprobs": -1}, "logprobs must be a whole number of at least 0, got -1"),
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
    ],
)
def test_what_cannot_be_honoured_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_what_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_one_stop_string_is_the_same_as_a_list_of_one_and_a_list_may_change_afterwards() -> None:
    stops = ["x"]
    params = SamplingParams(stop=stops)
    stops.append("y")
    assert params == SamplingParams(stop="x")
    assert hash(params) == hash(copy.copy(params))


def samplers(*params: SamplingParams, prompt: tuple[int, ...] = (), eos: tuple[int, ...] = ()) -> list[TokenSampler]:
    return [TokenSampler(each, prompt, eos) for each in params]


def test_greedy_takes_the_likeliest_token_of_each_sequence() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 5.0, -1.0]])
    assert [s.token for s in sample(logits, samplers(SamplingParams(), SamplingParams()))] == [1, 0]


def random_row(seed: int, size: int = 3000) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("k", [1, 2, 50, 2999, 3000, 5000])
def test_top_k_keeps_what_transformers_keeps(seed: int, k: int) -> None:
    row = random_row(seed)
    assert torch.equal(keep_top_k(row, k), TopKLogitsWarper(k)(None, row[None])[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [0.05, 1.0, 5.0])  # nearly equal: more than the likeliest 1024 are kept
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.99])
def test_top_p_keeps_what_transformers_keeps(seed: int, scale: float, p: float) -> None:
    row = random_row(seed).double() * scale
    assert torch.equal(keep_top_p(row, p), TopPLogitsWarper(p)(None, row[None])[0])


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(p: float) -> None:
    row = random_row(1)
    assert torch.equal(keep_min_p(row, p), MinPLogitsWarper(p)(None, row[None])[0])


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    prompt, output = (5, 7, 7, 11), [13, 5, 13]
    row = random_row(2)
    (sampler,) = samplers(SamplingParams(repetition_penalty=penalty), prompt=prompt)
    sampler.penalized(row)
    for token in output:
        sampler.note(token)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*prompt, *output]]), row[None].clone())[0]
    assert torch.equal(sampler.penalized(row), expected)
    assert not torch.equal(expected, row)


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    row = random_row(3, 10)
    (sampler,) = samplers(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt=(1, 1, 2))
    assert torch.equal(sampler.penalized(row), row)
    for token in [2, 4, 4, 4]:
        sampler.note(token)
    expected = row.clone()
    expected[2] -= 0.5 + 0.25
    expected[4] -= 0.5 + 3 * 0.25
    assert torch.allclose(sampler.penalized(row), expected)


def test_all_settings_together_give_the_distribution_of_transformers() -> None:
    row = random_row(4)
    prompt = tuple(row.topk(5).indices.tolist())
    params = SamplingParams(
        repetition_penalty=1.2, temperature=1.7, top_k=40, top_p=0.8, min_p=0.05, min_tokens=1, stop_token_ids=[9]
    )
    (sampler,) = samplers(params, prompt=prompt, eos=(prompt[0],))
    scores = row[None].double()
    ids = torch.tensor([prompt])
    for step in (
        RepetitionPenaltyLogitsProcessor(1.2),
        MinNewTokensLengthLogitsProcessor(len(prompt), 1, [9, prompt[0]], device="cpu"),
        TemperatureLogitsWarper(1.7),
        TopKLogitsWarper(40),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.05),
    ):
        scores = step(ids, scores)
    found = sampler.warped(sampler.penalized(row)).softmax(-1)
    assert torch.allclose(found, scores.softmax(-1)[0], atol=1e-6)
    assert 1 < int((found > 0).sum()) < 40
    assert found[prompt[0]] == 0


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    row = torch.tensor([0.1, -torch.inf, 0.5, 0.15, 0.25]).log().nan_to_num(neginf=-torch.inf)
    row[1] = -torch.inf
    (sampler,) = samplers(SamplingParams(temperature=1.0, seed=5))
    number = 4000
    counts = Counter(int(sampler.choose(row)) for _ in range(number))
    assert counts.keys() == {0, 2, 3, 4}
    expected = {0: 0.1, 2: 0.5, 3: 0.15, 4: 0.25}
    chi_squared = sum((counts[token] - p * number) ** 2 / (p * number) for token, p in expected.items())
    assert chi_squared < 16.3  # 1 in 1,000 for 3 degrees of freedom, and the seed is fixed


def test_the_ends_of_the_unit_interval_never_draw_what_is_impossible() -> None:
    row = torch.tensor([-torch.inf, 1.0, -torch.inf, 2.0, -torch.inf])
    assert int(draw(row, 0.0)) == 1
    assert int(draw(row, 1 - 2**-53)) == 3


@pytest.mark.parametrize("temperature", [1e-300, 1e-6])
def test_the_smallest_temperatures_take_the_likeliest(temperature: float) -> None:
    row = random_row(6)
    (sampler,) = samplers(SamplingParams(temperature=temperature, top_p=0.9, top_k=20, min_p=0.1))
    assert int(sampler.choose(row)) == int(row.argmax())


def test_a_seed_draws_the_same_whatever_else_is_in_the_batch() -> None:
    rows = [random_row(seed, 50) for seed in range(30)]

    def drawn(seed: int, others: int) -> list[int]:
        batch = samplers(*[SamplingParams(temperature=1.0)] * others, SamplingParams(temperature=1.0, seed=seed))
        return [sample(torch.stack([*[rows[0]] * others, row]), batch)[-1].token for row in rows]

    assert drawn(3, 0) == drawn(3, 0) == drawn(3, 2) == drawn(3, 5)
    assert len({tuple(drawn(seed, 0)) for seed in (3, -3, 4, 0)}) == 4


def test_without_a_seed_no_two_requests_draw_the_same() -> None:
    row = torch.zeros(1000)
    drawn = [
        [int(sampler.choose(row)) for _ in range(10)] for sampler in samplers(*[SamplingParams(temperature=1)] * 2)
    ]
    assert drawn[0] != drawn[1]


def test_stop_tokens_are_not_chosen_before_the_fewest_tokens_are_there() -> None:
    logits = torch.tensor([[1.0, 9.0, 8.0, 2.0]])
    params = SamplingParams(min_tokens=2, stop_token_ids=[1, 10**6])
    batch = samplers(params, eos=(2,))
    assert [sample(logits, batch)[0].token for _ in range(3)] == [3, 3, 1]
    ignoring = samplers(SamplingParams(min_tokens=2, ignore_eos=True), eos=(1,))
    assert sample(logits, ignoring)[0].token == 1


def test_log_probabilities_are_the_models_own_and_the_likeliest_come_first() -> None:
    row = random_row(7, 40)
    expected = row.log_softmax(-1)
    order = expected.argsort(descending=True).tolist()
    params = SamplingParams(logprobs=3, temperature=5.0, top_k=10, seed=1, presence_penalty=1.0)
    batch = samplers(params, SamplingParams(), SamplingParams(logprobs=0))
    first, second, third = sample(torch.stack([row] * 3), batch)
    assert second.logprobs is None
    assert first.logprobs is not None
    assert first.logprobs.token_id == first.token
    assert first.logprobs.logprob == pytest.approx(float(expected[first.token]))
    assert first.logprobs.rank == order.index(first.token) + 1
    assert list(first.logprobs.likeliest) == order[:3]
    assert list(first.logprobs.likeliest.values()) == pytest.approx(expected[order[:3]].tolist())
    assert third.logprobs is not None
    assert third.logprobs.likeliest == {}
    assert third.logprobs.rank == 1
    assert len(token_logprobs(row, 0, 10**6).likeliest) == 40


def test_an_output_ends_at_a_stop_token_or_at_its_length() -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=[7])
    assert finish_reason(params, 1, 2, {9}) is None
    assert finish_reason(params, 7, 2, {9}) == "stop"
    assert finish_reason(params, 9, 2, {9}) == "stop"
    assert finish_reason(params, 1, 3, {9}) == "length"
    assert finish_reason(params, 7, 3, {9}) == "stop"


def test_ignore_eos_ignores_the_models_tokens_but_not_the_callers() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=[7])
    assert finish_reason(params, 9, 1, {9}) is None
    assert finish_reason(params, 7, 1, {9, 7}) == "stop"


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_certain() -> None:
    stops = StopStrings(["###", "\nUser:"])
    assert [stops.feed(piece) for piece in ["a#", "#", "b\n", "Us", "er is", "\nUser", ":", "more"]] == [
        "a", "", "##b", "", "\nUser is", "", "", ""
    ]  # fmt: skip
    assert stops.found == "\nUser:"
    assert stops.finish() == ""


def test_what_was_held_back_comes_at_the_end_if_no_stop_string_came_of_it() -> None:
    stops = StopStrings(["###"])
    assert stops.feed("a##") == "a"
    assert stops.finish() == "##"
    assert stops.found is None


def test_a_stop_string_that_was_complete_too_early_is_text_and_a_later_one_is_not() -> None:
    stops = StopStrings(["ab", "abc"])
    assert stops.feed("xab", may_stop=False) == "x"
    assert stops.feed("y") == "aby"
    assert stops.feed("za", may_stop=False) == "z"
    assert stops.feed("b") == ""
    assert stops.found == "ab"


def naive_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: character by character, until the text so far ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3, unique=True),
)
def test_any_pieces_pass_up_to_the_first_stop_string_and_never_too_far(pieces: list[str], stops: list[str]) -> None:
    text, found = naive_cut("".join(pieces), stops)
    matcher = StopStrings(stops)
    passed = given_in = ""
    for piece in pieces:
        passed += matcher.feed(piece)
        given_in += piece
        assert text.startswith(passed)
        if matcher.found is None:
            # Nothing is held back without need: it begins some stop string.
            held = given_in[len(passed) :]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    passed += matcher.finish()
    assert (passed, matcher.found) == (text, found)


@given(text=st.text("ab日é🎉", max_size=20), stop=st.text("ab日é🎉", min_size=1, max_size=3))
def test_stop_strings_are_found_across_tokens_that_split_characters(text: str, stop: str) -> None:
    expected, found = naive_cut(text, [stop])
    output = OutputText(TOKENIZER, [], [stop])
    deltas = []
    for token in TOKENIZER(text)["input_ids"]:
        deltas.append(output.add(token))
        assert expected.startswith("".join(deltas))
    deltas.append(output.finish())
    assert "".join(deltas) == output.text == expected
    assert output.stop_string == found
