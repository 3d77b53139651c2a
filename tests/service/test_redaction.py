"""Redaction of secrets."""

from __future__ import annotations

import tracemalloc
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.service import redaction
from tarry.service.model import TaskContent


@pytest.mark.parametrize(
    "name",
    [
        "Authorization", "Proxy-Authorization", "Cookie", "X-API-Key", "api_key", "apikey",
        "X-Auth-Token", "access_token", "client_secret", "password", "X-Amz-Signature", "sig",
        "Ocp-Apim-Subscription-Key", "X-Goog-Credential", "key", "session_id", "jwt",
        "X-Hub-Signature-256", "authorisation", "passphrase", "private_key", "otp",
    ],
)  # fmt: skip
def test_a_name_is_recognized_as_secret(name: str) -> None:
    """Secret names are recognized in upper and lower case."""
    assert redaction.is_secret_name(name)
    assert redaction.is_secret_name(name.upper())
    assert f"{name}=[redacted]" == redaction.redact_named_values(f"{name}=value")


@pytest.mark.parametrize(
    "name",
    [
        "Content-Type",
        "X-Order",
        "monkey",
        "design",
        "Accept",
        "keyword",
        "page",
        "signal",
        "author",
    ],
)
def test_a_name_is_not_secret(name: str) -> None:
    """Names that only resemble a secret name are not secret."""
    assert not redaction.is_secret_name(name)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://a/b", "https://a/b"),
        ("https://a/b?c=d", "https://a/b?c=d"),
        ("https://a/?token=x", "https://a/?token=[redacted]"),
        ("https://a/?c=d&token=x=y&e", "https://a/?c=d&token=[redacted]&e"),
        ("https://a/?%74oken=x;sig=y", "https://a/?%74oken=[redacted];sig=[redacted]"),
        ("https://a/?token=", "https://a/?token="),
        ("https://a/token=x?c", "https://a/token=x?c"),
        ("https://a/?a?token=x", "https://a/?a?token=[redacted]"),
    ],
)
def test_secrets_in_a_query_are_redacted(url: str, expected: str) -> None:
    """The values of secret parameters are redacted, the rest is unchanged."""
    assert expected == redaction.redact_url(url)


def test_secrets_in_a_text_of_the_target_are_redacted() -> None:
    """Parts of header values, and plain or percent-encoded parameters are redacted."""
    content = TaskContent(
        url="https://a/?token=s%2Fecret-1&pin=12",
        headers={"Authorization": "Bearer longest-secret", "X-A": "visible"},
    )
    secrets = redaction.find_secrets(content)
    echoed = "longest-secret s/ecret-1 s%2Fecret-1 visible 12 Bearer longest-secret"
    assert "[redacted] [redacted] [redacted] visible 12 [redacted]" == redaction.redact_text(
        echoed, secrets
    )


@pytest.mark.parametrize(
    ("header", "value", "echoed"),
    [
        ("Cookie", "id=cookievalue66; theme=dark", "cookievalue66"),
        ("Authorization", "Basic dXNlcjpwYXNzd2Q5OQ==", "passwd99"),
        ("Authorization", "Basic dXNlcjpwYXNzd2Q5OQ==", "user:passwd99"),
        ("X-Hub-Signature-256", "sha256=abcdef0123", "abcdef0123"),
        ("Stripe-Signature", "t=1492774577,v1=ffeeddccbb", "ffeeddccbb"),
        ("Authorization", 'Digest username="u", response="6629fae49393"', "6629fae49393"),
    ],
)
def test_parts_of_a_secret_header_are_redacted(header: str, value: str, echoed: str) -> None:
    """A target may return only one cookie, or the password without the user name."""
    content = TaskContent(url="", headers={header: value})
    secrets = redaction.find_secrets(content)
    assert "got [redacted]" == redaction.redact_text(f"got {echoed}", secrets)


