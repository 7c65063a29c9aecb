"""One host without HTTP: what the prefill and the decode server have in common.

service    its life cycle, and how a request begins and ends
report     what it states about itself: health, load, status, counters
record     the file of requests that are computed, which outlives the process
admission  which requests it takes, and how long they stay
health     whether its engine works
gpu        how busy its accelerator is
request    one request, and its caller
feed       tokens from the engine's thread to the event loop
work       what requests make it compute beside the engine, and the most that it takes
"""
