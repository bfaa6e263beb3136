"""A complete RL run on one machine: a plane, rollout workers and trainer ranks, started and watched by one command.

launch      checks the machine, starts the processes of a run, restarts those that die, decides when it is over
processes   forks them from a fork server that has loaded torch; roles: what each of them does; sampler
tasks       what is learned: prompts, rewards, models
screen      the page in the terminal
endpoint    a tiny inference server, for first steps and tests
"""
