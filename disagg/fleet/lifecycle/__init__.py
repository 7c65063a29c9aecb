"""Servers: start, stop, restart, watch.

fleet_servers  starts, stops and restarts the servers of many hosts
other_servers  stops servers that no host of this fleet stands for
base           the Server interface; local: a process of this machine; deployed: a server under a service manager
host_status    one server's health and what it reported; comparison: of healthy servers, with each other and with here
health         every server's state by HTTP; http_get: one GET; diagnose: why a host is down, over SSH
logs           all hosts' logs in one stream; loglines: what a log line contains
state          the state folder: token, process records, logs, lock
temporary      a room: a fleet on this machine for as long as a block runs
"""
