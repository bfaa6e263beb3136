"""A complete RL run on one machine: a plane, rollout workers and trainer ranks, started and watched by one command.

launch      starts the processes of a run, restarts those that die, decides when it is over; preflight: checks before
processes   forks them from a fork server that has loaded torch; roles: what each of them does; sampler
tasks       what is learned: prompts, rewards, models; color: with images
screen      the page in the terminal; run_files: metrics and logs in the run's folder
endpoint    a tiny inference server, for first steps and tests; ray_nodes: the demo on a Ray cluster
"""
