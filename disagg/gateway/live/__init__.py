"""What the fleet is doing now, for the dashboard and `disagg top`.

hosts   what the client sees of a host -> its state, with reason and hint
rates   tokens per second of the last seconds
board   the observer: requests now, last answers, totals
feed    server-sent events for all who watch
"""
