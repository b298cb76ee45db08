"""Stop strings: found wherever they lie, shown nowhere, however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.stop_strings import StopStrings

SCRIPT = "KLMNOPQRSTUVKLMKLN"
PIECES = ["K", "LM", "N", "OP", "Q", "RST", "UV", "KLM", "KL", "N"]  # as tokens might cut it

few_letters = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def feed(stops: list[str], pieces: list[str], *, include_stop: bool = False) -> tuple[str, bool]:
    """Everything that is shown, and whether a stop string ended it."""
    search = StopStrings(stops, include_stop=include_stop)
    shown = []
    for piece in pieces:
        text, matched = search.push(piece)
        shown.append(text)
        if matched:
            return "".join(shown), True
    return "".join(shown) + search.flush(), False


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Oracle: start and end of the stop that is complete first, the longest of several."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - max(map(len, found)), end
    return None


def cut(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def test_every_substring_of_an_output_stops_it_at_its_first_occurrence():
    assert "".join(PIECES) == SCRIPT
    for length in range(1, 6):
        for start in range(len(SCRIPT) - length + 1):
            stop = SCRIPT[start : start + length]
            where = SCRIPT.find(stop)
            assert feed([stop], PIECES) == (SCRIPT[:where], True), stop
            shown = SCRIPT[: where + length]
            assert feed([stop], PIECES, include_stop=True) == (shown, True), stop


def test_a_match_is_reported_by_the_piece_that_completes_it():
    search = StopStrings(["MNO"])
    assert search.push("K") == ("K", False)
    assert search.push("LM") == ("L", False)
    assert search.push("N") == ("", False)
    assert search.push("OP") == ("", True)
    assert search.push("Q") == ("", True)
    assert search.flush() == ""


def test_an_included_stop_string_is_the_end_of_the_text():
    search = StopStrings(["MNO"], include_stop=True)
    assert search.push("KLM") == ("KL", False)
    assert search.push("NOPQ") == ("MNO", True)


@pytest.mark.parametrize("stops", [["ZZ", "OP"], ["OP", "ZZ"], ["OPQ", "OP"], ["P", "OP"]])
def test_of_several_stop_strings_the_first_to_be_complete_wins(stops):
    assert feed(stops, ["KLMN", "OPQ"]) == ("KLMN", True)


def test_text_that_only_began_like_a_stop_string_is_shown():
    search = StopStrings(["MNO"])
    assert search.push("LMN") == ("L", False)
    assert search.push("MN") == ("MN", False)
    assert search.flush() == "MN"


def test_no_stop_strings_let_everything_through_at_once():
    search = StopStrings([])
    assert search.push("anything") == ("anything", False)
    assert search.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop string is empty"):
        StopStrings(["x", ""])


@given(few_letters, stop_lists, st.lists(st.integers(0, 30), max_size=30), st.booleans())
def test_the_result_does_not_depend_on_how_the_text_is_cut(text, stops, cuts, include_stop):
    found = first_stop(text, stops)
    end = len(text) if found is None else found[include_stop]
    expected = (text[:end], found is not None)
    assert feed(stops, cut(text, cuts), include_stop=include_stop) == expected


@given(few_letters, stop_lists)
def test_no_more_is_held_back_than_could_still_begin_a_stop_string(text, stops):
    if first_stop(text, stops) is not None:
        return
    shown, _ = StopStrings(stops).push(text)
    held = text[len(shown) :]
    assert text.startswith(shown)
    begins = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    assert len(held) == max(begins, default=0)


def test_a_long_stop_string_that_almost_matches_again_and_again_is_searched_in_linear_time():
    count = 20_000
    search = StopStrings(["a" * count + "b", "a" * count + "c"])
    shown = [search.push("a")[0] for _ in range(3 * count)]
    assert "".join(shown) == "a" * (2 * count)
    assert search.push("c") == ("", True)
