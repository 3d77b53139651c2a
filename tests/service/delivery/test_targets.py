from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.errors import ConfigurationError
from tarry.service.delivery.targets import MAX_URL_BYTES, lane_name, parse_target

CANONICAL = [
    ("http://example.com", "http://example.com/"),
    ("HTTP://EXAMPLE.com:80/A?b=C", "http://example.com/A?b=C"),
    ("https://example.com:443/", "https://example.com/"),
    ("https://example.com:80/", "https://example.com:80/"),
    ("http://example.com./x", "http://example.com/x"),
    ("http://example.com?q", "http://example.com/?q"),
    ("http://example.com/a/../b//c", "http://example.com/a/../b//c"),
    ("http://example.com/x#fragment", "http://example.com/x"),
    ("http://example.com#fragment", "http://example.com/"),
    ("http://example.com/ä b".replace(" ", "%20"), "http://example.com/%C3%A4%20b"),
    ('http://example.com/"<>^`{|}', "http://example.com/%22%3C%3E%5E%60%7B%7C%7D"),
    ("http://example.com/%e4%zz?%2f%", "http://example.com/%E4%zz?%2F%"),
    ("http://bücher.example/", "http://xn--bcher-kva.example/"),
    ("http://straße.example/", "http://xn--strae-oqa.example/"),
    ("http://xn--bcher-kva.example/", "http://xn--bcher-kva.example/"),
    ("http://my_service:8080/", "http://my_service:8080/"),
    ("http://127.0.0.1/", "http://127.0.0.1/"),
    ("http://\uff11\uff12\uff17.\uff10.\uff10.\uff11/", "http://127.0.0.1/"),
    ("http://127。0。0。1/", "http://127.0.0.1/"),
    ("http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ/", "http://localhost/"),
    ("http://[0:0::1]:8080/", "http://[::1]:8080/"),
    ("http://[::FFFF:127.0.0.1]/", "http://[::ffff:127.0.0.1]/"),
    ("http://[::ffff:7f00:1]/", "http://[::ffff:127.0.0.1]/"),
    ("grpc://example.com:50051/pkg.v1.Service/Call", None),
    ("grpcs://example.com:443/Service/Call", None),
]
REJECTED = [
    ("", "start with http"),
    ("example.com", "start with http"),
    ("//example.com/", "start with http"),
    ("http:example.com", "start with http"),
    ("ftp://example.com/", "start with http"),
    ("file:///etc/passwd", "start with http"),
    ("gopher://example.com/", "start with http"),
    ("http:///path", "name a host"),
    ("http://:80/", "name a host"),
    ("http://./", "name a host"),
    ("http://user@example.com/", "user info"),
    ("http://user:secret@example.com/", "user info"),
    ("http://example.com@127.0.0.1/", "user info"),
    ("http://@127.0.0.1/", "user info"),
    ("http://exam ple.com/", "spaces"),
    (" http://example.com/", "spaces"),
    ("http://example.com/\r\nHost: x", "control"),
    ("http://example.com/\x00", "control"),
    ("http://example.com/\u2028", "spaces"),
    ("http://example.com\\@127.0.0.1/", "backslashes"),
    ("http://example.com/a\\b", "backslashes"),
    ("http://example.com:0/", "port"),
    ("http://example.com:65536/", "port"),
    ("http://example.com:/", "port"),
    ("http://example.com:+80/", "port"),
    ("http://example.com:8_0/", "port"),
    ("http://example.com:٨٠/", "port"),
    ("http://example.com:80:90/", "brackets"),
    ("http://::1/", "brackets"),
    ("http://[::1/", "brackets"),
    ("http://[::1]x/", "brackets"),
    ("http://[::1]80/", "brackets"),
    ("http://[127.0.0.1]/", "IPv6"),
    ("http://[v1.x]/", "IPv6"),
    ("http://[fe80::1%eth0]/", "zone"),
    ("http://[fe80::1%25eth0]/", "zone"),
    ("http://%6c%6fcalhost/", "percent"),
    ("http://example%2ecom/", "percent"),
    ("http://0177.0.0.1/", "four decimal"),
    ("http://0x7f.0.0.1/", "four decimal"),
    ("http://0x7f.1/", "four decimal"),
    ("http://0x7f000001/", "four decimal"),
    ("http://2130706433/", "four decimal"),
    ("http://127.1/", "four decimal"),
    ("http://127.0.1/", "four decimal"),
    ("http://0/", "four decimal"),
    ("http://127.0.0.01/", "four decimal"),
    ("http://256.0.0.1/", "four decimal"),
    ("http://1.2.3.4.5/", "four decimal"),
    ("http://127.0.0.0x1/", "four decimal"),
    ("http://-a.example/", "letters"),
    ("http://a..b/", "letters"),
    ("http://a,b/", "letters"),
    ("http://$(id)/", "letters"),
    (f"http://{'a' * 64}.example/", "letters"),
    (f"http://{'a.' * 130}example/", "at most 253 characters, got 267"),
    ("http://xn--a/", "IDNA"),
    ("http://a\u200d.example/", "IDNA"),
    ("http://\ud800.example/", "IDNA"),
    ("http://example.com/\ud800", "Unicode"),
    ("grpc://example.com/Service/Call", "port"),
    ("grpc://example.com:1/Call", "gRPC method"),
    ("grpc://example.com:1/Service/Call?x=1", "gRPC method"),
    ("grpc://example.com:1/", "gRPC method"),
]


