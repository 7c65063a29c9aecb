"""The machines and the servers on them. Servers are started as processes and never imported.

Rooms, from the top down; each imports only those below it:

doctor/     why a fleet does not work: findings, each with the command to run
bootstrap  what a bare machine lacks before it is deployed to
link/       measures the network that KV takes between two hosts
models/     model files on the hosts: download, copy, list, remove
rollout/    a new release host by host, back at the first host that fails
removal/    removes hosts, and what no host needs any more
deploy/     brings disagg to a host: facts -> plan (pure) -> apply
conditions/ what a host must have for its engine: deploy refuses by it, doctor reports it
lifecycle/  starts, stops and watches servers: health, logs, state
services/   the service managers that keep a server running: systemd, launchd, a plain process
tokens/     the fleet's secret here and on the hosts, and its rotation
changes/    who may change a host, which release waits for a restart; hooks around changes
facts/      what a host is and has: probes and their parsers
machine/    runs commands and moves files on a host, over SSH or on this machine
"""
