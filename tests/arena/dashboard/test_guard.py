"""Who may look: addresses, names, tokens and other sites, as pure checks."""

import socket

import pytest

from arena.dashboard.guard import (
    TOKEN_VARIABLE,
    Binding,
    address_text,
    bearer,
    cookie_name,
    is_loopback,
    is_token,
    parse_address,
    parse_binding,
    refuse_cross_site,
    refuse_host,
)

TOKEN = "a-token-of-sixteen-or-more"
LOCAL = Binding("127.0.0.1", 8642, None, is_chosen=False)
OPEN = Binding("0.0.0.0", 8642, TOKEN, is_chosen=True)


def test_off_is_no_binding() -> None:
    assert parse_binding("off", {}) is None


def test_the_default_is_loopback_without_a_token() -> None:
    assert parse_binding(None, {}) == Binding("127.0.0.1", 8642, None, is_chosen=False)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:9000", "127.0.0.1", 9000),
        ("LocalHost:0", "localhost", 0),
        ("[::1]:65535", "::1", 65535),
        ("[0:0:0:0:0:0:0:1]:1", "::1", 1),
        ("127.1.2.3:80", "127.1.2.3", 80),
    ],
)
def test_loopback_addresses_need_no_token(text: str, host: str, port: int) -> None:
    assert parse_binding(text, {}) == Binding(host, port, None, is_chosen=True)


@pytest.mark.parametrize(
    "text", ["0.0.0.0:1", "[::]:1", "192.168.1.7:1", "box.example:1", "127.1:1", "localhost.x:1"]
)
def test_other_addresses_get_a_new_token_each_time(text: str) -> None:
    first, second = parse_binding(text, {}), parse_binding(text, {})
    assert first is not None
    assert second is not None
    assert first.token is not None
    assert len(first.token) >= 32
    assert first.token != second.token


@pytest.mark.parametrize("text", ["0.0.0.0:1", "127.0.0.1:1"])
def test_a_token_of_the_environment_is_used(text: str) -> None:
    binding = parse_binding(text, {TOKEN_VARIABLE: TOKEN})
    assert binding is not None
    assert binding.token == TOKEN
    assert TOKEN not in repr(binding)


def test_an_empty_variable_is_no_token() -> None:
    binding = parse_binding("127.0.0.1:1", {TOKEN_VARIABLE: ""})
    assert binding is not None
    assert binding.token is None


@pytest.mark.parametrize(
    "token", ["short", "has space in the middle", "ünïcödé-ünïcödé-ü", "x" * 257]
)
def test_a_poor_token_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(ValueError, match=TOKEN_VARIABLE) as caught:
        parse_binding(None, {TOKEN_VARIABLE: token})
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8642",
        ":8642",
        "localhost",
        "localhost:",
        "::1:8642",
        "[::1]",
        "[1.2.3.4]:1",
        "[::g]:1",
        "[fe80::1%eth0]:1",
        "*:1",
        "a b:1",
        "http://localhost:1",
        "localhost:-1",
        "localhost:１２",
        "localhost:65536",
        "localhost:1\n",
        "localhost:1\r\nx: y",
    ],
)
def test_bad_text_is_one_clear_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--dashboard: ") as caught:
        parse_binding(text, {})
    assert len(str(caught.value).splitlines()) == 1


