"""HTTP in front of a service.

app          the ASGI application: fleet token, bounded bodies, request ids, every error as JSON
sse          server-sent events that end when the caller disconnects
accept       accepting connections
connections  which connections are kept when there are too many
protocol     bounds on one connection
"""
