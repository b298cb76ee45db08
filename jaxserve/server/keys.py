"""API keys: who has which, and whose a request is. Keys are kept as digests and shown nowhere."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY = re.compile(r"[\x21-\x7e]+")
OWN_NAME = "default"
"""Of the key that comes without a file."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    Attributes:
        name: of the key, or what stands for whatever credentials came; empty without any.
        has_key: the key was checked, so that the name can be relied on.
    """

    name: str
    has_key: bool = False

    @property
    def owner(self) -> str:
        """Whose what it leaves here is: the key's, or everybody's without a key."""
        return self.name if self.has_key else ""

    def tenant(self, user: str | None) -> str:
        """Whose fair share it is, if the request says `user`: a key cannot pass for many."""
        return self.name if self.has_key else user or self.name


NOBODY = Caller("")


class Keys:
    """The keys that open this server. Without any it is open to all."""

    def __init__(self, file: Path | None = None, key: str | None = None) -> None:
        """Read the file.

        Args:
            file: see `parse_keys`.
            key: one more, named `OWN_NAME`.

        Raises:
            ConfigError: the file cannot be read, or a line of it.
        """
        self._file = file
        self._own = {} if not key else {digest(key): OWN_NAME}
        self._names: dict[bytes, str] = {}
        self.reload()

    @property
    def needed(self) -> bool:
        """Whether requests need a key."""
        return bool(self._names)

    def reload(self) -> None:
        """Read the file again. ConfigError as in `__init__`; the keys stay what they were then."""
        self._names = self._own | ({} if self._file is None else read_keys(self._file))

    def find(self, authorization: str) -> Caller | None:
        """Whose request it is by its Authorization header, or None if a key is needed."""
        if not self.needed:
            return Caller(anonymous(authorization))
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        given, found = digest(key.strip()), None
        for known, name in self._names.items():  # all of them: the time tells nothing
            if hmac.compare_digest(given, known):
                found = Caller(name, has_key=True)
        return found


def anonymous(credentials: str) -> str:
    """Who asks where keys are not checked. Stands for the key, which nobody needs to see."""
    return digest(credentials).hex()[:16] if credentials else ""


def digest(key: str) -> bytes:
    """What is kept of a key. A header may hold bytes that are no text."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def read_keys(file: Path) -> dict[bytes, str]:
    """The name of each key of a file, by the key's digest.

    Raises:
        ConfigError: the file cannot be read, has no keys, or `parse_keys` says so.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the API keys in {file}: {reason}") from error
    return parse_keys(text, str(file))


def parse_keys(text: str, source: str) -> dict[bytes, str]:
    """One key a line: "name: key", or the key alone, which is named by its digest then.

    Keys may share a name; empty lines and lines that begin with # are passed over.

    Raises:
        ConfigError: a line is neither, a key has two names, or there are no keys.
    """
    names: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        before, colon, after = line.partition(":")
        name, key = (before.strip(), after.strip()) if colon else ("", line)
        if (colon and not NAME.fullmatch(name)) or not KEY.fullmatch(key):
            raise ConfigError(
                f"{source}, line {number}: write 'name: key' or just the key; a name has up to 64 "
                "letters, digits and . _ -, a key no spaces"
            )
        code = digest(key)
        name = name or f"key-{code.hex()[:8]}"
        if names.setdefault(code, name) != name:
            raise ConfigError(f"{source}, line {number}: {names[code]!r} has the same key")
    if not names:
        raise ConfigError(f"{source} has no API keys: write one 'name: key' a line")
    return names
