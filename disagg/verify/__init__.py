"""`disagg verify`: compare the hand-off with each host, or each engine, alone.

hosts     compares the hosts of a running fleet
answers   their answers compared, and what they may differ by; pure
prompts   texts to ask with
__main__  runs both engines of a model on one machine, with and without a hand-off, and reports
pair      the two engines, and the transfer between them
process   starts the prefill engine's process and calls it; it may belong to another environment
prefill   what runs in that process
compare   two runs compared, and what they may differ by; pure
"""
