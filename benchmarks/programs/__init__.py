"""The ways that benchmarks of the plane compare, each a program of its own: `python -m programs.NAME`.

They run in other interpreters too: where only the rivals are installed, or an older Penstock. So nothing here imports
`benchmarks`, and only `plane` imports Penstock. A way reads one JSON object per line and answers with one:
see `serving`.
"""
