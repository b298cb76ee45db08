"""The page in a browser, around the toy worker, whose model repeats what it is asked."""

import json
import re
import shutil
import threading

import pytest
from toy_server import running_server

from jaxserve.server.keys import Keys

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="the page's browser tests need playwright: install .[browser]"
)
if CHROMIUM is None:
    pytest.skip("the page's browser tests need a chromium executable", allow_module_level=True)

WAIT = 10_000
expect = playwright.expect
expect.set_options(timeout=WAIT)
SLOW = ("--step-seconds", "0.01", "--max-context", "2000")


@pytest.fixture(scope="module")
def server():
    """100 tokens a second: a test can look at an answer in the making."""
    with running_server(*SLOW, "--promise", "0.5", "0.05", "95") as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens a view of a server in a context of its own. Nothing may go wrong in its scripts, and no
    policy may be broken; that a server refuses something is not wrong."""
    contexts, complaints = [], []

    def complain(message):
        if message.type == "error" and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    def open_view(server, view="playground", **options):
        contexts.append(context := browser.new_context(**options))
        context.set_default_timeout(WAIT)
        page = context.new_page()
        page.on("console", complain)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.port}/#{view}")
        return page

    yield open_view
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        assert server.becomes(server.is_idle)


def say(page, text, **settings):
    """Send a message by keyboard; greedy, so that the toy repeats it."""
    for name, value in ({"temperature": "0", "max_tokens": "400"} | settings).items():
        page.fill(f"#{name}", value)
    page.fill("#message", text)
    page.press("#message", "Control+Enter")


def answer(page, number=-1):
    return page.locator(".answer").nth(number)


def finished(page, number=-1):
    """The text of an answer that has come to its end."""
    expect(answer(page, number)).to_have_attribute("aria-busy", "false")
    return answer(page, number).locator(".text").text_content()


def foot(page):
    return answer(page).locator(".foot").text_content()


def test_an_answer_appears_as_it_comes(server, open_page):
    page = open_page(server)
    say(page, "A" * 60)
    text = answer(page).locator(".text")
    expect(text).to_have_text(re.compile("^A{5,}$"))
    expect(answer(page)).to_have_attribute("aria-busy", "true")
    assert finished(page) == "A" * 60 + ">"  # the toy's template ends a prompt with >
    assert re.search(
        r"TTFT [\d.]+ ms · [\d.]+ tok/s · 62 tokens · prompt 61 · ended by itself", foot(page)
    )


def test_stopping_frees_the_request_and_keeps_the_text(server, open_page):
    page = open_page(server)
    say(page, "B" * 400)
    expect(answer(page).locator(".text")).to_have_text(re.compile("^B{5,}$"))
    assert server.service.client.num_open == 1
    page.get_by_role("button", name="Stop").click()
    assert 5 <= len(finished(page)) < 400
    assert foot(page).endswith("stopped by you")
    assert server.becomes(server.is_idle)
    expect(page.locator("#message")).to_be_focused()


def test_escape_stops_too(server, open_page):
    page = open_page(server)
    say(page, "C" * 400)
    expect(answer(page).locator(".text")).to_have_text(re.compile("^C{5,}$"))
    page.keyboard.press("Escape")
    finished(page)
    assert server.becomes(server.is_idle)


EVIL = '<script>window.hacked = 1</script><img src="x" onerror="window.hacked = 1">&amp;'


@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_what_a_model_writes_stays_text(server, open_page, mode, probabilities):
    page = open_page(server)
    page.get_by_text("Chat" if mode == "chat" else "Completion", exact=True).click()
    page.set_checked("#probabilities", probabilities)
    say(page, EVIL)
    assert finished(page).removesuffix("<eos>").removesuffix(">" if mode == "chat" else "") == EVIL
    if probabilities:
        page.locator(".token").first.hover()
        expect(page.locator("#popover")).to_be_visible()
    assert page.locator("#transcript :is(script, img)").count() == 0
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("mode", ["Chat", "Completion"])
def test_characters_of_several_tokens_come_out_whole(server, open_page, mode):
    page = open_page(server)
    page.get_by_text(mode, exact=True).click()
    page.check("#probabilities")
    say(page, "naïve 🙂!")
    finished(page)
    shown = page.locator(".answer .token:not(.ghost)").all_text_contents()
    assert "".join(shown).removesuffix(">") == "naïve 🙂!"
    assert "🙂" in shown and "ï" in shown


def test_a_token_tells_its_probability_by_pointer_and_by_keyboard(server, open_page):
    page = open_page(server)
    page.check("#probabilities")
    say(page, "abc")
    finished(page)
    popover = page.get_by_role("tooltip")
    page.locator(".token").nth(1).hover()
    expect(popover).to_contain_text("b 77.9% likely")
    assert popover.locator("li").count() == 5
    page.mouse.move(0, 0)
    expect(popover).to_be_hidden()
    page.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token").nth(1)).to_be_focused()
    expect(popover).to_contain_text("b 77.9% likely")


def test_a_conversation_is_told_to_the_model_and_can_be_begun_anew(server, open_page):
    page = open_page(server)
    page.fill("#system", "S.")
    say(page, "one")
    assert finished(page) == "S.one>"
    say(page, "two")
    assert finished(page) == "S.oneS.one>two>"
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".turn").count() == 0
    say(page, "three")
    assert finished(page) == "S.three>"


def test_thoughts_are_shown_apart_from_the_answer(server, open_page):
    page = open_page(server)
    deltas = ({"reasoning_content": "Hmm"}, {"reasoning_content": ", so"}, {"content": "42"})
    chunks = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    body = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    say(page, "hello")
    expect(answer(page).locator("> .text")).to_have_text("42")
    expect(answer(page).locator(".thoughts .text")).to_have_text("Hmm, so")


def test_settings_are_sent(server, open_page):
    page = open_page(server)
    page.get_by_text("Completion", exact=True).click()
    say(page, "abcdef", stop_strings="de\nzz")
    assert finished(page) == "abc"
    say(page, "one\ntwo", stop_strings="\\n")
    assert finished(page) == "one"
    say(page, "abcdef", stop_strings="", max_tokens="2")
    assert finished(page) == "ab"
    assert "cut at max tokens" in foot(page)
    drawn = []
    for seed in ("7", "7", "8"):
        say(page, "a", temperature="1", seed=seed, max_tokens="20", top_p="0.9", top_k="5")
        drawn.append(finished(page))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_refusal_is_told_and_the_field_is_marked(server, open_page):
    page = open_page(server)
    say(page, "hello", temperature="-1")
    notice = page.get_by_role("alert")
    expect(notice).to_contain_text("The server refuses this.")
    expect(notice).to_contain_text("emperature")
    expect(page.locator("#temperature")).to_have_attribute("aria-invalid", "true")
    page.fill("#temperature", "0")
    assert page.locator("[aria-invalid]").count() == 0
    notice.get_by_role("button", name="Try again").click()
    assert finished(page) == "hello>"
    assert page.get_by_role("alert").count() == 0
    assert page.locator(".asked").count() == 1


def test_a_busy_server_says_when_to_come_again(open_page):
    with running_server(*SLOW, max_pending=1) as server:
        page = open_page(server)
        other = threading.Thread(
            target=server.complete, args=("x" * 60,), kwargs={"max_tokens": 60}
        )
        other.start()
        assert server.becomes(lambda: server.service.client.num_open == 1)
        say(page, "hello")
        notice = page.get_by_role("alert")
        expect(notice).to_contain_text("The server is busy.")
        expect(notice.get_by_role("button")).to_have_text("Try again in 1 s")
        other.join()
        notice.get_by_role("button", name="Try again", exact=True).click()
        assert finished(page) == "hello>"


def test_a_server_that_takes_no_requests_says_why(server, open_page, monkeypatch):
    page = open_page(server)
    monkeypatch.setattr(server.service, "gave_up", "the engine is out of luck")
    say(page, "hello")
    notice = page.get_by_role("alert")
    expect(notice).to_contain_text("Not available. The engine is out of luck.")
    expect(page.locator("#status")).to_have_text("the engine is out of luck")


def test_a_lost_connection_is_told_and_what_came_is_kept(server, open_page):
    page = open_page(server)
    begun = 'data: {"choices": [{"index": 0, "delta": {"content": "so far"}}]}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=begun))
    say(page, "hello")
    notice = page.get_by_role("alert")
    expect(notice).to_contain_text("Connection lost.")
    assert finished(page) == "so far"
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_role("button", name="New conversation").click()
    say(page, "hello")
    expect(notice).to_contain_text("The server cannot be reached.")


def test_charts_move_under_load(server, open_page):
    page = open_page(server, "promise")
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_contain_text("95% of the requests get their first token within 500 ms")
    chart = page.locator("figure", has_text="Tokens per second")
    value = chart.locator(".value").first
    line = chart.locator("path.line.s1")
    expect(value).to_have_text("0")
    before = line.get_attribute("d")
    server.complete("x" * 60, max_tokens=60, n=4)
    expect(value).to_have_text(re.compile("^[1-9]"))
    assert line.get_attribute("d") != before
    ttft = page.locator("figure", has_text="Time to first token")
    expect(ttft.locator("line.limit")).to_have_count(1)
    expect(ttft.locator(".legend")).to_contain_text("limit 500 ms")
    expect(ttft.locator(".value").first).to_have_text(re.compile(r"^[\d.]+ ms$"))
    expect(page.locator("#verdicts li").first).to_contain_text("kept: p95")


def test_a_chart_is_read_by_pointer_and_by_keyboard(server, open_page):
    page = open_page(server, "promise")
    chart = page.locator("figure", has_text="KV pages")
    expect(chart.locator(".value").nth(2)).to_have_text(re.compile(r"[1-9]"))
    plot = chart.locator(".plot")
    plot.hover()
    expect(chart.locator(".cursor")).to_have_count(1)
    expect(chart.locator(".moment")).to_have_text(re.compile("now|ago"))
    page.mouse.move(0, 0)
    expect(chart.locator(".cursor")).to_have_count(0)
    plot.focus()
    page.keyboard.press("Home")
    expect(chart.locator("[aria-live]")).to_have_text(re.compile("live .*, cached .*, free "))
    assert plot.locator("svg").get_attribute("aria-label").startswith("KV pages, ")


def test_without_a_promise_there_are_values_and_no_limits(open_page):
    with running_server() as server:
        page = open_page(server, "promise")
        heading = page.get_by_role("heading", level=1)
        expect(heading).to_contain_text("Nothing is promised")
        assert (
            page.locator("figure", has_text="Time to first token").locator("line.limit").count()
            == 0
        )


def test_requests_are_listed_and_can_be_aborted(server, open_page):
    replies = []

    def ask():
        replies.append(server.complete("x" * 300, max_tokens=300, user="ann"))

    client = threading.Thread(target=ask)
    page = open_page(server, "requests")
    expect(page.locator("#requests-summary")).to_have_text("Nothing runs and nothing waits.")
    client.start()
    row = page.locator("tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("generating")
    expect(row).to_contain_text("ann")
    page.get_by_role("button", name="Abort cmpl-").click()
    expect(row).to_have_count(0)
    client.join()
    assert replies[0].finish_reason() == "abort"


def test_everything_works_by_keyboard(server, open_page):
    page = open_page(server, "promise")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    promise = page.get_by_role("tab", name="Promise")
    expect(promise).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    tab = page.get_by_role("tab", name="Playground")
    expect(tab).to_have_attribute("aria-selected", "true")
    assert page.url.endswith("#playground")
    expect(page.get_by_role("tabpanel", name="Playground")).to_be_visible()
    page.fill("#temperature", "0")
    page.locator("#message").focus()
    page.keyboard.type("typed")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Send")).to_be_focused()
    page.keyboard.press("Enter")
    assert finished(page) == "typed>"
    page.go_back()
    expect(page.get_by_role("tabpanel", name="Promise")).to_be_visible()


def test_a_key_is_asked_for_once_and_kept_in_the_tab(open_page):
    with running_server(*SLOW, keys=Keys(key="the-right-one")) as server:
        page = open_page(server)
        dialog = page.get_by_role("dialog", name="This server asks for an API key")
        field = page.get_by_label("API key", exact=True)
        expect(field).to_be_focused()
        field.fill("a-wrong-one")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("not known here")
        field.fill("the-right-one")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#status")).to_have_text("ready")
        say(page, "open")
        assert finished(page) == "open>"
        page.reload()
        expect(page.locator("#status")).to_have_text("ready")
        assert page.evaluate("sessionStorage.getItem('jaxserve-key')") == "the-right-one"
        assert "the-right-one" not in page.evaluate(
            "JSON.stringify(localStorage) + document.cookie"
        )


def test_a_key_that_is_not_given_is_not_asked_for_over_and_over(open_page):
    with running_server(*SLOW, keys=Keys(key="secret")) as server:
        page = open_page(server)
        dialog = page.get_by_role("dialog")
        page.get_by_role("button", name="Not now").click()
        expect(page.locator("#status")).to_have_text("needs an API key")
        page.wait_for_timeout(2500)  # longer than the page waits between two looks
        expect(dialog).to_be_hidden()
        say(page, "hello")
        expect(dialog).to_be_visible()  # somebody wants something now
        page.keyboard.press("Escape")
        expect(page.get_by_role("alert")).to_contain_text("No API key.")


def test_light_and_dark_are_the_systems_until_somebody_chooses(server, open_page):
    page = open_page(server, "promise", color_scheme="dark")

    def ground():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    dark, button = ground(), page.locator("#theme")
    expect(button).to_have_text("Auto")
    button.click()
    expect(button).to_have_text("Light")
    light = ground()
    assert light != dark
    page.reload()
    assert ground() == light
    button.click()
    page.emulate_media(color_scheme="light")
    assert ground() == dark


@pytest.mark.parametrize("view", ["promise", "playground", "requests"])
def test_a_phone_need_not_be_scrolled_sideways(server, open_page, view):
    page = open_page(server, view, viewport={"width": 360, "height": 700})
    expect(page.locator("#status")).to_have_text("ready")
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 360
    if view == "playground":
        assert page.locator("#send").bounding_box()["y"] < 700
