"""Text comes out as soon as it is certain, and never half a character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runner.detokenizer import IncrementalDetokenizer
from tests.runner.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def test_a_character_of_several_tokens_comes_out_with_its_last_one() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, TOKENIZER("prompt ")["input_ids"])
    tokens = TOKENIZER("é🎉!")["input_ids"]
    assert len(tokens) == 2 + 4 + 1
    assert [detokenizer.add([token]) for token in tokens] == ["", "é", "", "", "", "🎉", "!"]
    assert detokenizer.finish() == ""
    assert detokenizer.text == "é🎉!"


def test_an_unfinished_character_at_the_end_comes_out_as_a_replacement() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, [])
    tokens = TOKENIZER("a日")["input_ids"][:-1]
    assert [detokenizer.add([token]) for token in tokens] == ["a", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.text == TOKENIZER.decode(tokens)


@given(prompt=st.text(max_size=8), text=st.text(max_size=40), sizes=st.lists(st.integers(1, 5), min_size=40))
def test_the_pieces_of_any_text_join_to_it_without_replacements(prompt: str, text: str, sizes: list[int]) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    detokenizer = IncrementalDetokenizer(TOKENIZER, TOKENIZER(prompt)["input_ids"])
    pieces = []
    for size in sizes:
        pieces.append(detokenizer.add(tokens[:size]))
        tokens = tokens[size:]
    pieces += [detokenizer.add(tokens), detokenizer.finish()]
    assert "".join(pieces) == detokenizer.text == text
    assert text.count("\ufffd") == sum(piece.count("\ufffd") for piece in pieces)


@given(tokens=st.lists(st.integers(0, 255), max_size=60))
def test_the_pieces_of_any_bytes_join_to_what_the_tokenizer_makes_of_all(tokens: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, [])
    pieces = [detokenizer.add([token]) for token in tokens] + [detokenizer.finish()]
    assert "".join(pieces) == detokenizer.text == TOKENIZER.decode(tokens)
