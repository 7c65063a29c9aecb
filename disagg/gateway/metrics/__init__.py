"""What /metrics shows, for Prometheus. A figure that means the same as one of vLLM's has its name.

buckets   the bounds of the histograms
requests  counters and histograms of requests, by model; none is by client
hosts     gauges of hosts and models, computed when they are read
"""
