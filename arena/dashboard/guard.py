"""Who may look at the dashboard: where it listens, under which names it answers, the token, and the
headers of every answer. Checks are pure; the middlewares and the connection apply them."""

import hmac
import ipaddress
import os
import re
import secrets
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

log = structlog.get_logger()

DEFAULT_ADDRESS = "127.0.0.1:8642"
TOKEN_VARIABLE = "ARENA_DASHBOARD_TOKEN"
HTTP_PORT = 80

HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
)
"""On every answer, errors too."""

_ADDRESS = re.compile(
    r"(?:\[(?P<literal>[0-9a-f:.]{2,45})\]|(?P<name>[a-z0-9._-]{1,253}))(?::(?P<port>[0-9]{1,5}))?",
    re.IGNORECASE | re.ASCII,
)
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,256}", re.ASCII)


class Refusal(NamedTuple):
    """Why a request is not served: an HTTP status and one line for the person who sent it."""

    status: int
    line: str


@dataclass(frozen=True, slots=True)
class Binding:
    """Where the dashboard listens, and what a client must show. Raises ValueError for an address
    that others can reach without a token."""

    host: str
    """A name or an IP address, lower case, without brackets."""
    port: int
    """0: any free one."""
    token: str | None = field(repr=False)
    """None: whoever reaches the address may look."""
    is_chosen: bool
    """The user named the address; a port of ours that is taken gives way to a free one."""

    def __post_init__(self) -> None:
        if self.token is None and not is_loopback(self.host):
            raise ValueError(f"{self.host} can be reached by others: it needs a token")


def parse_binding(text: str | None, environ: Mapping[str, str] = os.environ) -> Binding | None:
    """The value of `--dashboard HOST:PORT|off`: None when it is off; the default address when the
    option was not given (`text` is None). Raises ValueError with one line.

    The token is the environment's, or a new one for an address that is not loopback."""
    if text == "off":
        return None
    host, port = parse_address(DEFAULT_ADDRESS if text is None else text) or ("", None)
    if port is None:
        raise ValueError(
            f"--dashboard: {text!r} is neither HOST:PORT ([::1]:8642 for IPv6, port 0 for any "
            "free one) nor off"
        )
    if port > 65535:
        raise ValueError(f"--dashboard: port {port} is not one of 0 to 65535")
    token = environ.get(TOKEN_VARIABLE) or None
    if token is not None and not _TOKEN.fullmatch(token):
        raise ValueError(
            f"{TOKEN_VARIABLE}: a token has 16 to 256 letters, digits or -._~; "
            "unset it to have one made"
        )
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe()
    return Binding(host, port, token, is_chosen=text is not None)


def parse_address(text: str) -> tuple[str, int | None] | None:
    """Host in lower case, IPv6 in its shortest form without brackets, and the port if there is one;
    None for anything that is not HOST or HOST:PORT."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return None
    host = (match["name"] or match["literal"]).lower()
    if match["literal"]:
        try:
            host = str(ipaddress.IPv6Address(host))
        except ValueError:
            return None
    return host, int(match["port"]) if match["port"] else None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. Any name but localhost may resolve to
    something else."""
    return host == "localhost" or (is_literal(host) and ipaddress.ip_address(host).is_loopback)


def is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def refuse_host(values: Sequence[str], binding: Binding, port: int) -> Refusal | None:
    """Against DNS rebinding: a page of someone else's whose name was made to lead here sends that
    name. `values` are the request's Host headers, `port` is where it came in.

    Beyond loopback the port is not compared: it may be another one outside a container."""
    address = parse_address(values[0]) if len(values) == 1 else None
    if address is None:
        return Refusal(400, "exactly one valid Host header is needed")
    name, named_port = address
    if is_loopback(binding.host):
        is_ours = name in {"127.0.0.1", "localhost", "::1", binding.host}
        is_ours = is_ours and (HTTP_PORT if named_port is None else named_port) == port
    else:
        machine = socket.gethostname().lower()
        own_names = {"localhost", binding.host, machine, machine.partition(".")[0]}
        is_ours = is_literal(name) or name in own_names
    if is_ours:
        return None
    line = f"this dashboard is http://{address_text(binding.host, port)}/ and nothing else"
    return Refusal(421, line)


