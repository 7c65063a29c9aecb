"""Servers: start, stop, restart, watch.

lifecycle   starts and stops the servers of many hosts
base        the Server interface; local: a server on this machine; deployed: a server that a service manager runs
health      every server's state by HTTP; ask: one HTTP GET; diagnose: the machines' side of it, over SSH
logs        all hosts' logs in one stream; loglines: what is in a line
state       what this machine remembers about a fleet
ports       the same fleet on other ports; simulated: the same fleet, simulated on this machine
"""
