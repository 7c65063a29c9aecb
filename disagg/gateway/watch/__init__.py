"""What happens to requests and hosts, for those who watch: metrics, history and the live view.

gateway       everything that watches one gateway
request       one request: counts what happens to it, once, and tells its observers
metrics       /metrics: requests by model, and their tokens as they arrive
host_metrics  /metrics: gauges of hosts and models, computed when they are read
board         /api/live: requests now, last answers, totals, plots
hosts         /api/live: what the client sees of a host -> its state, with reason and hint
feed          /api/live: server-sent events for all who watch
entry         /api/history: the record of one answer
recorder      /api/history: a bounded queue and the one thread that writes
history       /api/history: the SQLite file, bounded by age and rows
"""
