"""Incremental text and stop strings."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.text import Detokenizer, Stops, TextStream


def decode(ids: Sequence[int]) -> str:
    """Tokens are bytes, the hardest case: a character may take four of them."""
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.lists(st.integers(0, 255), max_size=80))
def test_any_bytes(ids: list[int]) -> None:
    """The pieces concatenate to the text of the whole, broken bytes included."""
    d = Detokenizer(decode)
    assert "".join(d.push(i) for i in ids) + d.close() == decode(ids)


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40))
def test_characters_come_whole(text: str) -> None:
    d = Detokenizer(decode)
    pieces = [d.push(b) for b in text.encode()]
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert "".join(pieces) == text
        assert d.close() == ""


def test_a_broken_character_is_shown_in_the_end() -> None:
    d = Detokenizer(decode)
    assert [d.push(b) for b in b"a\xe4\xbd"] == ["a", "", ""]
    assert d.close() == "\N{REPLACEMENT CHARACTER}"
    assert Detokenizer(decode).close() == ""


def test_no_stop_strings_hold_nothing() -> None:
    s = Stops(())
    assert s.push("abc") == ("abc", None)
    assert s.close() == ""


def test_partial_matches_are_held_back() -> None:
    s = Stops(("END", "\n\n"))
    assert s.push("a E") == ("a ", None)
    assert s.push("N") == ("", None)
    assert s.push("d\n") == ("ENd", None)
    assert s.push("x") == ("\nx", None)
    assert s.push("EN") == ("", None)
    assert s.close() == "EN"


def test_the_earliest_stop_wins_then_the_longest() -> None:
    assert Stops(("b", "ab")).push("xxabyy") == ("xx", "ab")
    assert Stops(("a", "ab")).push("xxabyy") == ("xx", "ab")
    s = Stops(("aab",))
    assert s.push("aa") == ("", None)
    assert s.push("ab") == ("a", "aab")


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=30),
)
def test_cut_anywhere(text: str, stops: list[str], cuts: list[int]) -> None:
    """What is shown never contains or passes a stop string, however the text arrives."""
    s, shown, at, found = Stops(stops), "", 0, None
    for n in (*cuts, *[1] * len(text)):
        piece, found = s.push(text[at : at + n])
        shown, at = shown + piece, at + n
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        if found or at >= len(text):
            break
    if found is None:
        assert shown + s.close() == text
        assert not any(stop in text for stop in stops)
    else:
        assert text[len(shown) :].startswith(found)


BROKEN = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("stops", "want"), [((), ("", BROKEN, None)), ((BROKEN,), ("", "", BROKEN))]
)
def test_close_runs_the_stops_too(stops: tuple[str, ...], want: tuple) -> None:
    t = TextStream(decode, stops)
    shown, stop = t.push(0xE4)
    assert stop is None
    assert (shown, *t.close()) == want


def test_one_replacement_character_per_missing_byte_is_held_back() -> None:
    """SentencePiece-style byte fallback shows every pending byte; the character comes whole."""
    data = "世a\N{SNOWMAN}".encode()

    def decode(ids: Sequence[int]) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError as error:
            broken = len(ids) - error.start
            return bytes(ids[: error.start]).decode() + "\N{REPLACEMENT CHARACTER}" * broken

    text = Detokenizer(decode)
    pieces = [text.push(b) for b in data]
    assert pieces == ["", "", "世", "a", "", "", "\N{SNOWMAN}"]
    assert text.close() == ""
