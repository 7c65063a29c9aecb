"""The network link that KV takes, from prefill host to decode host.

probe_program  sends and receives bytes; runs on the hosts, never imported
measure        rate, latency and network path between two hosts
route          the network interface that leads to an address: route.sh
judge          findings about a measured link; pure
survey         measures and judges the links of a fleet
handoff        runs the hand-off benchmark at both ends of a link
"""

from disagg.fleet.link.judge import far_below, hidden_tokens_per_s, judge
from disagg.fleet.link.measure import LinkEnd, MeasuredLink, MeasurementBounds, measure, measure_all
from disagg.fleet.link.route import Interface, NetworkPath, parse_path
from disagg.fleet.link.survey import LinkSurvey, exit_code, kv_pairs, pairs_between, survey

__all__ = [
    "Interface",
    "LinkEnd",
    "LinkSurvey",
    "MeasuredLink",
    "MeasurementBounds",
    "NetworkPath",
    "exit_code",
    "far_below",
    "hidden_tokens_per_s",
    "judge",
    "kv_pairs",
    "measure",
    "measure_all",
    "pairs_between",
    "parse_path",
    "survey",
]