@pytest.mark.parametrize(
    "echoed",
    [
        r"abC\/deF+ghI&\"j\\kL==",
        r"abC\u002fdeF\u002BghI\u0026\u0022j\u005ckL\u003d=",
        r"abC\\\/deF+ghI&\\\"j\\\\kL==",
        "abC%2FdeF%2bghI%26%22j%5CkL%3D%3D",
        "abC/deF&#43;ghI&amp;&quot;j&#x5C;kL&#x3d;=",
    ],
    ids=["json", "json codes", "json in json", "url", "html"],
)
def test_escaped_secrets_are_redacted(echoed: str) -> None:
    """A target may escape the characters of a secret that it returns."""
    content = TaskContent(url="", headers={"Authorization": 'Bearer abC/deF+ghI&"j\\kL=='})
    secrets = redaction.find_secrets(content)
    text = f'{{"a": "\\/x", "b": "{echoed}", "c": "{echoed}\\/y"}}'
    expected = '{"a": "\\/x", "b": "[redacted]", "c": "[redacted]\\/y"}'
    assert expected == redaction.redact_text(text, secrets)
    assert expected.encode() == redaction.redact_bytes(text.encode(), secrets)
    truncated = f"x: {echoed[:-4]}"
    assert "x: [redacted]" == redaction.redact_text(truncated, secrets, is_truncated=True)
    assert redaction.redact_text(f"{echoed[:4]} 5% &", secrets) == f"{echoed[:4]} 5% &"


PLAIN = "S3cret/Value+0123?&"
ENCODED_SECRETS = {
    "lower case": PLAIN.lower(),
    "upper case": PLAIN.upper(),
    "hex": PLAIN.encode().hex(),
    "upper case hex": PLAIN.encode().hex().upper(),
    "entities with zeros": "".join(f"&#{ord(char):06};" for char in PLAIN),
    "hex entities with zeros": "".join(f"&#x{ord(char):06x};" for char in PLAIN),
    "url twice": "".join(f"%25{ord(char):02X}" for char in PLAIN),
    "url three times": "".join(f"%2525{ord(char):02x}" for char in PLAIN),
    "x escapes": "".join(f"\\x{ord(char):02x}" for char in PLAIN),
    "braces": "".join(f"\\u{{{ord(char):x}}}" for char in PLAIN),
    "x escapes in json": "".join(f"\\\\x{ord(char):02X}" for char in PLAIN),
}


@pytest.mark.parametrize("echoed", ENCODED_SECRETS.values(), ids=ENCODED_SECRETS)
def test_encoded_secrets_are_redacted(echoed: str) -> None:
    """A target may change the case of a secret, or encode it."""
    secrets = [PLAIN]
    for text, expected in ((f"<{echoed}> \u00e9", "<[redacted]> \u00e9"), (echoed, "[redacted]")):
        assert expected == redaction.redact_text(text, secrets)
        encoded = text.encode("latin-1")
        assert expected.encode("latin-1") == redaction.redact_bytes(encoded, secrets)
    cut = echoed[: -len(echoed) // 3]
    assert "x [redacted]" == redaction.redact_text(f"x {cut}", secrets, is_truncated=True)


@given(
    before=st.binary(max_size=8),
    secret=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=6, max_size=30),
    after=st.binary(max_size=8),
    encode=st.sampled_from([b64encode, urlsafe_b64encode]),
)
def test_secrets_in_base64_are_redacted(
    before: bytes, secret: str, after: bytes, encode: Callable[[bytes], bytes]
) -> None:
    """A secret is found at each position of a longer text in base64."""
    encoded = encode(before + secret.encode() + after).decode()
    redacted = redaction.redact_text(f'"{encoded}"', [secret])
    assert "[redacted]" in redacted
    # Of the secret, at most a part of its first and of its last byte is left.
    left = "".join(redacted.strip('"').split("[redacted]"))
    rest = (len(before) + len(after)) * 4 / 3 + 8
    assert len(left) <= rest


@pytest.mark.parametrize("text", ["&#99999999;", "&#x110000;", "\\u{110000}", "%25", "%", "&#0;"])
def test_invalid_escapes_are_unchanged(text: str) -> None:
    """An escape without a character is no error."""
    assert text == redaction.redact_text(text, [PLAIN], is_truncated=True)


@pytest.mark.parametrize("value", ["Basic", "Basic !", "Basic dXN", "Basic /w==", "=;,"])
def test_malformed_secret_header_is_redacted(value: str) -> None:
    """A header that has no parts is a secret as a whole, if it is long enough."""
    secrets = redaction.find_secrets(TaskContent(url="", headers={"Authorization": value}))
    expected = value if len(value) < 6 else "[redacted]"
    assert expected == redaction.redact_text(value, secrets)


