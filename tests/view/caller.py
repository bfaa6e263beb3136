"""Raw requests to a viewer: no browser."""

from __future__ import annotations

import http.client

from penstock.view.access import cookie_name


class Caller:
    """Requests to one viewer, well-formed unless told otherwise."""

    def __init__(self, port: int, token: str, image: str) -> None:
        self.port, self.token, self.image = port, token, image

    def __call__(
        self, path: str, method: str = "GET", *, cookie: str | None = "", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        own = f"{cookie_name(self.token)}={self.token}" if cookie == "" else cookie
        sent = {**({"Cookie": own} if own else {}), **{name.replace("_", "-"): v for name, v in headers.items()}}
        try:
            connection.putrequest(method, path, skip_host="Host" in sent)
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()


STEP = "export=demo&run=&step=1"
ROUTES = [
    "/",
    "/static/app.js",
    "/static/style.css",
    "/api/overview",
    "/api/dropped?export=demo&run=",
    f"/api/whatif?{STEP}&rule=dppo",
    f"/api/search?{STEP}&query=times",
    f"/api/group?{STEP}&group=s1-g0",
    "/api/run?export=demo&run=",
    f"/api/step?{STEP}",
    f"/api/sample?{STEP}&sample=0",
    "/image/HASH",
    "/nothing",
]
