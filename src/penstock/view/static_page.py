"""Write a step or a sample as one self-contained page with scripts, styles, data and small images. Needs no server.

The page's content security policy allows its own script by hash and nothing else. Data is JSON in a script element of
another type, with every character escaped that could end the element.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from penstock.assets import INLINE_BYTES
from penstock.errors import AssetError, InvalidInput, StorageError, UnknownKey
from penstock.view.library import Library
from penstock.view.web import static_files

MAX_BYTES = 256 << 20


def write_page(path: Path, library: Library, *, run: str | None, step: int | None, sample: int | None) -> int:
    """Write the page and return its size in bytes."""
    if not path.parent.is_dir():
        raise InvalidInput(f"{path}: there is no folder {path.parent}; make it first, or choose another")
    text = make_page(library, run=run, step=step, sample=sample)
    return path.write_bytes(text)


def make_page(library: Library, *, run: str | None = None, step: int | None = None, sample: int | None = None) -> bytes:
    name, export = next(iter(library.exports.items()))
    run = export.choose(run)
    steps = export.steps(run)
    if not steps:
        raise UnknownKey(f"{export.folder}: no finished step yet")
    number = steps[-1].number if step is None else step
    data = _collect(library, name, run, number, sample)
    encoded = msgspec.json.encode(data)
    if len(encoded) > MAX_BYTES:
        raise InvalidInput(
            f"step {number}: {len(encoded) >> 20} MiB of tokens for one page; choose one sample with --sample"
        )
    return _assemble(static_files(), encoded)


def _collect(library: Library, name: str, run: str, number: int, sample: int | None) -> dict[str, Any]:
    """Collect all responses the page will request, keyed by its request URLs."""
    at = {"export": name, "run": run, "step": str(number)}
    index = library.index(name, run, number)
    chosen = list(range(len(index.rows))) if sample is None else [sample]
    found = library.step(name, run, number)
    if sample is not None:
        if not 0 <= sample < len(index.rows):
            raise UnknownKey(f"sample {sample}: the step has {len(index.rows)}, counted from 0")
        found = {**found, "samples": [index.rows[sample]]}
    answers: dict[str, Any] = {f"step?{urlencode(at)}": found}
    if sample is None:
        groups = {row["group_id"] or "" for row in index.rows}
        answers |= {
            f"group?{urlencode({**at, 'group': group})}": library.group(name, run, number, group) for group in groups
        }
    hashes: set[str] = set()
    for i in chosen:
        answer = library.sample(name, run, number, i)
        answers[f"sample?{urlencode({**at, 'sample': str(i)})}"] = answer
        hashes |= set(answer["images"])
    start = f"#/samples/{name}/{run or '~'}/{number}" + (f"/{sample}" if sample is not None else "")
    one = {
        "name": name,
        "folder": library.exports[name].folder.name,
        "runs": [{"run": run, "steps": [number], "state": None}],
    }
    answers["overview?"] = {
        "exports": [one],
        "difference": None,
        "start": start,
    }
    of_run = urlencode({"export": name, "run": run})
    # Settings name storage and hosts: a page that is passed on does not need them.
    answers[f"run?{of_run}"] = library.run(name, run) | {"settings": ""}
    if sample is None:
        answers[f"history?{of_run}"] = library.history(name, run)
        answers[f"dropped?{of_run}"] = library.dropped(name, run)
    return {"answers": answers, "images": {digest: uri for digest in hashes if (uri := _inline(library, digest))}}


def _inline(library: Library, digest: str) -> str | None:
    """Return an image as a data: URI, None if it is larger than 2 MiB or unreadable."""
    try:
        data, media_type = library.image(digest)
    except (AssetError, StorageError, UnknownKey, InvalidInput):
        return None
    return None if len(data) > INLINE_BYTES else f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _assemble(files: dict[str, bytes], data: bytes) -> bytes:
    """Put style, script and data into the page, in place of what it asks a server for."""
    script, style = files["app.js"], files["style.css"]
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'"
    safe = data.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")
    meta = b'<meta http-equiv="Content-Security-Policy" content="%b">' % policy.encode()
    embedded = b'<script type="application/json" id="embedded">%b</script>\n<script>%b</script>\n' % (safe, script)
    changes = {
        b'<meta charset="utf-8">': b'<meta charset="utf-8">\n' + meta,
        b'<link rel="icon" href="data:,">\n': b"",
        b'<link rel="stylesheet" href="static/style.css">': b"<style>%b</style>" % style,
        b'<script src="static/app.js" defer></script>\n': b"",
        b"</body>": embedded + b"</body>",
    }
    page = files["index.html"]
    for old, new in changes.items():
        assert page.count(old) == 1, old
        page = page.replace(old, new)
    return page


def _hash(content: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