@pytest.mark.parametrize("separator", ["; ", " "])
def test_whole_texts_are_redacted_if_there_are_too_many_secrets(separator: str) -> None:
    """The time to search a text does not grow with the number of secrets in a header."""
    cookies = [f"name-{number}=value-{number}" for number in range(300)]
    for count, expected in ((100, "got [redacted]"), (300, "[redacted]")):
        headers = {"Cookie": separator.join(cookies[:count])}
        secrets = redaction.find_secrets(TaskContent(url="", headers=headers))
        assert expected == redaction.redact_text("got value-99", secrets)
    url = "https://a.example/?" + "&".join(f"token={number:06}" for number in range(300))
    assert redaction.find_secrets(TaskContent(url=url)) is None
    headers = {"Cookie": "same=cookie; " * 300 + "id=cookievalue66"}
    secrets = redaction.find_secrets(TaskContent(url="", headers=headers))
    assert "got [redacted]" == redaction.redact_text("got cookievalue66", secrets)


def test_short_parts_of_a_secret_header_do_not_hide_a_long_one() -> None:
    """A secret after hundreds of cookies that are too short to be redacted is redacted."""
    cookies = "; ".join(f"c{number}=1" for number in range(400))
    headers = {"Cookie": f"{cookies}; id=cookievalue77"}
    secrets = redaction.find_secrets(TaskContent(url="", headers=headers))
    assert "[redacted]" == redaction.redact_text("cookievalue77", secrets)


def test_a_truncated_secret_is_redacted() -> None:
    """At the end of a truncated text, six characters of a secret are enough."""
    assert "a [redacted]" == redaction.redact_text(
        "a longest-s", ["longest-secret"], is_truncated=True
    )
    assert "a longe" == redaction.redact_text("a longe", ["longest-secret"], is_truncated=True)
    assert "a longest-s" == redaction.redact_text("a longest-s", ["longest-secret"])
    assert "aaaaaab [redacted]" == redaction.redact_text(
        "aaaaaab aaaaaaa", ["aaaaaaac"], is_truncated=True
    )
    assert b"\xff [redacted]" == redaction.redact_bytes(
        b"\xff longest-s", ["longest-secret"], is_truncated=True
    )


