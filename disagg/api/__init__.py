"""The contract between processes: every request body, event and answer as a frozen type, with its bounds stated once.

names        literals that several of these types share
engines      one value per engine
layout       what the KV of a model is, layer by layer
base         the base class: `to_json`, `from_json`, and the bounds of a field
sampling     how tokens are chosen
requests     the bodies of POST /generate, /decode and /prefill
events       the server-sent events of their answers; event_stream: the one reader of such streams
status       the answers of GET /health and GET /status
keeper       which models of a host are loaded, and the bodies and events of POST /models/load and the others
host_change  what `disagg status --notify` posts
calls        every path of the servers with these types; openapi: the document that is made from it
delivery     KV that an engine sends by itself: its order and its report
verify       what `python -m disagg.verify` prints
handoff      the hand-off benchmark: the task of its two ends, and its figures
gateway      GET /api/live, GET /api/history and POST /v1/parallel of a gateway

Servers, inference, fleet and cli build and read these types; nobody writes their keys by hand. docs/http-api.md
describes them, and a test compares the two.
"""
