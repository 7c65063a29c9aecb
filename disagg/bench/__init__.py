"""The performance of a running fleet under load: by a hand-off, by a split and on each machine alone.

benchmark  from the options of a benchmark to its result
workloads  the requests: random token ids of exact counts, or the items of a file, such as a Mooncake trace
plan       the sweep as a list of turns: which mode runs which requests, when each is sent, how long it will take. Pure
load       sends the requests of the turns to the fleet
beside     answers that run beside them, and what a prompt costs these
records    the record of one request, and of one turn
energy     watts of the machines: measured if possible, else as stated
handoff/   a hand-off of random KV, compared with other ways to move the same bytes
stats      from records to figures. Pure
verdict    from figures to sentences: where disaggregation wins and where it loses. Pure
result     all of it as one value, and as JSON
report     the result as one self-contained HTML page
charts     plots as SVG, of any data
"""

from typing import Final, Literal

MAX_REQUESTS: Final = 100_000
"""The most requests of one benchmark, all modes and points together."""

Mode = Literal["disaggregated", "split", "decode-alone", "prefill-alone", "whole"]
"""Which machines answer. "disaggregated": the prefill machine computes all layers of a prompt, and hands it over.
"split": both compute it, each some of the layers. "whole": the model's whole-request hosts, which take texts only."""
WorkloadKind = Literal["random", "prompts", "sharegpt", "mooncake"]
