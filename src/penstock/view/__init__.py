"""Export what the trainer did with every token, and read, show and compare exports.

write     export (TokenExporter) -> batch_records -> step_files (and what is kept), in jsonl or parquet; folders: where
a record  record (its columns, and steps of records), tallies (sums over a step, what-if masks)
read      reader (exported steps), plane_steps (what the plane has)
a run     run_files (metrics, state), history (rewards and events)
show      library (all of the above for the page) -> web (its server), access, static_page; static/: the page
          index (one step in memory), vocabulary (ids to text)
compare   diff (two runs), plot_step (a packed step)
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
