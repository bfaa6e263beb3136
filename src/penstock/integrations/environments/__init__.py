"""Environments whose rollouts go to a plane."""
