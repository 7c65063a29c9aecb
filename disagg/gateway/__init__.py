"""One HTTP server in front of a fleet, for clients of OpenAI's, Anthropic's or Ollama's API. `disagg serve` runs it.

serve       the process: listen, serve, drain
middleware  what every request passes through first: its id, and a place
app         routes, and what every POST passes through: key, size of the body, bounds
views       every GET
calls       what /openapi.json describes
health      whether it can answer a request
clients/    their keys, their models, their limits
dialects/   one room per API: body -> request, events -> answer; the request, events and errors that all of them use
models      the lists of models
hops        a request that comes back from another gateway is refused
run         a request's events, from AsyncClient
answer      events -> HTTP, streamed or whole; exchange: one response on its way to a caller that may disconnect
parallel/   several requests in one body
watch       what observes the requests: observe/ -> metrics/, live/, history/
dashboard/  the page
remote/     the gateway seen from another process: configuration for routers, a view that follows it
"""
