"""One HTTP server in front of a fleet, for clients that speak OpenAI's or Ollama's API. `disagg serve` runs it.

serve     the process: listen, serve, drain
app       routes, and what every request passes through: request id, key, size of the body
calls     what /openapi.json describes
health    whether it can answer a request
clients/  their keys, their models, their limits
request   a request in the gateway's own form
events    what happens to a request while it is answered
dialects/ one file per API: body -> request, events -> answer
models    the lists of models
run       a request's events, from AsyncClient
answer    events -> HTTP, streamed or whole
problems  errors as clients expect them
endpoints the configuration of routers in front of gateways
watch     what observes the requests: observe/ -> metrics/, live/, history/
views     the routes of those
"""
