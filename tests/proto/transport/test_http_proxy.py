"""Which proxy a connection goes through, as the environment says; never one to this machine, and never silently none."""

from __future__ import annotations

import logging

import grpc
import pytest

from edit.errors import ConfigError, TransportError
from editpb.transport.channel_options import channel_options
from editpb.transport.http_proxy import proxy_for, through
from editpb.transport.status import from_status

PROXY = "http://proxy.example:3128"
SAYS = "HTTP proxy returned response code"


@pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "http_proxy", "GRPC_PROXY", "HTTPS_PROXY", "HTTP_PROXY"])
def test_each_of_the_usual_names_counts(name: str) -> None:
    assert proxy_for("a.example:7700", {name: PROXY}) == PROXY


def test_the_first_that_is_set_counts_and_an_empty_one_is_not_set() -> None:
    assert proxy_for("a.example:1", {"http_proxy": "http://other:1", "HTTPS_PROXY": PROXY, "https_proxy": " "}) == PROXY


def test_the_way_is_told_with_the_variable_and_without_the_password() -> None:
    said = " (through the HTTP proxy proxy.example:3128, which the environment's HTTPS_PROXY names)"
    assert through("a.example:1", {"HTTPS_PROXY": "http://me:secret@proxy.example:3128"}) == said
    assert through("a.example:1", {"HTTPS_PROXY": PROXY, "no_proxy": "a.example"}) == through("a.example:1", {}) == ""


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:7", "localhost:7", "localhost.:7", "[::1]:7", "127.8.8.8:7", "[::ffff:127.0.0.1]:7", "0.0.0.0:7", "[::]:7"],
)
def test_this_machine_is_reached_directly(address: str) -> None:
    assert proxy_for(address, {"https_proxy": PROXY}) == ""


@pytest.mark.parametrize(
    ("address", "entries", "direct"),
    [
        ("a.example:7", "*", True),
        ("a.example:7", "example", True),
        ("a.example:7", ".example", True),
        ("A.Example:7", "other, a.example", True),
        ("a.example:7", "b.example", False),
        ("badexample:7", "example", False),
        ("10.1.2.3:7", "10.0.0.0/8", True),
        ("10.1.2.3:7", "10.1.2.3", True),
        ("11.1.2.3:7", "10.0.0.0/8", False),
        ("[2001:db8::1]:7", "2001:db8::/32", True),
        ("[2001:db8::1]:7", "[2001:db8::1]", True),
        ("[2001:db9::1]:7", "2001:db8::/32", False),
        ("a.example:7", "a.example:7", True),
        ("10.1.2.3:7", "10.1.2.3:9", True),
        ("[2001:db8::1]:7", "[2001:db8::1]:7", True),
        ("[2001:db8::1]:7", "2001:db8::1", True),
        ("a.example:7", "*.example", True),
        ("a.example:7", "*:7", True),
        ("badexample:7", "*.example", False),
        ("a.example.:7", "a.example", True),
        ("a.example:7", "a.example.", True),
        ("a.example:7", " , ,", False),
        ("a.example:7", ".", False),
    ],
)
def test_what_no_proxy_names_is_reached_directly(address: str, entries: str, direct: bool) -> None:
    assert (proxy_for(address, {"https_proxy": PROXY, "NO_PROXY": entries}) == "") is direct


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("proxy.example:3128", PROXY),
        ("http://[2001:db8::9]:8080/", "http://[2001:db8::9]:8080"),
        ("http://me:p%40s@proxy.example:3128", "http://me:p%40s@proxy.example:3128"),
        ("http://me:p@s@proxy.example:3128", "http://me:p%40s@proxy.example:3128"),
        ("http://me@proxy.example:3128", "http://me@proxy.example:3128"),
    ],
)
def test_the_url_is_given_to_grpc_as_it_reads_it(given: str, taken: str) -> None:
    assert proxy_for("a.example:7", {"https_proxy": given}) == taken


@pytest.mark.parametrize(
    "given",
    [
        "http://me:secret@proxy.example",
        "socks5://me:secret@h:1",
        "https://me:secret@h:1",
        "http://:1",
        "http://h:99999",
        "http://\udc80:1",
    ],
)
def test_a_proxy_that_cannot_be_is_one_line_without_the_password(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", given)
    monkeypatch.delenv("grpc_proxy", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(ConfigError, match=r"^the environment's https_proxy") as caught:
        channel_options("a.example:7")
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_it_is_said_once_and_without_the_password(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            proxy_for("a.example:7", {"https_proxy": "http://me:secret@told.example:3128"})
    (line,) = [each.message for each in caplog.records]
    assert "told.example:3128" in line and "secret" not in line


@pytest.mark.parametrize(
    ("code", "words"), [("407", "asks for a user and a password"), ("403", "does not let"), ("502", "502")]
)
def test_a_refusal_is_told_in_words_and_may_be_tried_again(code: str, words: str) -> None:
    said = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:192.0.2.1:3128: {SAYS} {code}"
    error = from_status(grpc.StatusCode.UNAVAILABLE, said)
    assert type(error) is TransportError
    assert str(error).startswith(f"the HTTP proxy 192.0.2.1:3128 answers {code}: ") and words in str(error)
