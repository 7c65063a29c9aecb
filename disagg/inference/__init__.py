"""What drives the servers: choose a route, run the request, retry, fall back, measure. `Client` is the public API."""
