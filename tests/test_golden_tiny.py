"""Every family against logits and tokens that another implementation computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import FAMILIES, TINY, all_logits, generate, make_engine, request, tiny

from jaxserve.models.attention import PagedAttention

MARGIN = 1e-3  # a smaller lead over the runner-up may fall either way


def golden(family: str) -> list[dict[str, Any]]:
    with np.load(TINY / family / "golden.npz") as file:
        names = ("prompt", "logits", "greedy", "greedy_margin")
        return [{name: file[f"{name}_{i}"] for name in names} for i in range(5)]


@pytest.mark.parametrize("kind", ["cpu", "native", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_golden_ones(family, kind):
    attention = PagedAttention(kind)
    for case in golden(family):
        got = all_logits(tiny(family, attention), case["prompt"].tolist(), attention)
        expected = case["logits"]
        np.testing.assert_allclose(got[-len(expected) :], expected, atol=5e-4)


@pytest.mark.parametrize("kind", ["cpu", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_the_golden_ones_all_served_together(family, kind):
    cases = golden(family)
    requests = [request(str(i), case["prompt"], 24) for i, case in enumerate(cases)]
    tokens = generate(make_engine(family, attention=PagedAttention(kind)), requests)
    compared = 0
    for i, case in enumerate(cases):
        close = np.flatnonzero(case["greedy_margin"] <= MARGIN)
        certain = int(close[0]) if close.size else 24
        compared += certain
        assert tokens[str(i)][:certain] == case["greedy"][:certain].tolist()
    assert compared > 60, "too many near ties for the comparison to prove anything"
