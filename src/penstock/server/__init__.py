"""`penstock serve`: the process around a plane, with its watchdog, HTTP API and metrics page.

daemon         the process: signals, exit codes, what it opens; watchdog; log_format; plane_process starts one
http_server    the one HTTP server, with http_protocol: limits and deadlines of connections
http_api       groups, feedback, states; http_leases: leased prompts and late columns; openapi describes it
metrics_page   /metrics, /healthz and /readyz; prometheus renders the numbers
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