@pytest.mark.parametrize(("text", "url"), CANONICAL, ids=[text for text, _ in CANONICAL])
def test_url_has_one_canonical_form(text: str, url: str | None) -> None:
    """A URL is parsed to its canonical form, which parses to itself."""
    target = parse_target(text)
    assert (url or text) == target.url
    assert target == parse_target(target.url)


@pytest.mark.parametrize(("text", "rule"), REJECTED, ids=[ascii(text)[:60] for text, _ in REJECTED])
def test_invalid_url_is_rejected(text: str, rule: str) -> None:
    """The error names the field and the rule."""
    with pytest.raises(ConfigurationError, match=f"^targetUrl must (.*){rule}"):
        parse_target(text)


@pytest.mark.parametrize("origin", [" http://h", "http://exam ple.com", "http://h\\", "ht tp://h"])
def test_percent_encoding_is_suggested_for_path_and_query_only(origin: str) -> None:
    """The error suggests %XX only for path and query, because a host cannot be encoded."""
    for path in ("/", "/ä", "/a#b c"):
        with pytest.raises(ConfigurationError, match=r"backslashes") as raised:
            parse_target(origin + path)
        assert ("%XX" in str(raised.value)) is (" " in path)
    with pytest.raises(ConfigurationError, match=r"backslashes, found ' ': write them as %XX$"):
        parse_target("http://h/a b")


def test_endpoint_is_scheme_host_and_port() -> None:
    """The endpoint is lower-case and has brackets around an IPv6 address."""
    assert "https:example.com:443" == parse_target("https://Example.com/x").endpoint
    assert "http:[2001:db8::1]:8080" == parse_target("http://[2001:DB8:0::1]:8080/").endpoint
    assert "grpc:h:1" == parse_target("grpc://h:1/S/M").endpoint


def test_long_url_is_rejected() -> None:
    """A URL is rejected when it or its canonical form is too long."""
    start = "http://h/"
    assert MAX_URL_BYTES == len(parse_target(start + "x" * (MAX_URL_BYTES - len(start))).url)
    for path in ("x" * (MAX_URL_BYTES - len(start) + 1), "ä" * (MAX_URL_BYTES - len(start))):
        with pytest.raises(ConfigurationError, match="at most 8192 bytes"):
            parse_target(start + path)


def test_error_shows_no_secret() -> None:
    """Messages contain neither user info nor query."""
    for text in ("http://user:hunter2@h/", "ftp://h/?token=hunter2", "http://h:x/?t=hunter2"):
        with pytest.raises(ConfigurationError) as raised:
            parse_target(text)
        assert "hunter2" not in str(raised.value)


def test_url_that_is_not_a_string_is_rejected() -> None:
    """None, a number or bytes raises TypeError."""
    for value in (None, 7, b"http://h/"):
        with pytest.raises(TypeError, match="targetUrl must be a string"):
            parse_target(value)  # type: ignore[arg-type]


@given(st.text(max_size=60), st.sampled_from(["http://", "https://", "http://h/", "http://h:"]))
def test_accepted_url_is_canonical_ascii(rest: str, start: str) -> None:
    """Any string is rejected, or becomes ASCII that parses to itself."""
    try:
        target = parse_target(start + rest)
    except ConfigurationError:
        return
    assert target.url.isascii()
    assert target.url.isprintable()
    assert not set(' \\"<>^`{|}#') & set(target.url)
    assert target == parse_target(target.url)


def test_lane_names() -> None:
    """A lane has the name of tenant and endpoint, and the lane key after `@`."""
    target = parse_target("https://[::1]/a@b?c@d")
    assert "acme/https:[::1]:443" == lane_name("acme", target)
    assert "acme/https:[::1]:443@customer-7" == lane_name("acme", target, "customer-7")
