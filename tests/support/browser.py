"""The viewer in a real browser: a server in a thread, and the system's Chromium driven by playwright."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

SIZES = (1400, 700)
"""Widths at which pages are looked at: a desk's screen and half of one."""
_PATIENCE_S = 60.0
"""How long a page may take to come to something, on a machine that has other work."""
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium() -> str:
    """The browser's path; an error that says how to get one where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise ConfigError(f"browser: none of {', '.join(NAMES)} is installed; run scripts/setup_browser")
    return found


@contextlib.contextmanager
def browsing(*, width: int = 1440, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """A page of a browser that has never been used before; errors of its scripts are collected in `page.errors`."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="penstock-browser-") as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=find_chromium(),
            headless=True,
            args=FLAGS,
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            device_scale_factor=1,
        )
        context.set_default_timeout(1000 * _PATIENCE_S)
        page = context.pages[0]
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda message: page.errors.append(message.text) if _is_error(message) else None)
        try:
            yield page
        finally:
            context.close()


def _is_error(message: Any) -> bool:
    """Whether a page says that something is wrong with it; that its server ended is not."""
    return bool(message.type == "error") and "/events" not in str(message.location.get("url", ""))


def wait_until(page: Any, expression: str, arg: Any = None, *, seconds: float = _PATIENCE_S) -> None:
    """Ask from outside until it is so: the page's policy forbids what Playwright does to look a second time."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression, arg):
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not so after {seconds:g} s: {expression}; the page says: {page.inner_text('body')[:500]}"
            )
        page.wait_for_timeout(20)


def keep_pictures(page: Any, folder: Path, name: str) -> None:
    """Pictures of what is shown, at both widths and in both themes; the page is left wide and light."""
    folder.mkdir(parents=True, exist_ok=True)
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        for width in reversed(SIZES):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(120)
            page.screenshot(path=str(folder / f"{name}-{width}-{theme}.png"))