def test_an_open_address_without_a_token_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="needs a token"):
        Binding("0.0.0.0", 8642, None, is_chosen=True)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.255.0.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_an_address_is_read_in_one_form() -> None:
    assert parse_address("EXAMPLE.org") == ("example.org", None)
    assert parse_address("[2001:DB8::0:1]:8") == ("2001:db8::1", 8)
    assert parse_address("user@host:8") is None


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8642", "localhost:8642", "LOCALHOST:8642", "[::1]:8642", "[0::1]:8642"]
)
def test_own_names_are_answered_on_loopback(host: str) -> None:
    assert refuse_host([host], LOCAL, 8642) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8642",
        "127.0.0.1.evil.example:8642",
        "localhost.:8642",
        "localhost",
        "localhost:8643",
        "localhost:08643",
        "0.0.0.0:8642",
        "127.0.0.2:8642",
        "192.168.1.7:8642",
        "[::ffff:7f00:1]:8642",
        f"{socket.gethostname()}.evil.example:8642",
    ],
)
def test_other_names_are_misdirected_on_loopback(host: str) -> None:
    refusal = refuse_host([host], LOCAL, 8642)
    assert refusal is not None
    assert refusal.status == 421
    assert "evil" not in refusal.line
    assert "http://127.0.0.1:8642/" in refusal.line


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        [""],
        ["127.0.0.1:8642", "127.0.0.1:8642"],
        ["127.0.0.1:8642 "],
        ["127.0.0.1:8642, evil.example"],
        ["http://127.0.0.1:8642"],
        ["127.0.0.1:x"],
        ["127.0.0.1:"],
        ["user@127.0.0.1:8642"],
        ["::1"],
        ["[::1"],
        ["<script>"],
        ["\u212aocalhost:8642"],
        ["localhost:\u0661"],
    ],
)
def test_missing_duplicate_and_garbage_hosts_are_refused(hosts: list[str]) -> None:
    for binding in (LOCAL, OPEN):
        refusal = refuse_host(hosts, binding, 8642)
        assert refusal is not None
        assert refusal.status == 400


def test_the_default_port_of_http_may_be_left_out() -> None:
    assert refuse_host(["localhost"], LOCAL, 80) is None


def test_another_loopback_address_answers_as_itself() -> None:
    binding = Binding("127.0.0.2", 0, None, is_chosen=True)
    assert refuse_host(["127.0.0.2:5"], binding, 5) is None


@pytest.mark.parametrize(
    "host",
    [
        "192.168.1.7:8642",
        "192.168.1.7:9999",
        "[2001:db8::1]",
        "127.0.0.1:8642",
        "localhost:8642",
        f"{socket.gethostname()}:8642",
        socket.gethostname().upper(),
    ],
)
def test_addresses_and_own_names_are_answered_beyond_loopback(host: str) -> None:
    assert refuse_host([host], OPEN, 8642) is None


def test_the_name_that_was_bound_is_answered() -> None:
    binding = Binding("box.example", 8642, TOKEN, is_chosen=True)
    assert refuse_host(["Box.Example:8642"], binding, 8642) is None
    refusal = refuse_host(["evil.example:8642"], binding, 8642)
    assert refusal is not None
    assert refusal.status == 421


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
        {"Host": "localhost:8642", "Origin": "http://localhost:8642"},
        {"Host": "LOCALHOST:8642", "Origin": "http://localhost:8642"},
    ],
)
def test_own_requests_pass(headers: dict[str, str]) -> None:
    assert refuse_cross_site(headers) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "<script>"},
        {"Host": "localhost:8642", "Origin": "http://localhost:3000"},
        {"Host": "localhost:8642", "Origin": "http://evil.example"},
        {"Host": "localhost:8642", "Origin": "null"},
        {"Host": "localhost:8642", "Origin": ""},
        {"Sec-Fetch-Site": "same-origin", "Host": "a", "Origin": "http://b"},
    ],
)
def test_other_sites_are_refused(headers: dict[str, str]) -> None:
    refusal = refuse_cross_site(headers)
    assert refusal is not None
    assert refusal.status == 403


def test_tokens_are_compared_whatever_they_hold() -> None:
    assert is_token(TOKEN, TOKEN)
    for wrong in (None, "", TOKEN[:-1], TOKEN + "x", "각", "\udcff", "\0"):
        assert not is_token(wrong, TOKEN)


def test_a_bearer_token_is_read() -> None:
    assert bearer("Bearer abc") == "abc"
    assert bearer("bearer  abc ") == "abc"
    assert bearer("Basic abc") is None
    assert bearer("") is None


def test_addresses_are_written_for_a_browser() -> None:
    assert address_text("::1", 8) == "[::1]:8"
    assert address_text("localhost", 8) == "localhost:8"
    assert address_text("0.0.0.0", 8) == address_text("::", 8) == f"{socket.gethostname()}:8"


def test_two_arenas_on_one_host_have_cookies_of_their_own() -> None:
    assert cookie_name(1) != cookie_name(2)
