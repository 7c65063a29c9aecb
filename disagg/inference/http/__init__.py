"""The servers' HTTP API from the caller's side. Every failure is a DisaggError that names the host.

host_calls    requests: JSON answers, event streams, answers of servers that are not disagg's
keeper_calls  requests to the keepers of hosts with several models: loads, unloads, files
connections   the connections of a client: how one is opened, and those that are kept
connection    one of them: HTTP/1.1 by httptools
"""
