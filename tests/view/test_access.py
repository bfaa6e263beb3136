"""Who the viewer's server lets in, by token, host and site; raw requests, no browser."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.view import Library
from penstock.view.access import POLICY, Guard, cookie_name, new_token
from penstock.view.web import viewer as make_viewer
from tests.view.caller import ROUTES, Caller


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_needs_the_token(viewer: Caller, route: str) -> None:
    path = route.replace("HASH", viewer.image)
    status = 404 if route == "/nothing" else 200
    assert viewer(path)[0] == status
    name = cookie_name(viewer.token)
    for cookie in (None, "penstock_1=x", f"{name}=", f"{name}={new_token()}"):
        refused, headers, body = viewer(path, cookie=cookie)
        assert refused == 403 and b"needs the token" in body and headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_nothing_but_get_and_head_exists(viewer: Caller, route: str, method: str) -> None:
    assert viewer(route.replace("HASH", viewer.image), method)[0] in (400, 405)


def test_head_answers_without_a_body(viewer: Caller) -> None:
    status, headers, body = viewer("/api/overview", "HEAD")
    assert status == 200 and body == b"" and int(headers["content-length"]) > 0


@pytest.mark.parametrize(
    "host",
    [
        "evil.com",
        "evil.com:PORT",
        "x/?",
        "127.0.0.1:PORT.evil.com",
        "",
        "LOCALHOST.:PORT",
        "127.0.0.1:",
        "127.0.0.2:PORT",
    ],
)
def test_another_host_is_refused_even_with_the_token(viewer: Caller, host: str) -> None:
    status, _, body = viewer("/api/overview", Host=host.replace("PORT", str(viewer.port)))
    assert status in (400, 421) and b"exports" not in body


def test_the_hosts_of_this_machine_are_taken(viewer: Caller) -> None:
    for host in ("127.0.0.1", "localhost", "[::1]", "LocalHost"):
        assert viewer("/api/overview", Host=f"{host}:{viewer.port}")[0] == 200


def test_a_tunnel_may_end_on_any_port_of_this_machine(viewer: Caller) -> None:
    for host in ("127.0.0.1:9999", "localhost:1", "127.0.0.1"):
        assert viewer("/api/overview", Host=host, Origin=f"http://{host}")[0] == 200
        assert viewer("/api/overview", Host=host, Origin="http://127.0.0.1:5")[0] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.com"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_requests_of_other_sites_are_refused(viewer: Caller, headers: dict[str, str]) -> None:
    assert viewer("/api/overview", **headers)[0] == 403


def test_the_token_in_the_address_becomes_a_cookie_and_goes(viewer: Caller) -> None:
    status, headers, _ = viewer(f"/?token={viewer.token}", cookie=None)
    assert status == 303 and headers["location"] == "/"
    assert headers["set-cookie"] == f"{cookie_name(viewer.token)}={viewer.token}; Path=/; HttpOnly; SameSite=Strict"
    for path in (
        f"/?token={viewer.token}x",
        "/?token=",
        f"/?token={viewer.token}&token=x",
        f"/api/overview?token={viewer.token}",
    ):
        status, headers, _ = viewer(path, cookie=None)
        assert status == 403 and "set-cookie" not in headers


@pytest.mark.parametrize("route", ["/", "/api/overview", "/nothing", "/image/HASH"])
def test_every_answer_carries_the_policy(viewer: Caller, route: str) -> None:
    for cookie in ("", None):
        _, headers, _ = viewer(route.replace("HASH", viewer.image), cookie=cookie)
        assert headers["content-security-policy"] == POLICY and headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"
        assert "server" not in headers


def test_the_server_listens_on_the_loopback_address_only() -> None:
    with contextlib.closing(make_viewer(Library(), token=new_token())) as server:
        assert server.url.startswith("http://127.0.0.1:")


def test_a_short_token_is_refused() -> None:
    async def app(*_: Any) -> None: ...

    with pytest.raises(ConfigError, match="at least 22"):
        Guard(app, token="")
    assert len(new_token()) >= 43 and new_token() != new_token()
