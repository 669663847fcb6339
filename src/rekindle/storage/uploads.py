"""Finds and removes the parts that killed uploads left in S3.

obstore can't do that, so these are two requests of our own, signed with the keys of the environment. No other module
needs to know S3's protocol.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from xml.etree import ElementTree

__all__ = ["abort_upload", "list_unfinished"]

_TIMEOUT = 20.0
_EMPTY = hashlib.sha256(b"").hexdigest()


def list_unfinished(bucket: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Yields name and id of uploads that were begun and neither completed nor aborted, at most a thousand.

    Uploads under way are among them. Yields nothing where the environment has no keys, as on a machine with a role,
    and where the server doesn't list uploads.
    """
    with suppress(OSError, HTTPException, ElementTree.ParseError):
        tree = ElementTree.fromstring(_request("GET", bucket, "", {"prefix": prefix, "uploads": ""}))
        for node in tree.iter():
            if node.tag.rpartition("}")[2] == "Upload":
                fields = {child.tag.rpartition("}")[2]: child.text or "" for child in node}
                yield fields.get("Key", ""), fields.get("UploadId", "")


def abort_upload(bucket: str, name: str, upload: str) -> None:
    """Removes an upload's parts. Ignores a refusal, and another process that was faster."""
    with suppress(OSError, HTTPException):
        _request("DELETE", bucket, name, {"uploadId": upload})


def _request(method: str, bucket: str, name: str, query: dict[str, str]) -> bytes:
    """Sends one request, signed with AWS Signature Version 4, and returns the answer. Raises OSError."""
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        raise PermissionError("the environment has no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    named = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"))
    endpoint = next(filter(None, named), f"https://s3.{region}.amazonaws.com").rstrip("/")
    path = urllib.parse.urlsplit(endpoint).path + urllib.parse.quote(f"/{bucket}" + (f"/{name}" if name else ""))
    asked = urllib.parse.urlencode(sorted(query.items()), quote_via=urllib.parse.quote, safe="")
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    host = urllib.parse.urlsplit(endpoint).netloc
    headers = {"host": host, "x-amz-content-sha256": _EMPTY, "x-amz-date": now}
    token = os.environ.get("AWS_SESSION_TOKEN")
    if token:
        headers["x-amz-security-token"] = token
    names = ";".join(sorted(headers))
    lines = [method, path, asked, *(f"{name}:{headers[name]}" for name in sorted(headers)), "", names, _EMPTY]
    scope = f"{now[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    signing = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        signing = hmac.digest(signing, part.encode(), "sha256")
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{digest}"
    signature = hmac.digest(signing, text.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    origin = endpoint.removesuffix(urllib.parse.urlsplit(endpoint).path)
    request = urllib.request.Request(f"{origin}{path}?{asked}", method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        data: bytes = answer.read()
        return data
