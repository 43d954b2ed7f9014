"""Steps of a response: where it is split, and which tokens they are, whatever the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolegraph.errors import AlignmentError
from rolegraph.models.tiny import END, write_tokenizer
from rolegraph.rewards.steps import Decode, _Search, reduce_steps, split_steps, step_ends, step_spans


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A byte-level one, in which every character beyond ASCII is several tokens."""
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def decode_of(tokenizer: object) -> Decode:
    return lambda ids: tokenizer.decode_batch([list(row) for row in ids], skip_special_tokens=True)  # type: ignore[attr-defined]


def ids_of(tokenizer: object, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[attr-defined]
    return ids


PIECES = st.text(st.sampled_from("ab .\n\u00e9\u4e2d\U0001f600"), max_size=6)


@pytest.mark.parametrize(
    ("text", "separator", "steps"),
    [
        ("", "\n\n", []),
        (" \n\n \n", "\n\n", []),
        ("one", "\n\n", ["one"]),
        ("one\n\ntwo", "\n\n", ["one", "two"]),
        ("\n\none\n\n\n\ntwo\n\n", "\n\n", ["one", "two"]),
        ("one\ntwo", "\n", ["one", "two"]),
        ("a<s>b<s>", "<s>", ["a", "b"]),
        ("a\n\n\nb", "\n\n", ["a", "\nb"]),
    ],
)
def test_a_text_is_split_at_separators(text: str, separator: str, steps: list[str]) -> None:
    assert split_steps(text, separator) == steps


@given(st.text(st.sampled_from("ab \n"), max_size=30), st.sampled_from(["\n\n", "\n", "ab"]))
def test_steps_are_all_of_the_text_but_separators_and_blanks(text: str, separator: str) -> None:
    spans = step_spans(text, separator)
    assert all(separator not in text[start:end] and text[start:end].strip() for start, end in spans)
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    assert edges == sorted(edges)
    outside = "".join(text[a:b] for a, b in zip(edges[0::2], edges[1::2], strict=True))
    assert not outside.replace(separator, "").strip()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(PIECES, max_size=5).map("\n\n".join), max_size=4), st.booleans())
def test_ends_are_monotone_and_minimal(tokenizer: object, texts: list[str], is_ended: bool) -> None:
    decode = decode_of(tokenizer)
    ids = [ids_of(tokenizer, text + (END if is_ended else "")) for text in texts]
    found = step_ends(ids, texts, decode)
    for tokens, text, ends in zip(ids, texts, found, strict=True):
        spans = step_spans(text)
        assert len(ends) == len(spans)
        assert ends == sorted(ends)
        if spans:
            assert ends[-1] == len(tokens), "the last step has what is left, the end of sequence too"
        for (following, _), end in zip(spans[1:], ends, strict=False):
            assert decode([tokens[:end]])[0].startswith(text[:following])
            assert not decode([tokens[: end - 1]])[0].startswith(text[:following]), "a token earlier is too early"


@pytest.mark.parametrize("word", ["word ", "\u4e2d\u6587 ", "\U0001f600", "\n"])
def test_the_work_grows_with_the_steps_and_not_with_the_size_of_a_search(tokenizer: object, word: str) -> None:
    text = "\n\n".join(["a" + word * (5 + step % 7) for step in range(40)])
    ids, decoded, decode = ids_of(tokenizer, text), [], decode_of(tokenizer)

    def counted(rows: Sequence[Sequence[int]]) -> list[str]:
        decoded.extend(len(row) for row in rows if len(row) > 1)
        return decode(rows)

    assert len(step_ends([ids], [text], counted)[0]) == 40
    assert len(decoded) < 40 * 6, "a binary search takes about 10 prefixes a step"


@given(st.integers(1, 200), st.data())
def test_a_search_finds_the_lowest_number_wherever_it_begins(most: int, data: st.DataObject) -> None:
    lowest, guess = data.draw(st.integers(0, most)), data.draw(st.integers(0, 2 * most))
    search, probes = _Search(most, guess), 0
    while search.low < search.high:
        probe = search.probe()
        assert search.low <= probe < search.high
        search.learn(probe, probe >= lowest)
        probes += 1
    assert search.high == lowest
    assert probes <= 2 * abs(min(guess, most) - lowest).bit_length() + 3


def test_a_token_across_two_steps_belongs_to_the_first() -> None:
    words = {1: "so", 2: ".\n\nIt", 3: " is", 4: "\n\n"}
    decode: Decode = lambda ids: ["".join(words[i] for i in row) for row in ids]  # noqa: E731
    assert step_ends([[1, 2, 3], [1, 4, 3, 4], [4], []], ["so.\n\nIt is", "so\n\n is\n\n", "\n\n", ""], decode) == [
        [2, 3],
        [2, 4],
        [],
        [],
    ]


def test_a_prefix_that_ends_inside_a_character_never_counts() -> None:
    def decode(rows: Sequence[Sequence[int]]) -> list[str]:
        """Of bytes, as decoders with a byte fallback do it: a mark for each byte that makes no character yet."""
        texts = []
        for row in rows:
            whole = bytes(row).decode(errors="ignore")
            texts.append(whole + "\ufffd" * (len(row) - len(whole.encode())))
        return texts

    text = "\U0001f600\n\nb\n\n\u00e9"
    assert decode([list(text.encode()[:3])]) == ["\ufffd" * 3], "as long as the first step with what follows it"
    assert step_ends([list(text.encode())], [text], decode) == [[6, 9, 11]]


def test_a_text_of_other_tokens_is_named(tokenizer: object) -> None:
    ids = [ids_of(tokenizer, "a\n\nb")]
    with pytest.raises(AlignmentError, match=r"row r7: response_text is not what .* \(from character 0 on: "):
        step_ends(ids, [" a\n\nb"], decode_of(tokenizer), uids=["r7"])


def test_steps_amount_to_a_number() -> None:
    scores = [0.5, 1.0, 0.75]
    assert [reduce_steps(scores, how) for how in ("min", "mean", "last")] == [0.5, 0.75, 0.75]
    assert reduce_steps([0.5, None], "min") is None
    assert reduce_steps([], "mean") is None
    with pytest.raises(ValueError, match="reduce='max': choose one of min, mean, last"):
        reduce_steps(scores, "max")  # type: ignore[arg-type]
