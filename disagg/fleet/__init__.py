"""The machines: what runs where, starting and stopping it, and how it fares. Servers are processes, never imported.

machine          what can be done on a machine: local_machine, ssh; connect: machines from hosts, many at once
deploy/          bringing disagg to a machine; services/: what keeps its server running there
server           one host's server: local_server, deployed_server; lifecycle: starting and stopping many
health           how servers fare by HTTP (ask); sight: as their machine tells; diagnose: both together
logs             all hosts' logs in one stream; loglines: what is in a line
state            what is remembered of a fleet on this machine
"""
