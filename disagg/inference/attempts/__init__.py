"""The attempts at one request, until one gives the answer.

retry         the retry policy: what to try, in which order, and what a failure rules out
plausible     whether what a host sends fits the request and itself
driver        what the requests of one client share
execute       performs the attempts, one after the other
suspects      requests that may have ended a host go on one at a time
waiting       waits for hosts that are busy or not up
waking        hosts load the model first, both of a hand-off at the same time
view_updates  updates the view of the fleet with what an attempt shows about its hosts
perform       one attempt: a hand-off, or the whole request on one host
handoff       the prompt on a prefill host, or on both, and what follows if that host fails
caller        how the hosts of an attempt are called
question      what any one host can answer about a prompt: how many tokens it has
score         what its model gives each of them
answer        an answer from its first to its last token, from one host or several
"""
