"""HTTP servers with bounds: what the gateway and the hosts' servers have in common.

server    uvicorn with these bounds: its application, accepting connections, its end
protocol  bounds on one connection, its TLS, and which connections are kept when there are too many
lazy      HTTP that is parsed no further than it is needed; what follows a refusal is dropped
arrival   what the head of a request may be, in how many pieces it may arrive, and where it ends
requests  request ids, and bodies of bounded size and time
stream    responses in parts: keep-alive, callers that stop reading or disconnect
program   the command line of a process that serves one host
"""
