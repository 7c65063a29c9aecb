"""Deploying to hosts: facts -> plan (pure) -> apply. Deploying twice changes nothing the second time.

environment   the Python environment that a host should have; requirements: what it has to hold, at which versions
release       the target state of a host: its files and the hash that names them, its model
steps         the steps of a plan, and how they are carried out on a machine
plan          facts and target state -> steps
compare       what a plan changes on a host, for whoever reads it
rollback      facts -> the steps back to an earlier release
deployment    all hosts of a fleet at the same time
client_keys   the files of keys on the gateways that are deployed elsewhere
"""
