"""Where a server is reached: a TCP port or a Unix socket, with TLS or without."""

from __future__ import annotations

import socket
import ssl
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError

CONNECT_TIMEOUT = 1.0
"""Seconds that whoever listens on a Unix socket has to take a connection."""
RELOADS = web.AppKey("reloads", list[Callable[[], None]])
"""What reads its files again on SIGHUP. Each raises ConfigError and keeps what it has."""


async def listen(runner: web.AppRunner, config: ServerConfig) -> web.BaseSite:
    """Open the address. ConfigError if that cannot be done."""
    tls = make_tls(config)
    if tls is not None:
        runner.app[RELOADS].append(lambda: load_certificate(tls, config))
    site: web.BaseSite
    if config.uds is not None:
        refuse_taken(config.uds)
        site = web.UnixSite(runner, config.uds, ssl_context=tls)
        where, remedy = str(config.uds), "choose another path"
    else:
        site = web.TCPSite(runner, config.host, config.port, ssl_context=tls)
        where, remedy = f"{config.host}:{config.port}", "choose another port"
    try:
        await site.start()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {where} ({reason}): {remedy}") from error
    return site


def url(runner: web.AppRunner, config: ServerConfig) -> str:
    """What to tell people once it listens."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    scheme = "http" if config.ssl_certfile is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{runner.addresses[0][1]}"


def make_tls(config: ServerConfig) -> ssl.SSLContext | None:
    """The server's side of TLS; None without a certificate.

    Raises:
        ConfigError: the files cannot be read, do not fit together, or one is missing.
    """
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile: a key alone proves nothing")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(context, config)
    return context


def load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Read certificate and key, for the connections to come. ConfigError as `make_tls`."""
    assert config.ssl_certfile is not None  # or there would be no context
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # a bad pair would leave half of it behind
    for each in (trial, context):
        try:
            # Asked for a password on a terminal nobody may be at, openssl would wait for ever.
            each.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "-")
        except OSError as error:  # SSLError is one
            files = " and ".join(str(f) for f in (config.ssl_certfile, config.ssl_keyfile) if f)
            raise ConfigError(
                f"cannot use the TLS certificate in {files} ({error.strerror}): PEM files are "
                "wanted, the key's without a password"
            ) from error


def refuse_taken(path: Path) -> None:
    """ConfigError if a server listens on this Unix socket, or if the path is something else.

    A socket nobody listens on is left behind by a server that was killed: asyncio replaces it.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigError(f"{path} is there and no socket: choose another path")
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.settimeout(CONNECT_TIMEOUT)
        probe.connect(str(path))
        raise ConfigError(f"a server listens on {path} already: choose another path")
