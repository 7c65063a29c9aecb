"""A client's view of its fleet's hosts, the choice among them, and the leases of requests that run.

view        who is up, how loaded, who fails
breaker     a host that fails gets no requests for a while
affinity    which decode hosts hold the beginning of a prompt
places      how many requests of this client are at each host
route       which hosts may serve a request, best first, and why
background  what runs beside requests: keeps the view fresh, extends the leases of what runs
"""
