"""How large a cluster one plane can serve: a simulation from constants that were measured on one machine."""