def refuse_cross_site(headers: Mapping[str, str]) -> Refusal | None:
    """Against other pages in the same browser. Browsers say who asks in Sec-Fetch-Site, and in
    Origin where it is not the page itself; programs send neither."""
    is_foreign = headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none")
    origin = headers.get("Origin")
    if origin is not None:
        host = headers.get("Host", "")
        is_foreign = is_foreign or origin.partition("://")[2].lower() != host.lower()
    return Refusal(403, "requests from other sites are refused") if is_foreign else None


def is_token(candidate: str | None, token: str) -> bool:
    """In constant time; whatever the candidate holds."""
    given = (candidate or "").encode("utf-8", "surrogatepass")
    return hmac.compare_digest(given, token.encode())


def bearer(authorization: str) -> str | None:
    """The token of an Authorization header of the Bearer scheme."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def cookie_name(port: int) -> str:
    """Cookies are shared by all ports of a host, and there may be several arenas."""
    return f"arena-token-{port}"


def address_text(host: str, port: int) -> str:
    """HOST:PORT, IPv6 in brackets; for the address of all interfaces, this machine's name."""
    if is_literal(host) and ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain(status: int, line: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer of one line of text."""
    own = {"Cache-Control": "no-store", **HEADERS, **(headers or {})}
    return web.Response(status=status, text=f"{line}\n", headers=own)


def middlewares(binding: Binding) -> tuple[Middleware, ...]:
    """In this order around every handler: errors become one line, and only who may look gets in."""

    @web.middleware
    async def speak_plainly(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            return plain(error.status, error.text or error.reason)
        except Exception:  # noqa: BLE001 - a failure to show the run stays here
            path = request.rel_url.raw_path  # as it was sent: no control characters, no token
            log.error("dashboard_failed", path=path, error=traceback.format_exc())
            if request.writer.output_size and request.transport is not None:
                request.transport.abort()  # too late for a status: the client sees it cut
            return plain(500, "internal error")

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        return _entrance(request, binding) or await handler(request)

    return speak_plainly, admit


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`."""
    response.headers.update(HEADERS)


def _entrance(request: web.Request, binding: Binding) -> web.Response | None:
    """What is answered instead of the page: a refusal, or the redirect that hands out the
    cookie."""
    port = (request.get_extra_info("sockname") or ("", 0))[1]  # None: the client has left
    refusal = refuse_host(request.headers.getall("Host", []), binding, port)
    if refusal is not None:
        return plain(*refusal)
    if not request.raw_path.startswith("/"):
        return plain(400, "a path is needed: this is no proxy")
    if binding.token is not None:
        answer = _token_answer(request, binding.token, cookie_name(port))
        if answer is not None:
            return answer
    if request.path.startswith("/api/"):
        refusal = refuse_cross_site(request.headers)
        if refusal is not None:
            return plain(*refusal)
    if request.method not in ("GET", "HEAD"):
        return plain(405, "only GET and HEAD", {"Allow": "GET, HEAD"})
    return None


def _token_answer(request: web.Request, token: str, cookie: str) -> web.Response | None:
    if request.path == "/" and is_token(request.query.get("token"), token):
        answer = plain(303, "see /", {"Location": "/"})
        answer.set_cookie(cookie, token, path="/", httponly=True, samesite="Strict")
        return answer
    shown = (bearer(request.headers.get("Authorization", "")), request.cookies.get(cookie))
    if any([is_token(candidate, token) for candidate in shown]):
        return None
    return plain(
        401,
        "a token is needed: open the address with ?token= that the arena printed, or send it as "
        "Authorization: Bearer",
        {"WWW-Authenticate": "Bearer"},
    )


class Runner(web.AppRunner):
    """Serves an application so that what fails before any middleware (HTTP that cannot be read,
    Expect headers) is answered like every other error."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            if "Expect" in request.headers:
                return plain(417, "no expectations are met here")
            return await server.request_handler(request)

        return _Server(
            answer,
            request_factory=server.request_factory,
            handler_cancellation=True,  # who has left gives their place back
            access_log=None,
            keepalive_timeout=75.0,
            lingering_time=1.0,
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size:
            raise ConnectionError("the answer has begun")
        if status == 400:
            answer = plain(400, "this is no request that can be read")
        else:
            self.log_exception("Error handling request", exc_info=exc)
            answer = plain(500, "internal error")
        answer.force_close()
        return answer

    def log_exception(self, *args: Any, **kw: Any) -> None:
        log.error("dashboard_connection_failed", doing=args[0], error=repr(kw.get("exc_info")))
