"""One HTTP server in front of a fleet, for clients that speak OpenAI's or Ollama's API. `disagg serve` runs it.

serve     the process: listen, serve, drain
app       routes, and what every request passes through: request id, key, size of the body
calls     what /openapi.json describes
health    whether it can answer a request
clients/  their keys, their models, their limits
dialects/ one room per API: body -> request, events -> answer; the request, events and errors that all of them use
models    the lists of models
run       a request's events, from AsyncClient
answer    events -> HTTP, streamed or whole
watch     what observes the requests: observe/ -> metrics/, live/, history/
views     the routes of those
remote/   the gateway seen from another process: configuration for routers, a view that follows it
"""
