"""Messages and the state machines that exchange them. No I/O and no clock: simulations drive the same code."""
