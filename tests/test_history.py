"""What the charts of the page show: bounded, of what happened, and only what is new."""

import math

import pytest
from toy_server import refusal, running_server

from jaxserve.frames import PromisedTimes, Stats
from jaxserve.server import history
from jaxserve.server.history import History
from jaxserve.server.metrics import Metrics, Timeline
from jaxserve.server.window import Window


@pytest.fixture
def metrics():
    return Metrics(open_sequences=lambda: 0)


@pytest.fixture
def clock(monkeypatch):
    """Seconds, and what moves them."""

    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(history, "perf_counter", clock)
    return clock


def newest(log):
    return log.since(0.0)[-1]


def test_only_a_quarter_of_an_hour_is_kept(metrics, clock):
    log = History(metrics)
    for _ in range(1000):
        clock.now += history.INTERVAL
        log.sample()
    kept = log.since(0.0)
    assert len(kept) == history.SPAN / history.INTERVAL == 450
    assert kept[-1].time - kept[0].time == pytest.approx(history.SPAN - history.INTERVAL)


def test_what_is_new_is_what_came_after(metrics, clock):
    log = History(metrics)
    for _ in range(5):
        clock.now += 2.0
        log.sample()
    times = [sample.time for sample in log.since(0.0)]
    assert times == sorted(times)
    assert [sample.time for sample in log.since(times[2])] == times[3:]
    assert log.since(times[-1]) == []


def test_a_sample_is_what_the_worker_said(metrics, clock):
    log = History(metrics)
    metrics.heard_from_worker(
        Stats(
            running=3,
            waiting=2,
            running_limit=7,
            pages_total=100,
            pages_live=30,
            pages_cached=50,
            step_seconds=0.02,
            predicted_seconds=0.03,
            prediction_error=0.1,
            rung=1,
        ),
        clock.now,
    )
    log.sample()
    sample = newest(log)
    assert (sample.running, sample.waiting, sample.running_limit, sample.rung) == (3, 2, 7, 1)
    assert (sample.pages_live, sample.pages_cached, sample.pages_free) == (30, 50, 20)
    assert (sample.step_seconds, sample.predicted_seconds) == (0.02, 0.03)
    assert sample.prediction_error == 0.1


def test_rates_are_of_the_time_between_the_worker_s_words(metrics, clock):
    log = History(metrics)
    metrics.heard_from_worker(Stats(steps=1, prompt_tokens=100, output_tokens=10), 1000.0)
    log.sample()
    # Said after 1.5 s, looked at after 2: what came in between is of 1.5 s.
    metrics.heard_from_worker(Stats(steps=2, prompt_tokens=400, output_tokens=25), 1001.5)
    clock.now += 2.0
    log.sample()
    assert (newest(log).prompt_rate, newest(log).output_rate) == (200.0, 10.0)


def test_there_is_no_rate_of_a_silent_worker_or_a_new_one(metrics, clock):
    log = History(metrics)
    metrics.heard_from_worker(Stats(steps=9, prompt_tokens=900, output_tokens=90), 1000.0)
    log.sample()
    log.sample()
    assert newest(log).prompt_rate is None
    metrics.heard_from_worker(Stats(steps=1, prompt_tokens=5, output_tokens=1), 1002.0)
    log.sample()
    assert newest(log).output_rate is None


def test_refusals_are_those_since_the_sample_before(metrics, clock):
    metrics.refused.labels("late").inc(5)
    log = History(metrics)
    metrics.refused.labels("late").inc(2)
    metrics.refused.labels("full").inc()
    log.sample()
    assert newest(log).refused == {"late": 2, "full": 1, "deadline": 0, "pending": 0, "rate": 0}
    log.sample()
    assert not any(newest(log).refused.values())


def times(metrics, seconds, now, promised=True):
    """A request whose first token took so long, and its second one as long again."""
    timeline = Timeline(now - 2 * seconds, now - 2 * seconds, promised=promised)
    metrics.token(timeline, now - seconds)
    metrics.token(timeline, now)
    metrics.finished(timeline)