def test_unknown_secrets_redact_the_whole_text() -> None:
    """If the content cannot be decrypted, any word may be a secret."""
    assert redaction.find_secrets(None) is None
    assert ("[redacted]", "") == tuple(redaction.redact_text(text, None) for text in ("x", ""))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Service Unavailable", "Service Unavailable"),
        ("the token is invalid", "the token is invalid"),
        ('{"access_token": "a", "x": 1}', '{"access_token": "[redacted]", "x": 1}'),
        (r'{"token":"a\"b","x":"y"}', '{"token":"[redacted]","x":"y"}'),
        (r'{"x":"{\"token\":\"a\\\"b\"}"}', r'{"x":"{\"token\":\"[redacted]\"}"}'),
        ('{"pin":1234}', '{"pin":[redacted]}'),
        ('{"token": "cut', '{"token": "[redacted]'),
        ("{'password': 'a b'}", "{'password': '[redacted]'}"),
        ("/?token=a&x=b#c", "/?token=[redacted]&x=b#c"),
        ("Authorization=Bearer a b", "Authorization=[redacted] b"),
        ("password='a b' x", "password='[redacted]' x"),
        ("token=password=a b", "token=[redacted] b"),
        ('{"token":"","auth":null,"tokens":[],"session":{}}',) * 2,
        ('{"author": "a", "monkey": "b"}',) * 2,
        ('{"token":["a"],"x":1}', '{"token":[redacted],"x":1}'),
        ('{"token":{"value":"a"},"x":1}', '{"token":[redacted],"x":1}'),
        ('{"password":["a","]}b"], "x": 1}', '{"password":[redacted], "x": 1}'),
        ('{"token": [["a"], {"b": "c', '{"token": [redacted]'),
        ('{"token":[a', '{"token":[redacted]'),
        (r'{"x":"{\"token\":[\"a\"]}"}', r'{"x":"{\"token\":[redacted]}"}'),
        (r'{"access\u005ftoken":"a"}', r'{"access\u005ftoken":"[redacted]"}'),
        (r'{"t\u006Fken":"a"}', r'{"t\u006Fken":"[redacted]"}'),
        ("token = a b", "token = [redacted] b"),
        ("token[]=a&user[password]=b", "token[]=[redacted]&user[password]=[redacted]"),
        ("token%5B%5D=a&x", "token%5B%5D=[redacted]&x"),
        ('{"token"=>"a"}', '{"token"=>"[redacted]"}'),
        ("x: y\npassword: a\nz", "x: y\npassword: [redacted]\nz"),
        ("got Authorization: Bearer a\r\nx: y", "got Authorization: [redacted]\r\nx: y"),
        ('Authorization: Digest u="a", r="b"\nx', "Authorization: [redacted]\nx"),
        ('{"x":"Cookie: a=b; c=d","y":1}', '{"x":"Cookie: [redacted]","y":1}'),
        ('Cookie: "a"', 'Cookie: "[redacted]"'),
        ("<x><token>a</token></x>", "<x><token>[redacted]</token></x>"),
        ('<a:pwd key="b">a</a:pwd>', '<a:pwd key="[redacted]">[redacted]</a:pwd>'),
        (
            "<token><a>b</a></token>c<token/><token />d",
            "<token>[redacted]</token>c<token/><token />d",
        ),
        ("<token>cut", "<token>[redacted]"),
        ('<a href="/?token=a">b</a>', '<a href="/?token=[redacted]">b</a>'),
        ("see http://u:a@b/ and c@d", "see http://[redacted]@b/ and c@d"),
        (r'"http:\/\/u:a@b\/"', r'"http:\/\/[redacted]@b\/"'),
        ("Session::Error, UNAUTHENTICATED: expired",) * 2,
        (
            '--b\r\nContent-Disposition: form-data; name="pwd"\r\nA: b\r\n\r\na\r\nb\r\n--b--',
            '--b\r\nContent-Disposition: form-data; name="pwd"\r\nA: b\r\n\r\n[redacted]\r\n--b--',
        ),
        ('form-data; name="a"\n\nb\n--b',) * 2,
        ('form-data; name="pin"\n\ncut', 'form-data; name="pin"\n\n[redacted]'),
        ('form-data; name="pin"\n\n\n--b',) * 2,
    ],
)
def test_named_secrets_in_a_text_of_the_target_are_redacted(text: str, expected: str) -> None:
    """The values of secret JSON members and parameters are redacted, and redacted only once."""
    assert expected == redaction.redact_named_values(text)
    assert expected == redaction.redact_named_values(expected)


@pytest.mark.parametrize(
    "text",
    [
        '"key":"', "key=", '"key":"\\"', '"' * 7, "\\" * 7, "'key': ", '"key":[', "<key>", "<key a",
        "key ", "key[", "://a", ":", 'cookie: ="', "\\u006b", '"key":{"',
        'form-data; name="key"\n', 'form-data; name="key"\n\n', 'form-data; name="',
    ],
)  # fmt: skip
def test_hostile_text_is_redacted_in_one_pass(text: str) -> None:
    """Repeated quotes, backslashes and names do not make the search fail."""
    repeated = text * 300
    assert len(redaction.redact_named_values(repeated)) <= 2 * len(repeated)


def test_large_secrets_of_many_tasks_do_not_stay_in_memory() -> None:
    """A caller cannot fill the memory of a process with tasks that have different credentials."""
    tracemalloc.start()
    try:
        for number in range(100):
            headers = {"Authorization": f"Bearer {number}{'x' * 30_000}"}
            secrets = redaction.find_secrets(TaskContent(url="https://a/", headers=headers))
            assert "refused" == redaction.redact_text("refused", secrets)
        assert tracemalloc.get_traced_memory()[0] < 20_000_000
    finally:
        tracemalloc.stop()


def test_secrets_are_encoded_once_for_many_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of a page, which are those of one task, are redacted in a bounded time."""
    encoded: list[str] = []

    def list_forms(secret: str) -> tuple[str, ...]:
        encoded.append(secret)
        return (secret,)

    monkeypatch.setattr(redaction, "_list_encoded_forms", list_forms)
    secrets = [f"only-in-this-test-{number}" for number in range(10, 60)]
    for _ in range(100):
        text = redaction.redact_text("an only-in-this\\-test-17", secrets)
        assert "an [redacted]" == text
    assert len(encoded) == len(secrets)
