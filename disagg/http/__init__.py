"""HTTP servers with bounds: what the gateway and the hosts' servers have in common.

server       uvicorn with these bounds
accept       listening, and accepting connections
connections  which connections are kept when there are too many
protocol     bounds on one connection, and its TLS
lazy         HTTP that is parsed no further than it is needed; what follows a refusal is dropped
heads        what the head of a request may be, so that it has one reading
arrival      in how many pieces a request may arrive, and where it ends
cycle        one request and its response
application  routes, and what every request passes through before them
requests     request ids, and bodies of bounded size and time
stream       responses in parts: keep-alive, callers that stop reading or disconnect
program      the command line of a process that serves one host
"""
