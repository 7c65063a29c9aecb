"""The link that KV takes, measured the way KV goes: prefill host -> decode host.

probe_program  sends and receives; runs on the hosts, never imported
path           which way the sender's packets take, by which interface
ends           the programs at both ends of it
measure        both, between two hosts
judge          what is wrong with a link, and what it is good for; pure
survey         all three for the links of a fleet, and what each means for its model
"""

from disagg.fleet.facts.route import Interface, NetworkPath, parse_path
from disagg.fleet.link.ends import LinkEnd
from disagg.fleet.link.judge import far_below, hidden_tokens_per_s, judge
from disagg.fleet.link.measure import Bounds, Link, measure, measure_all
from disagg.fleet.link.survey import LinkSurvey, exit_code, kv_pairs, pairs_between, survey

__all__ = [
    "Bounds",
    "Interface",
    "Link",
    "LinkEnd",
    "LinkSurvey",
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
