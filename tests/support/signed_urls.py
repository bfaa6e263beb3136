"""Checks signed URLs as S3 does (signature version 4), because the server that tests use takes any."""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl, quote, urlsplit

from tests.support.s3_server import ACCESS_KEY, SECRET_KEY

_SIGNATURE = "X-Amz-Signature"


def is_signed(target: str) -> bool:
    """Whether the signature of a request is in its URL."""
    return f"{_SIGNATURE}=" in target


def problem_with(method: str, target: str, host: str) -> str:
    """The code that S3 would refuse a signed URL with, or "" for a good one. `target`: path and query."""
    parts = urlsplit(target)
    fields = dict(parse_qsl(parts.query, keep_blank_values=True))
    key, day, region, service, _ = fields["X-Amz-Credential"].split("/")
    if key != ACCESS_KEY:
        return "InvalidAccessKeyId"
    given = fields.pop(_SIGNATURE)
    query = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(fields.items()))
    request = "\n".join([method, parts.path, query, f"host:{host}", "", "host", "UNSIGNED-PAYLOAD"])
    scope = f"{day}/{region}/{service}/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", fields["X-Amz-Date"], scope, hashlib.sha256(request.encode()).hexdigest()])
    secret = f"AWS4{SECRET_KEY}".encode()
    for word in (day, region, service, "aws4_request"):
        secret = hmac.digest(secret, word.encode(), "sha256")
    if not hmac.compare_digest(hmac.digest(secret, text.encode(), "sha256").hex(), given):
        return "SignatureDoesNotMatch"
    signed_at = datetime.strptime(fields["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    if datetime.now(UTC) > signed_at + timedelta(seconds=int(fields["X-Amz-Expires"])):
        return "AccessDenied"  # "Request has expired"
    return ""
