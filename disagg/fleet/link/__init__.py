"""The network link that KV takes, from prefill host to decode host.

probe_program  sends and receives bytes; runs on the hosts, never imported
measure        rate, latency and network path between two hosts
route          the network interface that leads to an address: route.sh
judge          findings about a measured link; pure
survey         measures and judges the links of a fleet
handoff        runs the hand-off benchmark at both ends of a link
"""
