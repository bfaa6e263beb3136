"""Look at the built site in a real browser and photograph it, at 1400 and at 700 pixels: artifacts/site-*.png.

make docs
.venv/bin/python -m scripts.photograph_site build/site

Fails if a page reports an error, the search finds nothing, or the recorded run shows no tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.support.browser import SIZES, browsing

ARTIFACTS = Path(__file__).resolve().parent.parent / "artifacts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    site = parser.parse_args().site.resolve().as_uri()
    ARTIFACTS.mkdir(exist_ok=True)
    for width in SIZES:
        with browsing(width=width, height=900) as page:
            for name in ("index", "how-to/grpo", "viewer", "api/train", "settings"):
                page.goto(f"{site}/{name}.html")
                page.screenshot(path=str(ARTIFACTS / f"site-{name.replace('/', '-')}-{width}.png"))
                wide = page.evaluate("document.documentElement.scrollWidth")
                assert wide <= width, f"{name} is {wide} pixels wide in a window of {width}"
            page.goto(f"{site}/search.html?q=max_staleness")
            page.wait_for_selector("ul.search li a")
            page.screenshot(path=str(ARTIFACTS / f"site-search-{width}.png"))
            page.goto(f"{site}/recorded-run.html")
            run = page.frame_locator("iframe.run")
            run.locator(".cursor").first.wait_for()
            page.screenshot(path=str(ARTIFACTS / f"site-run-{width}.png"))
            run.locator("#tab-run").click()
            run.locator(".event").first.wait_for()
            page.screenshot(path=str(ARTIFACTS / f"site-run-curves-{width}.png"))
            assert not page.errors, page.errors
    print(f"photographs in {ARTIFACTS}")


if __name__ == "__main__":
    main()
