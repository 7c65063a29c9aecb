"""What /metrics shows, for Prometheus. A figure that means the same as one of vLLM's has its name.

buckets   the bounds of the histograms
requests  counters and histograms of requests, by model; none is by client
tokens    tokens as they arrive, and the time between them
hosts     gauges of hosts and models, computed when they are read
"""
