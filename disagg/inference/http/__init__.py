"""The servers' HTTP API from the caller's side. Every failure is a DisaggError that names the host.

host_calls   requests: JSON answers, event streams, answers of servers that are not disagg's
connections  the open connections of a client
opening      how one is opened: its host's name, TCP, TLS
connection   one of them: HTTP/1.1 by httptools
"""
