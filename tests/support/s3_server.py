"""An S3 server on loopback (moto), for tests and measurements. Needs the `moto` package.

with s3_server() as endpoint:
    os.environ |= s3_environment(endpoint)
    storage = ObjectStorage(f"s3://{make_bucket(endpoint)}/runs/mine")
"""

from __future__ import annotations

import logging
import secrets
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

ACCESS_KEY, SECRET_KEY = "AKIATESTTESTTEST", "a-secret-that-nobody-may-see"


@contextmanager
def s3_server() -> Iterator[str]:
    """Its endpoint. Everything is in memory, and gone afterwards."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else each request is printed
    app = one_write_at_a_time(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def one_write_at_a_time(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Make create-only writes atomic, as those of S3 are.

    moto looks whether the object exists and then stores it, in a thread per request: of eight writers at once, two
    sometimes win. The body is read before the lock is taken, because a client may send it slowly or not at all.
    """
    lock = threading.Lock()

    def call(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "PUT" or "CONTENT_LENGTH" not in environ:
            return app(environ, start_response)
        environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with lock:
            return app(environ, start_response)

    return call


def s3_environment(endpoint: str) -> dict[str, str]:
    """What a process needs to reach it."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }


def make_bucket(endpoint: str) -> str:
    """A new bucket; returns its name."""
    name = f"penstock-{secrets.token_hex(6)}"
    # The key's name is in the header, so that the server makes it for the account that the client uses.
    scope = f"{ACCESS_KEY}/20260101/us-east-1/s3/aws4_request"
    signed = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"
    asked = urllib.request.Request(f"{endpoint}/{name}", method="PUT", headers={"Authorization": signed})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        answer.read()
    return name
