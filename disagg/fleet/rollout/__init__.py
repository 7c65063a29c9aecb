"""Rollouts: a new release, host by host, back to the one before at the first host that fails.

policy    the hosts' states and how many may be down -> the next turn; pure
gate      the test that a host passes before the next one is restarted: its answer to a fixed prompt
progress  each host's phase, what outlasts an interruption, and how it ended
rollout   carries the turns out
"""
