"""A complete RL run on a laptop: a plane, rollout workers and trainer ranks, started and watched by one command."""
