"""HTTP in front of a service.

app  the ASGI application: fleet token, bounded bodies, request ids, every error as JSON
sse  server-sent events that end when the caller disconnects
"""
