"""Whether a server works, and what happens if it does not.

progress  beats of the engine, and when it counts as stalled
engine    the engine judged by its requests and by self-tests
leases    requests that end unless their caller names them in time
monitor   the round of checks, every second, on the event loop
gpu       how busy the accelerator is
watchdog  the thread that ends a process that does not come back
"""
