"""The Grafana dashboard and the scrape example: whatever they name is there."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.frames import PromisedTimes
from jaxserve.server.metrics import Metrics

DOCS = Path(__file__).parent.parent / "docs"
DASHBOARD = json.loads((DOCS / "grafana.json").read_text())
PANELS = DASHBOARD["panels"]


@pytest.fixture(scope="module")
def exported():
    """Names and labels of every sample of /metrics, on a server with a promise."""
    metrics = Metrics(open_sequences=lambda: 0)
    metrics.promise = PromisedTimes(0.5, 0.033, 95.0)
    metrics.requests.labels("/v1/completions", "ok").inc()
    families = text_string_to_metric_families(metrics.text().decode())
    return {s.name: set(s.labels) for family in families for s in family.samples}


def expressions():
    return [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_every_metric_of_the_dashboard_is_exported_with_its_labels(exported, title, expression):
    names = re.findall(r"jaxserve_\w+", expression)
    assert names
    for name in names:
        assert name in exported, f"{title}: {name}"
    for labels in re.findall(r"sum by \(([\w, ]+)\)", expression):
        assert set(labels.split(", ")) <= exported[names[0]], f"{title}: {labels}"


def test_counters_are_looked_at_by_their_rate():
    for title, expression in expressions():
        for name in re.findall(r"(?:rate|increase)\((jaxserve_\w+)", expression):
            assert name.endswith(("_total", "_bucket")), f"{title}: rate of {name}"


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS]
    assert len(set(places)) == len(places)
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in PANELS)


def test_the_promise_s_limits_are_in_it():
    named = " ".join(expression for _, expression in expressions())
    for name in ("ttft_promised_seconds", "tpot_promised_seconds", "running_limit"):
        assert f"jaxserve_{name}" in named


def test_the_scrape_example_asks_for_metrics_where_the_server_listens_by_default():
    text = (DOCS / "prometheus.yml").read_text()
    assert '"127.0.0.1:8000"' in text
    assert "metrics_path" not in text  # Prometheus' own default, /metrics, is ours
