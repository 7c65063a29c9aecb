"""`disagg verify`: compare hand-offs and splits with each host, or each engine, alone.

hosts     compares the hosts of a running fleet; texts to ask with
__main__  runs both engines of a model on one machine, with and without a hand-off, and reports
pair      the two engines, and the transfer between them
prefill   the prefill engine in a process of its own, which may belong to another environment, and its parent's side
compare   two runs compared, and what they may differ by; which splits are; pure
"""
