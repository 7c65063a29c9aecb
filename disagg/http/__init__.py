"""HTTP servers with bounds: what the gateway and the hosts' servers have in common.

server       uvicorn with these bounds
accept       listening, and accepting connections
connections  which connections are kept when there are too many
protocol     bounds on one connection
requests     request ids, and bodies of bounded size and time
stream       responses in parts: keep-alive, callers that stop reading or disconnect
program      the command line of a process that serves one host
"""
