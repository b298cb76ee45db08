"""The page at /: its files come as they are, and a browser is told to run nothing else."""

import http.client
import re
import tomllib
from pathlib import Path

import pytest
from toy_server import running_server

from jaxserve.server.keys import Keys
from jaxserve.server.page import WEB

ROOT = Path(__file__).parent.parent
FILES = sorted(file.name for file in WEB.iterdir())
SCRIPTS = [name for name in FILES if name.endswith(".js")]
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


def path_of(name):
    return "/" if name == "index.html" else f"/page/{name}"


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_served_as_it_is_and_of_its_type(server, name):
    reply = server.request("GET", path_of(name))
    assert reply.status == 200
    assert reply.body == (WEB / name).read_bytes()
    assert reply.headers["Content-Type"] == TYPES[Path(name).suffix]


@pytest.mark.parametrize("name", FILES)
def test_a_browser_is_held_to_what_the_page_is_made_of(server, name):
    headers = server.request("GET", path_of(name)).headers
    policy = dict(
        directive.strip().split(" ", 1)
        for directive in headers["Content-Security-Policy"].split(";")
    )
    assert policy.pop("img-src") == "'self' data:"
    own = {"script-src", "style-src", "connect-src"}
    assert {name for name, sources in policy.items() if sources == "'self'"} == own
    nothing = {"default-src", "base-uri", "form-action", "frame-ancestors"}
    assert {name for name, sources in policy.items() if sources == "'none'"} == nothing
    assert policy.keys() == own | nothing
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize("name", ["index.html", "style.css"])
def test_a_file_a_browser_has_is_not_sent_again(server, name):
    first = server.request("GET", path_of(name))
    assert first.headers["Cache-Control"] == "no-cache"
    again = server.request("GET", path_of(name), headers={"If-None-Match": first.headers["Etag"]})
    assert (again.status, again.body) == (304, b"")
    assert again.headers["Content-Security-Policy"] == first.headers["Content-Security-Policy"]
    other = server.request("GET", path_of(name), headers={"If-None-Match": '"another"'})
    assert other.body == first.body


@pytest.mark.parametrize(
    "path", ["/page/", "/page/page.py", "/page/../page.py", "/page/%2e%2e/app.py", "/index.html"]
)
def test_nothing_else_is_served(server, path):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest("GET", path)  # as it is: a client would tidy the dots away
    connection.endheaders()
    assert connection.getresponse().status == 404
    connection.close()


def test_the_page_needs_no_key_and_what_it_shows_does():
    with running_server(keys=Keys(key="secret")) as server:
        assert server.request("GET", "/").status == 200
        assert server.request("GET", "/page/main.js").status == 200
        for path in ("/history", "/requests"):
            assert server.request("GET", path).status == 401
            key = {"Authorization": "Bearer secret"}
            assert server.request("GET", path, headers=key).status == 200
        assert server.post("/requests/chatcmpl-1/abort", b"").status == 401


def test_every_file_the_page_refers_to_is_there(server):
    page = (WEB / "index.html").read_text()
    referred = re.findall(r'(?:src|href)="(/[^"]*)"', page)
    assert "/page/main.js" in referred
    for path in referred:
        assert server.request("GET", path).status == 200, path
    for name in SCRIPTS:
        for imported in re.findall(r'from "\./([^"]+)"', (WEB / name).read_text()):
            assert imported in FILES, f"{name} imports {imported}"


def test_every_part_a_script_looks_for_is_on_the_page():
    ids = set(re.findall(r'\bid="([^"]+)"', (WEB / "index.html").read_text()))
    for name in SCRIPTS:
        for looked_for in re.findall(r'byId\("([^"$]+)"\)', (WEB / name).read_text()):
            assert looked_for in ids, f"{name} looks for {looked_for}"


def test_every_file_is_part_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "server/web/*" in project["tool"]["setuptools"]["package-data"]["jaxserve"]
    assert all(Path(name).suffix in TYPES for name in FILES)


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_makes_markup_or_code_of_text(name):
    script = (WEB / name).read_text()
    for word in (
        r"innerHTML",
        r"outerHTML",
        r"insertAdjacentHTML",
        r"document\.write",
        r"DOMParser",
        r"createContextualFragment",
        r"srcdoc",
        r"\beval\b",
        r"\bFunction\(",
        r"javascript:",
        r"setTimeout\(\s*[\"'`]",
    ):
        assert not re.search(word, script), f"{name} has {word}"


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_another_host(name):
    text = (WEB / name).read_text().replace("http://www.w3.org/2000/svg", "")  # a name, not a place
    assert not re.search(r"https?:|[\"'(]//\w|@import", text)


def test_the_page_has_neither_scripts_nor_styles_nor_handlers_in_it():
    page = (WEB / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""] * 2
