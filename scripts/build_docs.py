"""Build the documentation site from docs/, with the API and the commands from the source: `make docs`.

.venv-docs/bin/python scripts/build_docs.py build/site

The pages in docs/ are plain Markdown that any viewer shows. This script copies them, adds navigation, an API page per
package, the help of every command and a recorded run, and calls Sphinx. A broken link or anchor fails the build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from posixpath import relpath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md")
"""Pages beside docs/ that are pages of the site, too."""
PACKAGES = {
    "": "what most programs need: `import penstock as ps`",
    "capture": "rollouts: turns, trajectories, readers",
    "convert": "trajectories to samples: advantages, filters, groups",
    "frames": "samples to bytes and back",
    "packing": "samples into micro-batches",
    "replay": "tables: samplers, removers, limiters",
    "assets": "images by content hash",
    "train": "tensors, log-probabilities, losses",
    "view": "token export and its reader",
    "errors": "the exceptions",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    target = parser.parse_args().target.resolve()
    staged = target.parent / f"{target.name}-source"
    for folder in (staged, target):
        shutil.rmtree(folder, ignore_errors=True)
    stage(staged)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", str(staged), str(target)]
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        pages = len(list(target.rglob("*.html")))
        print(f"{pages} pages in {target}; open {target}/index.html")
    return code


def stage(staged: Path) -> None:
    """Copy pages with links that hold in the site, and add what is made from the source."""
    for page in sorted(DOCS.rglob("*.md")):
        write(staged / page.relative_to(DOCS), moved(page, page.relative_to(DOCS).as_posix(), staged))
    for name in BESIDE:
        if (ROOT / name).is_file():
            write(staged / "project" / name.lower(), moved(ROOT / name, f"project/{name.lower()}", staged))
    shutil.copytree(DOCS / "images", staged / "images")
    shutil.copy(DOCS / "site" / "conf.py", staged / "conf.py")
    (staged / "_static").mkdir(exist_ok=True)
    shutil.copy(DOCS / "site" / "site.css", staged / "_static")
    recorded_run(staged / "_static" / "demo-run.html")
    write(staged / "recorded-run.md", RECORDED)
    write(staged / "commands.md", commands())
    for name, text in api():
        write(staged / "api" / f"{name}.md", text)
    index = staged / "index.md"
    index.write_text(index.read_text().replace("## How-to\n", f"{SEE}## How-to\n", 1))
    index.write_text(index.read_text().replace("- [Glossary]", f"{REFERENCE}- [Glossary]", 1))
    for page in staged.rglob("index.md"):
        page.write_text(with_navigation(page.read_text()))


def recorded_run(page: Path) -> None:
    """Write the page of the recorded run, with the viewer as it is now. `scripts/record_run.py` records one."""
    sys.path.insert(0, str(ROOT / "src"))
    from penstock.view import Export, Library, open_vocabulary, write_page

    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(DOCS / "site" / "demo-run.tar.xz") as tar:
            tar.extractall(temporary, filter="data")
        run = Path(temporary) / "demo"
        library = Library(exports={"demo": Export(run)}, vocabulary=open_vocabulary(run))
        write_page(page, library, run="", step=None, sample=None)


SEE = "- [A recorded run](recorded-run.md): the viewer, to click through\n\n"
REFERENCE = "- [API](api/index.md): from the docstrings\n- [Help of every command](commands.md)\n"
RECORDED = """# A recorded run

This is the page of one step of `penstock demo --chaos`, as `penstock view RUN --html FILE` writes it: one file, without
a server. Click a sample, then a token. The Run page has the curves, with marks where a process was killed.
`penstock view runs/demo` opens the same page for all steps of a run of yours.

<iframe class="run" src="_static/demo-run.html" title="the viewer, with a recorded step of a demo run"></iframe>

[Open it on its own page](_static/demo-run.html).
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def moved(page: Path, where: str, staged: Path) -> str:
    """Return the text of a page with links that hold at `where` in the site. Files outside docs/ are copied."""
    folder = Path(where).parent.as_posix()

    def link(found: re.Match[str]) -> str:
        target, _, anchor = found[2].partition("#")
        if not target or "://" in target:
            return found[0]
        file = (page.parent / target).resolve()
        if file.is_relative_to(DOCS):
            new = file.relative_to(DOCS).as_posix()
        elif file.parent == ROOT and file.name in BESIDE:
            new = f"project/{file.name.lower()}"
        elif file == ROOT / "README.md":
            new = "index.md"
        elif file.is_file():
            new = f"_static/files/{file.relative_to(ROOT).as_posix()}"
            write(staged / new, file.read_text())
        else:  # a folder of the repository: name it
            assert file.exists(), f"{page}: {found[2]}"
            return f"{found[1]} (`{file.relative_to(ROOT).as_posix()}/`)"
        return f"[{found[1]}]({relpath(new, folder)}{'#' if anchor else ''}{anchor})"

    return outside_fences(page.read_text(), lambda text: LINK.sub(link, text))


def outside_fences(text: str, change: Any) -> str:
    """Apply a change to everything but fenced blocks."""
    parts, at = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, change(text[at:])])


