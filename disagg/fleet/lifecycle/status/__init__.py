"""The state of every server, and why one is down.

ask          asks servers by GET /health and /status, and machines over SSH; http_get: one GET
judge        what came of it -> the state of a server. Pure
host_status  what is known of one server
compare      healthy servers with each other, and with the code and settings here. Pure
verdicts     what `disagg verify` found exact
"""
