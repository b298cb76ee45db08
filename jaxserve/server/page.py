"""The page at /: its files as they are in `web/`, and what a browser may do with them.

Nothing on the page comes from elsewhere, and what a model writes never becomes markup: the policy
below holds a browser to both.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

WEB = Path(__file__).parent / "web"
CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, and asked about by its ETag: another version may be here
}


FILES = {file.name: file for file in WEB.iterdir() if file.suffix in CONTENT_TYPES}


async def show_page(http: web.Request) -> web.StreamResponse:
    """GET /."""
    return send(FILES["index.html"])


async def show_file(http: web.Request) -> web.StreamResponse:
    """GET /page/NAME. Only what is listed in FILES: no path leads elsewhere."""
    name = http.match_info["name"]
    if name not in FILES:
        raise web.HTTPNotFound
    return send(FILES[name])


def send(file: Path) -> web.FileResponse:
    return web.FileResponse(file, headers=HEADERS | {"Content-Type": CONTENT_TYPES[file.suffix]})
