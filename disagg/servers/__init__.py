"""The prefill and decode servers, which run on the hosts.

`python -m disagg.servers --config hosts.toml --host NAME` starts the server of one host.

run        the life of the process: bind, load, serve, drain
http/      the HTTP application around a service
service    what both services share: admission, life cycle
report     what a server states about itself: health, load, status, counters
prefill/   computes KV and sends it
decode     receives KV and generates           feed     tokens from the engine's thread to the event loop
request    one request                         answer   decode steps to events
caller     state that a request and the stream of its answer share
output/    what the tokens of an answer are    health/  whether the server works, and what happens if it does not
admission  the bounded queue                   threads  work that takes long
running    the file of requests that are computed, which outlives the process
work       what requests make a host compute   bounds   the most that it takes, as a table
"""
