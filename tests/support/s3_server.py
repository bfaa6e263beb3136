"""An S3 server on loopback (moto), for tests and measurements. Needs the `moto` package.

with s3_server() as endpoint:
    os.environ |= s3_environment(endpoint)
    storage = ObjectStorage(f"s3://{make_bucket(endpoint)}/runs/mine")
"""

from __future__ import annotations

import logging
import secrets
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

ACCESS_KEY, SECRET_KEY = "AKIATESTTESTTEST", "a-secret-that-nobody-may-see"


@contextmanager
def s3_server() -> Iterator[str]:
    """Its endpoint. Everything is in memory, and gone afterwards."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else each request is printed
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


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
