"""The commands of `penstock`, one per module. `terminal` and `which_run` are shared by them."""
