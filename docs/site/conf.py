"""Sphinx settings of the documentation site. `make docs` builds it."""

project = "Penstock"
author = "the Penstock authors"
copyright = "Apache-2.0"  # noqa: A001 - Sphinx's own name
extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["html_image"]
myst_heading_anchors = 6
myst_fence_as_directive: list[str] = []
# Mermaid blocks are shown as text: the site loads nothing from other hosts.
suppress_warnings = ["misc.highlighting_failure"]
html_theme = "furo"
html_title = "Penstock"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
templates_path: list[str] = []
exclude_patterns: list[str] = []
html_show_search_summary = (
    False  # summaries are fetched; without them the search also works from files, without a server
)