@pytest.mark.parametrize(("percentile", "tail"), [(None, 95.0), (90.0, 90.0), (99.0, 99.0)])
def test_the_tail_is_of_the_promised_percentile(metrics, clock, percentile, tail):
    if percentile is not None:
        metrics.promise = PromisedTimes(1.0, 0.1, percentile)
    log = History(metrics)
    log.sample()
    assert newest(log).ttft_tail is None
    for i in range(1, 101):
        times(metrics, i / 1000, clock.now)
    log.sample()
    sample = newest(log)
    assert (sample.ttft_p50, sample.ttft_tail) == pytest.approx((0.05, tail / 1000))
    assert (sample.tpot_p50, sample.tpot_tail) == pytest.approx((0.05, tail / 1000))


def test_the_batch_class_was_promised_nothing(metrics, clock):
    log = History(metrics)
    times(metrics, 0.1, clock.now)
    times(metrics, 50.0, clock.now, promised=False)
    log.sample()
    assert newest(log).ttft_tail == newest(log).tpot_tail == pytest.approx(0.1)
    assert b"jaxserve_time_to_first_token_seconds_count 2.0" in metrics.text()


def test_a_flexible_request_s_times_are_not_held_against_the_promise():
    with running_server() as server:
        metrics = server.service.client.metrics
        assert server.complete("abc", service_tier="flex").status == 200
        assert math.isnan(metrics.ttft.percentile(95, 0.0))
        assert server.complete("abc").status == 200
        assert metrics.ttft.percentile(95, 0.0) > 0


def test_several_percentiles_are_those_asked_for_one_by_one():
    window = Window()
    assert all(map(math.isnan, window.percentiles((50, 95), 0.0)))
    for i in range(37):
        window.add(float(i * 7 % 37), i / 10)
    alone = tuple(window.percentile(p, 4.0) for p in (1, 50, 95, 99.9))
    assert window.percentiles((1, 50, 95, 99.9), 4.0) == alone


def test_the_endpoint_tells_samples_promise_and_model():
    with running_server("--promise", "0.5", "0.05", "90") as server:
        assert server.complete("abc").status == 200

        def samples():
            return server.request("GET", "/history").json["samples"]["time"]

        assert server.becomes(lambda: len(samples()) >= 2)
        reply = server.request("GET", "/history")
        said = reply.json
        assert reply.headers["Cache-Control"] == "no-store"
        assert (said["model"], said["engine"], said["unavailable"]) == ("toy/echo", "a toy", None)
        assert said["promise"] == {"ttft": 0.5, "tpot": 0.05, "percentile": 90.0}
        assert (said["interval"], said["span"]) == (history.INTERVAL, history.SPAN)
        lengths = {len(column) for column in (said["samples"] | said["refused"]).values()}
        assert lengths == {len(said["samples"]["time"])}
        assert said["samples"]["ttft_tail"][-1] > 0
        assert said["samples"]["pages_free"][-1] == 1000
        newest = said["samples"]["time"][-1]
        newer = server.request("GET", f"/history?since={newest}").json["samples"]["time"]
        assert all(time > newest for time in newer)
        for name, value in (("ttft", 0.5), ("tpot", 0.05)):
            assert server.metric(f"jaxserve_{name}_promised_seconds") == value
        assert server.metric("jaxserve_promised_share") == 0.9
        for since in ("yesterday", "nan", "inf"):
            refusal(server.request("GET", f"/history?since={since}"), "since")


def test_nothing_is_promised_by_a_worker_that_says_nothing_of_it():
    with running_server() as server:
        assert server.request("GET", "/history").json["promise"] is None
        assert b"promised" not in server.request("GET", "/metrics").body


def test_without_a_worker_there_is_a_history_and_a_reason():
    with running_server(heartbeat_timeout=5.0) as server:
        client = server.service.client
        client.ready = None  # as between two workers
        said = server.request("GET", "/history").json
        assert said["engine"] == ""
        assert said["unavailable"].startswith("the worker is starting")