def with_navigation(text: str) -> str:
    """Append a hidden table of contents per section, made of the pages that the section links to."""
    trees, seen = [], set()
    for section in re.split(r"^## ", text, flags=re.M):
        title, _, rest = section.partition("\n")
        inside = rest if not section.startswith("# ") else section
        pages = [link for link in re.findall(r"\]\(([^)#]+)\.md[^)]*\)", inside) if "../" not in link]
        fresh = [page for page in dict.fromkeys(pages) if page not in seen]
        if section.startswith("# ") and "\n## " in text:
            continue  # links of an introduction: the sections have them
        seen.update(fresh)
        caption = "" if section.startswith("# ") else f":caption: {title.strip()}\n"
        if fresh:
            trees.append("```{toctree}\n:hidden:\n" + caption + "\n" + "\n".join(fresh) + "\n```\n")
    return text + "\n" + "\n".join(trees)


# ------------------------------------------------------------------ commands


def commands() -> str:
    """Return a page with the help of every command."""
    sys.path.insert(0, str(ROOT / "src"))
    os.environ["COLUMNS"] = "88"
    from penstock.cli import GROUPS, build_parser

    parser = build_parser()
    found: Any = next(action for action in parser._actions if hasattr(action, "choices") and action.choices)
    lines = [
        "# Help of every command",
        "",
        "What `penstock COMMAND --help` prints. [The command line](cli.md) explains them.",
    ]
    for group, own in GROUPS.items():
        lines += ["", f"## {group.capitalize()}"]
        for name in own:
            lines += ["", f"### penstock {name}", "", "```text", found.choices[name].format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------ API


def api() -> Iterator[tuple[str, str]]:
    """Yield a page per package, from signatures and docstrings. Nothing is imported: torch is not needed."""
    import griffe

    penstock: Any = griffe.load("penstock", search_paths=[str(ROOT / "src")], resolve_aliases=True)
    rows = [
        f"- [penstock{'.' if name else ''}{name}](./{name or 'penstock'}.md): {what}" for name, what in PACKAGES.items()
    ]
    yield "index", "\n".join(["# API", "", "Signatures and docstrings of the public packages.", "", *rows, ""])
    for name, what in PACKAGES.items():
        module = penstock[name] if name else penstock
        full = f"penstock.{name}".rstrip(".")
        lines = [f"# {full}", "", f"{what[0].upper()}{what[1:]}.", ""]
        for member in exported(module):
            lines += described(member, "ps" if not name else full)
        yield name or "penstock", "\n".join(lines) + "\n"


def exported(module: Any) -> list[Any]:
    """Return the classes and functions of a package's API, in the order of their names."""
    names = sorted(module.members.keys() - {"exports_of"}, key=str.lower)
    found = [module.members[name] for name in names if not name.startswith("_")]
    wanted = [m for m in found if m.is_alias or module.name == "errors"]
    return [m for m in wanted if _kind(m) in ("class", "function") and m.docstring]


def _kind(member: Any) -> str:
    try:
        return str(member.kind.value)
    except Exception:  # noqa: BLE001 - an alias to a package that is not installed here
        return ""


def described(member: Any, where: str) -> list[str]:
    """Return the Markdown of a class or function."""
    lines = [f"## {member.name}", "", "```python", signature(member, where), "```", "", *docstring(member), ""]
    if _kind(member) == "class":
        for method in member.members.values():
            public = not method.name.startswith("_") and _kind(method) == "function" and method.docstring
            if public:
                lines += ["```python", signature(method, member.name), "```", "", *docstring(method), ""]
    return lines


def signature(member: Any, where: str) -> str:
    called = member
    if _kind(member) == "class":
        called = member.members.get("__init__")
        if called is None:
            return f"class {where}.{member.name}"
    star = False
    parts = []
    for parameter in called.parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = parameter.kind.value if parameter.kind else ""
        if kind == "keyword-only" and not star:
            parts.append("*")
            star = True
        prefix = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        star = star or prefix == "*"
        typed = f": {parameter.annotation}" if parameter.annotation is not None else ""
        default = f" = {parameter.default}" if parameter.default is not None and not prefix else ""
        parts.append(f"{prefix}{parameter.name}{typed}{default}")
    result = f" -> {called.returns}" if called is member and called.returns is not None else ""
    short = f"{where}.{member.name}({', '.join(parts)}){result}"
    if len(short) <= 100:
        return short
    return f"{where}.{member.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def docstring(member: Any) -> list[str]:
    """Return a docstring as Markdown: doctests and drawings are fenced, so that nothing in them is markup."""
    lines: list[str] = []
    for block in str(member.docstring.value).strip().split("\n\n"):
        is_code = block.lstrip().startswith(">>>") or block.startswith("    ")
        kind = "pycon" if block.lstrip().startswith(">>>") else "text"
        lines += [f"```{kind}", block, "```", ""] if is_code else [escaped(block), ""]
    return lines


def escaped(text: str) -> str:
    """Escape what Markdown would take for HTML or a link, outside `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if i % 2 else re.sub(r"([<\[*_])", r"\\\1", part) for i, part in enumerate(parts))


if __name__ == "__main__":
    raise SystemExit(main())
