"""Addresses of servers: only what the user names is ever contacted, and only this machine unless they allow more."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from ssl import SSLContext, create_default_context
from urllib.parse import urlsplit

from kvsim.errors import UserError

_EXPECTED = "an address such as http://127.0.0.1:8080 is expected"


@dataclass(frozen=True)
class Address:
    """The base of a server's URLs, without a slash at the end."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def host(self) -> str:
        """The name or number of the machine."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """The port, that of the scheme if the URL has none."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    def tls(self) -> SSLContext | None:
        """Trusts the certificates that the system does, or those of the environment's ``SSL_CERT_FILE``; None if the
        scheme is not https.
        """
        return create_default_context() if urlsplit(self.url).scheme == "https" else None


def address_of(url: str, *, allow_remote: bool = False) -> Address:
    """The server that a URL names. Raises ``UserError`` unless it is one, and on this machine or ``allow_remote``."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as e:
        raise UserError(f"{url!r:.200}: {e}; {_EXPECTED}") from None
    if parts.scheme not in ("http", "https") or not host or any(c.isspace() or ord(c) < 32 for c in url):
        raise UserError(f"{url!r:.200}: not the address of a server; {_EXPECTED}")
    if parts.username is not None or parts.query or parts.fragment:
        raise UserError(f"{parts.scheme}://{host}: no user, query or fragment is accepted; {_EXPECTED}")
    if not allow_remote and not is_loopback(host):
        raise UserError(f"{host}: not an address of this machine; --allow-remote lets kvsim contact others")
    # What servers serve is below /v1 or at the root; users give either.
    return Address(url.rstrip("/").removesuffix("/v1"))


def is_loopback(host: str) -> bool:
    """Whether a host's name or number means this machine itself, without asking a name server."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
