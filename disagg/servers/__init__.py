"""What runs on the hosts: the prefill and decode HTTP servers, and what they share.

`python -m disagg.servers --config hosts.toml --host NAME` starts the server of one host. `app` is the HTTP shell
(auth, bounds, errors, request ids), `prefill` and `decode` are the two services, `schemas` the request bodies.
"""
