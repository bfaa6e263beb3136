"""Export what the trainer did with every token, and read, show and compare exports.

write     export (TokenExporter) -> batch_records -> step_files, in jsonl or parquet; folders: where files go
a record  record (its columns), keep_rules (which are kept), tallies (sums over a step), masking_rules
read      reader (exported steps), plane_steps (steps from the plane's frames), readable_step (what both share)
a run     run_files (metrics, state), curve_events, history, plane_groups (dropped ones), runs_table
show      library (all of the above for the page) -> web (its server), access, live, static_page; static/: the page
          index and step_tokens (one step in memory), vocabulary (ids to text)
compare   diff (two runs), plot_step (a packed step)
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
