"""The systems that the plane's benchmarks compare, each a separate program: `python -m programs.NAME`.

They run in other interpreters too: where only the rivals are installed, or an older Penstock. So nothing here imports
`benchmarks`, and only `plane` imports Penstock. A system reads one JSON object per line and answers with one:
see `serving`.
"""
