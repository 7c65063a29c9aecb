"""Deploying to hosts: facts -> plan (pure) -> apply. Deploying twice changes nothing the second time.

packages/     the Python environment that a host should have: requirements, versions, wheels
models        where a host reads its model from
prune/        what belongs to no host of hosts.toml any more
release       the target state of a host, with the package's files and the hash that names them
refusals      why a host cannot have a release
fit           whether a model fits a host's memory
steps         the types of a plan; scripts: the shell scripts that steps run
plan          facts and target state -> steps
difference/   what a plan changes on a host, for whoever reads it
undo          facts -> the steps of a rollback or an uninstallation
apply         carries a plan out on a machine
deployment    all hosts of a fleet at the same time; pace: how far an upload has come
client_keys   the files of keys on the gateways that are deployed elsewhere
"""
