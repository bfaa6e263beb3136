"""Trainers that take their steps from a plane."""
