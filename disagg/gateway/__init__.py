"""One HTTP server in front of a fleet, for clients of OpenAI's, Anthropic's or Ollama's API. `disagg serve` runs it.

serve       the process: listen, serve, drain
app         routes, and what every POST passes through: model, limits, a place
posted      a POST as it arrives: key, the gateways that have passed it on, body
views       every GET
refusals    in which API's form a request is refused that no dialect has read
document    what /openapi.json describes
dashboard   the page at /, whose files are in page/
health      whether it can answer a request
clients/    their keys, their models, their limits
dialects/   the APIs, each a translation without I/O: body -> request, events -> answer
models      the lists of models
pulling     models that are pulled, in the form of Ollama's API
run         a request's events, from AsyncClient
answer      events -> HTTP, streamed or whole, to a caller that may disconnect
parallel    several requests in one body
watch/      what observes the requests: metrics, live view, history
endpoints   the configuration of routers and monitors in front of gateways
follow      the live view, read from another process
"""
