"""Servers: start, stop, restart, watch.

fleet_servers  starts, stops and restarts the servers of many hosts, also those that no host of this fleet stands for
one_server     the Server interface; starts, stops and restarts one, and waits until it is healthy
local          a server that is a process of this machine; deployed: one under a service manager
logs           all hosts' logs in one stream; loglines: what a log line contains
state          the state folders of this user's fleets: process records, logs, lock
watch          reports when a host goes down and when it comes back
temporary      a fleet on this machine for as long as a block runs
status/        the state of every server, and why a host is down
"""
