"""A complete RL run on one machine: a plane, rollout workers and trainer ranks, started and watched by one command."""
