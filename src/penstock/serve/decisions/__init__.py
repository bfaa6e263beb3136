"""What the plane decides and writes down: engine, state, tables, ledger, log. No sockets."""
