"""The commands of `penstock`, one per module. `tables` and `which_run` are shared by them."""
